"""Several examples in a row: nothing is lost, nothing overlaps, and the model cannot tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from altup.data.tasks.examples import pad
from altup.errors import UserError
from altup.finetuning.mixture import Mixture
from altup.finetuning.packing import IGNORED, fit_rows, pack, target_widths
from tests.finetuning.test_mixture import TASKS
from tests.models.helpers import tiny_t5


def unpack(packed: dict[str, np.ndarray]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Inputs and targets, read back from the rows."""
    found = []
    for ids, segments, labels, target_segments in zip(
        *(packed[n] for n in ("input_ids", "segments", "labels", "decoder_segments")), strict=True
    ):
        assert set(segments) - {0} == set(target_segments) - {0}
        for segment in sorted(set(segments) - {0}):
            places = np.flatnonzero(segments == segment)
            assert (np.diff(places) == 1).all()
            found.append((tuple(ids[places]), tuple(labels[target_segments == segment])))
        assert (ids[segments == 0] == 0).all()
        assert (labels[target_segments == 0] == IGNORED).all()
    return found


@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(1, 6)), min_size=1, max_size=40),
    st.integers(1, 5),
)
@settings(max_examples=100, deadline=None)
def test_every_example_is_in_one_row_whole(lengths, quantum):
    inputs = [np.full(n, 10 + i, np.int32) for i, (n, _) in enumerate(lengths)]
    targets = [np.full(n, 100 + i, np.int32) for i, (_, n) in enumerate(lengths)]
    packed = pack(inputs, targets, 16, 8, quantum, 0)
    assert packed["input_ids"].shape[0] % quantum == 0
    want = sorted((tuple(x), tuple(y)) for x, y in zip(inputs, targets, strict=True))
    assert sorted(unpack(packed)) == want
    total = sum(n for n, _ in lengths)
    if all(m == 1 for _, m in lengths) and len(lengths) <= 8:
        rows = (packed["segments"] != 0).any(axis=1).sum()
        assert rows <= 2 * -(-total // 16)  # first fit wastes less than half


@pytest.mark.parametrize(("shortest", "longest", "most"), [(3, 40, 0.08), (80, 380, 0.12)])
def test_little_is_padding(shortest, longest, most):
    """Sentences, and paragraphs with a question: rows are nearly full, and targets need little room."""
    draw = np.random.default_rng(0)
    inputs, targets = draw.integers(shortest, longest, 256), draw.integers(2, 5, 256)
    widths = target_widths(inputs.mean(), targets.mean(), int(targets.max()), 512)
    rows = fit_rows(inputs.tolist(), targets.tolist(), 512, widths[0])
    assert 1 - inputs.sum() / (512 * len(rows)) < most
    assert sorted(example for row in rows for example in row) == list(range(256))
    assert all(inputs[row].sum() <= 512 and targets[row].sum() <= widths[0] for row in rows)
    assert widths[0] <= 1.1 * 512 * targets.mean() / inputs.mean() + 8


def test_widths_of_targets_reach_the_longest():
    assert target_widths(200.0, 5.8, 97, 512) == [24, 40, 64, 96, 104]
    assert target_widths(20.0, 2.0, 2, 512) == [64]


def random_examples(number: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    draw = np.random.default_rng(0)
    inputs = [draw.integers(3, 90, draw.integers(2, 15)).astype(np.int32) for _ in range(number)]
    targets = [draw.integers(3, 90, draw.integers(1, 6)).astype(np.int32) for _ in range(number)]
    return inputs, targets


def gradients(model, batch):
    model.zero_grad()
    output = model(**{name: torch.from_numpy(array).long() for name, array in batch.items()}, return_logits=False)
    output.loss_sum.backward()
    values = [output.loss_sum, output.nll_sum, output.num_correct, output.num_tokens]
    return [v.item() for v in values], {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("method", ["dense", "altup", "recycled", "sum", "moe"])
def test_packed_rows_train_as_padded_ones_do(method):
    """Loss, accuracy and every gradient: no token sees another example's."""
    model = tiny_t5(method, vocab_size=100, expert_jitter=0.0, z_loss=1e-3).double().train()
    inputs, targets = random_examples(12)
    lengths = np.array([len(x) for x in inputs])
    padded = {
        "input_ids": pad(inputs, 16, 0),
        "attention_mask": (np.arange(16) < lengths[:, None]).astype(np.int32),
        "labels": pad(targets, 8, IGNORED),
    }
    packed = pack(inputs, targets, 32, 24, 3, 0)
    assert packed["input_ids"].shape[0] < 12
    want, want_gradients = gradients(model, padded)
    got, got_gradients = gradients(model, packed)
    assert got == pytest.approx(want, rel=1e-6)
    for name, gradient in want_gradients.items():
        torch.testing.assert_close(got_gradients[name], gradient, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("method", ["sequence-altup", "stride-and-skip", "average-pooling"])
def test_models_that_mix_neighbours_refuse(method):
    packed = pack(*random_examples(4), 32, 24, 1, 0)
    with pytest.raises(UserError, match="segments"):
        tiny_t5(method)(**{name: torch.from_numpy(array).long() for name, array in packed.items()})


def test_half_a_numbering_is_refused():
    packed = {n: torch.from_numpy(a).long() for n, a in pack(*random_examples(4), 32, 24, 1, 0).items()}
    packed.pop("decoder_segments")
    with pytest.raises(UserError, match="together"):
        tiny_t5("dense")(**packed)


def test_a_packed_mixture_holds_what_a_padded_one_does():
    padded, packed = (Mixture(TASKS, [50, 20, 3], 24, 0, seed=1, packed_width=width) for width in (None, 64))
    shapes = set()
    for step in range(6):
        rows = padded.examples(step, 0, 24)
        want = sorted(
            (tuple(ids[mask == 1]), tuple(labels[labels != IGNORED]))
            for ids, mask, labels in zip(rows["input_ids"], rows["attention_mask"], rows["labels"], strict=True)
        )
        whole = packed.examples(step, 0, 24)
        shapes.add(whole["input_ids"].shape)
        assert sorted(unpack(whole)) == want
        parts = [unpack(packed.examples(step, start, start + 8)) for start in (0, 8, 16)]
        assert sorted(example for part in parts for example in part) == want
    assert len(shapes) <= 4
    assert packed.describe() == padded.describe()

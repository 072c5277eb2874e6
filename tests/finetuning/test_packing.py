"""Several examples in a row: nothing is lost, nothing overlaps, and the model cannot tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from altup.core.errors import UserError
from altup.data.tasks.examples import pad
from altup.finetuning.mixture import Mixture
from altup.finetuning.packing import (
    IGNORED,
    LAYOUTS,
    Rows,
    Sizes,
    Usual,
    fit_rows,
    narrow_rows,
    pack,
    target_widths,
    wide_rows,
)
from altup.training.prefetch import alike
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
            positions = np.flatnonzero(segments == segment)
            assert (np.diff(positions) == 1).all()
            found.append((tuple(ids[positions]), tuple(labels[target_segments == segment])))
        assert (ids[segments == 0] == 0).all()
        assert (labels[target_segments == 0] == IGNORED).all()
    return found


def usual(inputs, targets) -> Usual:
    return Usual(*(Sizes(float(np.mean(x)), float(np.std(x)), int(max(x))) for x in (inputs, targets)))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@given(st.lists(st.tuples(st.integers(1, 600), st.integers(1, 60)), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_every_example_is_in_one_row_whole(layout, lengths):
    inputs = [np.full(n, 10 + i, np.int32) for i, (n, _) in enumerate(lengths)]
    targets = [np.full(n, 100 + i, np.int32) for i, (_, n) in enumerate(lengths)]
    sizes, target_sizes = zip(*lengths, strict=True)
    rows = LAYOUTS[layout](sizes, target_sizes, usual(sizes, target_sizes))
    packed = pack(inputs, targets, rows, 0)
    want = sorted((tuple(x), tuple(y)) for x, y in zip(inputs, targets, strict=True))
    assert sorted(unpack(packed)) == want


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_no_examples_are_a_row_of_padding(layout):
    """Which a model can still take."""
    packed = pack([], [], LAYOUTS[layout]([], [], usual([20, 40], [3, 9])), 0)
    assert all(len(rows) == 1 and rows.size for rows in packed.values())
    assert not packed["segments"].any()
    assert not packed["decoder_segments"].any()


@given(st.lists(st.integers(1, 16), min_size=1, max_size=8))
@settings(deadline=None)
def test_first_fit_wastes_less_than_half(inputs):
    assert len(fit_rows(inputs, [1] * len(inputs), 16, 8)) <= 2 * -(-sum(inputs) // 16)


@pytest.mark.parametrize(("shortest", "longest", "most"), [(3, 40, 0.08), (80, 380, 0.12)])
def test_little_is_padding(shortest, longest, most):
    """Sentences, and paragraphs with a question: rows are nearly full, and targets need little room."""
    draw = np.random.default_rng(0)
    inputs, targets = draw.integers(shortest, longest, 256), draw.integers(2, 5, 256)
    width = target_widths(usual(inputs, targets), 512)[0]
    rows = fit_rows(inputs.tolist(), targets.tolist(), 512, width)
    assert 1 - inputs.sum() / (512 * len(rows)) < most
    assert sorted(example for row in rows for example in row) == list(range(256))
    assert all(inputs[row].sum() <= 512 and targets[row].sum() <= width for row in rows)
    assert width <= 1.1 * 512 * targets.mean() / inputs.mean() + 8


@pytest.mark.parametrize(("shortest", "longest"), [(3, 40), (80, 380)])
def test_wide_rows_are_full(shortest, longest):
    draw = np.random.default_rng(0)
    inputs, targets = draw.integers(shortest, longest, 256).tolist(), draw.integers(2, 5, 256).tolist()
    narrow, wide = (make(inputs, targets, usual(inputs, targets)) for make in (narrow_rows, wide_rows))
    assert sum(inputs) > 0.96 * wide.number * wide.width
    assert sum(targets) > 0.75 * wide.number * wide.target_width
    assert wide.positions < 1.005 * narrow.positions


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(("batch", "most"), [(8, 24), (32, 24), (192, 16)])
@pytest.mark.parametrize("longs", [0.0, 0.1])
def test_batches_have_few_shapes(layout, batch, most, longs):
    """Whatever their size, and where long examples are among short ones."""
    draw = np.random.default_rng(0)
    inputs = draw.integers(80, 380, (200, batch))
    if longs:
        inputs = np.where(draw.random(inputs.shape) < longs, inputs, inputs // 10)
    targets = draw.integers(2, 9, inputs.shape)
    like = usual(inputs.ravel(), targets.ravel())
    found = [LAYOUTS[layout](x.tolist(), y.tolist(), like) for x, y in zip(inputs, targets, strict=True)]
    assert len({(rows.number, rows.width, rows.target_width) for rows in found}) <= most
    positions, tokens = sum(rows.positions for rows in found), inputs.sum() + targets.sum()
    assert tokens > {8: 0.5, 32: 0.7, 192: 0.8}[batch] * positions


def test_wide_rows_end_with_tiles():
    draw = np.random.default_rng(0)
    inputs, targets = draw.integers(80, 380, 192).tolist(), draw.integers(2, 9, 192).tolist()
    rows = wide_rows(inputs, targets, usual(inputs, targets))
    assert (rows.number, rows.width % 128, rows.target_width % 32) == (11, 0, 0)


def test_an_input_longer_than_wide_rows_makes_fewer_of_them():
    inputs, targets = [200] * 255 + [8192], [5] * 256
    rows = wide_rows(inputs, targets, usual(inputs, targets))
    assert rows.positions < 1.2 * sum(inputs)


def test_the_room_for_targets_is_what_makes_the_fewest_places():
    """Three of these go into a row by their inputs, but two if there is room for the usual targets alone."""
    like = Usual(Sizes(170.0, 0.0, 170), Sizes(5.0, 9.0, 27))
    rows = narrow_rows([170] * 30, [9] * 30, like)
    assert target_widths(like, 512) == [24, 32]
    assert (rows.number, rows.target_width) == (10, 32)


def test_widths_of_targets_reach_the_longest():
    assert target_widths(Usual(Sizes(200.0, 0.0, 512), Sizes(5.8, 0.0, 97)), 512) == [24, 40, 64, 96, 104]
    assert target_widths(Usual(Sizes(20.0, 0.0, 60), Sizes(2.0, 0.0, 2)), 512) == [64]


def packed_rows(inputs, targets) -> dict[str, np.ndarray]:
    """Rows 32 wide, of 24 for targets; the last is empty."""
    rows = fit_rows([len(x) for x in inputs], [len(y) for y in targets], 32, 24)
    return pack(inputs, targets, Rows(rows, len(rows) + 1, 32, 24), 0)


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
    packed = packed_rows(inputs, targets)
    assert packed["input_ids"].shape[0] < 12
    want, want_gradients = gradients(model, padded)
    got, got_gradients = gradients(model, packed)
    assert got == pytest.approx(want, rel=1e-6)
    for name, gradient in want_gradients.items():
        torch.testing.assert_close(got_gradients[name], gradient, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("method", ["sequence-altup", "stride-and-skip", "average-pooling"])
def test_models_that_mix_neighbours_refuse(method):
    packed = packed_rows(*random_examples(4))
    with pytest.raises(UserError, match="segments"):
        tiny_t5(method)(**{name: torch.from_numpy(array).long() for name, array in packed.items()})


def test_half_a_numbering_is_refused():
    packed = {n: torch.from_numpy(a).long() for n, a in packed_rows(*random_examples(4)).items()}
    packed.pop("decoder_segments")
    with pytest.raises(UserError, match="together"):
        tiny_t5("dense")(**packed)


def test_packed_rows_are_given_whole():
    """No mask that would be ignored, no number missing, no cache: a later step could not tell whose it is."""
    model = tiny_t5("altup")
    packed = {n: torch.from_numpy(a).long() for n, a in packed_rows(*random_examples(4)).items()}
    assert (
        model(**{**packed, "labels": None, "decoder_input_ids": packed["labels"].clamp(min=0)})
        .logits.isfinite()
        .all()
    )
    for wrong, says in (
        ({"decoder_attention_mask": torch.ones_like(packed["labels"])}, "mask or decoder_segments"),
        ({"segments": packed["segments"][:, :1]}, "does not number"),
        ({"decoder_segments": packed["decoder_segments"][:, :1]}, "does not number"),
        ({"use_cache": True}, "no cache"),
    ):
        with pytest.raises(UserError, match=says):
            model(**{**packed, **wrong})
    with pytest.raises(UserError, match="no cache"):
        model.generate(
            packed["input_ids"], segments=packed["segments"], decoder_segments=packed["segments"][:, :1]
        )


@pytest.mark.parametrize("packing", sorted(LAYOUTS))
def test_a_packed_mixture_holds_what_a_padded_one_does(packing):
    padded, packed = (Mixture(TASKS, [50, 20, 3], 24, 0, seed=1, packing=layout) for layout in (None, packing))
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


@pytest.mark.parametrize("packing", sorted(LAYOUTS))
def test_packed_micro_batches_can_be_made_of_one_shape(packing):
    """And hold what they hold anyway."""
    mixture = Mixture(TASKS, [50, 20, 3], 24, 0, seed=1, packing=packing)
    differed = False
    for step in range(6):
        apart = [mixture.examples(step, start, start + 8) for start in (0, 8, 16)]
        differed |= len({rows["input_ids"].shape for rows in apart}) > 1
        levelled = alike(apart)
        assert len({tuple((name, rows.shape) for name, rows in micro.items()) for micro in levelled}) == 1
        for micro, rows in zip(levelled, apart, strict=True):
            assert unpack(micro) == unpack(rows)
    assert differed

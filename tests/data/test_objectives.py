from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from scipy import stats

from altup.core.errors import UserError
from altup.data.objectives import Causal, Masked, SpanCorruption, build_objective, noise_counts, span_lengths
from altup.data.randomness import keys
from altup.data.tokenizer import Vocabulary

SENTINELS = list(range(32_099, 31_999, -1))


def t5_lengths(inputs_length: int, noise_density: float, mean_span: float) -> tuple[int, int]:
    """T5's `random_spans_helper`, written out."""

    def split(tokens: int) -> tuple[int, int]:
        noise = round(tokens * noise_density)
        spans = round(noise / mean_span)
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = inputs_length
    while split(tokens + 1)[0] <= inputs_length:
        tokens += 1
    return tokens, split(tokens)[1]


def corrupt(raw: list[int], noise_lengths: list[int], kept_lengths: list[int]) -> tuple[list[int], list[int]]:
    """One example, token by token."""
    inputs, targets, at = [], [], 0
    for span, (noise, kept) in enumerate(zip(noise_lengths, kept_lengths, strict=True)):
        inputs += raw[at : at + kept]
        at += kept
        inputs.append(SENTINELS[span])
        targets.append(SENTINELS[span])
        targets += raw[at : at + noise]
        at += noise
    assert at == len(raw)
    return [*inputs, 1], [*targets, 1]


def restore(inputs: list[int], targets: list[int]) -> list[int]:
    """The raw tokens back from inputs and targets."""
    spans: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token >= 32_000:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    return [t for token in inputs[:-1] for t in spans.get(token, [token])]


def test_the_counts_of_the_paper() -> None:
    assert span_lengths(512) == (568, 114)
    assert noise_counts(568, 0.15, 3.0) == (85, 28)
    example = SpanCorruption(SENTINELS, 1)(np.full((2, 568), 7, np.uint16), keys(0, np.arange(2)))
    assert example["input_ids"].shape == (2, 512)
    assert example["labels"].shape == (2, 114)
    assert all(array.dtype == np.int32 for array in example.values())


@pytest.mark.parametrize("density", [0.1, 0.15, 0.3, 0.5])
@pytest.mark.parametrize("span", [2.0, 3.0, 8.0])
def test_other_lengths_are_derived_as_t5_does(density: float, span: float) -> None:
    for length in (64, 100, 128, 200, 256, 384, 512):
        assert span_lengths(length, density, span) == t5_lengths(length, density, span)


def test_a_hand_written_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 tokens, 4 of them noise in 2 spans: kept 3 and 5, noise 1 and 3."""
    objective = SpanCorruption(SENTINELS, 1, input_length=11, noise_density=0.33, mean_span=2.0)
    assert (objective.raw_length, objective.noise, objective.spans) == (12, 4, 2)
    cuts = {4: [1, 3], 8: [3, 5]}
    monkeypatch.setattr(objective, "_segment", lambda key, tokens, stream: np.array([cuts[tokens]]))
    example = objective(np.arange(10, 22)[None], keys(0, np.arange(1)))
    assert example["input_ids"].tolist() == [[10, 11, 12, 32_099, 14, 15, 16, 17, 18, 32_098, 1]]
    assert example["labels"].tolist() == [[32_099, 13, 32_098, 19, 20, 21, 1]]


@pytest.mark.parametrize(
    ("length", "density", "span"), [(512, 0.15, 3.0), (64, 0.15, 3.0), (30, 0.5, 1.0), (8, 0.3, 9)]
)
def test_against_one_example_at_a_time(length: int, density: float, span: float) -> None:
    objective = SpanCorruption(SENTINELS, 1, length, density, span if span < length else 4.0)
    rng = np.random.default_rng(0)
    raw = rng.integers(3, 32_000, (50, objective.raw_length)).astype(np.uint16)
    key = keys(1, np.arange(50))
    noise = objective._segment(key, objective.noise, 0).tolist()
    kept = objective._segment(key, objective.raw_length - objective.noise, 1).tolist()
    made = objective(raw, key)
    for row in range(50):
        assert min(noise[row]) >= 1
        assert min(kept[row]) >= 1
        inputs, targets = corrupt(raw[row].tolist(), noise[row], kept[row])
        assert made["input_ids"][row].tolist() == inputs
        assert made["labels"][row].tolist() == targets
        assert restore(inputs, targets) == raw[row].tolist()


def test_every_division_into_spans_is_equally_likely() -> None:
    objective = SpanCorruption(SENTINELS, 1, 20, 0.3, 2.0)
    assert (objective.noise, objective.spans) == (7, 4)
    divisions = {}
    for cuts in combinations(range(1, 7), 3):
        edges = [0, *cuts, 7]
        divisions[tuple(b - a for a, b in pairwise(edges))] = len(divisions)
    found = objective._segment(keys(0, np.arange(40_000)), 7, 0).tolist()
    counts = np.bincount([divisions[tuple(row)] for row in found], minlength=len(divisions))
    assert stats.chisquare(counts).pvalue > 1e-4


def test_rows_do_not_depend_on_their_neighbours() -> None:
    objective = SpanCorruption(SENTINELS, 1, 64)
    raw = np.random.default_rng(0).integers(3, 32_000, (9, objective.raw_length))
    key = keys(0, np.arange(9))
    whole = objective(raw, key)
    for row in range(9):
        alone = objective(raw[row : row + 1], key[row : row + 1])
        assert all(np.array_equal(alone[name][0], whole[name][row]) for name in whole)


def test_the_advice_on_sentinels_is_true() -> None:
    """`--vocab-size` gives 100 sentinels, so it is named only where these are enough."""
    with pytest.raises(UserError, match="needs 114 sentinels") as caught:
        SpanCorruption(range(100), 1, 2048)
    assert "--vocab-size" not in str(caught.value)
    with pytest.raises(UserError, match="needs 28 sentinels, the tokenizer has 0") as caught:
        SpanCorruption((), 1, 512)
    assert "--vocab-size` has 100" in str(caught.value)
    SpanCorruption(range(100), 1, 512)


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(UserError, match="needs 114 sentinels, the tokenizer has 100"):
        SpanCorruption(SENTINELS, 1, 2048)
    with pytest.raises(UserError, match="tokenizer has 0"):
        SpanCorruption([], 1)
    with pytest.raises(UserError, match=r"noise_density=1\.5"):
        SpanCorruption(SENTINELS, 1, 512, noise_density=1.5)
    with pytest.raises(UserError, match="input_length=0"):
        SpanCorruption(SENTINELS, 1, 0)


def test_masked_counts_and_shares() -> None:
    objective = Masked(mask=4, vocab_size=1000, start=2, eos=3, length=128)
    assert (objective.raw_length, objective.asked) == (126, 19)
    raw = np.random.default_rng(0).integers(10, 1000, (4000, 126))
    made = objective(raw, keys(0, np.arange(4000)))
    inputs, labels = made["input_ids"], made["labels"]
    assert inputs.shape == labels.shape == (4000, 128)
    assert (inputs[:, 0] == 2).all()
    assert (inputs[:, -1] == 3).all()
    asked = labels != -100
    assert (asked.sum(1) == 19).all()
    assert not asked[:, [0, -1]].any()
    places = np.zeros_like(asked)
    np.put_along_axis(places, made["masked_positions"], True, axis=1)
    assert np.array_equal(places, asked)
    whole = np.pad(raw, ((0, 0), (1, 1)))
    assert np.array_equal(labels[asked], whole[asked])
    assert np.array_equal(inputs[:, 1:-1][~asked[:, 1:-1]], raw[~asked[:, 1:-1]])
    masked = np.mean(inputs[asked] == 4)
    kept = np.mean(inputs[asked] == labels[asked])
    assert masked == pytest.approx(0.8, abs=0.01)
    assert kept == pytest.approx(0.1, abs=0.01)
    assert asked[:, 1:-1].mean(0) == pytest.approx(np.full(126, 19 / 126), abs=0.03)


def test_masked_without_a_start_token() -> None:
    objective = Masked(mask=9, vocab_size=10, start=None, eos=1, length=8)
    made = objective(np.full((3, 7), 5), keys(0, np.arange(3)))
    assert (made["input_ids"][:, -1] == 1).all()
    assert ((made["labels"] != -100).sum(1) == 1).all()


def test_causal_labels_are_the_next_tokens() -> None:
    made = Causal(start=1, length=5)(np.array([[10, 11, 12, 13, 14]]), keys(0, np.arange(1)))
    assert made["input_ids"].tolist() == [[1, 10, 11, 12, 13]]
    assert made["shift_labels"].tolist() == [[10, 11, 12, 13, 14]]


def test_building_by_name() -> None:
    ours = Vocabulary("", 32_100, 0, 1, None, 32_099, tuple(range(32_099, 31_999, -1)))
    assert build_objective("span-corruption", ours).raw_length == 568
    assert build_objective("masked", ours, 128).raw_length == 127
    assert build_objective("causal", ours, 128).raw_length == 128
    bare = Vocabulary("", 100, 0, 1, None, None, ())
    with pytest.raises(UserError, match="no mask token"):
        build_objective("masked", bare)
    with pytest.raises(UserError, match="sentinels"):
        build_objective("span-corruption", bare)
    with pytest.raises(UserError, match="objective='prefix' is not known"):
        build_objective("prefix", ours)

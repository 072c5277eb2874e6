from __future__ import annotations

import numpy as np
import pytest

from altup.core.errors import UserError
from altup.data.objectives import Causal, Masked, build_objective
from altup.data.randomness import keys
from altup.data.tokenizer import Vocabulary


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

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from altup.data.randomness import below, choose, draws, keys, mix, permute


def test_mix_is_splitmix64() -> None:
    """The first outputs of the published generator from seed 1234567."""
    state = np.array([1234567], np.uint64) + np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 255, 257, 1000, 4097, 65536, 100_003])
def test_permute_is_a_bijection(size: int) -> None:
    for seed in range(3):
        image = permute(np.arange(size), size, keys(seed, np.zeros(size, np.int64)))
        assert np.array_equal(np.sort(image), np.arange(size))


def test_any_element_can_be_had_alone() -> None:
    key = keys(5, np.full(1000, 3))
    whole = permute(np.arange(1000), 1000, key)
    for i in (0, 17, 999):
        assert permute(np.array([i]), 1000, key[:1])[0] == whole[i]


def test_all_permutations_of_four_are_equally_likely() -> None:
    n = 48_000
    key = np.repeat(keys(0, np.arange(n)), 4)
    images = permute(np.tile(np.arange(4), n), 4, key).reshape(n, 4)
    counts = np.unique(images @ [64, 16, 4, 1], return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-4


def test_neighbours_are_scattered() -> None:
    size = 100_000
    image = permute(np.arange(size), size, keys(1, np.zeros(size, np.int64)))
    assert abs(np.corrcoef(np.arange(size), image)[0, 1]) < 0.02
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.02
    assert np.mean(np.abs(np.diff(image)) < 10) < 0.001


def test_every_subset_is_equally_likely() -> None:
    chosen = choose(keys(0, np.arange(60_000)), 3, 6)
    subsets = {subset: i for i, subset in enumerate(combinations(range(6), 3))}
    counts = np.bincount([subsets[tuple(row)] for row in chosen.tolist()], minlength=20)
    assert stats.chisquare(counts).pvalue > 1e-4


def test_choose_at_the_edges() -> None:
    key = keys(0, np.arange(5))
    assert choose(key, 0, 7).shape == (5, 0)
    assert np.array_equal(choose(key, 7, 7), np.tile(np.arange(7), (5, 1)))
    assert np.array_equal(choose(key, 1, 1), np.zeros((5, 1)))


def test_draws_are_uniform_and_streams_differ() -> None:
    key = keys(0, np.arange(2000))
    first, second = draws(key, 50, stream=0), draws(key, 50, stream=1)
    for numbers in (first, second):
        assert stats.chisquare(np.bincount(below(numbers, 10).ravel().astype(int))).pvalue > 1e-4
    correlation = np.corrcoef(first.ravel() / 2.0**64, second.ravel() / 2.0**64)[0, 1]
    assert abs(correlation) < 0.01
    assert len(np.unique(first)) == first.size


def test_keys_depend_on_every_coordinate() -> None:
    grid = np.meshgrid(np.arange(30), np.arange(30), np.arange(30))
    seen = np.concatenate([keys(seed, *(axis.ravel() for axis in grid)) for seed in range(3)])
    assert len(np.unique(seen)) == 3 * 30**3

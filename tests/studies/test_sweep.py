"""Sweeps: what is tried next, and what is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from altup.studies.sweep import Point, count_points, edges, search, starting_point, tunable
from altup.training.pretraining import PretrainConfig

GRID = {"lr": [0.1, 0.2, 0.4], "decay": [0, 1]}


def run(how: str, grid: dict, start: Point, loss: Callable[[Point], float]) -> tuple[Point, int]:
    """A search to its end: what is best, and how many runs it took."""
    known: dict[str, float] = {}
    while (found := search(how, grid, start, lambda point: known.get(str(point)))).missing:
        for point in found.missing:
            assert str(point) not in known
            known[str(point)] = loss(point)
    return found.best, len(known)


def test_a_search_by_hand() -> None:
    """By coordinates first the rates at decay 1, of which 0.2 is best, then the decays at that rate. Through the
    grid the pair that coordinates do not find."""
    losses = {(0.1, 1): 3.0, (0.2, 1): 2.0, (0.4, 1): 2.5, (0.2, 0): 1.9, (0.1, 0): 0.5, (0.4, 0): 9.0}

    def loss(point: Point) -> float:
        return losses[point["lr"], point["decay"]]

    start = {"lr": 0.4, "decay": 1}
    assert run("coordinate", GRID, start, loss) == ({"lr": 0.2, "decay": 0}, 4)
    assert run("grid", GRID, start, loss) == ({"lr": 0.1, "decay": 0}, 6)


@given(
    st.lists(st.floats(0, 9) | st.just(math.inf), min_size=12, max_size=12),
    st.sampled_from(["coordinate", "grid"]),
)
def test_nothing_that_was_tried_is_better_and_no_run_is_made_twice(losses: list[float], how: str) -> None:
    grid = {"a": [0, 1, 2], "b": [0, 1], "c": [0, 1]}

    def loss(point: Point) -> float:
        return losses[point["a"] * 4 + point["b"] * 2 + point["c"]]

    best, runs = run(how, grid, {"a": 1, "b": 0, "c": 1}, loss)
    assert runs <= count_points(how, grid)
    assert count_points("coordinate", grid) == 3 + 1 + 1
    if how == "grid":
        assert runs == 12
        assert loss(best) == min(losses)
    elif math.isfinite(loss(best)):
        assert loss(best) <= min(loss({**best, "c": value}) for value in (0, 1))


def test_where_all_diverge_the_start_stays() -> None:
    start = {"lr": 0.2, "decay": 1}
    for how in ("coordinate", "grid"):
        assert run(how, GRID, start, lambda point: math.inf)[0] == start


def test_a_sweep_begins_with_what_the_model_has(data: Path) -> None:
    config = PretrainConfig(data=str(data), size="tiny", optimizer="muon", lr=0.05, lr_factors={"embeddings": 3.0})
    grid = {"lr": [0.01, 0.04, 0.2], "lr_factors.embeddings": [1, 4], "schedule": ["cosine", "linear"]}
    begin = starting_point(grid, {}, config)
    assert begin == {"lr": 0.04, "lr_factors.embeddings": 4, "schedule": "cosine"}
    assert starting_point(grid, {"lr": 0.2}, config)["lr"] == 0.2


@pytest.mark.parametrize(
    ("model", "swept"),
    [
        ({"method": "altup"}, ["lr_factors.coefficients", "lr_factors.positions"]),
        ({"method": "dense"}, ["lr_factors.positions"]),
        ({"method": "altup", "model": "decoder"}, ["lr_factors.coefficients"]),
    ],
)
def test_what_a_model_does_not_have_is_not_swept(data: Path, model: dict[str, str], swept: list[str]) -> None:
    grid = {"lr_factors.coefficients": [1, 2], "lr_factors.positions": [1, 2], "lr": [1, 2]}
    config = PretrainConfig(data=str(data), size="tiny", **model)
    assert list(tunable(grid, config, {"lr": 3})) == swept
    assert list(tunable(grid, config, {"lr_factors": {"coefficients": 1, "positions": 1}})) == ["lr"]


def test_edges_are_where_a_better_value_may_lie_beyond() -> None:
    grid = {"lr": [0.1, 0.2, 0.4], "schedule": ["cosine", "linear"], "seed": [1]}
    assert edges(grid, {"lr": 0.4, "schedule": "linear", "seed": 1}) == ["lr"]
    assert edges(grid, {"lr": 0.2, "schedule": "linear", "seed": 1}) == []

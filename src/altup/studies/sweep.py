"""Sweeps: which settings to try next, and which are best, given the losses of the runs so far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from altup.training.pretraining import PretrainConfig

Point = dict[str, Any]  # setting → value; `lr_factors.embeddings` is an entry of a mapping
Loss = Callable[[Point], float | None]  # infinite of a run that diverged, None of one that was not made


@dataclass(frozen=True)
class Search:
    """`best` is the best point so far; `missing` are those to run next, none once it has ended."""

    best: Point
    missing: list[Point]


def search(how: str, grid: Mapping[str, Sequence[Any]], start: Point, loss: Loss) -> Search:
    """The search of a `Tuning`, by coordinates or through the whole grid."""
    if how == "grid":
        return _best_of(
            [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())], start, loss
        )
    found = Search(start, [])
    for name, values in grid.items():
        found = _best_of([{**found.best, name: value} for value in values], found.best, loss)
        if found.missing:
            break
    return found


def _best_of(points: Sequence[Point], start: Point, loss: Loss) -> Search:
    """Of equals the first; where all have diverged, `start`."""
    losses = [loss(point) for point in points]
    missing = [point for point, value in zip(points, losses, strict=True) if value is None]
    known = [(value, i) for i, value in enumerate(losses) if value is not None and math.isfinite(value)]
    return Search(points[min(known)[1]] if known else dict(start), missing)


def count_points(how: str, grid: Mapping[str, Sequence[Any]]) -> int:
    """How many runs a search makes: settings share the point at which one ends and the next begins."""
    sizes = [len(values) for values in grid.values()]
    return math.prod(sizes) if how == "grid" else sum(sizes) - len(sizes) + 1


def tunable(
    grid: Mapping[str, list[Any]], config: PretrainConfig, fixed: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """The settings of a grid that the model has, without those that a row or the user has `fixed`: of a mapping
    the entries that are named."""
    given = {
        f"{name}.{entry}" if entry else name
        for name, value in fixed.items()
        for entry in (value if isinstance(value, dict) else [""])
    }
    absent = {"lr_factors.coefficients": not config.has_coefficients, "lr_factors.positions": config.kind != "t5"}
    return {name: values for name, values in grid.items() if name not in given and not absent.get(name)}


def starting_point(grid: Mapping[str, list[Any]], start: Point, config: PretrainConfig) -> Point:
    """Of each setting the value in `start`, else the nearest to the model's own (by their ratio, where they are
    numbers above 0), else the first."""
    return {name: _nearest(values, start.get(name, read_setting(config, name))) for name, values in grid.items()}


def read_setting(config: PretrainConfig, name: str) -> Any:
    name, _, part = name.partition(".")
    value = getattr(config, name)
    return value.get(part, 1.0) if part else value


def _nearest(values: Sequence[Any], wanted: Any) -> Any:
    if wanted in values:
        return values[list(values).index(wanted)]  # 2 is 2.0, but a point is known by how it is written
    if all(isinstance(value, int | float) and value > 0 for value in (*values, wanted)):
        return min(values, key=lambda value: abs(math.log(value / wanted)))
    return values[0]


def change(settings: dict[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with those of a point; `lr_factors.embeddings` changes an entry of a mapping."""
    changed = dict(settings)
    for name, value in point.items():
        field_name, _, entry = name.partition(".")
        changed[field_name] = {**changed.get(field_name, {}), entry: value} if entry else value
    return changed


def describe_point(point: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in point.items()
    )


def edges(grid: Mapping[str, Sequence[Any]], chosen: Point) -> list[str]:
    """The settings whose best value is the first or last of those tried, so that a better one may lie beyond.
    Words have no beyond."""
    return [
        name for name, values in grid.items()
        if len(values) > 1 and chosen.get(name) in (values[0], values[-1]) and not isinstance(values[0], str)
    ]  # fmt: skip

"""Shapes of the JSON files in a results folder, which may come from anyone: what is wrong with one, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from altup.core.schema import describe_kind, fits
from altup.studies.study import FINETUNED

Number = int | float
# What every record of a run has, and what the reports read of a pretraining run.
RECORD: dict[str, Any] = {
    "key": str, "kind": str, "step": int, "measures": dict[str, float], "hardware": str, "versions": str,
    "date": str,
}  # fmt: skip
PRETRAIN = {"curves": dict[str, list[list[float]]], "coefficients": dict[str, list[dict[str, Any]]]}
MORE = {
    "title": str, "config": dict[str, Any], "start": dict[str, str], "continues": dict[str, Any],
    "tuned": list[str], "tuned_by": str, "of": str, "column": str, "tasks": dict[str, dict[str, float]],
    "missing": list[str], "diverged": str,
}  # fmt: skip
SWEEP = {
    "key": str, "model": str, "scale": str, "steps": int, "seed": int, "grid": dict[str, list[Any]],
    "chosen": dict[str, Any] | None, "curves": dict[str, list[list[Any]]], "runs": list[list[Any]],
}  # fmt: skip
SETTLED = {"steps": int, "curves": dict[str, list[list[Any]]], "runs": list[list[Any]]}
LARGEST = 1e30  # number of a curve or a coefficient
CURVES = {"held_out": 3, "train": 2}  # numbers of a point: the step, the loss, the accuracy
BLOCK = {"stack": str, "layer": int, "P": list[list[float]], "g": list[float], "active": int}
STRIDED = {"stack": str, "layer": int, "a": list[float], "b": list[float]}


def record_misfit(record: Any) -> str | None:
    """What is wrong with a record of a run; None where reports can read it."""
    kinds = RECORD | (PRETRAIN if isinstance(record, dict) and record.get("kind") == "pretrain" else {})
    if wrong := misfit(record, kinds, MORE):
        return wrong
    if record["kind"] != "pretrain":
        told = "diverged" not in record or record.get("column") in FINETUNED
        return None if told else f"column must be one of {', '.join(FINETUNED)}"
    for name, size in CURVES.items():
        if any(len(point) != size for point in record["curves"].get(name, [[]])):
            return f"curves.{name} is no list of {size} numbers each"
    if not is_finite([record["curves"], record["coefficients"]]):
        return "curves or coefficients are not finite"
    return _coefficients_misfit(record["coefficients"])


def _coefficients_misfit(found: Mapping[str, Any]) -> str | None:
    blocks, strided = found.get("blocks", []), found.get("sequence", [])
    for name, entries, kinds in (("blocks", blocks, BLOCK), ("sequence", strided, STRIDED)):
        for entry in entries:
            if wrong := misfit(entry, kinds):
                return f"coefficients.{name}: {wrong}"
    for entry in blocks:
        k = len(blocks[0]["g"])
        square = len(entry["g"]) == len(entry["P"]) == k and all(len(line) == k for line in entry["P"])
        if not square or not 0 <= entry["active"] < k:
            return "coefficients.blocks: P, g and active do not belong together"
    if any((len(entry["a"]), len(entry["b"])) != (2, 1) for entry in strided):
        return "coefficients.sequence: a has two numbers and b one"
    return None


def sweep_misfit(sweep: Any) -> str | None:
    """What is wrong with a sweep."""
    if wrong := misfit(sweep, SWEEP, {"settled": dict[str, Any]}):
        return wrong
    for name, values in sweep["grid"].items():
        if not all(map(_is_value, values)):
            return f"grid.{name} holds more than numbers and text"
        if len({isinstance(value, str) for value in values}) > 1:
            return f"grid.{name} mixes numbers and text"
    if not all(map(_is_value, (sweep["chosen"] or {}).values())):
        return "chosen holds more than numbers and text"
    longer = sweep.get("settled")
    if longer is not None and (wrong := misfit(longer, SETTLED)):
        return f"settled: {wrong}"
    for part in (sweep, longer or {"curves": {}, "runs": []}):
        if wrong := _walk_misfit(part, sweep["grid"]):
            return wrong
    return None


def _walk_misfit(part: Mapping[str, Any], grid: Mapping[str, list[Any]]) -> str | None:
    for name, curve in part["curves"].items():
        known = grid.get(name, [])
        fitting = (len(point) == 2 and point[0] in known and _is_loss(point[1]) for point in curve)
        if name not in grid or not all(fitting):
            return f"curves.{name} does not go with the grid"
    if not all(len(run) == 3 and _is_point(run[0]) and _is_loss(run[1]) for run in part["runs"]):
        return "runs is no list of settings, loss and key"
    return None


def _is_point(found: Any) -> bool:
    return fits(found, dict[str, Any]) and all(map(_is_value, found.values()))


def _is_value(found: Any) -> bool:
    """Of a setting."""
    return isinstance(found, str) or (fits(found, Number) and abs(found) <= LARGEST)


def _is_loss(value: Any) -> bool:
    return fits(value, Number | None) and is_finite(value)


def is_finite(found: Any) -> bool:
    """Whether all numbers in nested lists and mappings are, as a drawing needs them; text and null pass."""
    if isinstance(found, dict | list):
        return all(map(is_finite, found.values() if isinstance(found, dict) else found))
    return not isinstance(found, int | float) or abs(found) < LARGEST


def misfit(found: Any, needed: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> str | None:
    """The first field that is missing or of another kind than said; `more` are those that may be missing."""
    if not isinstance(found, dict):
        return "it is no mapping"
    if lacking := _first(name for name in needed if name not in found):
        return f"{lacking} is missing"
    kinds = {**needed, **(more or {})}
    wrong = _first(name for name, kind in kinds.items() if name in found and not fits(found[name], kind))
    return f"{wrong} must be {describe_kind(kinds[wrong])}" if wrong else None


def _first(names: Any) -> str | None:
    return next(iter(names), None)

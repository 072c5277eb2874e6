"""The coefficients of the update rules: what they learned, and pictures of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from altup.studies.charts import Series
from altup.studies.drawings import Lines, Plot
from altup.studies.jobs import file_name
from altup.studies.pages import Figure, HeatRow, heat_map, show_coefficient, table
from altup.studies.results import Record, Records
from altup.studies.statistics import Statistics
from altup.studies.study import Study


def read_coefficients(model: Path) -> dict[str, Any]:
    """What the rules learned: `blocks` are P, g and the active block of each layer; `sequence` a₁, a₂, b."""
    from altup.training.tensor_files import TensorFiles

    place = re.compile(r"(?:.*\.)?(\w+)\.rule\.updates\.(\d+)\.(P|g)")
    strided = re.compile(r"(?:.*\.)?(\w+)\.layers\.(\d+)\.update\.(a|b)")
    found: dict[str, dict[tuple[str, int], dict[str, Any]]] = {"blocks": {}, "sequence": {}}
    for name, stored in TensorFiles(model, "model").items():
        for kind, pattern in (("blocks", place), ("sequence", strided)):
            if match := pattern.fullmatch(name):
                stack, layer, which = match[1], int(match[2]), match[3]
                value = stored[...].float()
                if not value.isfinite().all():
                    return {}  # of a model that diverged nothing can be drawn
                entry = found[kind].setdefault((stack, layer), {"stack": stack, "layer": layer})
                entry[which] = _rounded(value.tolist())
    blocks = list(found["blocks"].values())
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    for entry in blocks:
        entry["active"] = _active_block(settings.get("selection"), entry["layer"], len(entry["g"]))
    order = ("encoder", "decoder")
    blocks.sort(key=lambda e: (order.index(e["stack"]) if e["stack"] in order else 2, e["layer"]))
    sequence = sorted(found["sequence"].values(), key=lambda e: e["layer"])
    return {kind: entries for kind, entries in (("blocks", blocks), ("sequence", sequence)) if entries}


def _active_block(selection: str | list[int] | None, layer: int, blocks: int) -> int:
    if isinstance(selection, list):
        return selection[layer]
    return 0 if selection == "same" else layer % blocks


def _rounded(value: Any) -> Any:
    return [_rounded(v) for v in value] if isinstance(value, list) else round(value, 4)


def coefficient_figures(
    studies: Sequence[Study], stats: Statistics, record: Records
) -> tuple[list[Plot], list[Figure]]:
    """Line plots and heat maps of every distinct model that has coefficients, one seed each."""
    shown: dict[tuple[str, str], Record] = {}
    for study in studies:
        for row in study.rows:
            for size in stats.sizes(study.name, row.label):
                keys = stats.runs(study.name, row.label, size)
                kept = record(keys[0]) if keys else None
                if kept and kept["coefficients"]:
                    shown.setdefault((row.label, size), kept["coefficients"])
    plots: list[Plot] = []
    figures: list[Figure] = []
    for (label, size), coefficients in shown.items():
        if blocks := coefficients.get("blocks"):
            figures.append(block_figure(f"{label} · {size}", blocks))
            plots.append(_lines(label, size, blocks))
        if strided := coefficients.get("sequence"):
            figures.append(_sequence_figure(f"{label} · {size}", strided))
    return plots, figures


def block_figure(title: str, blocks: list[dict[str, Any]]) -> Figure:
    """P and g of every layer, coloured by how far they went."""
    count = range(len(blocks[0]["g"]))
    head = ["layer", *(f"P{_low(i)}{_low(j)}" for i in count for j in count), *(f"g{_low(i)}" for i in count)]
    start = [float(i == j) for i in count for j in count] + [1.0 for _ in count]
    rows = [
        HeatRow(
            f"{b['stack']} {b['layer'] + 1} · block {b['active'] + 1}",
            [*(value for line in b["P"] for value in line), *b["g"]],
            start,
        )
        for b in blocks
    ]
    full = max(abs(v - n) for row in rows for v, n in zip(row.values, row.neutral, strict=True)) or 1.0
    return Figure(
        title,
        heat_map(head, rows, full),
        f"Deepest colour {full:.2f} away from the start. “Block” is the one that the layer computed on.",
    )


def _lines(label: str, size: str, blocks: list[dict[str, Any]]) -> Plot:
    """g of the active and of the other blocks, and how much a block keeps of itself and takes from the others."""
    places = range(1, len(blocks) + 1)
    active = [b["g"][b["active"]] for b in blocks]
    others = [_mean([g for i, g in enumerate(b["g"]) if i != b["active"]]) for b in blocks]
    kept = [_mean([b["P"][i][i] for i in range(len(b["g"]))]) for b in blocks]
    taken = [_mean([p for i, line in enumerate(b["P"]) for j, p in enumerate(line) if i != j]) for b in blocks]
    named = (("g, active", active, 1), ("g, others", others, 2), ("P, own", kept, 3), ("P, other", taken, 4))
    stacks = [b["stack"] for b in blocks]
    first = {stack: stacks.index(stack) + 1 for stack in dict.fromkeys(stacks)}
    where = ", ".join(f"{stack} from {place}" for stack, place in first.items())
    return Lines(
        f"coefficients-{file_name(f'{label} {size}')}", f"Coefficients layer by layer: {label}, {size}",
        f"Means over blocks; {where}. “g, active” is how far the computed block goes to what the layer found "
        "(1: all the way), “g, others” how far the rest follow it; “P, own” is what a block keeps of itself, "
        "“P, other” what it takes from each other one.",
        [Series(name, list(zip(places, values, strict=True)), colour) for name, values, colour in named],
        "layer", "coefficient",
    )  # fmt: skip


def _sequence_figure(title: str, strided: list[dict[str, Any]]) -> Figure:
    rows = [
        [f"{entry['stack']} {entry['layer'] + 1}", *(show_coefficient(v) for v in (*entry["a"], *entry["b"]))]
        for entry in strided
    ]
    return Figure(
        title,
        table(["layer", "a₁", "a₂", "b"], rows),
        "A skipped token is predicted as a₁ times itself plus a₂ times the kept token before it, and corrected by "
        "b times what the layer changed there. Starts: 1, 0, 1.",
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _low(index: int) -> str:
    return str(index + 1).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))

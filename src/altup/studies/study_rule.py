"""What the update rule learned: P and g of every layer, as heat maps and as lines over the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from altup.studies.evidence import Evidence
from altup.studies.report import HeatRow, Html, Lines, Plot, Series, figure, grid, heat_map, paragraph, table
from altup.studies.report.tables import signed
from altup.studies.study import Study

Records = Callable[[str], dict[str, Any] | None]
FORMULA = (
    "A layer computes y from one block, a. Every block i is predicted from all of them, x̂ᵢ = Σⱼ Pᵢⱼ xⱼ, and then "
    "corrected by what the layer found: xᵢ = x̂ᵢ + gᵢ (y − x̂ₐ). Unless a title says otherwise P starts as the "
    "identity and g as ones: blue cells went up from there, orange ones down."
)


def rule_section(studies: Sequence[Study], evidence: Evidence, record: Records) -> tuple[list[Html], list[Plot]]:
    """Heat maps and line plots of every distinct model that has coefficients, one seed each."""
    shown: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    for study in studies:
        for row in study.rows:
            for size in evidence.sizes(study.name, row.label):
                keys = evidence.runs(study.name, row.label, size)
                found = record(keys[0]) if keys else None
                if found and found["coefficients"]:
                    shown.setdefault((row.label, size), (study.name, found))
    if not shown:
        return [paragraph("No model with coefficients has been run yet.")], []
    plots: list[Plot] = []
    figures: list[Html] = []
    for (label, size), (_, found) in shown.items():
        coefficients = found["coefficients"]
        if blocks := coefficients.get("blocks"):
            figures.append(_heat(f"{label} · {size}", blocks))
            plots.append(_lines(label, size, blocks))
        if strided := coefficients.get("sequence"):
            figures.append(_sequence(f"{label} · {size}", strided))
    lines = [plot.figure() for plot in plots]
    return [paragraph(FORMULA), grid(*lines), grid(*figures)], plots


def _heat(title: str, blocks: list[dict[str, Any]]) -> Html:
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
    return figure(
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
    plain = "".join(c if c.isalnum() else "-" for c in f"{label}-{size}".lower())
    return Lines(
        f"coefficients-{plain}", f"Coefficients layer by layer: {label}, {size}",
        f"Means over blocks; {where}. “g, active” is how far the computed block goes to what the layer found "
        "(1: all the way), “g, others” how far the rest follow it; “P, own” is what a block keeps of itself, "
        "“P, other” what it takes from each other one.",
        [Series(name, list(zip(places, values, strict=True)), colour) for name, values, colour in named],
        "layer", "coefficient",
    )  # fmt: skip


def _sequence(title: str, strided: list[dict[str, Any]]) -> Html:
    rows = [
        [f"{entry['stack']} {entry['layer'] + 1}", *(signed(v) for v in (*entry["a"], *entry["b"]))]
        for entry in strided
    ]
    return figure(
        title,
        table(["layer", "a₁", "a₂", "b"], rows),
        "A skipped token is predicted as a₁ times itself plus a₂ times the kept token before it, and corrected by "
        "b times what the layer changed there. Starts: 1, 0, 1.",
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _low(index: int) -> str:
    return "₁₂₃₄₅₆₇₈₉"[index]

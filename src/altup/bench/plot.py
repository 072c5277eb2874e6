"""Rows as bars: one panel a problem, the time of each provider with its ratio to the baseline."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from altup.bench.rows import Row
from altup.bench.table import WHOLE, by_problem, by_provider, find
from altup.core.errors import UserError

DRAWN = [mode for mode in WHOLE if mode != "copy"]
# Okabe and Ito's colours, told apart by colour-blind readers and in grey.
COLOURS = {"ours": "#0072B2", "plain": "#56B4E9", "peer": "#E69F00", "floor": "#BBBBBB"}


def draw(rows: Iterable[Row], path: Path) -> None:
    """Write a PNG, SVG or PDF, whichever the name of the file ends in."""
    panels = {}
    for title, mine in by_problem(rows).items():
        times = {name: find(theirs, "ms", DRAWN) for name, theirs in by_provider(mine).items()}
        found = {name: row for name, row in times.items() if row is not None}
        if found:
            panels[title] = (found, {name: find(theirs, "speedup") for name, theirs in by_provider(mine).items()})
    if not panels:
        raise UserError(f"--plot {path}: no provider was timed, so there is nothing to draw")

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    bars = [len(found) for found, _ in panels.values()]
    figure = Figure(figsize=(8, sum(0.9 + 0.3 * n for n in bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[0.9 + 0.3 * n for n in bars])[:, 0]
    for axis, (title, (found, ratios)) in zip(axes, panels.items(), strict=True):
        names = list(found)
        middle = [found[name].p50 or 0.0 for name in names]
        spread = [
            [m - (found[name].p20 or m) for name, m in zip(names, middle, strict=True)],
            [(found[name].p80 or m) - m for name, m in zip(names, middle, strict=True)],
        ]
        colours = [COLOURS[found[name].kind] for name in names]
        axis.barh(names, middle, xerr=spread, color=colours, error_kw={"lw": 0.8, "capsize": 2})
        for place, (name, ms) in enumerate(zip(names, middle, strict=True)):
            ratio = ratios[name]
            text = f"{ms:.3g} ms" + (f"  {ratio.p50:.2f}×" if ratio is not None else "")
            axis.text(max(ms, found[name].p80 or ms), place, f"  {text}", va="center", fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.25)
        notes = {ratio.note for ratio in ratios.values() if ratio is not None}
        axis.set_title("; ".join([title, *(f"× {note}" for note in notes)]), fontsize=9, loc="left")
        axis.set_xlabel("ms: median, 20th to 80th percentile", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    kinds = [
        kind for kind in COLOURS if any(row.kind == kind for found, _ in panels.values() for row in found.values())
    ]
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=kind) for kind in kinds], loc="outside lower right", ncols=4
    )
    try:
        figure.savefig(path, dpi=150)
    except (ValueError, OSError) as error:
        raise UserError(f"--plot {path}: {error}; name a file that ends in .png, .svg or .pdf") from None

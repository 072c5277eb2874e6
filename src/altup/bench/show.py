"""Rows as tables (one table a problem, one line a provider) and as bars (one panel a problem)."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from altup.bench.rows import OK, BenchRow
from altup.core.errors import UserError
from altup.core.text import shorten

if TYPE_CHECKING:
    from rich.table import Table

TIMES = ("forward", "backward", "both", "update", "generate", "produce", "copy")
DRAWN = ("both", "update", "generate", "produce")
NOTE = 60  # characters of a note that are shown; files keep the whole
# Okabe and Ito's colours, which colour-blind readers and grey prints tell apart.
COLOURS = {"ours": "#0072B2", "plain": "#56B4E9", "peer": "#E69F00", "floor": "#BBBBBB"}
OTHERS = {
    "overhead": "{:+.1%}",
    "floor": "{:+.1%}",
    "fraction": "{:.1%}",
    "overhead/floor": "{:.2f}×",
    "over plain": "{:.2f}×",
}


def by_problem(rows: Iterable[BenchRow]) -> dict[str, list[BenchRow]]:
    """Rows under the title of their problem, in the order they came."""
    groups: dict[str, list[BenchRow]] = defaultdict(list)
    for row in rows:
        groups[title(row)].append(row)
    return groups


def title(row: BenchRow) -> str:
    return f"{row.case}: " + ", ".join(f"{name} {value}" for name, value in row.sizes.items())


def by_provider(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    groups: dict[str, list[BenchRow]] = defaultdict(list)
    for row in rows:
        groups[row.provider].append(row)
    return groups


def find(rows: Sequence[BenchRow], metric: str, modes: Sequence[str] = ()) -> BenchRow | None:
    """The last such row: a file may hold several runs."""
    found = [
        row for row in rows if row.metric == metric and (not modes or row.mode in modes) and row.p50 is not None
    ]
    return found[-1] if found else None


def build_table(name: str, rows: Sequence[BenchRow]) -> Table:
    from rich import box
    from rich.table import Table

    modes = [mode for mode in TIMES if any(row.mode == mode and row.metric == "ms" for row in rows)]
    measured = {row.metric for row in rows if row.p50 is not None}
    rates = sorted(metric for metric in measured if metric.endswith("/s"))
    others = [metric for metric in ("GiB", "s", "speedup", *OTHERS) if metric in measured]
    table = Table(title=name, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("provider", no_wrap=True)
    headings = {"s": "start s", "speedup": "×"}
    for heading in [*(f"{mode} ms" for mode in modes), *rates, *(headings.get(o, o) for o in others)]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for provider, mine in sorted(by_provider(rows).items(), key=lambda item: find(item[1], "ms") is None):
        bad = next((row for row in mine if row.status != OK), None)
        cells = [_time(find(mine, "ms", [mode])) for mode in modes]
        cells += [_number(find(mine, rate)) for rate in rates]
        cells += [_other(find(mine, metric)) for metric in others]
        note = (
            f"{bad.status}: {bad.note}" if bad and not any(cells) else "floor" if mine[0].kind == "floor" else ""
        )
        table.add_row(provider, *cells, shorten(note, NOTE))
    return table


def print_tables(rows: Iterable[BenchRow]) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for name, mine in by_problem(rows).items():
        console.print(build_table(name, mine))


def _time(row: BenchRow | None) -> str:
    return "" if row is None or row.p50 is None else f"{row.p50:.3g}" if row.p50 < 100 else f"{row.p50:.1f}"


def _number(row: BenchRow | None) -> str:
    return "" if row is None or row.p50 is None else f"{row.p50:,.0f}" if row.p50 >= 100 else f"{row.p50:.3g}"


def _other(row: BenchRow | None) -> str:
    if row is None or row.p50 is None:
        return ""
    return OTHERS.get(row.metric, "{:.2f}").format(row.p50)


def draw(rows: Iterable[BenchRow], path: Path) -> None:
    """The time of each provider with its ratio to the baseline, as a PNG, SVG or PDF by the file's suffix."""
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

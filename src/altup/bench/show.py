"""Rows as tables (one table a problem, one line a provider) and as bars (one panel a problem)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from altup.bench.rows import OK, BenchRow
from altup.core.errors import UserError

TIMES = ("forward", "backward", "both", "update", "generate", "produce", "copy")
DRAWN = ("both", "update", "generate", "produce")
PARTS = ("forward", "backward")
NEED_GPU = ("needs a GPU", "for GPUs")  # the second is what earlier versions wrote
# Okabe and Ito's colours, which colour-blind readers and grey prints tell apart.
COLOURS = {"ours": "#0072B2", "plain": "#56B4E9", "peer": "#E69F00", "floor": "#BBBBBB"}
SHARES = {
    "overhead": "{:+.1%}",
    "over plain": "{:.2f}×",
    "over bf16": "{:.2f}×",
    "fraction": "{:.1%}",
    "floor": "{:+.1%}",
    "overhead/floor": "{:.2f}×",
}
HEADINGS = {"s": "start s", "speedup": "×"}


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


@dataclass(frozen=True)
class BenchTable:
    """A problem's numbers, a line a provider, and below them what the columns mean and what was not measured."""

    head: list[str]
    rows: list[list[str]]
    notes: list[str]


def build_table(rows: Sequence[BenchRow]) -> BenchTable:
    """The most important columns come first: a narrow terminal shows the others in a table of their own."""
    modes = [mode for mode in TIMES if any(row.mode == mode and row.metric == "ms" for row in rows)]
    wholes = [mode for mode in modes if mode not in PARTS]
    times = {f"{mode} ms": [mode] for mode in modes if mode in PARTS}
    if wholes:
        only = [mode for mode in wholes if mode != "copy"] or wholes
        times[f"{only[0]} ms" if len(only) == 1 else "ms"] = wholes
    measured = {row.metric for row in rows if row.p50 is not None and row.kind != "floor"}
    rates = sorted(metric for metric in measured if metric.endswith("/s"))
    order = (
        "speedup",
        "overhead",
        "over plain",
        "over bf16",
        *rates,
        "GiB",
        "s",
        "fraction",
        "floor",
        "overhead/floor",
    )
    others = [metric for metric in order if metric in measured]
    lines = []
    for provider, mine in by_provider(rows).items():
        cells = [_time(find(mine, "ms", chosen)) for chosen in times.values()]
        cells += [_number(find(mine, metric)) for metric in others]
        if any(cells):
            lines.append([provider, *cells])
    head = ["provider", *times, *(HEADINGS.get(metric, metric) for metric in others)]
    return BenchTable(head, lines, [*_meanings(rows), *_absent(rows)])


def _meanings(rows: Sequence[BenchRow]) -> Iterator[str]:
    """What ratios are ratios to, and which providers do a part of the work only."""
    for metric in ("speedup", *SHARES):
        notes = dict.fromkeys(row.note for row in rows if row.metric == metric and row.note)
        if notes:
            yield f"{HEADINGS.get(metric, metric)}: {'; '.join(notes)}."
    floors = {row.provider: "" for row in rows if row.kind == "floor" and row.status == OK}
    floors |= {row.provider: f" ({_number(row)} GB/s)" for row in rows if row.metric == "GB/s"}
    if floors:
        names = ", ".join(name + speed for name, speed in floors.items())
        yield f"A part of the work, and a bound for the others: {names}."


def _absent(rows: Sequence[BenchRow]) -> Iterator[str]:
    """The providers without a number, by the reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for provider, mine in by_provider(rows).items():
        bad = next((row for row in mine if row.status != OK), None)
        if bad and find(mine, "ms") is None:
            reason = bad.note.splitlines()[0].split(". ")[0] if bad.note else "no reason is known"
            reasons["need a GPU" if reason in NEED_GPU else f"{bad.status}, {reason}"].append(provider)
    for reason, providers in reasons.items():
        yield f"Not measured ({reason}): {', '.join(providers)}."


def print_tables(rows: Iterable[BenchRow]) -> None:
    from altup.core.tables import print_table, table_console

    console = table_console()
    for name, mine in by_problem(rows).items():
        table = build_table(mine)
        if table.rows:
            print_table(console, table.head, table.rows, name)
        else:
            console.print(name, style="bold", markup=False)
        for note in table.notes:
            console.print(note, style="dim", markup=False)
        console.print()


def _time(row: BenchRow | None) -> str:
    return "" if row is None or row.p50 is None else f"{row.p50:.3g}" if row.p50 < 100 else f"{row.p50:.1f}"


def _number(row: BenchRow | None) -> str:
    if row is None or row.p50 is None:
        return ""
    if row.metric == "speedup" and row.p20 is not None and row.samples > 1:
        return f"{row.p50:.2f} ({row.p20:.2f} to {row.p80:.2f})"
    if row.metric.endswith("/s"):
        return f"{row.p50:,.0f}" if row.p50 >= 100 else f"{row.p50:.3g}"
    return SHARES.get(row.metric, "{:.2f}").format(row.p50)


def draw(rows: Iterable[BenchRow], path: Path) -> None:
    """The time of each provider with its ratio to the baseline, as a PNG, SVG or PDF by the file's suffix."""
    panels = {}
    for title, mine in by_problem(rows).items():
        times = {name: find(its, "ms", DRAWN) for name, its in by_provider(mine).items()}
        found = {name: row for name, row in times.items() if row is not None}
        if found:
            panels[title] = (found, {name: find(its, "speedup") for name, its in by_provider(mine).items()})
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
        for row, (name, ms) in enumerate(zip(names, middle, strict=True)):
            ratio = ratios[name]
            text = f"{ms:.3g} ms" + (f"  {ratio.p50:.2f}×" if ratio is not None else "")
            axis.text(max(ms, found[name].p80 or ms), row, f"  {text}", va="center", fontsize=8)
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

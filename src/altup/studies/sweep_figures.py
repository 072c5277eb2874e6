"""Sweeps in tables and report: what was chosen for each model, and the losses that say why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from altup.studies.charts import Series
from altup.studies.drawings import Lines
from altup.studies.pages import Cell, Column, DataTable
from altup.studies.plots import PALETTE, colours
from altup.studies.results import Record, Records, count_runs
from altup.studies.statistics import Statistics
from altup.studies.study import Row, Study
from altup.studies.tuning import edges_of

_RAN = " (the runs: …): they were made before the value beside it was chosen; those with it are still to be made."
_GIVEN = " (given): the study names that value."
_FROM = " (from, as): it began with what was chosen for that model, or took it as it is."
Sweeps = Callable[[str], Record | None]  # a sweep's key → what the results keep of it
NAMES = {
    "lr": "learning rate",
    "lr_factors.embeddings": "embeddings' factor",
    "lr_factors.head": "head's factor",
    "lr_factors.coefficients": "coefficients' factor",
    "lr_factors.positions": "relative positions' factor",
    "lr_factors.vectors": "norms' factor",
}


def sweeps_of(study: Study, stats: Statistics, record: Records, read: Sweeps) -> dict[tuple[str, str], Record]:
    """(label, size) → the sweep that chose its settings; lengths of a study share it."""
    found: dict[tuple[str, str], Record] = {}
    for row in study.rows:
        for size in stats.sizes(study.name, row.label):
            for key in stats.runs(study.name, row.label, size):
                swept = (record(key) or {}).get("tuned_by")
                if swept and (sweep := read(swept)):
                    found.setdefault((row.label, size.partition(", ")[0]), sweep)
    return found


def add_given(row: Row, sweep: Record) -> Record:
    """The sweep, with those of its settings that the row names itself."""
    named = {name: _named(row, name) for name in {**sweep["grid"], **(sweep["chosen"] or {})}}
    return {**sweep, "given": {name: value for name, value in named.items() if value is not None}}


def _named(row: Row, name: str) -> Any:
    """The value of a setting that a row names itself, such as lr or lr_factors.embeddings."""
    field, _, part = name.partition(".")
    value = row.settings.get(field)
    return value.get(part) if part and isinstance(value, dict) else value


def _settings(sweeps: Mapping[Any, Record]) -> dict[str, list[Any]]:
    """Every setting that any model was tuned in or took from another, with all its values."""
    found: dict[str, list[Any]] = {}
    for sweep in sweeps.values():
        taken = {name: [value] for name, value in (sweep["chosen"] or {}).items()}
        for name, values in {**taken, **sweep["grid"]}.items():
            known = found.setdefault(name, [])
            known += [value for value in values if value not in known]
    return found


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _mark(sweep: Record, name: str) -> str:
    """What is to be said of a value: the study gives it; the sweep goes on; the runs have another, chosen before;
    or it is an edge."""
    if name in sweep.get("given", ()):
        return "given"
    if not sweep["chosen"]:
        return "so far"
    ran: dict[str, Any] = sweep.get("ran") or sweep["chosen"]
    if name in ran and ran[name] != sweep["chosen"].get(name):
        return f"the runs: {_show(ran[name])}"
    return "edge" if name in edges_of(sweep) else ""


def _values(sweep: Record) -> dict[str, Any]:
    """What was chosen or given; of a sweep that goes on the best so far."""
    return {**(sweep["chosen"] or _best_run(sweep)[0]), **sweep.get("given", {})}


def _chosen(sweep: Record, name: str) -> str:
    """The value with its mark."""
    found = _values(sweep)
    if name not in found:
        return "–"
    mark = _mark(sweep, name)
    return f"{_show(found[name])} ({mark})" if mark else _show(found[name])


def _best(sweep: Record) -> float | None:
    """The loss of what was chosen; of what was given, if the sweep has such a run."""
    if not sweep.get("given"):
        return _best_run(sweep)[1]
    wanted = _values(sweep)
    alike = (loss for point, loss in _longest_runs(sweep) if all(wanted.get(k) == v for k, v in point.items()))
    return next(alike, None)


def _best_run(sweep: Record) -> tuple[dict[str, Any], float | None]:
    return min(_longest_runs(sweep), key=lambda run: run[1], default=({}, None))


def _longest_runs(sweep: Record) -> list[tuple[dict[str, Any], float]]:
    """The settings and losses of those that did not diverge."""
    made = sweep.get("settled", sweep)["runs"]
    return [(point, loss) for point, loss, _ in made if loss is not None]


def _runs(sweep: Record) -> str:
    """`7, 1 diverged`, and `7 + 3` of a sweep with longer runs; `3, from small dense` of one that began there."""
    made = [part["runs"] for part in (sweep, sweep.get("settled")) if part]
    diverged = sum(loss is None for runs in made for _, loss, _ in runs)
    told = [" + ".join(str(len(runs)) for runs in made), *([f"{diverged} diverged"] if diverged else [])]
    if "from" in sweep:
        told = [*told, f"from {sweep['from']}"] if made[0] else [f"as {sweep['from']}"]
    return ", ".join(told)


def introduce_sweeps(sweeps: Mapping[Any, Record]) -> str:
    edge = any(edges_of(sweep) for sweep in sweeps.values())
    seed = next(iter(sweeps.values()))["seed"]
    lengths = sorted({sweep["steps"] for sweep in sweeps.values() if sweep["runs"]})
    told = f" with seed {seed} in runs of {' or '.join(f'{n:,}' for n in lengths)} steps" if lengths else ""
    return (
        f"Each model was tuned{told}, by the loss on another part of the held-out text than the one reported."
        + _tell_settled(sweeps)
        + (_FROM if any("from" in sweep for sweep in sweeps.values()) else "")
        + (_GIVEN if any(sweep.get("given") for sweep in sweeps.values()) else "")
        + (_RAN if any("ran" in sweep for sweep in sweeps.values()) else "")
        + (" (edge): the best value is the last of the grid, and a better one may lie beyond it." if edge else "")
    )


def _tell_settled(sweeps: Mapping[Any, Record]) -> str:
    longer = [sweep["settled"] for sweep in sweeps.values() if "settled" in sweep]
    if not longer:
        return ""
    names = dict.fromkeys(NAMES.get(name, name) for part in longer for name in part["curves"])
    return f" The {' and the '.join(names)} settled in runs of {longer[0]['steps']:,} steps."


def text_sweeps(sweeps: Mapping[tuple[str, str], Record]) -> str:
    """What was chosen, as Markdown; empty where nothing was tuned."""
    if not sweeps:
        return ""
    head, *rows = sweep_lines(sweeps)
    lines = [head, ["---"] * len(head), *rows]
    return f"{introduce_sweeps(sweeps)}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def sweep_lines(sweeps: Mapping[tuple[str, str], Record]) -> list[list[str]]:
    """The head, and a line a model: the values chosen, the loss there, and the runs it took."""
    settings = _settings(sweeps)
    lines = [["tuned", *(NAMES.get(name, name) for name in settings), "loss there", "runs"]]
    for (label, size), sweep in sweeps.items():
        best = _best(sweep)
        cells = [f"{size} · {label}", *(_chosen(sweep, name) for name in settings)]
        lines.append([*cells, "–" if best is None else f"{best:.3f}", _runs(sweep)])
    return lines


def sweep_table(sweeps: Mapping[tuple[str, str], Record]) -> DataTable:
    """The same for the report."""
    settings = _settings(sweeps)
    columns = [Column("model", text=True), *(Column(NAMES.get(name, name), "chosen") for name in settings)]
    columns += [Column("best loss of the sweep"), Column("runs")]
    rows = []
    for (label, size), sweep in sweeps.items():
        best = _best(sweep)
        cells = [Cell(label, below=size)]
        for name in settings:
            value = _values(sweep).get(name)
            number = float(value) if isinstance(value, int | float) else None
            below = _mark(sweep, name) if value is not None else ""
            below = "edge of the grid" if below == "edge" else below
            cells.append(Cell("–" if value is None else _show(value), below, number))
        cells.append(Cell("–" if best is None else f"{best:.3f}", value=best))
        rows.append([*cells, Cell(_runs(sweep), value=count_runs(sweep))])
    return DataTable(columns, rows, introduce_sweeps(sweeps))


def _is_near(loss: float | None, lowest: float) -> bool:
    """To the best, so that the others can be told apart beside it."""
    return loss is not None and loss <= lowest + 1.0


def sweep_plots(study: Study, sweeps: Mapping[tuple[str, str], Record]) -> list[Lines]:
    """The loss against the values of each setting, a line a model, its choice marked; a sweep from which several
    rows have their settings is drawn as that of the first."""
    first: dict[str, tuple[str, str]] = {}
    for place, sweep in sweeps.items():
        first.setdefault(sweep["key"], place)
    own = {place: sweeps[place] for place in first.values()}
    return _plots(study.name, colours(study), own)


def begun_plots(sweeps: Mapping[tuple[str, str], Record]) -> list[Lines]:
    """The same of models that have no results yet, which belong to no study alone."""
    labels = dict.fromkeys(label for label, _ in sweeps)
    return _plots("sweeps", {label: i % PALETTE for i, label in enumerate(labels)}, sweeps)


def _plots(prefix: str, colour: Mapping[str, int], sweeps: Mapping[tuple[str, str], Record]) -> list[Lines]:
    """By the lengths of runs: first the short ones, then those in which models settled."""
    longer = {place: _as_sweep(sweep) for place, sweep in sweeps.items() if "settled" in sweep}
    lengths = sorted({part["steps"] for part in (*sweeps.values(), *longer.values())})
    plots = []
    for i, steps in enumerate(lengths):
        of_length = {place: sweep for place, sweep in sweeps.items() if sweep["steps"] == steps}
        of_length |= {place: sweep for place, sweep in longer.items() if sweep["steps"] == steps}
        name = (prefix, f"{prefix}-settled")[i] if i < 2 else f"{prefix}-{steps}-steps"
        plots += _curves(name, colour, of_length)
    return plots


def _as_sweep(sweep: Record) -> Record:
    """Its longer runs, as a sweep of their own."""
    longer = sweep["settled"]
    return {**sweep, **longer, "grid": {name: sweep["grid"][name] for name in longer["curves"]}}


def _curves(prefix: str, colour: Mapping[str, int], sweeps: Mapping[tuple[str, str], Record]) -> list[Lines]:
    plots = []
    sizes = {size for _, size in sweeps}
    for name, values in _settings(sweeps).items():
        ordered = values if any(isinstance(value, str) for value in values) else sorted(values)
        known = [
            loss for sweep in sweeps.values() for _, loss in sweep["curves"].get(name, ()) if loss is not None
        ]
        lowest, series = min(known, default=0.0), []
        for (label, size), sweep in sweeps.items():
            curve = [(value, loss) for value, loss in sweep["curves"].get(name, ()) if _is_near(loss, lowest)]
            points = [(float(ordered.index(value)), loss) for value, loss in curve]
            chosen = (sweep["chosen"] or {}).get(name)
            if points:
                title = label if len(sizes) == 1 else f"{label} · {size}"
                mark = float(ordered.index(chosen)) if chosen in ordered else None
                series.append(Series(title, points, colour[label], mark))
        if series:
            title = NAMES.get(name, name)
            steps = next(iter(sweeps.values()))["steps"]
            plots.append(
                Lines(
                    f"{prefix}-tuning-{name.replace('.', '-').replace('_', '-')}",
                    f"Tuning: {title}, {steps:,} steps",
                    "Loss of the sweep's runs at each value; the large point is what was chosen. Later settings "
                    "were swept at the best of those before. Runs that diverged, or ended more than a nat above "
                    "the best, are not drawn.",
                    series, title, "loss on the text for tuning (nats a token)",
                    "{:.3f}".format, [_show(value) for value in ordered],
                )
            )  # fmt: skip
    return plots

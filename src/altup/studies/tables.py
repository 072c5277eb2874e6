"""The tables of studies: Markdown for documents, CSV for programs, and tables of the report that can be sorted."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from altup.core.text import number_of, signed
from altup.studies.comparison import NOT_RUN, SPEED, compare, measures_shown, show_pair
from altup.studies.frontier import LATENCIES, compare_speedups, printed_speedups
from altup.studies.pages import Cell, Column, DataTable
from altup.studies.results import Records
from altup.studies.statistics import Difference, Statistics
from altup.studies.study import FINETUNED, METRICS, STATIC, Metric, Study

FORMATS = ("table", "markdown", "csv")
PERCENT = Metric("speedup", "%", 1)


def text_table(study: Study, stats: Statistics, form: str) -> str:
    """Every row of the paper's table and of ours, as Markdown or CSV."""
    rows = compare(study, stats)
    shown = measures_shown(rows, study)
    has_paper = {m: any(row.cells[m].paper is not None for row in rows) for m in shown}
    head = ["model", "seeds"]
    for m in shown:
        title = METRICS[m].head
        head += [f"{title}, paper"] if has_paper[m] else []
        head.append(f"{title}, ours")
    body = []
    for row in rows:
        cells = [row.name, row.count]
        for m in shown:
            theirs, ours = show_pair(row.cells[m], m)
            cells += [theirs] if has_paper[m] else []
            cells.append(ours or (NOT_RUN if not row.run and m == shown[0] else "–"))
        body.append(cells)
    if form == "csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([head, *body])
        return text.getvalue()
    lines = [head, ["---"] * len(head), *body]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    return f"### {study.title}\n\n{study.question}\n\n{table}\n"


def text_claims(study: Study, stats: Statistics) -> str:
    """The outcome of each claim, as a list."""
    lines = [f"- {claim} – **{word}**" for claim, word in tell_claims(study, stats)]
    return "\n".join(lines) + ("\n" if lines else "")


def text_speedups(study: Study, stats: Statistics) -> str:
    """The speedups at equal score of the models that were run, as a list; empty for a study without a frontier."""
    lines = []
    for row in compare_speedups(study, stats) if study.frontier else ():
        for name, found in row.ours.items():
            told = found if isinstance(found, str) else show_difference(found, PERCENT) + " %"
            if isinstance(found, Difference):
                told += show_interval(found, PERCENT, ", 95 % interval ")
            if found != NOT_RUN:
                lines.append(f"- {row.label} ({row.size}), speedup at equal {row.benchmark}, {name}: {told}\n")
    return "".join(lines)


def tell_claims(study: Study, stats: Statistics) -> Iterator[tuple[str, str]]:
    """Each claim with our numbers, and its verdict."""
    for verdict in stats.verdicts(study):
        claim, d = verdict.claim, verdict.difference
        metric = METRICS[claim.metric]
        number = ""
        if d is not None:
            number = f": {show_difference(d, metric)} {metric.unit}{show_interval(d, metric, ', 95 % interval ')}"
            number += f" ({verdict.size}; {show_seeds(d)})"
        yield f"{claim.better} better than {claim.than} in {metric.title}{number}", verdict.word


def show_difference(d: Difference, metric: Metric) -> str:
    """`+0.29 ± 0.09`."""
    return signed(d.mean, metric.digits) + (f" ± {metric.show(d.error)}" if d.error is not None else "")


def show_interval(d: Difference, metric: Metric, before: str = "") -> str:
    """`−0.10 to +0.68`, with `before` in front; empty where a model has one seed."""
    if d.low is None or d.high is None:
        return ""
    return f"{before}{signed(d.low, metric.digits)} to {signed(d.high, metric.digits)}"


def show_seeds(d: Difference) -> str:
    ours, theirs = d.seeds
    return number_of(ours, "seed") + ("" if ours == theirs else f" against {theirs}")


def study_table(study: Study, stats: Statistics, record: Records) -> DataTable:
    """For every measure the paper's number and ours, gains over the baseline below them."""
    rows = compare(study, stats)
    shown = measures_shown(rows, study)
    has_paper = {m: any(row.cells[m].paper is not None for row in rows) for m in shown}
    columns = [Column("model", text=True)]
    for m in shown:
        head = METRICS[m].head
        columns += [Column("paper", head)] if has_paper[m] else []
        columns.append(Column("ours", head))
    body = []
    for row in rows:
        beyond = study.table is not None and not row.in_paper
        below = [row.size, *([number_of(row.seeds, "seed")] if row.seeds else [])]
        below += [row.collapsed] if row.collapsed else []
        below += ["not in the paper's table"] if beyond else []
        cells = [Cell(row.label, below=", ".join(below))]
        for m in shown:
            pair = row.cells[m]
            theirs, ours = show_pair(pair, m)
            if has_paper[m]:
                cells.append(_with_gain(theirs, pair.paper))
            if ours:
                cells.append(_with_gain(ours, pair.ours.mean if pair.ours else None))
            else:
                once = not row.run and m == shown[0]
                cells.append(Cell(NOT_RUN, kind="absent told") if once else Cell("–", kind="absent"))
        body.append(cells)
    caption = f"Below a score: its difference to {study.baseline} of the same size"
    caption += (
        ", ± its standard error over the seeds of both models." if any(row.seeds > 1 for row in rows) else "."
    )
    if any(m in STATIC for m in shown):
        caption += " Parameters and FLOPs of models that were not run are counted from their shape."
    if has_paper.get(SPEED):
        caption += " The paper's sequences a second are counted by the core of its accelerators."
    return DataTable(columns, body, caption + missing_note(study, stats, record))


def _with_gain(text: str, value: float | None) -> Cell:
    """`61.86 (+0.65)` as a number with its gain below."""
    number, bracket, gain = text.partition(" (")
    return Cell(number, gain.removesuffix(")") if bracket else "", value)


def missing_note(study: Study, stats: Statistics, record: Records) -> str:
    """A sentence on the fine-tuned columns that leave out tasks of a suite, or a part of the held-out examples."""
    from altup.data.tasks import SUITES

    told: dict[str, None] = {}  # in order, each once
    for result in stats.results:
        kept = record(result.run) if result.study == study.name and result.seed else None
        if kept is None or kept["kind"] != "finetune" or "diverged" in kept or result.metric not in study.measures:
            continue
        tasks, name = list(kept["tasks"]), FINETUNED[kept["column"]].title
        left_out = [task for task in SUITES.get(tasks[0].split("/")[0], ()) if task not in tasks]
        if left_out:
            told[f"{name} is the mean of {', '.join(task.split('/')[-1] for task in tasks)} alone"] = None
        if kept["missing"]:
            told[f"{name} counts a part of the examples ({', '.join(kept['missing'])})"] = None
    return f" Our numbers are partial: {'; '.join(told)}." if told else ""


def speedup_table(study: Study, stats: Statistics) -> DataTable:
    """Speedup at equal score by what was timed; for a study of the paper's also the paper's, and our arithmetic on
    its printed numbers."""
    ours, of_paper = compare_speedups(study, stats), study.table is not None
    timed = [name for name in LATENCIES if any(row.ours[name] != NOT_RUN for row in ours)] or ["training"]
    head = "speedup at equal score (%)"
    columns = [Column("model", text=True), Column("score", text=True)]
    columns += [Column("paper", head)] if of_paper else []
    columns += [Column(f"ours, {name}", head) for name in timed]
    columns += [Column("printed numbers", head)] if of_paper else []
    body = []
    for row in ours:
        cells = [Cell(row.label, below=row.size), Cell(row.benchmark)]
        if of_paper:
            cells.append(Cell("") if row.paper is None else Cell(f"{row.paper:.0f}", value=row.paper))
        cells += [_speedup_cell(row.ours[name]) for name in timed]
        body.append([*cells, Cell("")] if of_paper else cells)
    for row in printed_speedups() if of_paper else ():
        blank = [Cell("")] * (1 + len(timed))
        body.append(
            [Cell(row.label, below=row.size), Cell(row.benchmark), *blank, _percent_cell(row.paper, 0, "")]
        )
    caption = (
        "(latency of the dense model that would reach the score − latency) / latency, the dense model "
        "interpolated between those measured. Where no two of them bracket the score there is no number: "
        "nothing is extrapolated. Below it: Student's 95 % interval, from the seeds of the model and of the two "
        "dense ones."
    )
    if of_paper:
        caption += " “Printed numbers”: our arithmetic on the paper's scores and speeds of S, B, L."
    return DataTable(columns, body, caption)


def _speedup_cell(found: Difference | str) -> Cell:
    if isinstance(found, str):
        return Cell(found, kind="absent")
    return _percent_cell(found.mean, PERCENT.digits, show_interval(found, PERCENT))


def _percent_cell(value: float | None, digits: int, below: str) -> Cell:
    return Cell("") if value is None else Cell(signed(value, digits), below, value)


def results_table(stats: Statistics) -> DataTable:
    """Every result, to be searched."""
    columns = [
        Column("study", text=True), Column("model", text=True), Column("size", text=True), Column("seed"),
        Column("measure", text=True), Column("value"), Column("unit", text=True), Column("step"),
        Column("run", text=True), Column("on", text=True), Column("date", text=True),
    ]  # fmt: skip
    rows = [
        [
            Cell(r.study), Cell(r.label), Cell(r.size), Cell(r.seed), Cell(METRICS[r.metric].title),
            Cell(METRICS[r.metric].show(r.value), value=r.value), Cell(r.unit), Cell(r.step), Cell(r.run),
            Cell(r.hardware), Cell(r.date),
        ]
        for r in stats.results
    ]  # fmt: skip
    return DataTable(columns, rows, "One row a run and measure. Click a head to sort.", filters=True)

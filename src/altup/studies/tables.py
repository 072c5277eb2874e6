"""The tables of studies beside the paper's: built once, shown as HTML, Markdown, CSV or in a terminal."""

from __future__ import annotations

import csv
import io
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from altup.core.text import number_of, signed
from altup.studies.frontier import LATENCIES, NOT_RUN, compare_speedups
from altup.studies.results import Record, ResultFolders
from altup.studies.statistics import (
    BETTER,
    NOT_SIGNIFICANT,
    ONE_SEED,
    WORSE,
    Difference,
    Mean,
    Statistics,
    Verdict,
)
from altup.studies.study import (
    FINETUNED,
    GAINS,
    METRICS,
    RELATIVE,
    STATIC,
    Metric,
    Study,
)
from altup.studies.sweep import edges

if TYPE_CHECKING:
    from altup.core.terminal import Console

FORMATS = ("table", "markdown", "csv")
PERCENT = Metric("speedup", "%", 1)
SPEED = "train_seq_per_s"
HEAD = 14  # columns of a measure's name in a terminal, which may take several lines


@dataclass(frozen=True)
class Cell:
    """A cell's text, smaller text below it, and the value it is sorted by (the text by default)."""

    text: str | int = ""
    below: str = ""
    value: float | None = None
    kind: str = ""

    @property
    def line(self) -> str:
        return f"{self.text} ({self.below})" if self.below and self.text else str(self.text) or self.below


@dataclass(frozen=True)
class Column:
    """`group` is the common head over neighbouring columns of the same group."""

    name: str
    group: str = ""
    text: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells, of which the first names the row; `filters` asks for a field above the page's table that
    searches it."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    filters: bool = False

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The common heads and how many columns each spans; none where no column has one."""
        if not any(column.group for column in self.columns):
            return []
        runs = itertools.groupby(enumerate(self.columns), lambda c: c[1].group or c[0])
        return [(name if isinstance(name, str) else "", len(list(columns))) for name, columns in runs]

    def __html__(self) -> str:
        from altup.studies.pages import macro

        return str(macro("data_table", self))

    @property
    def lines(self) -> list[list[str]]:
        """The head and the rows as plain text."""
        head = [f"{column.group}, {column.name}" if column.group else column.name for column in self.columns]
        return [head, *([cell.line for cell in row] for row in self.rows)]

    def markdown(self) -> str:
        head, *body = self.lines
        lines = [head, ["---"] * len(head), *body]
        table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        return f"{table}\n\n{self.caption}\n"

    def csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.lines)
        return text.getvalue()

    def print(self, console: Console) -> None:
        from altup.core.tables import print_table

        head = ["\n".join([*textwrap.wrap(column.group, HEAD), column.name]) for column in self.columns]
        body = [["\n".join(filter(None, (str(cell.text), cell.below))) for cell in row] for row in self.rows]
        kept = [i for i in range(len(head)) if i == 0 or any(line[i] for line in body)]
        joined = {n for n, i in enumerate(kept) if i and self.columns[i].group == self.columns[i - 1].group != ""}
        print_table(console, [head[i] for i in kept], [[line[i] for i in kept] for line in body], joined=joined)
        if self.caption:
            console.print(self.caption, style="dim", markup=False)


# --- a study beside the paper ---


def paper_numbers(study: Study) -> dict[tuple[str, str], dict[str, float]]:
    """(size, label) → measure → the paper's number."""
    columns = {column: name for name, metric in METRICS.items() for column in metric.paper}
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in study.paper_rows():
        size = study.sizes["paper"][0] if row["model"] == "lightweight-bert" else str(row["model"])
        numbers = {columns[c]: float(v) for c, v in row.items() if c in columns and isinstance(v, int | float)}
        found.setdefault((size, str(study.label_of(row))), {}).update(numbers)
    for (size, _), numbers in found.items():
        base = found.get((size, study.baseline), {})
        if SPEED in numbers and SPEED in base:
            numbers["relative_speed"] = numbers[SPEED] / base[SPEED]
    return found


def study_table(study: Study, stats: Statistics, known: ResultFolders, run_alone: bool = False) -> Table:
    """The rows of the paper's table in its order, then what was run beyond it: for every measure the paper's
    number and ours, with the difference to the baseline below it. `run_alone` leaves out what was not run."""
    numbers = paper_numbers(study)
    ran = [
        (size, row.label) for size in stats.sizes_of(study) for row in study.rows
        if size in stats.sizes(study.name, row.label)
    ]  # fmt: skip
    rows = [place for place in dict.fromkeys([*numbers, *ran]) if place in ran or not run_alone]
    ours = {(place, m): _ours(study, stats, *place, m) for place in rows for m in study.measures}
    of_paper = {(place, m): numbers.get(place, {}).get(m) for place in rows for m in study.measures}
    has_ours = [m for m in study.measures if any(ours[place, m] for place in rows)]
    has_paper = [m for m in study.measures if any(of_paper[place, m] is not None for place in rows)]
    shown = [m for m in study.measures if m in has_ours or (m in has_paper and not run_alone)]
    columns = [Column("model", text=True), Column("seeds")]
    for m in shown:
        columns += [
            Column(name, METRICS[m].head) for name in ("paper", "ours") if name == "ours" or m in has_paper
        ]
    body = []
    for place in rows:
        cells = [Cell(" · ".join(place), _remark(study, stats, *place)), _count(study, stats, *place)]
        for m in shown:
            if m in has_paper:
                cells.append(_paper_cell(study, numbers, *place, m))
            cells.append(
                ours[place, m] or Cell(NOT_RUN if place not in ran and m == shown[0] else "–", kind="absent")
            )
        body.append(cells)
    return Table(columns, body, _caption(study, stats, known, shown, has_paper, set(rows) > set(ran)))


def _count(study: Study, stats: Statistics, size: str, label: str) -> Cell:
    seeds = len(stats.runs(study.name, label, size))
    return Cell(str(seeds) if seeds else "–", stats.describe_diverged(study.name, label, size), seeds)


def _remark(study: Study, stats: Statistics, size: str, label: str) -> str:
    reason = stats.reason_against(study, size, "loss", label, study.baseline)
    return f"not comparable with {study.baseline}: {reason}" if reason else ""


def _paper_cell(
    study: Study, numbers: dict[tuple[str, str], dict[str, float]], size: str, label: str, metric: str
) -> Cell:
    number, base = (numbers.get((size, name), {}).get(metric) for name in (label, study.baseline))
    if number is None:
        return Cell("")
    form, gain = METRICS[metric], ""
    if metric in GAINS and base is not None and label != study.baseline:
        gain = signed(number - base, form.digits)
    return Cell(form.show(number), gain, number)


def _ours(study: Study, stats: Statistics, size: str, label: str, metric: str) -> Cell | None:
    form = METRICS[metric]
    if metric in RELATIVE:
        ratio = stats.relative(study, size, metric, label)
        return None if ratio is None else Cell(form.show(ratio), value=ratio)
    mean = stats.mean(study.name, label, size, metric)
    if metric in STATIC and mean is None:
        mean = _count_from_shape(study, label, size, metric)
    if mean is None:
        return None
    if metric not in GAINS:
        return Cell(form.show(mean.mean), value=mean.mean)
    error = f" ± {form.show(mean.error)}" if mean.error is not None else ""
    gain = stats.difference(study, size, metric, label, study.baseline) if label != study.baseline else None
    return Cell(form.show(mean.mean) + error, show_difference(gain, form) if gain else "", mean.mean)


def _count_from_shape(study: Study, label: str, size: str, metric: str) -> Mean | None:
    """Parameters and FLOPs of the paper's model, from its configuration."""
    from altup.models.accounting import account
    from altup.models.families import family

    row = study.row(label)
    config_class = family(row.family).config_class
    if size not in config_class.SIZES:
        return None
    names = {n: row.settings[n] for n in ("method", "k", "stride", "experts", "extra_layers") if n in row.settings}
    cost = account(config_class.from_preset(size, **names))
    value = {"embedding_params": cost.embedding, "non_embedding_params": cost.non_embedding}
    return Mean(float(value.get(metric, cost.flops_train)), 1, None, "counted")


def _caption(
    study: Study, stats: Statistics, known: ResultFolders, shown: Sequence[str], has_paper: Sequence[str],
    any_counted: bool,
) -> str:  # fmt: skip
    found = [f"Scale {stats.scale}, text {stats.data}."] if stats.results else []
    if stats.elsewhere:
        found.append(f"There are other results, which are not shown: {stats.elsewhere}.")
    found.append(
        f"Below a score: its difference to {study.baseline} of the same size, ± its standard error over seeds."
    )
    if any(m in STATIC for m in shown) and any_counted:
        found.append("Parameters and FLOPs of models that were not run are counted from their shape.")
    if SPEED in has_paper:
        found.append("The paper counts sequences a second by the core of its accelerators.")
    return " ".join([*found, *_partial_columns(study, stats, known)])


def _partial_columns(study: Study, stats: Statistics, known: ResultFolders) -> Iterator[str]:
    """The fine-tuned columns without some tasks of a suite, or with a part of the held-out examples."""
    from altup.data.tasks import SUITES

    found: dict[str, None] = {}
    for run in dict.fromkeys(r.run for r in stats.results if r.seed and r.metric in study.measures):
        record = known.record(run)
        if record is None or record["kind"] != "finetune" or "diverged" in record:
            continue
        tasks, name = list(record["tasks"]), FINETUNED[record["column"]].title
        if set(SUITES.get(tasks[0].split("/")[0], ())) - set(tasks):
            found[f"Ours of {name} is the mean of {', '.join(task.split('/')[-1] for task in tasks)} alone."] = (
                None
            )
        if record["missing"]:
            found[f"Ours of {name} counts a part of the examples ({', '.join(record['missing'])})."] = None
    yield from found


# --- claims ---


@dataclass(frozen=True)
class Judged:
    """A claim with its outcome in words: `number` is the difference with its standard error, `why` says how the
    seeds lead from it to the verdict, `paper` what the paper has."""

    verdict: Verdict
    claim: str
    metric: str
    word: str
    number: str
    why: str
    paper: str
    of_paper: float | None  # the paper's difference at the same size

    @property
    def line(self) -> str:
        number = f": {self.number}" if self.number else ""
        return f"{self.claim}, {self.metric}{number} – {self.word} ({self.why} {self.paper})"


def judge_claims(study: Study, stats: Statistics) -> list[Judged]:
    """Every claim of a study at every size where it was run."""
    numbers = paper_numbers(study)
    return [_judge(verdict, numbers) for verdict in stats.verdicts(study)]


def _judge(verdict: Verdict, numbers: dict[tuple[str, str], dict[str, float]]) -> Judged:
    claim, d = verdict.claim, verdict.difference
    metric, of_paper = METRICS[claim.metric], dict[str, float]()
    for size in dict.fromkeys(size for size, _ in numbers):
        one, other = (numbers.get((size, name), {}).get(claim.metric) for name in (claim.better, claim.than))
        if one is not None and other is not None:
            of_paper[size] = one - other
    same = of_paper.get(verdict.size) if d else None
    relevant, word = [same] if same is not None else list(of_paper.values()), verdict.word
    if d is not None and relevant and word in (BETTER, WORSE):
        agreeing = {(value > 0) == (d.mean > 0) for value in relevant}
        word = "reproduces the paper" if agreeing == {True} else word
        word = "contradicts the paper" if agreeing == {False} else word
    listed = ", ".join(f"{signed(value, metric.digits)} ({size})" for size, value in of_paper.items())
    return Judged(
        verdict,
        f"{claim.better} better than {claim.than}",
        metric.title + (f", {verdict.size}" if d else ""),
        word,
        f"{show_difference(d, metric)} {metric.difference_unit}" if d else "",
        _why(verdict, metric),
        f"The paper: {listed}." if listed else "Not a claim of the paper.",
        same,
    )


def _why(verdict: Verdict, metric: Metric) -> str:
    """How the verdict follows from the seeds."""
    d = verdict.difference
    if d is None:
        return f"{verdict.why}." if verdict.why else "Not run at this scale."
    seeds = number_of(d.seeds[0], "seed") + (" each" if d.seeds[0] == d.seeds[1] else f" against {d.seeds[1]}")
    if verdict.word == ONE_SEED:
        return f"{seeds}: no interval."
    interval = f"95 % interval {show_interval(d, metric)}, {seeds}"
    if verdict.word == NOT_SIGNIFICANT:
        return f"{interval}; it includes zero."
    return f"{interval}{'' if metric.higher else '; lower is better'}."


def show_difference(d: Difference, metric: Metric) -> str:
    """`+0.29 ± 0.09`."""
    return signed(d.mean, metric.digits) + (f" ± {metric.show(d.error)}" if d.error is not None else "")


def show_interval(d: Difference, metric: Metric) -> str:
    """`−0.10 to +0.68`; empty where a model has one seed."""
    if d.low is None or d.high is None:
        return ""
    return f"{signed(d.low, metric.digits)} to {signed(d.high, metric.digits)}"


# --- speedups, sweeps, all results ---


def speedup_table(study: Study, stats: Statistics) -> Table:
    """Speedup at equal score by what was timed; for a study of the paper's also the paper's."""
    rows = compare_speedups(study, stats)
    has_paper = any(row.paper is not None for row in rows)
    timed = [metric for metric in LATENCIES if any(row.ours[metric] != NOT_RUN for row in rows)] or [
        "relative_speed"
    ]
    head = "speedup at equal score (%)"
    columns = [Column("model", text=True), Column("score", text=True)]
    columns += [Column("paper", head)] if has_paper else []
    columns += [Column(f"ours, {LATENCIES[metric][0]}", head) for metric in timed]
    body = [
        [
            Cell(f"{row.size} · {row.label}"), Cell(row.benchmark),
            *([Cell("" if row.paper is None else f"{row.paper:.0f}", value=row.paper)] if has_paper else []),
            *(_speedup_cell(row.ours[metric]) for metric in timed),
        ]
        for row in rows
    ]  # fmt: skip
    caption = (
        "(latency of the dense model that would reach the score − latency) / latency, the dense model "
        "interpolated "
        "between those measured; below it Student's 95 % interval. Nothing is extrapolated."
    )
    return Table(columns, body, caption)


def _speedup_cell(found: Difference | str) -> Cell:
    if isinstance(found, str):
        return Cell(found, kind="absent")
    return Cell(signed(found.mean, PERCENT.digits), show_interval(found, PERCENT), found.mean)


def sweep_table(study: Study, stats: Statistics, known: ResultFolders) -> Table | None:
    """What the sweep of each model chose, and from which values; None where nothing was swept."""
    swept: dict[str, list[Record]] = {}
    for record in known.records():
        if "sweep" in record:
            swept.setdefault(record["sweep"]["key"], []).append(record)
    rows: list[Sequence[Cell]] = []
    for size in stats.sizes_of(study):
        for row in study.rows:
            runs = stats.runs(study.name, row.label, size)
            reported = known.record(runs[0]) if runs else None
            if not reported or reported.get("sweep_key") not in swept:
                continue
            tried, chosen = swept[reported["sweep_key"]], reported["chosen"]
            grid: dict[str, list[Any]] = tried[0]["sweep"]["grid"]
            settings = [
                f"{name} {chosen[name]} of {', '.join(map(str, grid[name]))}" for name in grid if name in chosen
            ]
            beyond = ", ".join(edges(grid, chosen))
            rows.append([
                Cell(f"{size} · {row.label}"), Cell(len(tried)), Cell(f"{tried[0]['step']:,}"),
                Cell("; ".join(settings)), Cell(beyond),
            ])  # fmt: skip
    columns = [
        Column("model", text=True), Column("runs"), Column("steps"), Column("chosen", text=True),
        Column("at the edge of its values", text=True),
    ]  # fmt: skip
    caption = (
        "Each model's best settings, on another part of the held-out text and with another seed than reported."
    )
    return Table(columns, rows, caption) if rows else None


def results_table(results: Sequence[Any]) -> Table:
    """Every result, to be searched."""
    names = ("study", "label", "size", "seed", "metric", "value", "unit", "step", "run", "hardware", "date")
    columns = [Column(name, text=name not in ("seed", "value", "step")) for name in names]
    rows = [
        [
            Cell(METRICS[r.metric].show(r.value), value=r.value) if name == "value"
            else Cell(METRICS[r.metric].title if name == "metric" else getattr(r, name))
            for name in names
        ]
        for r in results
    ]  # fmt: skip
    return Table(columns, rows, "One row a run and measure. Click a head to sort.", filters=True)

"""A study's table: a row for every row of the paper's, our numbers beside theirs, and rows of ours beyond them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from altup.studies import paper
from altup.studies.evidence import Difference, Estimate, Evidence
from altup.studies.metrics import GAINS, METRICS, RELATIVE, STATIC, metric_of_column
from altup.studies.speedup import OutsideDenseRangeError, speedup
from altup.studies.study import Study

NOT_RUN = "not run at this scale"
OUTSIDE = "outside the dense range"
NO_LINE = "needs two dense models"
SPEED = "train_seq_per_s"
# What the paper's figure calls a benchmark, and our measures for it (their mean).
BENCHMARKS = {
    "accuracy": ("accuracy",),
    "GLUE": ("glue",),
    "SuperGLUE": ("superglue",),
    "SQuAD": ("squad_em", "squad_f1"),
    "TriviaQA": ("triviaqa_em", "triviaqa_f1"),
}
LATENCIES = {"training": "relative_speed", "forward": "relative_forward", "generation": "relative_generate"}


@dataclass(frozen=True)
class Pair:
    """One measure of one model: the paper's number and ours, each with its difference to the baseline."""

    paper: float | None = None
    paper_gain: float | None = None
    ours: Estimate | None = None
    gain: Difference | None = None


@dataclass(frozen=True)
class TableRow:
    """`in_paper` rows stand in the paper's table; `run` says whether we measured that model, `seeds` how often we
    trained it."""

    size: str
    label: str
    in_paper: bool
    run: bool
    seeds: int
    cells: dict[str, Pair] = field(default_factory=dict)
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.size} · {self.label}"


def compare(study: Study, evidence: Evidence) -> list[TableRow]:
    """The rows of the paper's table in its order, then what we ran beyond it."""
    numbers = paper_numbers(study)
    ran = [
        (size, row.label)
        for size in dict.fromkeys(s for row in study.rows for s in evidence.sizes(study.name, row.label))
        for row in study.rows
        if size in evidence.sizes(study.name, row.label)
    ]
    rows = []
    for place in [*numbers, *(place for place in ran if place not in numbers)]:
        size, label = place
        theirs = numbers.get(place, {})
        base = numbers.get((size, study.baseline), {})
        cells = {m: _pair(study, evidence, size, label, m, theirs, base) for m in study.measures}
        seeds = len(evidence.runs(study.name, label, size))
        rows.append(TableRow(size, label, place in numbers, place in ran, seeds, cells))
    return rows


def measures_shown(rows: list[TableRow], study: Study) -> list[str]:
    """The study's measures of which there is any number."""
    return [
        m for m in study.measures
        if any(row.cells[m].paper is not None or row.cells[m].ours is not None for row in rows)
    ]  # fmt: skip


def _pair(
    study: Study, evidence: Evidence, size: str, label: str, metric: str,
    theirs: dict[str, float], base: dict[str, float],
) -> Pair:  # fmt: skip
    number, reference = theirs.get(metric), base.get(metric)
    ours = evidence.get(study.name, label, size, metric)
    if metric in RELATIVE:
        return Pair(number, None, _relative(study, evidence, size, ours, metric))
    if metric in STATIC and ours is None:
        return Pair(number, None, _count(study, label, size, metric))
    if metric not in GAINS or label == study.baseline:
        return Pair(number, None, ours)
    gain = number - reference if number is not None and reference is not None else None
    return Pair(number, gain, ours, evidence.difference(study.name, size, metric, label, study.baseline))


def _relative(study: Study, evidence: Evidence, size: str, ours: Estimate | None, metric: str) -> Estimate | None:
    """Ratios are measured to the dense model; where the study's baseline is another, to that one."""
    base = evidence.get(study.name, study.baseline, size, metric)
    if ours is None or base is None:
        return None
    return Estimate(ours.mean / base.mean, ours.seeds, None, ours.hardware)


def _count(study: Study, label: str, size: str, metric: str) -> Estimate | None:
    """Parameters and FLOPs of the paper's model, from its configuration."""
    from altup.models.accounting import account
    from altup.models.families import family

    settings = study.row(label).settings
    config_class = family(settings.get("model", "t5")).config_class
    if size not in config_class.SIZES:
        return None
    names = {n: settings[n] for n in ("method", "k", "stride", "experts", "extra_layers") if n in settings}
    cost = account(config_class.from_preset(size, **names))
    value = {"embedding_params": cost.embedding, "non_embedding_params": cost.non_embedding}
    return Estimate(float(value.get(metric, cost.flops_train)), 1, None, "counted")


def paper_numbers(study: Study) -> dict[tuple[str, str], dict[str, float]]:
    """(size, label) → measure → the paper's number. A row of the paper that no label describes is an error."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in study.paper_rows():
        label = study.label_of(row)
        assert label is not None, f"{study.name}: no row describes {row}"
        place = (size_of(row, study), label)
        named = {metric_of_column(column): value for column, value in row.items()}
        found.setdefault(place, {}).update(
            {name: float(value) for name, value in named.items() if name and isinstance(value, int | float)}
        )
    for (size, _), numbers in found.items():
        base = found.get((size, study.baseline), {})
        if SPEED in numbers and SPEED in base:
            numbers["relative_speed"] = numbers[SPEED] / base[SPEED]
    return found


def size_of(row: dict[str, Any], study: Study) -> str:
    """Our name of the paper's size; the lightweight BERT is the one size of its study."""
    name = str(row["model"])
    return study.sizes["paper"][0] if name == "lightweight-bert" else name


@dataclass(frozen=True)
class SpeedupRow:
    """Speedup at equal score in percent, by what is timed; text where there is none."""

    size: str
    label: str
    benchmark: str
    paper: float | None
    ours: dict[str, float | str]


def compare_speedups(study: Study, evidence: Evidence) -> list[SpeedupRow]:
    """A row for every row of the paper, and for every model and score of ours that can be placed."""
    rows = []
    told = {
        (size_of(row, study), study.label_of(row), str(row["benchmark"])): float(row["speedup_percent"])
        for row in study.paper_rows()
    }
    for (size, label, benchmark), percent in told.items():
        rows.append(
            SpeedupRow(size, label or "", benchmark, percent, _speedups(study, evidence, size, label, benchmark))
        )
    for row in study.rows:
        if row.label in study.frontier:
            continue
        for size in evidence.sizes(study.name, row.label):
            for benchmark in BENCHMARKS:
                if (size, row.label, benchmark) not in told:
                    ours = _speedups(study, evidence, size, row.label, benchmark)
                    if any(value != NOT_RUN for value in ours.values()):
                        rows.append(SpeedupRow(size, row.label, benchmark, None, ours))
    return rows


def frontier_points(
    study: Study, evidence: Evidence, benchmark: str, latency: str
) -> list[tuple[str, str, float, float]]:
    """(size, label, relative latency, score) of every model that has both."""
    found = []
    for row in study.rows:
        for size in evidence.sizes(study.name, row.label):
            score, time = (
                _score(study, evidence, size, row.label, benchmark),
                _time(study, evidence, size, row.label, latency),
            )
            if score is not None and time is not None:
                found.append((size, row.label, time, score))
    return found


def _speedups(
    study: Study, evidence: Evidence, size: str, label: str | None, benchmark: str
) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, metric in LATENCIES.items():
        points = frontier_points(study, evidence, benchmark, metric)
        own = [(time, score) for s, l, time, score in points if (s, l) == (size, label)]
        dense = [(time, score) for _, l, time, score in points if l in study.frontier]
        if not own:
            found[name] = NOT_RUN
            continue
        if len(dense) < 2:
            found[name] = NO_LINE
            continue
        try:
            found[name] = 100 * speedup(dense, *own[0])
        except OutsideDenseRangeError:
            found[name] = OUTSIDE
    return found


def _score(study: Study, evidence: Evidence, size: str, label: str, benchmark: str) -> float | None:
    parts = [evidence.get(study.name, label, size, metric) for metric in BENCHMARKS[benchmark]]
    values = [part.mean for part in parts if part is not None]
    return sum(values) / len(values) if len(values) == len(parts) else None


def _time(study: Study, evidence: Evidence, size: str, label: str, metric: str) -> float | None:
    """Latency of a model: seconds a sequence in training, milliseconds a batch in inference.

    It is the baseline's, by the ratio of their speeds: only ratios are measured in turns, and a machine is not as
    fast in every comparison.
    """
    absolute = {
        "relative_speed": "train_seq_per_s",
        "relative_forward": "forward_ms",
        "relative_generate": "generate_ms",
    }
    found = evidence.get(study.name, study.baseline, size, absolute[metric])
    base, own = (evidence.get(study.name, name, size, metric) for name in (study.baseline, label))
    if found is None or base is None or own is None:
        return None
    latency = 1 / found.mean if metric == "relative_speed" else found.mean
    return latency * base.mean / own.mean


def printed_speedups() -> list[SpeedupRow]:
    """The same arithmetic on the numbers that the paper prints: small and base with AltUp between S, B and L."""
    speeds = {
        (row["model"], row["method"]): float(row["train_speed_examples_per_s_per_core"])
        for row in paper.table("parameters_and_speed")
        if row["pretrain_steps"] == 500_000
    }
    scores = {(row["model"], row["method"]): row for row in paper.table("varying_k") if row["k"] != 4}
    rows = []
    for size in ("small", "base"):
        for benchmark, metrics in BENCHMARKS.items():
            columns = ["pretrain_accuracy" if m == "accuracy" else m for m in metrics]

            def score(place: tuple[str, str], columns: list[str] = columns) -> float:
                return sum(float(scores[place][c]) for c in columns) / len(columns)

            dense = [(1 / speeds[s, "dense"], score((s, "dense"))) for s in ("small", "base", "large")]
            found = 100 * speedup(dense, 1 / speeds[size, "altup"], score((size, "altup")))
            rows.append(SpeedupRow(size, "AltUp K=2", benchmark, found, {}))
    return rows


def show_pair(pair: Pair, metric: str) -> tuple[str, str]:
    """The paper's number and ours as text, each with its gain over the baseline where there is one."""
    form = METRICS[metric]
    theirs = "" if pair.paper is None else form.show(pair.paper)
    if pair.paper_gain is not None:
        theirs += f" ({signed(pair.paper_gain, form.digits)})"
    if pair.ours is None:
        return theirs, ""
    ours = form.show(pair.ours.mean)
    if pair.ours.error is not None and metric in GAINS:
        ours += f" ± {form.show(pair.ours.error)}"
    if pair.gain is not None:
        error = f" ± {form.show(pair.gain.error)}" if pair.gain.error is not None else ""
        ours += f" ({signed(pair.gain.mean, form.digits)}{error})"
    return theirs, ours


def signed(value: float, digits: int) -> str:
    """With its sign, as a gain is written."""
    if abs(value) >= 1e6:
        return f"{value:+.2e}".replace("e+0", "e").replace("-", "−")
    return f"{value:+,.{digits}f}".replace("-", "−")

"""A study beside the paper: a row for every row of its table, our numbers with theirs, and rows of ours beyond."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from altup.core.text import signed
from altup.studies.statistics import Difference, Mean, Statistics
from altup.studies.study import GAINS, METRICS, RELATIVE, STATIC, Study, metric_of_column

NOT_RUN = "not run at this scale"
SPEED = "train_seq_per_s"


@dataclass(frozen=True)
class Pair:
    """One measure of one model: the paper's number and ours, each with its difference to the baseline."""

    paper: float | None = None
    paper_gain: float | None = None
    ours: Mean | None = None
    gain: Difference | None = None


@dataclass(frozen=True)
class TableRow:
    """`in_paper` rows stand in the paper's table; `run` says whether we measured that model, `seeds` how often we
    trained it, and `collapsed` what is to be said of seeds whose runs collapsed."""

    size: str
    label: str
    in_paper: bool
    run: bool
    seeds: int
    collapsed: str
    cells: dict[str, Pair] = field(default_factory=dict)
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.size} · {self.label}"

    @property
    def count(self) -> str:
        """Of its seeds."""
        return (str(self.seeds) if self.seeds else "–") + (f", {self.collapsed}" if self.collapsed else "")


def compare(study: Study, stats: Statistics) -> list[TableRow]:
    """The rows of the paper's table in its order, then what we ran beyond it."""
    numbers = paper_numbers(study)
    ran = [
        (size, row.label)
        for size in stats.sizes_of(study)
        for row in study.rows
        if size in stats.sizes(study.name, row.label)
    ]
    rows = []
    for place in [*numbers, *(place for place in ran if place not in numbers)]:
        size, label = place
        theirs = numbers.get(place, {})
        base = numbers.get((size, study.baseline), {})
        cells = {m: _pair(study, stats, size, label, m, theirs, base) for m in study.measures}
        seeds = len(stats.runs(study.name, label, size))
        collapsed = stats.describe_collapses(study.name, label, size)
        rows.append(TableRow(size, label, place in numbers, place in ran, seeds, collapsed, cells))
    return rows


def measures_shown(rows: list[TableRow], study: Study) -> list[str]:
    """The study's measures of which there is any number."""
    return [
        m for m in study.measures
        if any(row.cells[m].paper is not None or row.cells[m].ours is not None for row in rows)
    ]  # fmt: skip


def _pair(
    study: Study, stats: Statistics, size: str, label: str, metric: str,
    theirs: dict[str, float], base: dict[str, float],
) -> Pair:  # fmt: skip
    number, reference = theirs.get(metric), base.get(metric)
    ours = stats.mean(study.name, label, size, metric)
    if metric in RELATIVE:
        return Pair(number, None, _relative(study, stats, size, ours, metric))
    if metric in STATIC and ours is None:
        return Pair(number, None, _count(study, label, size, metric))
    if metric not in GAINS or label == study.baseline:
        return Pair(number, None, ours)
    gain = number - reference if number is not None and reference is not None else None
    return Pair(number, gain, ours, stats.difference(study, size, metric, label, study.baseline))


def _relative(study: Study, stats: Statistics, size: str, ours: Mean | None, metric: str) -> Mean | None:
    """Ratios are measured to the dense model; where the study's baseline is another, to that one."""
    base = stats.mean(study.name, study.baseline, size, metric)
    if ours is None or base is None:
        return None
    return Mean(ours.mean / base.mean, ours.seeds, None, ours.hardware)


def _count(study: Study, label: str, size: str, metric: str) -> Mean | None:
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
    return Mean(float(value.get(metric, cost.flops_train)), 1, None, "counted")


def paper_numbers(study: Study) -> dict[tuple[str, str], dict[str, float]]:
    """(size, label) → measure → the paper's number. A row of the paper that no label describes is an error."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in study.paper_rows():
        label = study.label_of(row)
        place = (size_of(row, study), str(label))  # every row has one: `read_study` refuses a study without
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


def paper_differences(study: Study) -> dict[tuple[str, str, str], dict[str, float]]:
    """(better, than, measure) → size → the difference that the paper's table shows."""
    numbers = paper_numbers(study)
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for claim in study.expect:
        for size in dict.fromkeys(size for size, _ in numbers):
            one = numbers.get((size, claim.better), {}).get(claim.metric)
            other = numbers.get((size, claim.than), {}).get(claim.metric)
            if one is not None and other is not None:
                found.setdefault((claim.better, claim.than, claim.metric), {})[size] = one - other
    return found


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

"""A study: a question, the models that answer it, what is measured, and the table of the paper beside them.

Studies are YAML files in `library/`, or a user's own. docs/studies.md explains the fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from altup.core.errors import UserError, check_choice, did_you_mean
from altup.core.files import check_file_name
from altup.core.schema import check_kinds, parse_yaml, read_yaml, refuse_unknown
from altup.studies import paper


@dataclass(frozen=True)
class Metric:
    """`digits` after the point; `higher` says which way is better (None: neither); `paper` its columns there."""

    title: str
    unit: str
    digits: int = 2
    higher: bool | None = True
    paper: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        """Of a column: the title with its unit, unless it says it itself."""
        return self.title if self.unit in self.title else f"{self.title} ({self.unit})"

    def show(self, value: float) -> str:
        if abs(value) >= 1e6:
            return f"{value:.2e}".replace("e+0", "e").replace("e+", "e")
        return f"{value:,.{self.digits}f}".replace("-", "−")


@dataclass(frozen=True)
class FinetunedColumn:
    """What a model may be fine-tuned for. `measures` are ours, with the metric of the column's one task, or None
    for the mean over its tasks. A run that diverged has the measure `collapse` instead."""

    title: str
    measures: dict[str, str | None]
    collapse: str


FINETUNED: dict[str, FinetunedColumn] = {
    "glue": FinetunedColumn("GLUE", {"glue": None}, "collapse_glue"),
    "superglue": FinetunedColumn("SuperGLUE", {"superglue": None}, "collapse_superglue"),
    "squad": FinetunedColumn("SQuAD", {"squad_em": "exact_match", "squad_f1": "f1_words"}, "collapse_squad"),
    "triviaqa": FinetunedColumn(
        "TriviaQA", {"triviaqa_em": "trivia_exact_match", "triviaqa_f1": "trivia_f1_words"}, "collapse_triviaqa"
    ),
}
COLLAPSE = "collapse"  # the measure of a pretraining run that lost what it had learned
COLLAPSES = {COLLAPSE, *(column.collapse for column in FINETUNED.values())}
METRICS: dict[str, Metric] = {
    "accuracy": Metric("held-out accuracy", "%", paper=("pretrain_accuracy", "mlm_accuracy")),
    "loss": Metric("held-out loss", "nats a token", 3, higher=False),
    "glue": Metric("GLUE", "%", paper=("glue",)),
    "superglue": Metric("SuperGLUE", "%", paper=("superglue",)),
    "squad_em": Metric("SQuAD EM", "%", paper=("squad_em",)),
    "squad_f1": Metric("SQuAD F1", "%", paper=("squad_f1",)),
    "triviaqa_em": Metric("TriviaQA EM", "%", paper=("triviaqa_em",)),
    "triviaqa_f1": Metric("TriviaQA F1", "%", paper=("triviaqa_f1",)),
    "relative_speed": Metric("training speed", "× baseline", paper=("relative_speed",)),
    "train_seq_per_s": Metric("sequences a second", "seq/s", 1, paper=("train_speed_examples_per_s_per_core",)),
    "relative_forward": Metric("forward speed", "× baseline"),
    "relative_generate": Metric("generation speed", "× baseline"),
    "forward_ms": Metric("forward pass", "ms a batch", 2, higher=False),
    "generate_ms": Metric("generation", "ms a batch", 1, higher=False),
    "peak_memory": Metric("peak memory in training", "GiB", 2, higher=False),
    "embedding_params": Metric("embedding parameters", "parameters", 0, None, paper=("embedding_params",)),
    "non_embedding_params": Metric("other parameters", "parameters", 0, None, paper=("non_embedding_params",)),
    "flops_train": Metric("training FLOPs", "FLOPs a sequence", 0, higher=False),
    "run_flops": Metric("FLOPs of the run", "FLOPs", 0, None),
    "steps": Metric("steps", "updates", 0, None),
    "train_seconds": Metric("seconds of training, measured", "s", 1, None),
    "planned_seconds": Metric("seconds of training, planned", "s", 1, None),
    COLLAPSE: Metric("last held-out loss above the lowest of a run that collapsed", "nats a token", 3, None),
    **{
        column.collapse: Metric(f"step by which fine-tuning on {column.title} diverged", "updates", 0, None)
        for column in FINETUNED.values()
    },
}
# Ratios to the dense model, in whose rounds they were measured.
RELATIVE = ("relative_speed", "relative_forward", "relative_generate")
# Counted from the shape of the model.
STATIC = ("embedding_params", "non_embedding_params", "flops_train")
# Measures of which the difference to the baseline is worth a number.
GAINS = ("accuracy", "loss", *(name for column in FINETUNED.values() for name in column.measures))


def metric_of_column(column: str) -> str | None:
    """Our measure for a column of the paper's tables."""
    return next((name for name, metric in METRICS.items() if column in metric.paper), None)


LIBRARY = "library"
SCALES = ("smoke", "long", "mini", "paper")
SUPERSEDED = ("mini-adamw",)  # what was `mini` first; there are results of it
SHIPPED = (*SCALES, *SUPERSEDED)
# What a paper's row and a study's row are compared by, with what a row means that does not say it.
IDENTITY = {"method": "dense", "k": 1, "stride": 1, "extra_layers": 0}
# How P and g of AltUp may start other than as the identity and ones: `coefficients.py`.
STARTS = {"P": ("average", "noisy"), "g": ("active",)}


@dataclass(frozen=True)
class Row:
    """One model of a study: fields of `PretrainConfig`, how its coefficients start, and exceptions by scale.

    `continues` is the label of a dense row, as whose trained model this one begins, widened to its own method.
    With `time_of` it trains as long as the row of that label takes. With `tune_from` its sweep begins where that
    of the row of that label ended; `tune` are the settings that are swept, if not all that the scale says.
    """

    label: str
    settings: dict[str, Any]
    start: dict[str, str] = field(default_factory=dict)
    continues: str | None = None
    time_of: str | None = None
    tune_from: str | None = None
    tune: list[str] | None = None
    at: dict[str, dict[str, Any] | None] = field(default_factory=dict)

    def settings_at(self, scale: str) -> dict[str, Any] | None:
        """The fields at a scale; None where the row is not run."""
        change = self.at.get(scale, {})
        return None if change is None else {**self.settings, **change}

    @property
    def identity(self) -> dict[str, Any]:
        """Method, K, stride and extra layers, as the paper's tables name them."""
        from altup.models.methods import preset_fields

        found = {name: self.settings.get(name, usual) for name, usual in IDENTITY.items()}
        usual = preset_fields(found["method"])
        if "num_blocks" in usual:
            found["k"] = self.settings.get("k", usual["num_blocks"])
        if "stride" in usual:
            found["stride"] = self.settings.get("stride", usual["stride"])
        return found


@dataclass(frozen=True)
class Claim:
    """A claim that can be tested: `better` beats `than` in `metric`."""

    better: str
    than: str
    metric: str = "accuracy"


@dataclass(frozen=True)
class Study:
    """A question and how to answer it.

    `table` names a table of the paper, of which the rows that agree with `where` belong to this study. `sizes`,
    `settings` and `lengths` (numbers of steps, each compared for itself) are by scale; where a scale is not named
    its own count. Where rows continue others, the lengths are theirs. `finetune` lists the columns that a model
    may be fine-tuned for, and `finetune_at` the scales at which that is done. With `equal_time` every model trains
    as long as the row of that label takes for the scale's steps; `speeds` by label, measured before and relative
    to each other, say how many steps that makes, so that none are measured for it. `frontier` names the dense rows
    between which the speedup at equal accuracy is interpolated; `speeds` count there where none were measured.
    `baseline` is what differences are taken to.
    """

    name: str
    title: str
    question: str
    finding: str
    rows: tuple[Row, ...]
    measures: tuple[str, ...]
    table: str | None = None
    where: dict[str, list[Any]] = field(default_factory=dict)
    baseline: str = "Dense"
    sizes: dict[str, list[str]] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    finetune: tuple[str, ...] = ()
    finetune_at: tuple[str, ...] = ("paper",)
    equal_time: str | None = None
    speeds: dict[str, float] = field(default_factory=dict)
    frontier: tuple[str, ...] = ()
    expect: tuple[Claim, ...] = ()
    order: int = 100

    def row(self, label: str) -> Row:
        for row in self.rows:
            if row.label == label:
                return row
        raise UserError(f"study {self.name} has no row {label!r}; it has {', '.join(r.label for r in self.rows)}")

    def is_paired(self, one: str, other: str) -> bool:
        """Whether two rows' runs of a seed go on from one model, or one of them from the other's."""
        first, second = ((row.continues or row.label) for row in map(self.row, (one, other)))
        return first == second

    def timed_by(self, row: Row) -> str | None:
        """The label of the row as long as which this one trains, if any."""
        return row.time_of or self.equal_time

    def steps_by_speeds(self, row: Row, steps: int) -> int | None:
        """The steps that a row makes while the one as long as which it trains makes `steps`, by the speeds that
        the study gives, if any."""
        timed_by = self.timed_by(row)
        if not self.speeds or timed_by is None:
            return None
        return max(1, round(steps * self.speeds[row.label] / self.speeds[timed_by]))

    @property
    def continued(self) -> set[str]:
        """Labels of the rows that others continue."""
        return {row.continues for row in self.rows if row.continues}

    def paper_rows(self) -> list[dict[str, Any]]:
        """The rows of the paper's table that belong here."""
        if self.table is None:
            return []
        found = paper.table(self.table)
        return [row for row in found if all(row[name] in values for name, values in self.where.items())]

    def label_of(self, paper_row: Mapping[str, Any]) -> str | None:
        """The study's row that a row of the paper's table describes."""
        theirs = {name: paper_row.get(name, usual) for name, usual in IDENTITY.items()}
        for row in self.rows:
            ours = row.identity
            if "stride" not in paper_row:
                ours = {**ours, "stride": theirs["stride"]}
            if ours == theirs and not row.start:
                return row.label
        return None


def read_study(name: str, text: str, source: str) -> Study:
    """A study from its YAML text."""
    return build_study(name, parse_yaml(text, source), source)


def build_study(name: str, values: dict[str, Any], source: str) -> Study:
    """A study from the values of its YAML; what is not understood is refused by name."""
    known = {f.name for f in fields(Study)} - {"name"}
    refuse_unknown(source, values, known)
    written = {"rows": dict[str, Any], "expect": list[Any]}
    check_kinds(source, values, {**get_type_hints(Study), **written})
    for needed in ("title", "question", "rows"):
        if not values.get(needed):
            raise UserError(f"{source}: {needed!r} is missing; see docs/studies.md")
    rows = tuple(_read_row(label, row, source) for label, row in values.pop("rows").items())
    expect = tuple(_read_claim(entry, source) for entry in values.pop("expect", ()))
    for name_of_list in ("measures", "finetune", "finetune_at", "frontier"):
        if name_of_list in values:
            values[name_of_list] = tuple(values[name_of_list])
    values = {"finding": "", "measures": ("accuracy", "loss", "relative_speed"), **values}
    study = Study(name=name, rows=rows, expect=expect, **values)
    _check(study, source)
    return study


def _read_row(label: str, values: Any, source: str) -> Row:
    if not isinstance(values, dict):
        raise UserError(f"{source}: row {label!r} must hold fields, such as {{method: altup, k: 2}}")
    values = dict(values)
    hints = {**get_type_hints(Row), "model_overrides": dict[str, Any]}
    check_kinds(f"{source}: row {label!r}", values, hints)
    names = [f.name for f in fields(Row) if f.name not in ("label", "settings")]
    return Row(str(label), **{name: values.pop(name) for name in names if name in values}, settings=values)


def check_start(start: Mapping[str, str]) -> None:
    for name, value in start.items():
        check_choice("start", name, STARTS)
        check_choice(f"start {name}", value, STARTS[name])


def _read_claim(values: Any, source: str) -> Claim:
    if not isinstance(values, dict) or not {"better", "than"} <= values.keys():
        raise UserError(f"{source}: expect needs `better` and `than`, two labels; found {values!r}")
    refuse_unknown(source, values, [f.name for f in fields(Claim)])
    return Claim(**values)


def _check(study: Study, source: str) -> None:
    """Check that every name that is used is defined."""
    for metric in (*study.measures, *(e.metric for e in study.expect)):
        check_choice(f"{source}: measures", metric, METRICS)
    for claim in study.expect:
        if METRICS[claim.metric].higher is None:
            raise UserError(f"{source}: expect: of {claim.metric} neither more nor less is better; claim another")
    labels = [row.label for row in study.rows]
    named = [
        study.baseline,
        *filter(None, [study.equal_time]),
        *study.frontier,
        *(x for e in study.expect for x in (e.better, e.than)),
    ]
    named += [label for row in study.rows for label in (row.continues, row.time_of, row.tune_from) if label]
    for label in named:
        check_choice(f"{source}: label", label, labels)
    for row in study.rows:
        if row.continues and study.row(row.continues).continues:
            raise UserError(f"{source}: row {row.label!r} continues {row.continues!r}, which continues another")
        if row.time_of and study.row(row.time_of).time_of:
            raise UserError(f"{source}: row {row.label!r} has the time of {row.time_of!r}, which has another's")
        if row.label in _relatives(study, row):
            raise UserError(f"{source}: row {row.label!r} is tuned from itself; one row must begin by itself")
    _check_speeds(study, source, labels)
    exceptions = [scale for row in study.rows for scale in row.at]
    for scale in (*exceptions, *study.sizes, *study.settings, *study.lengths, *study.finetune_at):
        check_choice(f"{source}: scale", scale, SHIPPED)
    for column in study.finetune:
        check_choice(f"{source}: finetune", column, FINETUNED)
    for row in study.rows:
        check_start(row.start)
    if study.table is not None:
        check_choice(f"{source}: table", study.table, paper.TABLES)
        refuse_unknown(f"{source}: where", study.where, paper.table(study.table)[0])
        for theirs in study.paper_rows():
            if study.label_of(theirs) is None:
                told = ", ".join(f"{name} {theirs[name]}" for name in ("model", *IDENTITY) if name in theirs)
                raise UserError(
                    f"{source}: no row describes {told} of the table; add one, or leave it out by `where`"
                )


def _check_speeds(study: Study, source: str, labels: list[str]) -> None:
    timed = any(study.timed_by(row) for row in study.rows)
    if study.speeds and not (timed or study.frontier or "relative_speed" in study.measures):
        raise UserError(
            f"{source}: speeds count the steps of rows that train in equal time, place models beside a frontier "
            "and fill the column relative_speed; add equal_time, frontier or the measure"
        )
    for label in study.speeds:
        check_choice(f"{source}: speeds", label, labels)
    for label in labels if study.speeds else ():
        if not 0 < study.speeds.get(label, 0.0) < math.inf:
            raise UserError(f"{source}: speeds has none of {label!r}; give a number above 0 for every row")


def _relatives(study: Study, row: Row) -> list[str]:
    """The rows from which a row is tuned, one after the other; the last is named twice where they go round."""
    found: list[str] = []
    while row.tune_from and row.tune_from not in found:
        found.append(row.tune_from)
        row = study.row(row.tune_from)
    return found


@cache
def shipped() -> dict[str, Study]:
    """The studies of the library, in the order in which the report tells them."""
    folder = files(__package__).joinpath(LIBRARY)
    found = [
        read_study(file.name.removesuffix(".yaml"), file.read_text(encoding="utf-8"), file.name)
        for file in folder.iterdir()
        if file.name.endswith(".yaml")
    ]
    return {study.name: study for study in sorted(found, key=lambda s: (s.order, s.name))}


def find_study(name: str) -> Study:
    """A shipped study by its name, or a user's own by the path of its YAML file."""
    if name in shipped():
        return shipped()[name]
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return build_study(check_file_name(path.stem, name), read_yaml(path), name)
    hint = did_you_mean(name, shipped()) or "`altup study list` shows them"
    raise UserError(f"study {name!r} is not known; {hint}")

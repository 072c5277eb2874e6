"""A study: a question, the models that answer it, what is measured, and the table of the paper beside them.

Studies are YAML files in `library/`, or a user's own. docs/studies.md explains the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
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
        """The title of a column, with its unit unless the title names it."""
        return self.title if self.unit in self.title.split() else f"{self.title} ({self.unit})"

    @property
    def difference_unit(self) -> str:
        return "points" if self.unit == "%" else self.unit

    def show(self, value: float) -> str:
        if abs(value) >= 1e6:
            return f"{value:.2e}".replace("e+0", "e").replace("e+", "e")
        return f"{value:,.{self.digits}f}".replace("-", "−")


@dataclass(frozen=True)
class FinetunedColumn:
    """A suite or task to fine-tune on. `measures` are ours, each with the metric of the column's one task, or None
    for the mean over its tasks."""

    title: str
    measures: dict[str, str | None]


FINETUNED: dict[str, FinetunedColumn] = {
    "glue": FinetunedColumn("GLUE", {"glue": None}),
    "superglue": FinetunedColumn("SuperGLUE", {"superglue": None}),
    "squad": FinetunedColumn("SQuAD", {"squad_em": "exact_match", "squad_f1": "f1_words"}),
    "triviaqa": FinetunedColumn(
        "TriviaQA", {"triviaqa_em": "trivia_exact_match", "triviaqa_f1": "trivia_f1_words"}
    ),
}
DIVERGED = "diverged"  # the measure of a run that diverged, which has no other: the step at which it ended
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
    "train_seconds": Metric("training time, measured", "s", 1, None),
    "planned_seconds": Metric("training time, by the speed compared", "s", 1, None),
    DIVERGED: Metric("diverged at step", "updates", 0, None),
    **{
        f"{DIVERGED}_{name}": Metric(f"fine-tuning on {column.title} diverged at step", "updates", 0, None)
        for name, column in FINETUNED.items()
    },
}
# Ratios to the dense model, which takes turns with the others in the same comparison.
RELATIVE = ("relative_speed", "relative_forward", "relative_generate")
SPEEDS = (*RELATIVE, "train_seq_per_s", "forward_ms", "generate_ms", "peak_memory")
# Counted from the shape of the model.
STATIC = ("embedding_params", "non_embedding_params", "flops_train")
# Measures whose difference to the baseline is shown.
GAINS = ("accuracy", "loss", *(name for column in FINETUNED.values() for name in column.measures))

SCALES = ("smoke", "mini", "paper")
# The columns that identify a row of the paper's tables, with the values of a row that does not name them.
IDENTITY = {"method": "dense", "k": 1, "stride": 1, "extra_layers": 0}
# How P and g of AltUp may start other than as the identity and ones: `work.set_coefficients`.
STARTS = {"P": ("average", "noisy"), "g": ("active",)}


@dataclass(frozen=True)
class Row:
    """One model of a study: fields of `PretrainConfig`, how its coefficients start, and exceptions by scale.

    `continues` is the label of a dense row: this row starts from that row's trained model, widened to its own
    method. With `time_of` or `flops_of` it trains for the time or the FLOPs of the row of that label. `tune` are
    the settings to sweep, where they are not all of the scale's: their names, or a grid of their own.
    """

    label: str
    settings: dict[str, Any]
    start: dict[str, str] = field(default_factory=dict)
    continues: str | None = None
    time_of: str | None = None
    flops_of: str | None = None
    tune: list[str] | dict[str, list[Any]] | None = None
    at: dict[str, dict[str, Any] | None] = field(default_factory=dict)

    def settings_at(self, scale: str) -> dict[str, Any] | None:
        """The fields at a scale; None where the row is not run."""
        change = self.at.get(scale, {})
        return None if change is None else {**self.settings, **change}

    @property
    def family(self) -> str:
        return str(self.settings.get("model", "t5"))

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
    may be fine-tuned for, and `finetune_at` the scales at which that is done. `equal_time` and `equal_flops` give
    every row the `time_of` or the `flops_of` that row. `frontier` names the dense rows between which the speedup
    at equal accuracy is interpolated. `baseline` is what differences are taken to.
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
    equal_flops: str | None = None
    frontier: tuple[str, ...] = ()
    expect: tuple[Claim, ...] = ()
    order: int = 100

    def row(self, label: str) -> Row:
        return next(row for row in self.rows if row.label == label)

    def is_paired(self, one: str, other: str) -> bool:
        """Whether two rows' runs of a seed start from one trained model, or one of them from the other's."""
        first, second = ((row.continues or row.label) for row in map(self.row, (one, other)))
        return first == second

    @property
    def continued(self) -> set[str]:
        """Labels of the rows that others continue."""
        return {row.continues for row in self.rows if row.continues}

    def paper_rows(self) -> list[dict[str, Any]]:
        """The rows of the paper's table that belong here."""
        found = paper.table(self.table) if self.table else []
        return [row for row in found if all(row[name] in values for name, values in self.where.items())]

    def label_of(self, paper_row: Mapping[str, Any]) -> str | None:
        """The study's row that a row of the paper's table describes."""
        wanted = {name: paper_row.get(name, usual) for name, usual in IDENTITY.items()}
        if "stride" not in paper_row:
            del wanted["stride"]
        for row in self.rows:
            if not row.start and {name: row.identity[name] for name in wanted} == wanted:
                return row.label
        return None


def build_study(name: str, values: dict[str, Any], source: str) -> Study:
    """A study from the values of its YAML; what is not understood is refused by name."""
    refuse_unknown(source, values, {f.name for f in fields(Study)} - {"name"})
    check_kinds(source, values, {**get_type_hints(Study), "rows": dict[str, Any], "expect": list[Any]})
    for needed in ("title", "question", "rows"):
        if not values.get(needed):
            raise UserError(f"{source}: {needed!r} is missing; see docs/studies.md")
    values = {"finding": "", "measures": ["accuracy", "loss", "relative_speed"], **values}
    values["rows"] = tuple(_read_row(str(label), row, source) for label, row in values["rows"].items())
    values["expect"] = tuple(_read_claim(entry, source) for entry in values.get("expect", ()))
    for name_of_list in ("measures", "finetune", "finetune_at", "frontier"):
        if name_of_list in values:
            values[name_of_list] = tuple(values[name_of_list])
    study = Study(name=name, **values)
    _check(study, source)
    return replace(study, rows=tuple(_with_budget(study, row) for row in study.rows))


def _with_budget(study: Study, row: Row) -> Row:
    if row.time_of or row.flops_of or row.label in study.continued:
        return row
    time_of, flops_of = (of if of != row.label else None for of in (study.equal_time, study.equal_flops))
    return replace(row, time_of=time_of, flops_of=flops_of)


def _read_row(label: str, values: Any, source: str) -> Row:
    if not isinstance(values, dict):
        raise UserError(f"{source}: row {label!r} must hold fields, such as {{method: altup, k: 2}}")
    check_kinds(f"{source}: row {label!r}", values, {**get_type_hints(Row), "model_overrides": dict[str, Any]})
    own = {f.name for f in fields(Row)} - {"label", "settings"}
    settings = {name: value for name, value in values.items() if name not in own}
    row = Row(label, settings, **{name: value for name, value in values.items() if name in own})
    for name, value in row.start.items():
        check_choice(f"{source}: start", name, STARTS)
        check_choice(f"{source}: start {name}", value, STARTS[name])
    return row


def _read_claim(values: Any, source: str) -> Claim:
    if not isinstance(values, dict) or not {"better", "than"} <= values.keys():
        raise UserError(f"{source}: expect needs `better` and `than`, two labels; found {values!r}")
    refuse_unknown(source, values, [f.name for f in fields(Claim)])
    check_kinds(f"{source}: expect", values, get_type_hints(Claim))
    return Claim(**values)


def _check(study: Study, source: str) -> None:
    """Check that every name that is used is defined, and that claims compare what can be compared."""
    for metric in (*study.measures, *(claim.metric for claim in study.expect)):
        check_choice(f"{source}: measures", metric, METRICS)
    labels = [row.label for row in study.rows]
    named = [study.baseline, study.equal_time, study.equal_flops, *study.frontier]
    named += [label for claim in study.expect for label in (claim.better, claim.than)]
    named += [label for row in study.rows for label in (row.continues, row.time_of, row.flops_of)]
    for label in filter(None, named):
        check_choice(f"{source}: label", label, labels)
    for claim in study.expect:
        better, than = study.row(claim.better), study.row(claim.than)
        if METRICS[claim.metric].higher is None:
            raise UserError(f"{source}: expect: of {claim.metric} neither more nor less is better; claim another")
        if claim.metric in ("accuracy", "loss", *RELATIVE) and better.family != than.family:
            differ = "dense models to be relative to" if claim.metric in RELATIVE else "objectives"
            raise UserError(
                f"{source}: expect: {claim.better!r} ({better.family}) and {claim.than!r} ({than.family}) have "
                f"different {differ}, so their {claim.metric} cannot be compared; claim a score or train_seq_per_s"
            )
    if study.equal_time and study.equal_flops:
        raise UserError(f"{source}: equal_time and equal_flops exclude each other; make two studies")
    for row in study.rows:
        if row.continues and study.row(row.continues).continues:
            raise UserError(f"{source}: row {row.label!r} continues {row.continues!r}, which continues another")
        reference = row.time_of or row.flops_of
        if reference and (study.row(reference).time_of or study.row(reference).flops_of):
            raise UserError(f"{source}: row {row.label!r} trains as {reference!r} does, which trains as another")
        if row.time_of and row.flops_of:
            raise UserError(f"{source}: row {row.label!r}: time_of and flops_of exclude each other")
    exceptions = [scale for row in study.rows for scale in row.at]
    for scale in (*exceptions, *study.sizes, *study.settings, *study.lengths, *study.finetune_at):
        check_choice(f"{source}: scale", scale, SCALES)
    for column in study.finetune:
        check_choice(f"{source}: finetune", column, FINETUNED)
    if study.table is not None:
        check_choice(f"{source}: table", study.table, paper.TABLES)
        refuse_unknown(f"{source}: where", study.where, paper.table(study.table)[0])
        for of_paper in study.paper_rows():
            if study.label_of(of_paper) is None:
                found = ", ".join(f"{name} {of_paper[name]}" for name in ("model", *IDENTITY) if name in of_paper)
                raise UserError(
                    f"{source}: no row describes {found} of the table; add one, or exclude it by `where`"
                )


@cache
def shipped() -> dict[str, Study]:
    """The studies of the library, in the order of the report."""
    texts = {
        file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8")
        for file in files(__package__).joinpath("library").iterdir()
        if file.name.endswith(".yaml")
    }
    found = [build_study(name, parse_yaml(text, f"{name}.yaml"), f"{name}.yaml") for name, text in texts.items()]
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

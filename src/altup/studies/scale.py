"""Scales: how large and how long the runs of a study are, from seconds on a CPU to the paper's own setting.

The smallest one brings its text and tasks along.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from altup.core.errors import MOST_SEED, UserError, check_choice, check_whole, choose_one
from altup.core.schema import check_kinds, parse_yaml, read_yaml, refuse_unknown
from altup.studies.study import FINETUNED, SCALES, SHIPPED, Row, Study

SMOKE_EXAMPLES = {"train": 24, "validation": 8}
SMOKE_HELD_OUT = 0.05


@dataclass(frozen=True)
class FinetuneColumn:
    """A fine-tuning run that fills columns of tables: its tasks, and their own fields of `FinetuneConfig`."""

    tasks: list[str]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tuning:
    """What a scale sweeps. `grid` has each setting's values in their order, `start` where a sweep begins (without
    it the nearest value to what the model would have), `steps` and `seed` are those of its runs. The settings of
    `settle` are then walked through once more, in runs of `settle_steps`: what is best after half of the steps
    need not be so after all of them; values that were more than `settle_within` behind the best in the short runs
    are left out there. `near` are the settings that are swept for a row with `tune_from`, unless it names its own.
    `continuing` is the grid of models that go on from a trained one,
    if it is another."""

    grid: dict[str, list[Any]]
    steps: int
    seed: int = 0
    start: dict[str, Any] = field(default_factory=dict)
    continuing: dict[str, list[Any]] = field(default_factory=dict)
    settle: list[str] = field(default_factory=list)
    settle_steps: int = 0
    settle_within: float | None = None
    near: list[str] = field(default_factory=list)

    def check(self, source: str) -> None:
        """Raise UserError where a sweep could not be made."""
        from altup.core.schema import describe_settings
        from altup.training.pretraining import PretrainConfig

        known = describe_settings(PretrainConfig)
        for name, values in (*self.grid.items(), *self.continuing.items()):
            field_name, _, part = name.partition(".")
            check_choice(f"{source}: tune", field_name, known)
            is_mapping = isinstance(known[field_name].default, dict)
            if bool(part) != is_mapping:
                told = "name one of its entries" if is_mapping else "it has no entries"
                raise UserError(f"{source}: tune {name}: {told}, as in lr_factors.embeddings")
            if not values or len({str(value) for value in values}) < len(values):
                raise UserError(f"{source}: tune {name}={values!r}; give a list of different values")
            for i, value in enumerate(values):  # YAML 1.1 reads 1e-3 as text
                values[i] = known[field_name].read({part: value})[part] if part else known[field_name].read(value)
        for name, value in self.start.items():
            check_choice(f"{source}: tune start", name, self.grid)
            check_choice(f"{source}: tune start {name}", value, self.grid[name])
        for told, names in (("settle", self.settle), ("near", self.near)):
            for name in names:
                check_choice(f"{source}: tune {told}", name, self.grid)
        if bool(self.settle) != (self.settle_steps > 0):
            raise UserError(f"{source}: tune: settle and settle_steps, the length of its runs, go together")


@dataclass(frozen=True)
class Scale:
    """How studies are run.

    `base` is the shipped scale whose exceptions in the studies count. `shapes` are fields of the model's config by
    size. `pretrain`, `by_size` and `given` are fields of `PretrainConfig`, the later ones stronger; a study's own
    settings come before `given` (from `--set`). `experts` replaces the number of experts; models of an
    equal-time study train for `minutes`, if any are given. `data` is "embedded" where the scale brings its text.
    With `tune` each model is trained with its own best settings.
    """

    name: str
    base: str
    about: str = ""
    sizes: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    data: str | None = None
    vocab_size: int = 32_000
    shapes: dict[str, dict[str, Any]] = field(default_factory=dict)
    pretrain: dict[str, Any] = field(default_factory=dict)
    by_size: dict[str, dict[str, Any]] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    experts: int | None = None
    minutes: float | None = None
    tune: Tuning | None = None
    finetune: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, FinetuneColumn] = field(default_factory=dict)
    speed: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str) -> Scale:
        """From what `dataclasses.asdict` made of one, and a file has kept."""
        parts = {"tune": dict[str, Any] | None, "columns": dict[str, dict[str, Any]]}
        check_kinds(source, values, {**get_type_hints(cls), **parts})
        for part in values["columns"].values():
            check_kinds(f"{source}: columns", part, get_type_hints(FinetuneColumn))
        columns = {name: FinetuneColumn(**column) for name, column in values["columns"].items()}
        if tune := values.get("tune"):
            check_kinds(f"{source}: tune", tune, get_type_hints(Tuning))
            tune = Tuning(**tune)
            tune.check(source)
        return cls(**{**values, "columns": columns, "tune": tune or None})

    def check_seeds(self, seeds: Sequence[int], source: str) -> None:
        """What is chosen with one seed must be reported with others."""
        if self.tune and self.tune.seed in seeds:
            raise UserError(
                f"{source}: seed {self.tune.seed} is that of the sweeps, and what is reported must come from "
                "others; give other seeds"
            )

    def sizes_of(self, study: Study) -> list[str]:
        return study.sizes.get(self.base, self.sizes)

    def variants_of(self, study: Study) -> list[Variant]:
        """The sizes at which a study is run, each at every one of its lengths; `--set steps` stands for them."""
        sizes, lengths = self.sizes_of(study), study.lengths.get(self.base, [])
        if not lengths or "steps" in self.given:
            return [Variant(size, size) for size in sizes]
        return [Variant(f"{size}, {steps:,} steps", size, steps) for size in sizes for steps in lengths]

    def grid_of(self, row: Row) -> dict[str, list[Any]]:
        """What a sweep of a row walks through, as far as its model has it."""
        if self.tune is None:
            return {}
        return self.tune.continuing if row.continues and self.tune.continuing else self.tune.grid


@dataclass(frozen=True)
class Variant:
    """A size, and where a study has several lengths one of them; results are told by its `name`."""

    name: str
    size: str
    steps: int | None = None

    def changes(self, study: Study, row: Row) -> dict[str, Any]:
        """What it changes in a row's config: the steps, but not of a row that others continue."""
        return {"steps": self.steps} if self.steps and row.label not in study.continued else {}


def read_variant(name: str) -> tuple[str, int]:
    """The size and the steps that a variant's name tells; 0 steps where its study has no lengths."""
    found = re.fullmatch(r"(.*), (\d[\d,]*) steps", name)
    return (found[1], int(found[2].replace(",", ""))) if found else (name, 0)


def find_scale(name: str) -> Scale:
    """A shipped scale, or a user's YAML file, which may build on one: `like: mini`."""
    if name in SHIPPED:
        text = files(__package__).joinpath("scales", f"{name}.yaml").read_text(encoding="utf-8")
        return _build(name, name, parse_yaml(text, name), name)
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"scale {name!r} is not known; {choose_one(name, SCALES)}, or give a YAML file")
    values = read_yaml(path)
    base = values.pop("like", "mini")
    if base not in SHIPPED:
        raise UserError(f"{name}: like={base!r} is not known; {choose_one(base, SHIPPED)}")
    text = files(__package__).joinpath("scales", f"{base}.yaml").read_text(encoding="utf-8")
    return _build(path.stem, base, _merged(parse_yaml(text, name), values), name)


def _merged(below: Any, above: Any) -> Any:
    """`above` laid over `below`, mapping by mapping; what `above` names comes first, in its order, because a sweep
    walks through its grid in order. Null takes out what `below` has."""
    if not isinstance(above, dict):
        return above
    below = below if isinstance(below, dict) else {}
    named = {name: _merged(below.get(name), value) for name, value in above.items() if value is not None}
    return named | {name: value for name, value in below.items() if name not in above}


def _build(name: str, base: str, values: dict[str, Any], source: str) -> Scale:
    refuse_unknown(source, values, {f.name for f in fields(Scale)} - {"name", "base", "given", "columns"})
    check_kinds(source, values, {**get_type_hints(Scale), "tune": dict[str, Any] | None})
    tune = _read_tuning(values.pop("tune", None), source)
    finetune = values.pop("finetune", {})
    written = {"settings": dict[str, Any], "columns": dict[str, dict[str, Any]]}
    refuse_unknown(f"{source}: finetune", finetune, written)
    check_kinds(f"{source}: finetune", finetune, written)
    refuse_unknown(f"{source}: finetune columns", finetune.get("columns", {}), FINETUNED)
    for column, of in finetune.get("columns", {}).items():
        if not of.get("tasks"):
            raise UserError(f"{source}: finetune column {column!r} has no tasks; give {{tasks: [glue/cola, …]}}")
    columns = {
        column: FinetuneColumn(of["tasks"], {key: value for key, value in of.items() if key != "tasks"})
        for column, of in finetune.get("columns", {}).items()
    }
    scale = Scale(
        name=name, base=base, tune=tune, finetune=finetune.get("settings", {}), columns=columns, **values
    )
    scale.check_seeds(scale.seeds, source)
    return scale


def _read_tuning(values: dict[str, Any] | None, source: str) -> Tuning | None:
    if not values:
        return None
    refuse_unknown(f"{source}: tune", values, {f.name for f in fields(Tuning)})
    check_kinds(f"{source}: tune", values, get_type_hints(Tuning))
    for needed in ("grid", "steps"):
        if not values.get(needed):
            raise UserError(f"{source}: tune has no {needed}; see docs/studies.md")
    tuning = Tuning(**values)
    tuning.check(source)
    return tuning


def with_settings(scale: Scale, given: dict[str, Any], minutes: float | None = None) -> Scale:
    """The scale with fields of `PretrainConfig` set (`finetune.NAME` sets those of fine-tuning).

    The name tells both, so that results of different settings are never averaged.
    """
    if minutes is not None:
        if not 0 < minutes < float("inf"):
            raise UserError(f"minutes={minutes} makes no sense; give a number above 0")
        if minutes != scale.minutes:
            scale = replace(scale, minutes=minutes, name=f"{scale.name}:minutes={minutes:g}")
    if not given:
        return scale
    from altup.training.pretraining import MODEL_NAMES

    refuse = [name for name in given if name in (*MODEL_NAMES, "model_overrides", "seed", "data")]
    if refuse:
        raise UserError(
            f"--set {refuse[0]}: the study decides that; use --only, --seeds, --data or a study of yours"
        )
    tuned = {name.removeprefix("finetune."): v for name, v in given.items() if name.startswith("finetune.")}
    trained = {name: value for name, value in given.items() if not name.startswith("finetune.")}
    suffix = ",".join(f"{name}={value}" for name, value in sorted(given.items()))
    name = f"{scale.name}{',' if ':' in scale.name else ':'}{suffix}"
    return replace(
        scale, name=name, given=trained, finetune={**scale.finetune, **tuned},
        columns={name: FinetuneColumn(c.tasks, {**c.settings, **tuned}) for name, c in scale.columns.items()},
    )  # fmt: skip


def read_seeds(text: str) -> list[int]:
    """`0,1,2` → [0, 1, 2]."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds {text}: give whole numbers with commas, for example 0,1") from None
    for seed in seeds:
        check_whole("seed", seed, 0, MOST_SEED)
    return list(dict.fromkeys(seeds))


def count_runs(study: Study, scale: Scale) -> int:
    """How many models a seed of the study trains."""
    rows = [row.settings_at(scale.base) for row in study.rows]
    sizes = [variant.size for variant in scale.variants_of(study)]
    return sum(row is not None and row.get("size", size) == size for size in sizes for row in rows)


def prepare_smoke_text(out: Path, vocab_size: int) -> Path:
    """The English that comes with Python."""
    from altup.data.embedded import Embedded
    from altup.data.prepare import Recipe, prepare

    recipe = Recipe([Embedded()], validation_fraction=SMOKE_HELD_OUT, vocab_size=vocab_size, sample_bytes=400_000)
    prepare(out / "text", recipe, workers=1)
    return out / "text"


def prepare_smoke_tasks(out: Path) -> Path:
    """SST-2, CoLA and SQuAD in name and format: a sentence is long or not, mentions a file or not, and a question
    asks for its second word. They show that fine-tuning works, and nothing about language."""
    folder = out / "tasks"
    if (folder / "done").exists():
        return folder
    from altup.data.embedded import documents

    draw = random.Random(0)
    sentences = [line for text in documents() for line in text.splitlines() if 6 <= len(line.split()) <= 12]
    for split, count in SMOKE_EXAMPLES.items():
        chosen = draw.sample(sentences, count)
        rows: dict[str, list[dict[str, Any]]] = {
            "glue/sst2": [{"sentence": s, "label": int(len(s) > 60), "idx": i} for i, s in enumerate(chosen)],
            "glue/cola": [{"sentence": s, "label": int("file" in s), "idx": i} for i, s in enumerate(chosen)],
            "squad/v1.1": [
                {"id": str(i), "title": "", "context": s, "question": f"What comes after {s.split()[0]}?",
                 "answers": {"text": [s.split()[1]], "answer_start": [len(s.split()[0]) + 1]}}
                for i, s in enumerate(chosen)
            ],
        }  # fmt: skip
        for task, records in rows.items():
            path = folder / task / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (folder / "done").touch()
    return folder

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
from altup.core.schema import check_kinds, describe_settings, parse_yaml, read_yaml, refuse_unknown
from altup.studies.study import FINETUNED, SCALES, Row, Study

SEARCHES = ("coordinate", "grid")
SMOKE_EXAMPLES = {"train": 24, "validation": 8}
SMOKE_HELD_OUT = 0.05


@dataclass(frozen=True)
class FinetuneColumn:
    """A fine-tuning run that fills columns of tables: its tasks, and fields of `FinetuneConfig`."""

    tasks: list[str]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tuning:
    """What is swept for every model before it is compared, in runs of `steps` steps with `seed`.

    `grid` has each setting's values. `search: coordinate` tries the values of one setting after the other, each
    time with the best of those before and, of those behind, `start` or the nearest value to the model's own;
    `search: grid` tries every combination.
    """

    grid: dict[str, list[Any]]
    steps: int
    seed: int = 0
    search: str = "coordinate"
    start: dict[str, Any] = field(default_factory=dict)

    def check(self, source: str) -> None:
        """Raise UserError where a sweep could not be made."""
        check_choice(f"{source}: tune search", self.search, SEARCHES)
        check_grid(self.grid, source)
        for name, value in self.start.items():
            check_choice(f"{source}: tune start", name, self.grid)
            check_choice(f"{source}: tune start {name}", value, self.grid[name])


def check_grid(grid: dict[str, list[Any]], source: str) -> None:
    """Names and values must be those of settings; numbers that YAML reads as text, such as 1e-3, become
    numbers."""
    from altup.training.pretraining import PretrainConfig

    known = describe_settings(PretrainConfig)
    for name, values in grid.items():
        field_name, _, part = name.partition(".")
        check_choice(f"{source}: tune", field_name, known)
        is_mapping = isinstance(known[field_name].default, dict)
        if bool(part) != is_mapping:
            remedy = "name one of its entries" if is_mapping else "it has no entries"
            raise UserError(f"{source}: tune {name}: {remedy}, as in lr_factors.embeddings")
        if not values or len({str(value) for value in values}) < len(values):
            raise UserError(f"{source}: tune {name}={values!r}; give a list of different values")
        for i, value in enumerate(values):
            values[i] = known[field_name].read({part: value})[part] if part else known[field_name].read(value)


@dataclass(frozen=True)
class Variant:
    """A size and, where a study has several lengths, one of them; results are listed by its `name`."""

    name: str
    size: str
    steps: int | None = None


@dataclass(frozen=True)
class Scale:
    """How studies are run.

    `base` is the shipped scale whose exceptions in the studies count. `shapes` are fields of the model's config by
    size. `pretrain`, `by_size` and `given` are fields of `PretrainConfig`, the later ones stronger; a study's own
    settings come before `given` (from `--set`). `experts` replaces the number of experts. `data` is "embedded"
    where the scale brings its text. With `tune` each model is trained with its own best settings.
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
    tune: Tuning | None = None
    columns: dict[str, FinetuneColumn] = field(default_factory=dict)
    speed: dict[str, int] = field(default_factory=dict)

    def check_seeds(self, seeds: Sequence[int], source: str) -> None:
        """What is chosen with one seed must be reported with others."""
        for seed in seeds:
            check_whole(f"{source}: seed", seed, 0, MOST_SEED)
        if self.tune and self.tune.seed in seeds:
            raise UserError(
                f"{source}: seed {self.tune.seed} is that of the sweeps, and what is reported must come from "
                "others; give other seeds"
            )

    def sizes_of(self, study: Study) -> list[str]:
        return study.sizes.get(self.base, self.sizes)

    def variants_of(self, study: Study) -> list[Variant]:
        """The sizes at which a study is run, each at every one of its lengths; `--set steps` replaces them."""
        sizes, lengths = self.sizes_of(study), study.lengths.get(self.base, [])
        if not lengths or "steps" in self.given:
            return [Variant(size, size) for size in sizes]
        return [Variant(f"{size}, {steps:,} steps", size, steps) for size in sizes for steps in lengths]

    def grid_of(self, row: Row) -> dict[str, list[Any]]:
        """What is swept for a row, as far as its model has it."""
        if self.tune is None:
            return {}
        if isinstance(row.tune, dict):
            return row.tune
        return {name: values for name, values in self.tune.grid.items() if row.tune is None or name in row.tune}


def read_variant(name: str) -> tuple[str, int]:
    """The size and the steps in a variant's name; 0 steps where its study has no lengths."""
    found = re.fullmatch(r"(.*), (\d[\d,]*) steps", name)
    return (found[1], int(found[2].replace(",", ""))) if found else (name, 0)


def find_scale(name: str) -> Scale:
    """A shipped scale, or a user's YAML file, which may build on one: `like: mini`."""
    if name in SCALES:
        return _build(name, name, _read_shipped(name), name)
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"scale {name!r} is not known; {choose_one(name, SCALES)}, or give a YAML file")
    values = read_yaml(path)
    base = values.pop("like", "mini")
    if base not in SCALES:
        raise UserError(f"{name}: like={base!r} is not known; {choose_one(base, SCALES)}")
    return _build(path.stem, base, _merged(_read_shipped(base), values), name)


def _read_shipped(name: str) -> dict[str, Any]:
    return parse_yaml(files(__package__).joinpath("scales", f"{name}.yaml").read_text(encoding="utf-8"), name)


def _merged(below: Any, above: Any) -> Any:
    """`above` laid over `below`, mapping by mapping; what `above` names comes first, in its order, because a sweep
    follows the order of its grid. Null removes what `below` has."""
    if not isinstance(above, dict):
        return above
    below = below if isinstance(below, dict) else {}
    named = {name: _merged(below.get(name), value) for name, value in above.items() if value is not None}
    return named | {name: value for name, value in below.items() if name not in above}


def _build(name: str, base: str, values: dict[str, Any], source: str) -> Scale:
    known = {f.name for f in fields(Scale)} - {"name", "base", "columns"} | {"finetune"}
    refuse_unknown(source, values, known)
    kinds = {**get_type_hints(Scale), "tune": dict[str, Any], "finetune": dict[str, dict[str, Any]]}
    check_kinds(source, values, kinds)
    finetune = values.pop("finetune", {})
    refuse_unknown(f"{source}: finetune", finetune, {"settings", "columns"})
    columns = {}
    for column, of in finetune.get("columns", {}).items():
        check_choice(f"{source}: finetune columns", column, FINETUNED)
        if not isinstance(of, dict) or not isinstance(of.get("tasks"), list):
            raise UserError(f"{source}: column {column} needs tasks, such as {{tasks: [squad]}}")
        settings = {**finetune.get("settings", {}), **{key: value for key, value in of.items() if key != "tasks"}}
        columns[column] = FinetuneColumn(of["tasks"], settings)
    tune = _read_tuning(values.pop("tune", None), source)
    scale = Scale(name=name, base=base, tune=tune, columns=columns, **values)
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


def with_settings(scale: Scale, given: dict[str, Any]) -> Scale:
    """The scale with fields of `PretrainConfig` set (`finetune.NAME` sets those of fine-tuning).

    The name says so, so that results of different settings are never averaged.
    """
    if not given:
        return scale
    from altup.training.pretraining import MODEL_NAMES

    for name in given:
        if name in (*MODEL_NAMES, "model_overrides", "seed", "data"):
            raise UserError(
                f"--set {name}: the study decides that; use --only, --seeds, --data or a study of yours"
            )
    tuned = {name.removeprefix("finetune."): v for name, v in given.items() if name.startswith("finetune.")}
    trained = {name: value for name, value in given.items() if not name.startswith("finetune.")}
    columns = {
        name: FinetuneColumn(column.tasks, {**column.settings, **tuned}) for name, column in scale.columns.items()
    }
    suffix = ",".join(f"{name}={value}" for name, value in sorted(given.items()))
    return replace(scale, name=f"{scale.name}:{suffix}", given={**scale.given, **trained}, columns=columns)


def read_seeds(text: str) -> list[int]:
    """`0,1,2` → [0, 1, 2]."""
    try:
        seeds = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UserError(f"--seeds {text}: give whole numbers with commas, for example 0,1") from None
    for seed in seeds:
        check_whole("--seeds", seed, 0, MOST_SEED)
    return seeds


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

"""Jobs: the pieces of work that studies are made of, what identifies one, and the data they share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.core.errors import UserError
from altup.core.files import read_json
from altup.studies.scale import Scale
from altup.studies.study import Row

if TYPE_CHECKING:
    from torch import nn

    from altup.data.objectives import Objective
    from altup.data.tokenizer import Vocabulary
    from altup.training.config import TrainConfig
    from altup.training.pretraining import PretrainConfig

NOT_PREPARED = "not prepared"  # the identity of text that is not there
# What decides how fast a model trains, reads and writes, beside the machine and the vocabulary.
SPEED_FIELDS = (
    *("model", "size", "method", "k", "stride", "experts", "extra_layers", "model_overrides", "dropout"),
    *("batch_size", "micro_batch", "inputs_length", "noise_density", "mean_span", "optimizer", "muon_by"),
    *("clip_norm", "precision", "compile", "activation_checkpointing", "deterministic", "parallel"),
)
# What decides, beside the text, which examples a pretraining run is measured on, and the objective.
MEASURED_ON = ("model", "inputs_length", "noise_density", "mean_span", "eval_sequences", "eval_part")


@dataclass(frozen=True)
class Job:
    """Something to run, in a process of its own or in this one. `settings` is all that it needs, as JSON.

    `kind` is pretrain, finetune or speed; `needs` are the keys of the runs whose models it starts from. `key` is a
    hash of everything that decides what is computed, so that studies share jobs and none runs twice. A job of kind
    speed measures several models; each has a record under a key of its own.
    """

    kind: str
    key: str
    title: str
    settings: dict[str, Any]
    steps: int = 0
    sequences: int = 0
    needs: tuple[str, ...] = ()

    @property
    def records(self) -> list[str]:
        """The keys of what it records."""
        return list(self.settings["configs"]) if self.kind == "speed" else [self.key]

    def folder(self, out: Path) -> Path:
        """Where a training job's run lies below a studies folder; another title may have named it."""
        place = out / {"pretrain": "runs", "finetune": "finetuned"}[self.kind]
        return find_run(place, self.key) or place / f"{file_name(self.title)}-{self.key}"

    def has_model(self, out: Path) -> bool:
        return (self.folder(out) / "final").is_dir()


def find_run(place: Path, key: str) -> Path | None:
    return next(iter(place.glob(f"*-{key}")), None)


def read_job(path: Path) -> Job:
    """A job that `Queue` wrote for another process."""
    try:
        job = Job(**read_json(path))
        job = replace(job, needs=tuple(job.needs))
        if job.kind in ("pretrain", "finetune", "speed") and isinstance(job.settings, dict) and job.records:
            return job
    except (ValueError, TypeError, KeyError):
        pass
    raise UserError(f"{path} does not describe a job; `altup study run` makes these files")


def file_name(text: str) -> str:
    """Letters, digits, points and single hyphens."""
    plain = "".join(c if c.isalnum() or c in "-." else "-" for c in text.lower())
    return "-".join(filter(None, plain.split("-")))[:100]


def key_of(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def default_settings(kind: type[TrainConfig]) -> dict[str, Any]:
    """The fields that decide what is computed, with their defaults."""
    free = {*kind.may_change(), "batches"}
    usual = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(kind)}
    return {name: value for name, value in usual.items() if name not in free}


def deciding_fields(config: TrainConfig) -> dict[str, Any]:
    """The fields that decide what is computed, where they differ from the defaults."""
    values = asdict(config)
    return {n: values[n] for n, usual in default_settings(type(config)).items() if values[n] != usual}


def speed_key(config: PretrainConfig, vocabulary: int, machine: str) -> str:
    return key_of("speed", {name: getattr(config, name) for name in SPEED_FIELDS}, vocabulary, machine)


def describe_model(config: PretrainConfig, row: Row) -> str:
    """`small altup K=2 +4 layers`, then what else the row changes."""
    parts = [*([config.kind] if config.kind != "t5" else []), str(config.size), str(config.method)]
    parts += [f"K={config.k}"] if config.k and config.k > 1 else []
    parts += [f"+{config.extra_layers} layers"] if config.extra_layers else []
    changes = {**row.settings.get("model_overrides", {}), **row.start}
    return " ".join([*parts, *(f"{name} {value}" for name, value in changes.items())])


def pretrain_job(config: PretrainConfig, row: Row, data: StudyData, parent: Job | None = None) -> Job:
    """Pretraining of a row's model; with `parent` it starts from that job's model, widened."""
    needs = () if parent is None else (parent.key,)
    key = key_of("pretrain", deciding_fields(config), row.start, data.identity, *needs)
    title = f"{describe_model(config, row)} {config.steps} steps seed {config.seed}"
    settings = {"config": asdict(config), "start": row.start, "data": data.identity}
    if parent is not None:
        title = f"{title} after {parent.steps} steps dense"
        settings["continues"] = parent.key
    return Job("pretrain", key, title, settings, config.steps, config.steps * config.batch_size, needs)


def finetune_job(column: str, scale: Scale, trained: Job, seed: int, data: StudyData) -> Job:
    """Fine-tuning of a pretrained run for one column; the worker fills in where the model lies."""
    from altup.finetuning.config import FinetuneConfig

    of = scale.columns[column]
    own = {"tasks": of.tasks, "seed": seed, "data": data.tasks, "model": trained.key}
    settings = {"trackers": ["none"], **of.settings, **own}
    config = FinetuneConfig.from_dict(settings, f"scale {scale.name}, column {column}")
    tasks = data.identify_tasks(name for name, _ in config.weighted_names())
    key = key_of("finetune", deciding_fields(config), config.eval_limit, trained.key, tasks)
    described = {"config": asdict(config), "column": column, "of": trained.key, "data": tasks}
    return Job(
        "finetune", key, f"{trained.title} on {column}", described,
        config.steps, config.steps * config.batch_size, (trained.key,),
    )  # fmt: skip


def speed_job(models: Mapping[str, tuple[PretrainConfig, Row]], timing: Mapping[str, int]) -> Job:
    """A comparison in turns of models by their speed keys; the first is what the others are compared with."""
    configs = {key: asdict(config) for key, (config, _) in models.items()}
    names = [describe_model(config, row) for config, row in models.values()]
    return Job(
        "speed", key_of(list(models), timing), f"speed of {', '.join(names)}", {"configs": configs, **timing}
    )


@dataclass(frozen=True)
class StudyData:
    """Where text and tasks lie, the vocabulary, and what identifies the text."""

    data: str
    tasks: str | None
    identity: str
    vocabulary: Vocabulary
    _known: dict[tuple[Any, ...], str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def prepared(cls, data: str, tasks: str | None) -> StudyData:
        """The prepared folder `data`; runs on other text, or on the same text split otherwise, are other runs."""
        from altup.data.shards import TokenStream

        text, unseen = TokenStream(data, "train"), TokenStream(data, "validation")
        identity = identify_text(text.sha256, unseen.sha256, text.vocabulary.sha256)
        return cls(data, tasks, identity, text.vocabulary)

    @classmethod
    def not_prepared(cls, tasks: str | None) -> StudyData:
        """Text that is not there yet, in T5's vocabulary: enough to say what studies would cost."""
        from altup.data.tokenizer import SENTINELS, Vocabulary

        size = 32_000 + len(SENTINELS)
        sentinels = tuple(range(size - 1, 31_999, -1))
        return cls("DATA", tasks, NOT_PREPARED, Vocabulary("", size, 0, 1, None, sentinels[0], sentinels))

    def identify_tasks(self, names: Iterable[str]) -> dict[str, str]:
        """Task → a hash of its files. Tasks of the hub are known by their names. Files are read once."""
        from altup.data.tasks import find_tasks
        from altup.data.tasks.examples import open_tasks, source_of

        found = {}
        for task in find_tasks(names):
            if not task.files and self.tasks is None:
                continue
            place = (task.name, *task.files.values())
            if place not in self._known:
                source = source_of(task, open_tasks(self.tasks))
                splits = [split for split in ("train", *task.held_out) if source.has(task, split)]
                self._known[place] = key_of([source.describe(task, split) for split in splits])
            found[task.name] = self._known[place]
        return found


def identify_text(train: str, unseen: str, vocabulary: str) -> str:
    """One short hash of the hashes of a prepared folder's splits and vocabulary."""
    return hashlib.sha256(f"{train}{unseen}{vocabulary}".encode()).hexdigest()[:8]


def objective_of(config: PretrainConfig, vocabulary: Vocabulary) -> Objective:
    """What a run's config trains on."""
    from altup.data.objectives import build_objective
    from altup.models.families import family

    name = family(config.kind).objective
    return build_objective(name, vocabulary, config.inputs_length, config.noise_density, config.mean_span)


def fresh_model(config: PretrainConfig, vocabulary: Vocabulary) -> nn.Module:
    """The weights that `pretrain` starts from."""
    import torch

    from altup.training.pretraining import build_model

    torch.manual_seed(config.seed)
    return build_model(config.kind, config.model_config(vocabulary), None)


def count_costs(config: PretrainConfig, vocabulary: Vocabulary) -> dict[str, float]:
    """Parameters, and FLOPs of one of the run's sequences."""
    from altup.models.accounting import account

    cost = account(config.model_config(vocabulary), config.inputs_length, objective_of(config, vocabulary).targets)
    return {
        "embedding_params": cost.embedding,
        "non_embedding_params": cost.non_embedding,
        "flops_train": cost.flops_train,
    }

"""Jobs: the pieces of work that studies are made of, what tells one from another, and where their files lie."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from altup.core.errors import UserError
from altup.core.files import read_json
from altup.studies.scale import Scale
from altup.studies.study import Row
from altup.training.optimizers.config import COEFFICIENT_GROWTH, LARGEST_GROWTH

if TYPE_CHECKING:
    from torch import nn

    from altup.data.objectives import Objective
    from altup.data.tokenizer import Vocabulary
    from altup.training.config import TrainConfig
    from altup.training.pretraining import PretrainConfig

NOTHING: Mapping[str, Any] = MappingProxyType({})
NOT_PREPARED = "imagined"  # identity of text that is not there
DIVERGED = "diverged.json"  # says why a run ended before its last step: its folder then has no final model
# What decides how fast a model is, beside the machine.
SPEED_FIELDS = (
    *("model", "size", "method", "k", "stride", "experts", "extra_layers", "model_overrides", "batch_size"),
    *("micro_batch", "inputs_length", "optimizer", "precision", "compile", "activation_checkpointing"),
)
# The same, later than the first keys, which go on leaving out what it was then.
LATER_SPEED_FIELDS = {
    **{"muon_by": "matrix", "noise_density": 0.15, "mean_span": 3.0, "dropout": 0.0},
    **{"clip_norm": None, "deterministic": False, "parallel": "ddp"},
}
# Defaults that have changed since the first keys were made: a key goes on leaving out what they were then.
FIRST_DEFAULTS = {
    "optimizer": "adafactor",
    "model": "t5",
    "method": "dense",
    "dropout": 0.0,
    "coefficient_growth": LARGEST_GROWTH,  # `told_coefficients` gives it where it decides nothing
}
# What a job's settings hold, by its kind.
JOB_SETTINGS = {"pretrain": {"config", "start"}, "finetune": {"config", "of"}, "speed": {"configs"}}
# What a file of measured speeds holds of a model (`speed.Measured`).
SPEED_RECORD = {"train", "forward", "generate", "forward_ms", "generate_ms", "peak_memory"}


@dataclass(frozen=True)
class Job:
    """Something to run, in a process of its own or in this one. `settings` is all that it needs, as JSON.

    `kind` is pretrain, finetune or speed; `needs` are the keys of jobs that must be done before.
    """

    kind: str
    key: str
    title: str
    settings: dict[str, Any]
    steps: int = 0
    sequences: int = 0
    needs: tuple[str, ...] = ()

    def is_whole(self) -> bool:
        """Whether one that was read has what its kind needs."""
        if not isinstance(self.needs, list | tuple):
            return False
        texts = (self.kind, self.key, self.title, *self.needs)
        if not all(isinstance(text, str) for text in texts) or self.kind not in JOB_SETTINGS:
            return False
        return isinstance(self.settings, dict) and JOB_SETTINGS[self.kind] <= self.settings.keys()

    @property
    def folder_name(self) -> str:
        return f"{file_name(self.title)}-{self.key}"

    def folder(self, out: Path) -> Path:
        """Where a training job's run lies below a studies folder; another title may have named it."""
        place = out / {"pretrain": "runs", "finetune": "finetuned"}[self.kind]
        found = list(place.glob(f"*-{self.key}"))
        return found[0] if found else place / self.folder_name

    def is_done(self, out: Path) -> bool:
        if self.kind == "speed":
            return all(speed_file(out, key).exists() for key in self.settings["configs"])
        folder = self.folder(out)
        ended = (folder / "final").is_dir() and (folder / "README.md").exists()  # the card is written last
        return ended or (folder / DIVERGED).exists()


def read_job(path: Path) -> Job:
    """A job that `Queue` wrote for a process of its own."""
    try:
        job = Job(**read_json(path))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} does not describe a job ({error}); `altup study run` makes these files") from None
    if not job.is_whole():
        raise UserError(f"{path} does not describe a whole job; `altup study run` makes these files")
    return replace(job, needs=tuple(job.needs))


def file_name(text: str) -> str:
    """Letters, digits, points and single hyphens."""
    plain = "".join(c if c.isalnum() or c in "-." else "-" for c in text.lower())
    return "-".join(filter(None, plain.split("-")))


def speed_file(out: Path, key: str) -> Path:
    return out / "speed" / f"{key}.json"


def read_speed(path: Path) -> dict[str, Any]:
    """What a comparison of speed wrote of one model."""
    try:
        found = read_json(path)
        if isinstance(found, dict) and found.keys() >= SPEED_RECORD:
            return found
    except ValueError:
        pass
    raise UserError(f"{path} is not a whole measurement; remove it, and it is made again")


@dataclass(frozen=True)
class StudyData:
    """Where text and tasks lie, its vocabulary, and what identifies the text, and each task that was asked for."""

    data: str
    tasks: str | None
    identity: str
    vocabulary: Vocabulary
    known: dict[tuple[Any, ...], str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def prepared(cls, data: str, tasks: str | None) -> StudyData:
        """The prepared folder `data`; runs on other text, or on the same text cut otherwise, are other runs."""
        from altup.data.shards import TokenStream

        text, unseen = TokenStream(data, "train"), TokenStream(data, "validation")
        identity = identify_text(text.sha256, unseen.sha256, text.vocabulary.sha256)
        return cls(data, tasks, identity, text.vocabulary)

    @classmethod
    def not_prepared(cls, tasks: str | None) -> StudyData:
        """Text that is not there yet, in T5's vocabulary: enough to say what studies would cost."""
        from altup.data.tokenizer import SENTINELS, Vocabulary

        pieces = 32_000
        sentinels = tuple(range(pieces + len(SENTINELS) - 1, pieces - 1, -1))
        vocabulary = Vocabulary("", pieces + len(SENTINELS), 0, 1, None, sentinels[0], sentinels)
        return cls("DATA", tasks, NOT_PREPARED, vocabulary)

    def identify_tasks(self, names: Iterable[str]) -> dict[str, str]:
        """Task → a hash of its files. Nothing of those on the hub, which are known by their names.

        The files are read once: what a task is does not change while studies run.
        """
        from altup.data.tasks import find_tasks
        from altup.data.tasks.examples import open_tasks, source_of

        found = {}
        for task in find_tasks(names):
            if not task.files and self.tasks is None:
                continue
            place = (task.name, *task.files.values())
            if place not in self.known:
                source = source_of(task, open_tasks(self.tasks))
                splits = [split for split in ("train", *task.held_out) if source.has(task, split)]
                self.known[place] = key_of([source.describe(task, split) for split in splits])
            found[task.name] = self.known[place]
        return found


def identify_text(train: str, unseen: str, vocabulary: str) -> str:
    """One short hash of the hashes of a prepared folder's splits and vocabulary."""
    return hashlib.sha256(f"{train}{unseen}{vocabulary}".encode()).hexdigest()[:8]


def key_of(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def deciding_fields(config: TrainConfig) -> dict[str, Any]:
    """The fields that decide what is computed, where they differ from the defaults.

    So a field that a later version adds does not turn finished runs into unknown ones.
    """
    usual, values = usual_fields(type(config)), asdict(config) | told_coefficients(config)
    return {name: values[name] for name in usual if values[name] != usual[name]}


def told_coefficients(config: TrainConfig) -> dict[str, float]:
    """`coefficient_growth`, where it decides what is computed: in pretraining with Muon, of coefficients that are
    not made from the data. Elsewhere what it was at first. And `coefficient_decay`, unless nothing has any."""
    decay = config.coefficient_decay if getattr(config, "has_coefficients", True) else 0.0
    if config.optimizer != "muon" or not getattr(config, "has_scalars", False):
        return {"coefficient_growth": LARGEST_GROWTH, "coefficient_decay": decay}
    growth = COEFFICIENT_GROWTH if config.coefficient_growth is None else config.coefficient_growth
    return {"coefficient_growth": growth, "coefficient_decay": decay}


def usual_fields(kind: type[TrainConfig]) -> dict[str, Any]:
    """The fields that decide what is computed, with the values that `deciding_fields` leaves out."""
    free = {*kind.may_change(), "batches"}
    usual = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(kind)}
    usual |= {name: value for name, value in FIRST_DEFAULTS.items() if usual.get(name, "") is None}
    return {name: value for name, value in usual.items() if name not in free}


def model_key(config: Mapping[str, Any], start: Mapping[str, str]) -> str:
    """What the seeds of a model have in common: its deciding fields but the seed, and its coefficients' start."""
    return key_of({name: value for name, value in config.items() if name != "seed"}, start)


def speed_key(config: PretrainConfig, vocabulary: int, machine: str) -> str:
    later = {name: getattr(config, name) for name in LATER_SPEED_FIELDS}
    own = {name: value for name, value in later.items() if value != LATER_SPEED_FIELDS[name]}
    return key_of({name: getattr(config, name) for name in SPEED_FIELDS} | own, vocabulary, machine)


def describe_model(config: PretrainConfig, changes: dict[str, Any]) -> str:
    """`small altup K=2 +4 layers`, then what else was changed."""
    parts = [*([config.kind] if config.kind != "t5" else []), str(config.size), str(config.method)]
    if config.k and config.k > 1:
        parts.append(f"K={config.k}")
    if config.extra_layers:
        parts.append(f"+{config.extra_layers} layers")
    parts += [f"{name} {value}" for name, value in changes.items()]
    return " ".join(parts)


def pretrain_job(config: PretrainConfig, row: Row, data: StudyData, parent: Job | None = None) -> Job:
    """Pretraining of a row's model; with `parent` it goes on from that job's model, widened."""
    of_parent = () if parent is None else (parent.key,)
    key = key_of("pretrain", deciding_fields(config), row.start, data.identity, *of_parent)
    changes = {**row.settings.get("model_overrides", {}), **row.start}
    title = f"{describe_model(config, changes)} {config.steps} steps seed {config.seed}"
    settings = {"config": asdict(config), "start": row.start, "data": data.identity}
    if parent is not None:
        title = f"{title} after {parent.title}"
        settings["continues"] = {"run": parent.key, "steps": parent.steps}
    return Job("pretrain", key, title, settings, config.steps, config.steps * config.batch_size, of_parent)


def finetune_job(
    column: str, scale: Scale, trained: Job, seed: int, data: StudyData, changes: Mapping[str, Any] = NOTHING
) -> Job:
    """Fine-tuning of a pretrained run for one column; the worker fills in where the model lies."""
    from altup.finetuning.config import FinetuneConfig

    of = scale.columns[column]
    settings = {
        "trackers": ["none"],
        **scale.finetune,
        **of.settings,
        "tasks": of.tasks,
        "seed": seed,
        "data": data.tasks,
        **changes,
    }
    tuned = FinetuneConfig.from_dict({**settings, "model": trained.key}, f"scale {scale.name}, column {column}")
    tasks = data.identify_tasks(name for name, _ in tuned.weighted_names())
    key = key_of("finetune", deciding_fields(tuned), tuned.eval_limit, trained.key, *([tasks] if tasks else []))
    described = {"config": asdict(tuned), "column": column, "of": trained.key, "data": tasks}
    return Job(
        "finetune", key, f"{trained.title} on {column}", described,
        tuned.steps, tuned.steps * tuned.batch_size, (trained.key,),
    )  # fmt: skip


def speed_job(configs: Mapping[str, PretrainConfig], timing: Mapping[str, int]) -> Job:
    """A comparison in turns of models by their speed keys, the first being what the others are compared with."""
    first = next(iter(configs.values()))
    title = f"speed of {first.size}: {', '.join(describe_model(config, {}) for config in configs.values())}"
    settings = {"configs": {key: asdict(config) for key, config in configs.items()}, **timing}
    return Job("speed", key_of("speed", list(configs), timing), title, settings)


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

"""What a study has to run: every model resolved to a config, every config to a key, nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.core.errors import UserError, check_choice
from altup.studies.inputs import Inputs, key_of
from altup.studies.scale import Scale
from altup.studies.study import Row, Study

if TYPE_CHECKING:
    from altup.training.config import TrainConfig
    from altup.training.pretraining import PretrainConfig

# What decides how fast a model is, beside the machine.
SPEED_FIELDS = (
    *("model", "size", "method", "k", "stride", "experts", "extra_layers", "model_overrides", "batch_size"),
    *("micro_batch", "inputs_length", "optimizer", "precision", "compile", "activation_checkpointing"),
)
NARROW: dict[str, Any] = {"method": "dense", "k": None, "stride": None, "experts": None, "extra_layers": 0}
TOGETHER = 4  # models beside the dense one whose speed is compared in one process, unless the scale says less


@dataclass(frozen=True)
class Job:
    """Something to run, in a process of its own or in this one. `settings` is all that the work needs, as JSON."""

    kind: str
    key: str
    title: str
    settings: dict[str, Any]
    steps: int = 0
    sequences: int = 0
    needs: tuple[str, ...] = ()

    @property
    def folder_name(self) -> str:
        plain = "".join(c if c.isalnum() or c in "-." else "-" for c in self.title.lower())
        return f"{'-'.join(filter(None, plain.split('-')))}-{self.key}"


@dataclass(frozen=True)
class Cell:
    """One model of one study at one size and seed, and the jobs that measure it.

    There is no job yet where the steps of an equal-time run wait for speeds (`waits`, and `waits_for` their keys);
    `as_long_as` is then a run of about the same time. `seconds` is what an equal-time run should take. `optional`
    are fine-tuning jobs that this study does not ask for, but whose results it shows if another study ran them.
    """

    study: Study
    label: str
    size: str
    seed: int
    speed_key: str
    pretrain: Job | None = None
    as_long_as: Job | None = None
    waits_for: tuple[str, ...] = ()
    seconds: float | None = None
    finetune: dict[str, Job] = field(default_factory=dict)
    optional: dict[str, Job] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        return self.pretrain is None


@dataclass(frozen=True)
class Plan:
    scale: Scale
    data: str
    cells: list[Cell]
    speed: list[Job]

    def training(self) -> list[Job]:
        """Every pretraining and fine-tuning job once; baselines first, then study by study."""
        found: dict[str, Job] = {}
        for cell in self.cells:
            for job in (cell.pretrain, *cell.finetune.values()):
                if job is not None:
                    found.setdefault(job.key, job)
        return list(found.values())


@dataclass(frozen=True)
class SpeedFacts:
    """A measured training speed, and the ratio to the dense model's in the same comparison."""

    seq_per_s: float
    relative: float


def deciding_fields(config: TrainConfig) -> dict[str, Any]:
    """The fields that decide what is computed, where they differ from the defaults.

    So a field that a later version adds does not turn finished runs into unknown ones.
    """
    free = {*config.may_change(), "batches"}
    usual = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(config)}
    values = asdict(config)
    return {name: value for name, value in values.items() if name not in free and value != usual[name]}


def speed_key(config: PretrainConfig, vocabulary: int, machine: str) -> str:
    return key_of({name: getattr(config, name) for name in SPEED_FIELDS}, vocabulary, machine)


def resolve(study: Study, row: Row, size: str, scale: Scale, seed: int, data: str) -> PretrainConfig | None:
    """The config of a row; None where the row is not run at this scale, or not at this size."""
    from altup.training.pretraining import PretrainConfig

    own = row.settings_at(scale.base)
    if own is None or own.get("size", size) != size:
        return None
    overrides = {**scale.shapes.get(size, {}), **own.get("model_overrides", {})}
    if scale.experts and "moe" in str(own.get("method", "")).split("+"):
        own = {"experts": scale.experts, **own}
    settings = {
        **scale.pretrain,
        **scale.by_size.get(size, {}),
        **study.settings.get(scale.base, {}),
        **own,
        **scale.given,
        **{"size": size, "seed": seed, "data": data, "model_overrides": overrides},
    }
    source = f"study {study.name}, row {row.label!r}"
    try:
        return PretrainConfig.from_dict(settings, source)
    except UserError as error:
        told = str(error)
        raise UserError(told if told.startswith(source) else f"{source}: {told}") from None


def make_plan(
    studies: Sequence[Study],
    scale: Scale,
    inputs: Inputs,
    *,
    seeds: Sequence[int],
    only: Sequence[str] = (),
    finetune: bool = True,
    speeds: Mapping[str, SpeedFacts],
    chosen_steps: Callable[[Study, str, str], int | None],
    machine: str,
) -> Plan:
    """All cells of the studies. `chosen_steps(study, label, size)` are those of an equal-time run made before."""
    labels = {row.label for study in studies for row in study.rows}
    for label in only:
        check_choice("--only", label, sorted(labels))
    vocabulary = inputs.vocabulary.padded_size
    cells: list[Cell] = []
    speed: dict[str, PretrainConfig] = {}
    for study in studies:
        wanted = finetune and scale.base in study.finetune_at
        for label, size, config in _configs(study, scale, inputs, seeds, only):
            fast = speed_key(config, vocabulary, machine)
            cell = Cell(study, label, size, config.seed, fast)
            speed.setdefault(fast, config)
            steps: int | None = config.steps
            if study.equal_time:
                speed_of = partial(_steps_a_second, speeds, scale, vocabulary, machine)
                timed = _timed(study, scale, config, inputs)
                steps = chosen_steps(study, label, size) or _steps_in_time(config, timed, scale.minutes, speed_of)
                own, needed = speed_of(config), {fast: config}
                if scale.minutes is None:
                    needed[speed_key(timed, vocabulary, machine)] = timed
                if steps is None:
                    speed.update(needed)  # `timed` is compared even where --only does not train it
                cell = replace(
                    cell, seconds=steps / own if steps and own else None,
                    as_long_as=pretrain_job(timed, study.row(study.equal_time), inputs), waits_for=tuple(needed),
                )  # fmt: skip
            if steps is not None:
                cell = _with_jobs(cell, replace(config, steps=steps), scale, inputs, wanted)
            cells.append(cell)
    jobs = _speed_jobs(speed, speeds, scale, vocabulary, machine)
    return Plan(scale, inputs.identity, cells, jobs)


def _configs(
    study: Study, scale: Scale, inputs: Inputs, seeds: Sequence[int], only: Sequence[str]
) -> Iterable[tuple[str, str, PretrainConfig]]:
    """Label, size and config of everything the study trains."""
    for size in scale.sizes_of(study):
        for row in study.rows:
            if only and row.label not in only:
                continue
            for seed in seeds:
                config = resolve(study, row, size, scale, seed, inputs.data)
                if config is not None:
                    yield row.label, size, config


def _timed(study: Study, scale: Scale, config: PretrainConfig, inputs: Inputs) -> PretrainConfig:
    """The model of the same size and seed whose time the others of an equal-time study take."""
    row = study.row(str(study.equal_time))
    timed = resolve(study, row, str(config.size), scale, config.seed, inputs.data)
    if timed is None:
        raise UserError(f"study {study.name}: equal_time row {row.label!r} has no {config.size} model here")
    return timed


def _steps_a_second(
    speeds: Mapping[str, SpeedFacts], scale: Scale, vocabulary: int, machine: str, config: PretrainConfig
) -> float | None:
    """The dense model's speed times the ratio measured in turns, where both are known."""
    dense, own = (speed_key(c, vocabulary, machine) for c in (narrow(config, scale), config))
    if dense not in speeds or own not in speeds:
        return None
    return speeds[dense].seq_per_s * speeds[own].relative / config.batch_size


def _steps_in_time(
    config: PretrainConfig,
    timed: PretrainConfig,
    minutes: float | None,
    speed_of: Callable[[PretrainConfig], float | None],
) -> int | None:
    """The steps that fit into the minutes or, without any, into the time that `timed` takes for its own."""
    if minutes is None and config == timed:
        return config.steps
    own, speed = speed_of(config), speed_of(timed)
    seconds = 60 * minutes if minutes is not None else timed.steps / speed if speed else None
    return max(1, round(own * seconds)) if own and seconds else None


def _with_jobs(cell: Cell, config: PretrainConfig, scale: Scale, inputs: Inputs, wanted: bool) -> Cell:
    job = pretrain_job(config, cell.study.row(cell.label), inputs)
    tuned = {
        name: finetune_job(name, scale, job, config, inputs)
        for name in cell.study.finetune
        if name in scale.columns
    }
    return replace(cell, pretrain=job, finetune=tuned if wanted else {}, optional={} if wanted else tuned)


def narrow(config: PretrainConfig, scale: Scale) -> PretrainConfig:
    """The dense model of the same size."""
    return replace(config, **NARROW, model_overrides=scale.shapes.get(str(config.size), {}), batches={})


def describe_model(config: PretrainConfig, changes: dict[str, Any]) -> str:
    """`small altup K=2 +4 layers`, then what else was changed."""
    parts = [*([config.model] if config.model != "t5" else []), str(config.size), config.method]
    if config.k and config.k > 1:
        parts.append(f"K={config.k}")
    if config.extra_layers:
        parts.append(f"+{config.extra_layers} layers")
    parts += [f"{name} {value}" for name, value in changes.items()]
    return " ".join(parts)


def pretrain_job(config: PretrainConfig, row: Row, inputs: Inputs) -> Job:
    key = key_of("pretrain", deciding_fields(config), row.start, inputs.identity)
    changes = {**row.settings.get("model_overrides", {}), **row.start}
    title = f"{describe_model(config, changes)} {config.steps} steps seed {config.seed}"
    settings = {"config": asdict(config), "start": row.start, "data": inputs.identity}
    return Job("pretrain", key, title, settings, config.steps, config.steps * config.batch_size)


def finetune_job(column: str, scale: Scale, trained: Job, config: PretrainConfig, inputs: Inputs) -> Job:
    """Fine-tuning of a pretrained run for one column; the worker fills in where the model lies."""
    from altup.finetuning.config import FinetuneConfig

    of = scale.columns[column]
    settings = {**scale.finetune, **of.settings, "tasks": of.tasks, "seed": config.seed, "data": inputs.tasks}
    tuned = FinetuneConfig.from_dict({**settings, "model": trained.key}, f"scale {scale.name}, column {column}")
    data = inputs.identify_tasks(name for name, _ in tuned.weighted_names())
    key = key_of("finetune", deciding_fields(tuned), tuned.eval_limit, trained.key, *([data] if data else []))
    described = {"config": asdict(tuned), "column": column, "of": trained.key, "data": data}
    return Job(
        "finetune", key, f"{trained.title} on {column}", described,
        tuned.steps, tuned.steps * tuned.batch_size, (trained.key,),
    )  # fmt: skip


def _speed_jobs(
    configs: dict[str, PretrainConfig],
    known_speeds: Mapping[str, SpeedFacts],
    scale: Scale,
    vocabulary: int,
    machine: str,
) -> list[Job]:
    """Comparisons of speed in turns: the dense model of a size, trained in the same way (batch, length and so on),
    with others that are not measured yet."""
    groups: dict[str, tuple[PretrainConfig, dict[str, PretrainConfig]]] = {}
    for key, config in configs.items():
        dense = narrow(config, scale)
        groups.setdefault(speed_key(dense, vocabulary, machine), (dense, {}))[1][key] = config
    timing = dict(scale.speed)
    together = timing.pop("together", TOGETHER)
    jobs = []
    for base, (dense, group) in groups.items():
        others = [key for key in group if key != base and key not in known_speeds]
        least = 0 if base in known_speeds else 1
        for begin in range(0, max(len(others), least), together):
            chunk = [base, *others[begin : begin + together]]
            known = {base: dense, **group}
            jobs.append(
                Job(
                    "speed", key_of("speed", chunk, timing),
                    f"speed of {dense.size}: {', '.join(describe_model(known[key], {}) for key in chunk)}",
                    {"configs": {key: asdict(known[key]) for key in chunk}, **timing},
                )
            )  # fmt: skip
    return jobs


def run_folder(out: Path, job: Job) -> Path:
    """Where a job's run or record lies below a studies folder."""
    place = {"pretrain": "runs", "finetune": "finetuned"}[job.kind]
    found = list((out / place).glob(f"*-{job.key}"))
    return found[0] if found else out / place / job.folder_name

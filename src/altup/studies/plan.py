"""The plan of a run of studies: every row becomes a config, every config a job, and no job runs twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from altup.core.errors import UserError, check_choice
from altup.studies.jobs import Job, StudyData, finetune_job, pretrain_job, speed_job, speed_key
from altup.studies.scale import Scale
from altup.studies.study import Row, Study

if TYPE_CHECKING:
    from altup.training.pretraining import PretrainConfig

DENSE: dict[str, Any] = {"method": "dense", "k": None, "stride": None, "experts": None, "extra_layers": 0}
TOGETHER = 4  # models beside the dense one whose speed is compared in one process, unless the scale says less


@dataclass(frozen=True)
class Trial:
    """A row of a study at one size with one seed, and the jobs that measure it.

    There is no job yet where the steps of an equal-time run wait for speeds (`waits`, and `waits_for` their keys);
    `as_long_as` is then a run of about the same time. `seconds` is what an equal-time run should take.
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

    @property
    def waits(self) -> bool:
        return self.pretrain is None


@dataclass(frozen=True)
class Plan:
    """Everything that studies need at a scale; `speed` are the comparisons that are not made yet."""

    scale: Scale
    data: str
    trials: list[Trial]
    speed: list[Job]

    def training(self) -> list[Job]:
        """Every pretraining and fine-tuning job once, study by study."""
        found: dict[str, Job] = {}
        for trial in self.trials:
            for job in (trial.pretrain, *trial.finetune.values()):
                if job is not None:
                    found.setdefault(job.key, job)
        return list(found.values())

    def speed_first(self) -> list[Job]:
        """The comparisons that trials wait for."""
        keys = {key for trial in self.trials if trial.waits for key in trial.waits_for}
        return [job for job in self.speed if keys.intersection(job.settings["configs"])]


@dataclass(frozen=True)
class KnownSpeed:
    """A measured training speed, and the ratio to the dense model's in the same comparison."""

    seq_per_s: float
    relative: float


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
    data: StudyData,
    *,
    seeds: Sequence[int],
    only: Sequence[str] = (),
    finetune: bool = True,
    speeds: Mapping[str, KnownSpeed],
    chosen_steps: Callable[[Study, str, str], int | None],
    machine: str,
) -> Plan:
    """All trials of the studies. `chosen_steps(study, label, size)` are those of an equal-time run made before."""
    labels = {row.label for study in studies for row in study.rows}
    for label in only:
        check_choice("--only", label, sorted(labels))
    vocabulary = data.vocabulary.padded_size
    trials: list[Trial] = []
    to_compare: dict[str, PretrainConfig] = {}
    for study in studies:
        columns = [name for name in study.finetune if name in scale.columns]
        if not finetune or scale.base not in study.finetune_at:
            columns = []
        for label, size, config in _configs(study, scale, data, seeds, only):
            fast = speed_key(config, vocabulary, machine)
            trial = Trial(study, label, size, config.seed, fast)
            to_compare.setdefault(fast, config)
            steps: int | None = config.steps
            if study.equal_time:
                speed_of = partial(_steps_a_second, speeds, scale, vocabulary, machine)
                timed = _timed(study, scale, config, data)
                steps = chosen_steps(study, label, size) or _steps_in_time(config, timed, scale.minutes, speed_of)
                own, needed = speed_of(config), {fast: config}
                if scale.minutes is None:
                    needed[speed_key(timed, vocabulary, machine)] = timed
                if steps is None:
                    to_compare.update(needed)  # `timed` is compared even where --only does not train it
                trial = replace(
                    trial, seconds=steps / own if steps and own else None,
                    as_long_as=pretrain_job(timed, study.row(study.equal_time), data), waits_for=tuple(needed),
                )  # fmt: skip
            if steps is not None:
                job = pretrain_job(replace(config, steps=steps), study.row(label), data)
                tuned = {name: finetune_job(name, scale, job, config.seed, data) for name in columns}
                trial = replace(trial, pretrain=job, finetune=tuned)
            trials.append(trial)
    return Plan(scale, data.identity, trials, _speed_jobs(to_compare, speeds, scale, vocabulary, machine))


def _configs(
    study: Study, scale: Scale, data: StudyData, seeds: Sequence[int], only: Sequence[str]
) -> Iterable[tuple[str, str, PretrainConfig]]:
    """Label, size and config of everything the study trains."""
    for size in scale.sizes_of(study):
        for row in study.rows:
            if only and row.label not in only:
                continue
            for seed in seeds:
                config = resolve(study, row, size, scale, seed, data.data)
                if config is not None:
                    yield row.label, size, config


def _timed(study: Study, scale: Scale, config: PretrainConfig, data: StudyData) -> PretrainConfig:
    """The model of the same size and seed whose time the others of an equal-time study take."""
    row = study.row(str(study.equal_time))
    timed = resolve(study, row, str(config.size), scale, config.seed, data.data)
    if timed is None:
        raise UserError(f"study {study.name}: equal_time row {row.label!r} has no {config.size} model here")
    return timed


def _steps_a_second(
    speeds: Mapping[str, KnownSpeed], scale: Scale, vocabulary: int, machine: str, config: PretrainConfig
) -> float | None:
    """The dense model's speed times the ratio measured in turns, where both are known."""
    dense, own = (speed_key(c, vocabulary, machine) for c in (dense_of(config, scale), config))
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


def dense_of(config: PretrainConfig, scale: Scale) -> PretrainConfig:
    """The dense model of the same size, trained in the same way (batch, length and so on)."""
    return replace(config, **DENSE, model_overrides=scale.shapes.get(str(config.size), {}), batches={})


def _speed_jobs(
    configs: dict[str, PretrainConfig],
    known_speeds: Mapping[str, KnownSpeed],
    scale: Scale,
    vocabulary: int,
    machine: str,
) -> list[Job]:
    """Comparisons of speed in turns: a dense model with others of its size that are not measured yet."""
    groups: dict[str, tuple[PretrainConfig, dict[str, PretrainConfig]]] = {}
    for key, config in configs.items():
        dense = dense_of(config, scale)
        groups.setdefault(speed_key(dense, vocabulary, machine), (dense, {}))[1][key] = config
    timing = dict(scale.speed)
    together = timing.pop("together", TOGETHER)
    jobs = []
    for base, (dense, group) in groups.items():
        others = [key for key in group if key != base and key not in known_speeds]
        least = 0 if base in known_speeds else 1
        for begin in range(0, max(len(others), least), together):
            compared = {base: dense, **{key: group[key] for key in others[begin : begin + together]}}
            jobs.append(speed_job(compared, timing))
    return jobs

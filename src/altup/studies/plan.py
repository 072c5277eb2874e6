"""The plan of a run of studies: every row becomes a config, every config a job, and no job runs twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from altup.core.errors import UserError, check_choice
from altup.studies.jobs import Job, StudyData, finetune_job, pretrain_job, speed_job, speed_key
from altup.studies.scale import Scale, Variant
from altup.studies.study import Row, Study
from altup.studies.tuning import REPORTING, Losses, Sweep, find_sweep, grid_of

if TYPE_CHECKING:
    from altup.training.pretraining import PretrainConfig

DENSE: dict[str, Any] = {"method": "dense", "k": None, "stride": None, "experts": None, "extra_layers": 0}
TOGETHER = 4  # models beside the dense one whose speed is compared in one process, unless the scale says less


@dataclass(frozen=True)
class Trial:
    """A row of a study at one size with one seed, and the jobs that measure it.

    There is no job yet (`waits`) where the steps of an equal-time run wait for speeds (`waits_for` their keys), or
    settings for the end of a sweep; `as_long_as` is then a run of about the same time. `size` is the variant's
    name. `seconds` is what an equal-time run should take.
    """

    study: Study
    label: str
    size: str
    seed: int
    speed_key: str
    pretrain: Job | None = None
    as_long_as: Job | None = None
    waits_for: tuple[str, ...] = ()
    sweep: Sweep | None = None
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

    def sweeps(self) -> list[Sweep]:
        """Every model's sweep once."""
        return list({trial.sweep.key: trial.sweep for trial in self.trials if trial.sweep}.values())

    def tuning(self) -> list[Job]:
        """The runs that sweeps wait for now."""
        return list({job.key: job for sweep in self.sweeps() for job in sweep.todo}.values())

    def speed_first(self) -> list[Job]:
        """The comparisons that trials wait for."""
        keys = {key for trial in self.trials if trial.waits for key in trial.waits_for}
        return [job for job in self.speed if keys.intersection(job.settings["configs"])]


@dataclass(frozen=True)
class KnownSpeed:
    """A measured training speed, and the ratio to the dense model's in the same comparison."""

    seq_per_s: float
    relative: float


def resolve(
    study: Study,
    row: Row,
    size: str,
    scale: Scale,
    seed: int,
    data: str,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> PretrainConfig | None:
    """The config of a row; None where the row is not run at this scale, or not at this size.

    `changes` are stronger than all else; `lr_factors.embeddings` changes an entry of a mapping.
    """
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
    for name, value in changes.items():
        field_name, _, entry = name.partition(".")
        settings[field_name] = {**settings.get(field_name, {}), entry: value} if entry else value
    source = f"study {study.name}, row {row.label!r}"
    try:
        return PretrainConfig.from_dict(settings, source)
    except UserError as error:
        told = str(error)
        raise UserError(told if told.startswith(source) else f"{source}: {told}") from None


def tuned_settings(scale: Scale, sweep: Sweep | None = None) -> dict[str, Any]:
    """What tuning changes in the runs that are reported: the held-out text, and what the sweep has chosen."""
    if scale.tune is None:
        return {}
    return {**REPORTING, **((sweep.chosen or {}) if sweep else {})}


def tuned_names(row: Row, scale: Scale, config: PretrainConfig) -> list[str]:
    """The settings that are swept for a row: not those that it sets itself, nor those of `--set`."""
    if scale.tune is None:
        return []
    return list(grid_of(scale.tune, config, {**(row.settings_at(scale.base) or {}), **scale.given}))


def sweep_of(study: Study, row: Row, size: str, scale: Scale, data: StudyData, losses: Losses) -> Sweep | None:
    """The sweep of a row that is run at the scale and size; None where nothing of it is tuned."""
    if scale.tune is None:
        return None

    def configure(changes: Mapping[str, Any]) -> PretrainConfig:
        config = resolve(study, row, size, scale, 0, data.data, changes)
        assert config is not None  # asked before
        return config

    names = tuned_names(row, scale, configure({}))
    return find_sweep(scale.tune, row, names, configure, data, losses)


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
    losses: Losses = lambda key: None,
) -> Plan:
    """All trials of the studies. `chosen_steps(study, label, size)` are those of an equal-time run made before,
    `losses` those of the sweeps' runs."""
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
        for row, variant, config, sweep in _configs(study, scale, data, seeds, only, losses):
            fast = speed_key(config, vocabulary, machine)
            trial = Trial(study, row.label, variant.name, config.seed, fast, sweep=sweep)
            to_compare.setdefault(fast, config)
            steps: int | None = config.steps
            if study.equal_time:
                speed_of = partial(_steps_a_second, speeds, scale, vocabulary, machine)
                timed = _timed(study, scale, variant, config.seed, data)
                steps = chosen_steps(study, row.label, variant.name) or _steps_in_time(
                    config, timed, scale.minutes, speed_of, row.label == study.equal_time
                )
                own, needed = speed_of(config), {fast: config}
                if scale.minutes is None:
                    needed[speed_key(timed, vocabulary, machine)] = timed
                if steps is None:
                    to_compare.update(needed)  # `timed` is compared even where --only does not train it
                trial = replace(
                    trial, seconds=steps / own if steps and own else None,
                    as_long_as=pretrain_job(timed, study.row(study.equal_time), data), waits_for=tuple(needed),
                )  # fmt: skip
            elif sweep is not None:
                trial = replace(trial, as_long_as=pretrain_job(config, row, data))
            if steps is not None and (sweep is None or sweep.chosen is not None):
                job = pretrain_job(replace(config, steps=steps), row, data)
                if sweep is not None:
                    job = replace(job, settings={**job.settings, "tuned_by": sweep.key, "tuned": list(sweep.grid)})
                tuned = {name: finetune_job(name, scale, job, config.seed, data) for name in columns}
                trial = replace(trial, pretrain=job, finetune=tuned)
            trials.append(trial)
    return Plan(scale, data.identity, trials, _speed_jobs(to_compare, speeds, scale, vocabulary, machine))


def _configs(
    study: Study, scale: Scale, data: StudyData, seeds: Sequence[int], only: Sequence[str], losses: Losses
) -> Iterable[tuple[Row, Variant, PretrainConfig, Sweep | None]]:
    """Row, variant, config and sweep of everything the study trains."""
    for variant in scale.variants_of(study):
        steps = {"steps": variant.steps} if variant.steps else {}
        for row in study.rows:
            if only and row.label not in only:
                continue
            if resolve(study, row, variant.size, scale, 0, data.data) is None:
                continue
            sweep = sweep_of(study, row, variant.size, scale, data, losses)
            changes = {**steps, **tuned_settings(scale, sweep)}
            for seed in seeds:
                config = resolve(study, row, variant.size, scale, seed, data.data, changes)
                assert config is not None
                yield row, variant, config, sweep


def _timed(study: Study, scale: Scale, variant: Variant, seed: int, data: StudyData) -> PretrainConfig:
    """The model of the same size and seed whose time the others of an equal-time study take."""
    row = study.row(str(study.equal_time))
    steps = {"steps": variant.steps} if variant.steps else {}
    timed = resolve(study, row, variant.size, scale, seed, data.data, steps)
    if timed is None:
        raise UserError(f"study {study.name}: equal_time row {row.label!r} has no {variant.size} model here")
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
    is_timed: bool,
) -> int | None:
    """The steps that fit into the minutes or, without any, into the time that `timed` takes for its own."""
    if minutes is None and is_timed:
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

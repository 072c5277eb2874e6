"""The plan of a run of studies: every row becomes a config, every config a job, and no job runs twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from altup.core.errors import UserError, check_choice
from altup.studies.configs import Collapsed, Model, resolve
from altup.studies.jobs import Job, StudyData, finetune_job, pretrain_job, speed_job, speed_key
from altup.studies.scale import Scale, Variant
from altup.studies.study import Study
from altup.studies.tuning import Losses, Parent, Sweep

if TYPE_CHECKING:
    from altup.training.pretraining import PretrainConfig

DENSE: dict[str, Any] = {"method": "dense", "k": None, "stride": None, "experts": None, "extra_layers": 0}
TOGETHER = 4  # models beside the dense one whose speed is compared in one process, unless the scale says less


@dataclass(frozen=True)
class Trial:
    """A row of a study at one size with one seed, and the jobs that measure it.

    There is no job yet (`waits`) where the steps of an equal-time run wait for speeds (`waits_for` their keys), or
    settings for the end of a sweep; `as_long_as` are then jobs of about the same time, the training first. `size`
    is the variant's name. `seconds` is what the run should take, where a study compares times. `parent` is the run
    that it goes on from, if any; if it collapsed there will be no job. `collapsed` is the run of the same seed
    that lost what it had learned, where it is repeated: `pretrain` is then that run with `on_spike: skip`. So it
    is with `collapsed_finetune` and `finetune`.
    """

    study: Study
    label: str
    size: str
    seed: int
    speed_key: str
    pretrain: Job | None = None
    collapsed: Job | None = None
    as_long_as: tuple[Job, ...] = ()
    waits_for: tuple[str, ...] = ()
    sweep: Sweep | None = None
    parent: Parent | None = None
    seconds: float | None = None
    finetune: dict[str, Job] = field(default_factory=dict)
    collapsed_finetune: tuple[Job, ...] = ()

    @property
    def waits(self) -> bool:
        return self.pretrain is None

    @property
    def jobs(self) -> list[Job]:
        return [] if self.pretrain is None else [self.pretrain, *self.finetune.values()]

    @property
    def is_lost(self) -> bool:
        """Whether it cannot be run, because what it goes on from has collapsed, or what its sweep goes on from."""
        parent, sweep = self.parent, self.sweep
        return self.waits and ((parent is not None and parent.collapsed) or (sweep is not None and sweep.is_stuck))

    @property
    def is_timed(self) -> bool:
        return self.study.timed_by(self.study.row(self.label)) is not None


@dataclass(frozen=True)
class Plan:
    """Everything that studies need at a scale; `speed` are the comparisons that are not made yet."""

    scale: Scale
    data: str
    trials: list[Trial]
    speed: list[Job]

    def wanted(self) -> list[Job]:
        """Every pretraining and fine-tuning job that measures something once, study by study and seed by seed."""
        return list({job.key: job for trial in self.trials for job in trial.jobs}.values())

    def training(self) -> list[Job]:
        """Those, each after the run whose model it goes on from."""
        found: dict[str, Job] = {}
        for trial in self.trials:
            parents = [trial.parent.job] if trial.parent and not trial.waits else []
            found |= {job.key: job for job in (*parents, *trial.jobs)}
        return list(found.values())

    def sweeps(self) -> list[Sweep]:
        """Every model's sweep once, and before it those of the model that it continues and of its relatives."""
        both = [sweep for t in self.trials for sweep in (t.parent and t.parent.sweep, t.sweep) if sweep]
        return list({sweep.key: sweep for last in both for sweep in last.chain}.values())

    def tuning(self) -> list[Job]:
        """The runs that sweeps wait for now, and before them those whose models they go on from."""
        going = [sweep for sweep in self.sweeps() if sweep.todo and not sweep.is_stuck]
        ready = [sweep for sweep in going if sweep.parent is None or sweep.parent.settled]
        parents = [sweep.parent.job for sweep in ready if sweep.parent]
        return list({job.key: job for job in (*parents, *(job for sweep in ready for job in sweep.todo))}.values())

    def parents_ahead(self) -> list[Job]:
        """The runs from which sweeps and waiting trials will go on, some still without their settings."""
        sweeps = [sweep.parent for sweep in self.sweeps() if sweep.todo and not sweep.is_stuck]
        trials = [trial.parent for trial in self.trials if trial.waits and not trial.is_lost]
        return list({parent.job.key: parent.job for parent in (*sweeps, *trials) if parent}.values())

    def speed_first(self) -> list[Job]:
        """The comparisons that trials wait for."""
        keys = {key for trial in self.trials if trial.waits for key in trial.waits_for}
        return [job for job in self.speed if keys.intersection(job.settings["configs"])]


@dataclass(frozen=True)
class KnownSpeed:
    """A measured training speed, and the ratio to the dense model's in the same comparison."""

    seq_per_s: float
    relative: float


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
    collapsed: Collapsed = lambda key: None,
    repeat_collapsed: bool = False,
) -> Plan:
    """All trials of the studies, seed by seed, so that models can be compared before all seeds are there.

    `chosen_steps(study, label, size)` are those of an equal-time run made before, `losses` those of the sweeps'
    runs, `collapsed` says which runs lost what they had learned, by their keys.
    """
    labels = {row.label for study in studies for row in study.rows}
    for label in only:
        check_choice("--only", label, sorted(labels))
    known = _Speeds(speeds, scale, data.vocabulary.padded_size, machine)
    trials: list[Trial] = []
    to_compare: dict[str, PretrainConfig] = {}
    for study in studies:
        columns = [name for name in study.finetune if name in scale.columns]
        if not finetune or scale.base not in study.finetune_at:
            columns = []
        models = list(_models(study, scale, data, only, losses, collapsed, repeat_collapsed))
        for seed in seeds:
            for variant, model in models:
                made = chosen_steps(study, model.row.label, variant.name)
                trial, compared = _plan_trial(model, variant, seed, known, made, columns)
                trials.append(trial)
                for key, config in compared.items():
                    to_compare.setdefault(key, config)
    return Plan(scale, data.identity, trials, _speed_jobs(to_compare, known))


def _models(
    study: Study, scale: Scale, data: StudyData, only: Sequence[str], losses: Losses, collapsed: Collapsed,
    repeat: bool,
) -> Iterable[tuple[Variant, Model]]:  # fmt: skip
    """Everything that the study trains, at each of its sizes and lengths."""
    for variant in scale.variants_of(study):
        for row in study.rows:
            if only and row.label not in only:
                continue
            if model := Model.find(study, row, variant.size, scale, data, losses, collapsed, repeat):
                yield variant, model


def _plan_trial(
    model: Model, variant: Variant, seed: int, known: _Speeds, made: int | None, columns: Sequence[str]
) -> tuple[Trial, dict[str, PretrainConfig]]:
    """A trial, and the models by their keys whose speed it asks for. `made` are the steps of an equal-time run of
    another seed."""
    study, row, scale, data = model.study, model.row, model.scale, model.data
    config, parent = model.reported(seed, variant.changes(study, row)), model.parent(seed)
    compared = {known.key(config): config}
    trial = Trial(study, row.label, variant.name, seed, known.key(config), sweep=model.sweep, parent=parent)
    if trial.is_lost:
        return trial, compared
    steps: int | None = config.steps
    similar = model.job(config, parent)
    if timed_by := study.timed_by(row):
        timed = _timed(study, timed_by, scale, variant, seed, data)
        similar = pretrain_job(timed, study.row(timed_by), data)
        minutes = scale.minutes if study.equal_time else None
        given = study.steps_by_speeds(row, timed.steps) if minutes is None else None
        steps = given or made or known.steps_in_time(config, timed, minutes, row.label == timed_by)
        needed = compared if minutes is not None else {**compared, known.key(timed): timed}
        trial = replace(trial, waits_for=() if given else tuple(needed))
        if steps is None:
            compared = needed  # `timed` is compared even where --only does not train it
    if any(study.timed_by(other) for other in study.rows) and steps and (own := known.steps_a_second(config)):
        trial = replace(trial, seconds=steps / own)

    def finetuned(job: Job) -> dict[str, tuple[Job, Job | None]]:
        """The run of each column, and the one that it repeats."""
        found = {}
        for name in () if model.collapsed(job.key) else columns:
            first, again = (finetune_job(name, scale, job, seed, data, c) for c in ({}, {"on_spike": "skip"}))
            found[name] = model.choose(first, again)
        return found

    if steps is None or not model.settled:
        return replace(trial, as_long_as=(similar, *(tuned for tuned, _ in finetuned(similar).values()))), compared
    job, lost = model.counted(replace(config, steps=steps), parent)
    tuned = finetuned(job)
    trial = replace(trial, pretrain=job, collapsed=lost, finetune={name: one for name, (one, _) in tuned.items()})
    return replace(trial, collapsed_finetune=tuple(lost for _, lost in tuned.values() if lost)), compared


def _timed(study: Study, label: str, scale: Scale, variant: Variant, seed: int, data: StudyData) -> PretrainConfig:
    """The model of the same size and seed whose time others take."""
    row = study.row(label)
    timed = resolve(study, row, variant.size, scale, seed, data.data, variant.changes(study, row))
    if timed is None:
        raise UserError(f"study {study.name}: row {label!r}, whose time counts, has no {variant.size} model here")
    return timed


@dataclass(frozen=True)
class _Speeds:
    """The speeds that are known on a machine, of models with a vocabulary."""

    known: Mapping[str, KnownSpeed]
    scale: Scale
    vocabulary: int
    machine: str

    def key(self, config: PretrainConfig) -> str:
        return speed_key(config, self.vocabulary, self.machine)

    def steps_a_second(self, config: PretrainConfig) -> float | None:
        """The dense model's speed times the ratio measured in turns, where both are known."""
        dense, own = self.key(dense_of(config, self.scale)), self.key(config)
        if dense not in self.known or own not in self.known:
            return None
        return self.known[dense].seq_per_s * self.known[own].relative / config.batch_size

    def steps_in_time(
        self, config: PretrainConfig, timed: PretrainConfig, minutes: float | None, is_timed: bool
    ) -> int | None:
        """The steps that fit into the minutes or, without any, into the time that `timed` takes for its own."""
        if minutes is None and is_timed:
            return config.steps
        own, speed = self.steps_a_second(config), self.steps_a_second(timed)
        seconds = 60 * minutes if minutes is not None else timed.steps / speed if speed else None
        return max(1, round(own * seconds)) if own and seconds else None


def dense_of(config: PretrainConfig, scale: Scale) -> PretrainConfig:
    """The dense model of the same size, trained in the same way (batch, length and so on)."""
    return replace(config, **DENSE, model_overrides=scale.shapes.get(str(config.size), {}), batches={})


def _speed_jobs(configs: dict[str, PretrainConfig], known: _Speeds) -> list[Job]:
    """Comparisons of speed in turns: a dense model with others of its size that are not measured yet."""
    groups: dict[str, tuple[PretrainConfig, dict[str, PretrainConfig]]] = {}
    for key, config in configs.items():
        dense = dense_of(config, known.scale)
        groups.setdefault(known.key(dense), (dense, {}))[1][key] = config
    timing = dict(known.scale.speed)
    together = timing.pop("together", TOGETHER)
    jobs = []
    for base, (dense, group) in groups.items():
        others = [key for key in group if key != base and key not in known.known]
        least = 0 if base in known.known else 1
        for begin in range(0, max(len(others), least), together):
            compared = {base: dense, **{key: group[key] for key in others[begin : begin + together]}}
            jobs.append(speed_job(compared, timing))
    return jobs

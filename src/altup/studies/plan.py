"""The plan of studies: rows × sizes × lengths × seeds, planned once; what is known by then says what to run next.

A run may wait for others: for the sweep that chooses its settings, for the speeds that say how many steps fit into
a time, for the model that it starts from. `NotReadyError` says for which. So `Plan.todo` is the one way from a
plan to results: it lists what can be run now, given the records so far, until nothing is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.core.errors import UserError, check_choice
from altup.studies.jobs import (
    Job,
    StudyData,
    count_costs,
    deciding_fields,
    describe_model,
    find_run,
    finetune_job,
    key_of,
    pretrain_job,
    speed_job,
    speed_key,
)
from altup.studies.scale import Scale, Variant
from altup.studies.study import SPEEDS, Row, Study
from altup.studies.sweep import Point, Search, change, describe_point, search, starting_point, tunable

if TYPE_CHECKING:
    from altup.studies.results import Records
    from altup.training.pretraining import PretrainConfig

DENSE: dict[str, Any] = {"method": "dense", "k": None, "stride": None, "experts": None, "extra_layers": 0}
TOGETHER = 4  # models beside the dense one whose speed is compared in one process, unless the scale says less
LEAST_POINTS = 20  # of a held-out curve
OTHER_ORDER = 1000  # added to the seed of a run that continues another, which else would see its batches again


class NotReadyError(Exception):
    """Something is not known before these jobs have ended; without jobs it never will be, for a `reason`."""

    def __init__(self, jobs: Sequence[Job] = (), reason: str = "") -> None:
        super().__init__(reason)
        self.jobs, self.reason = list(jobs), reason


@dataclass(frozen=True)
class Context:
    """What all models of a plan share. `known` has the records so far; `speed_jobs` are by the keys of what they
    measure."""

    scale: Scale
    data: StudyData
    known: Records
    machine: str
    speed_jobs: dict[str, Job] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A row of a study at one size and length."""

    study: Study
    row: Row
    variant: Variant
    context: Context
    _tuning: dict[str, Job] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def find(cls, study: Study, label: str, variant: Variant, context: Context) -> Model | None:
        """None where the row is not run at this scale or size."""
        model = cls(study, study.row(label), variant, context)
        own = model.row.settings_at(context.scale.base)
        if own is None or own.get("size", variant.size) != variant.size:
            return None
        model.check_parent()
        return model

    def config(self, seed: int, point: Mapping[str, Any]) -> PretrainConfig:
        """The row's settings at the scale, changed by a point of its sweep."""
        from altup.training.pretraining import GENTLER, PretrainConfig

        scale, row, size = self.context.scale, self.row, self.variant.size
        own = row.settings_at(scale.base) or {}
        overrides = {**scale.shapes.get(size, {}), **own.get("model_overrides", {})}
        experts = (
            {"experts": scale.experts} if scale.experts and "moe" in str(own.get("method")).split("+") else {}
        )
        length = (
            {"steps": self.variant.steps} if self.variant.steps and row.label not in self.study.continued else {}
        )
        settings = {
            "trackers": ["none"], **scale.pretrain, **scale.by_size.get(size, {}),
            **self.study.settings.get(scale.base, {}),
            **experts, **own, **scale.given, **length,
            "size": size, "seed": seed, "data": self.context.data.data, "model_overrides": overrides,
        }  # fmt: skip
        settings = change(settings, point)
        if row.continues:
            settings["seed"] += OTHER_ORDER
        config = PretrainConfig.from_dict(settings, f"study {self.study.name}, row {row.label!r}")
        if row.continues and settings.get("lr") is None and config.lr is not None:
            config = replace(config, lr=GENTLER * config.lr)
        return replace(config, eval_every=min(config.eval_every, max(1, config.steps // LEAST_POINTS)))

    @cached_property
    def untuned(self) -> PretrainConfig:
        """Its config before anything is chosen for it: enough to count its cost and to compare its speed."""
        return self.config(0, {})

    def other(self, label: str) -> Model:
        """The model of another row at the same size and length."""
        found = Model.find(self.study, label, self.variant, self.context)
        if found is None:
            raise UserError(
                f"study {self.study.name}: row {self.row.label!r} needs row {label!r}, which is not run at size "
                f"{self.variant.size}"
            )
        return found

    @cached_property
    def parent(self) -> Model | None:
        return self.other(self.row.continues) if self.row.continues else None

    def check_parent(self) -> None:
        """Only a dense model of the same shape can be widened."""
        if self.parent is None:
            return
        from altup.models.upcycling import UPCYCLE_METHODS

        own, parent = self.untuned, self.parent.untuned
        source = f"study {self.study.name}, row {self.row.label!r} continues {self.row.continues!r}"
        check_choice(f"{source}: method", own.method, UPCYCLE_METHODS)
        if parent.method != "dense":
            raise UserError(f"{source}, which is {parent.method}; continue a dense one")
        for name in ("model", "extra_layers", "model_overrides"):
            if getattr(own, name) != getattr(parent, name):
                values = f"{name}={getattr(own, name)!r}, the other {getattr(parent, name)!r}"
                raise UserError(f"{source} with {values}; they must agree")

    # --- its sweep ---

    @cached_property
    def grid(self) -> dict[str, list[Any]]:
        """What is swept: not what the row sets itself, nor what `--set` gives."""
        scale = self.context.scale
        fixed = {**(self.row.settings_at(scale.base) or {}), **scale.given}
        return tunable(scale.grid_of(self.row), self.untuned, fixed)

    @cached_property
    def sweep_key(self) -> str:
        return key_of(deciding_fields(self.untuned), self.row.start, self.row.continues, self.grid)

    def sweep(self) -> Search | None:
        """How far its sweep has come, by the losses that are known."""
        tune = self.context.scale.tune
        if tune is None or not self.grid:
            return None

        def loss(point: Point) -> float | None:
            record = self.context.known(self.tuning_job(point).key)
            return None if record is None else record["measures"].get("loss", float("inf"))

        return search(tune.search, self.grid, starting_point(self.grid, tune.start, self.untuned), loss)

    def tuning_job(self, point: Point) -> Job:
        """A run of the sweep: on one part of the held-out text, with a seed that is not reported."""
        place, tune = describe_point(point), self.context.scale.tune
        assert tune is not None  # asked by `sweep`
        if place not in self._tuning:
            steps = min(tune.steps, self.untuned.steps)
            own = {**self._inherited(), **point, "eval_part": "tuning", "steps": steps}
            config = self.config(tune.seed, own)
            job = pretrain_job(config, self.row, self.context.data, self.parent_job(tune.seed))
            sweep = {
                "key": self.sweep_key,
                "model": describe_model(config, self.row),
                "point": point,
                "grid": self.grid,
            }
            title = f"tuning {job.title}: {place}"
            self._tuning[place] = replace(job, title=title, settings={**job.settings, "sweep": sweep})
        return self._tuning[place]

    def chosen(self) -> Point:
        """The settings that its sweep found best."""
        found = self.sweep()
        if found and found.missing:
            raise NotReadyError([self.tuning_job(point) for point in found.missing])
        return {**self._inherited(), **(found.best if found else {})}

    def _inherited(self) -> Point:
        """What was chosen for the model that it continues, but the rate, which a trained model has another of."""
        return {n: value for n, value in self.parent.chosen().items() if n != "lr"} if self.parent else {}

    # --- its runs ---

    def parent_job(self, seed: int) -> Job | None:
        """The run whose model a run with this seed starts from."""
        if self.parent is None:
            return None
        job = self.parent.job(seed)
        record = self.context.known(job.key)
        if record is None:
            raise NotReadyError([job])
        if "diverged" in record:
            raise NotReadyError(reason=f"{job.title}, which it continues, diverged")
        return job

    def job(self, seed: int) -> Job:
        """The run that is reported."""
        part = {"eval_part": "reporting"} if self.context.scale.tune else {}
        chosen = self.chosen()
        config = self.config(seed, {**chosen, **part, "steps": self.steps()})
        job = pretrain_job(config, self.row, self.context.data, self.parent_job(seed))
        tuned = {"chosen": chosen, "sweep_key": self.sweep_key} if self.grid and self.context.scale.tune else {}
        return replace(job, settings={**job.settings, **tuned})

    def steps(self) -> int:
        """Its own or, in equal time or FLOPs, as many as cost what the other row's cost."""
        label = self.row.time_of or self.row.flops_of
        if label is None:
            return self.untuned.steps
        other = self.other(label)
        cost = Model.seconds_a_step if self.row.time_of else Model.flops_a_step
        return max(1, round(other.untuned.steps * cost(other) / cost(self)))

    def flops_a_step(self) -> float:
        config = self.untuned
        return config.batch_size * count_costs(config, self.context.data.vocabulary)["flops_train"]

    def seconds_a_step(self) -> float:
        """From the dense model's speed times the ratio measured in turns."""
        keys = [self.dense_key, self.speed_key]
        records = [self.context.known(key) for key in keys]
        missing = [key for key, record in zip(keys, records, strict=True) if record is None]
        if missing:
            raise NotReadyError(
                list({job.key: job for key in missing if (job := self.context.speed_jobs.get(key))}.values())
            )
        dense, own = (record["measures"] for record in records if record)
        return float(self.untuned.batch_size / (dense["train_seq_per_s"] * own["relative_speed"]))

    @property
    def budget(self) -> str:
        """The time or the FLOPs that it shares with other rows; empty where it shares none."""
        label = self.row.time_of or self.row.flops_of or self.row.label
        sharing = [row for row in self.study.rows if label in (row.time_of, row.flops_of)]
        if not sharing:
            return ""
        config, what = self.other(label).untuned, "time" if sharing[0].time_of else "FLOPs"
        return f"the {what} of {label}'s {config.steps:,} steps of {config.batch_size:,}"

    @cached_property
    def dense(self) -> PretrainConfig:
        """The dense model of the same size, trained in the same way (batch, length and so on)."""
        shapes = self.context.scale.shapes.get(str(self.untuned.size), {})
        return replace(self.untuned, **DENSE, model_overrides=shapes, batches={})

    @cached_property
    def speed_key(self) -> str:
        return speed_key(self.untuned, self.context.data.vocabulary.padded_size, self.context.machine)

    @cached_property
    def dense_key(self) -> str:
        return speed_key(self.dense, self.context.data.vocabulary.padded_size, self.context.machine)


@dataclass(frozen=True)
class Trial:
    """A model with one seed, and the columns that it is fine-tuned for."""

    model: Model
    seed: int
    columns: Sequence[str]
    times: bool  # whether the speed of its model is compared

    @property
    def title(self) -> str:
        model = self.model
        return f"{model.study.name}: {model.row.label}, {model.variant.name}, seed {self.seed}"

    def jobs(self) -> dict[str, Job]:
        """Its jobs that are known by now: `""` is the pretraining, the others are by their columns.
        `NotReadyError` if none is known."""
        context, job = self.model.context, self._job
        found, record = {"": job}, context.known(job.key)
        if record and "diverged" not in record:
            found |= {
                name: finetune_job(name, context.scale, job, self.seed, context.data) for name in self.columns
            }
        return found

    @cached_property
    def _job(self) -> Job:
        return self.model.job(self.seed)

    def todo(self) -> list[Job]:
        """What can be run of it now."""
        context = self.model.context
        speeds = [context.speed_jobs.get(self.model.speed_key)] if self.times else []
        try:
            jobs = [job for job in self.jobs().values() if context.known(job.key) is None]
        except NotReadyError as wait:
            jobs = wait.jobs
        return [*jobs, *filter(None, speeds)]


@dataclass(frozen=True)
class Plan:
    """All trials of studies, seed by seed, so that models can be compared before all seeds are there."""

    context: Context
    trials: list[Trial]
    out: Path
    _seen: dict[str, Job] = field(default_factory=dict)

    def todo(self) -> list[Job]:
        """The jobs that can be run now, each once, comparisons of speed last unless others wait for them."""
        found = {job.key: job for trial in self.trials for job in trial.todo()}
        for trial in self.trials:
            with contextlib.suppress(NotReadyError):
                parent = trial.model.parent_job(trial.seed)
                self._seen.update({job.key: job for job in (parent, trial.jobs()[""]) if job})
        jobs = {job.key: job for key in found for job in self._with_models(found[key])}
        return sorted(jobs.values(), key=lambda job: job.kind == "speed")

    def _with_models(self, job: Job) -> list[Job]:
        """The job, or instead of it the runs whose models it needs, where only their records are here."""
        missing = [need for need in job.needs if not self._has_model(need)]
        known = [self._seen[need] for need in missing if need in self._seen]
        return [each for one in known for each in self._with_models(one)] if missing else [job]

    def _has_model(self, key: str) -> bool:
        folder = find_run(self.out / "runs", key)
        return folder is not None and (folder / "final").is_dir()

    def stuck(self, failed: Collection[str] = ()) -> list[str]:
        """The trials that cannot be run, each with the reason; `failed` are the keys of jobs."""
        found = []
        for trial in self.trials:
            try:
                trial.jobs()
            except NotReadyError as wait:
                if all(job.key in failed for job in wait.jobs):
                    names = " and ".join(job.title for job in wait.jobs)
                    found.append(f"{trial.title}: {wait.reason or f'it waits for {names}, which failed'}")
        return found


def make_plan(
    studies: Sequence[Study],
    context: Context,
    out: Path,
    seeds: Sequence[int],
    only: Sequence[str] = (),
    finetune: bool = True,
    speed: bool = True,
) -> Plan:
    """The trials of the studies, without the rows that `only` leaves out, and the comparisons of speed that they
    ask for or depend on."""
    labels = sorted({row.label for study in studies for row in study.rows})
    for label in only:
        check_choice("--only", label, labels)
    scale, trials, timed = context.scale, list[Trial](), list[Model]()
    for study in studies:
        fine = finetune and scale.base in study.finetune_at
        columns = [name for name in study.finetune if fine and name in scale.columns]
        models = [
            model for variant in scale.variants_of(study) for row in study.rows
            if (not only or row.label in only) and (model := Model.find(study, row.label, variant, context))
        ]  # fmt: skip
        times = speed and not set(study.measures).isdisjoint(SPEEDS)
        trials += [Trial(model, seed, columns, times) for seed in seeds for model in models]
        for model in models:
            timed += [model] if times or model.row.time_of else []
            timed += [model.other(model.row.time_of)] if model.row.time_of else []
    context.speed_jobs.update(_speed_jobs(timed, context))
    return Plan(context, trials, out)


def _speed_jobs(models: Sequence[Model], context: Context) -> dict[str, Job]:
    """Comparisons of speed in turns: a dense model with others of its size that are not measured yet."""
    groups: dict[str, dict[str, Model]] = {}
    for model in models:
        groups.setdefault(model.dense_key, {})[model.speed_key] = model
    timing = dict(context.scale.speed)
    together, found = timing.pop("together", TOGETHER), dict[str, Job]()
    for dense_key, group in groups.items():
        one = next(iter(group.values()))
        others = [key for key in group if key != dense_key and context.known(key) is None]
        if not others and context.known(dense_key) is None:
            others = [dense_key]
        for begin in range(0, len(others), together):
            keys = others[begin : begin + together]
            compared = {dense_key: (one.dense, Row("Dense", {}))}
            compared |= {key: (group[key].untuned, group[key].row) for key in keys if key != dense_key}
            job = speed_job(compared, timing)
            found |= {key: found.get(key, job) for key in compared}
    return found

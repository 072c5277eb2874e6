"""From a row of a study to its model's config: at a scale, with what is tuned for it, and as what it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from altup.core.errors import UserError, check_choice
from altup.studies.jobs import NOTHING, Job, StudyData, pretrain_job
from altup.studies.scale import Scale
from altup.studies.study import Row, Study
from altup.studies.tuning import REPORTING, Losses, Parent, Sweep, find_sweep, swept_names, tunable

if TYPE_CHECKING:
    from altup.training.pretraining import PretrainConfig

# Key of a run → whether it lost what it had learned; None where it was not run.
Collapsed = Callable[[str], bool | None]
OTHER_ORDER = 1000  # added to the seed of a model that goes on, which else would see its parent's batches again


def resolve(
    study: Study,
    row: Row,
    size: str,
    scale: Scale,
    seed: int,
    data: str,
    changes: Mapping[str, Any] = NOTHING,
) -> PretrainConfig | None:
    """The config of a row; None where the row is not run at this scale, or not at this size.

    `changes` are stronger than all else; `lr_factors.embeddings` changes an entry of a mapping. A model that goes
    on from another has, unless one is given, the rate of `altup pretrain --from`.
    """
    from altup.training.pretraining import GENTLER, PretrainConfig

    own = row.settings_at(scale.base)
    if own is None or own.get("size", size) != size:
        return None
    overrides = {**scale.shapes.get(size, {}), **own.get("model_overrides", {})}
    if scale.experts and "moe" in str(own.get("method", "")).split("+"):
        own = {"experts": scale.experts, **own}
    settings = {
        "trackers": ["none"],  # a study keeps its own records
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
    if row.continues:
        settings["seed"] += OTHER_ORDER
    source = f"study {study.name}, row {row.label!r}"
    try:
        config = PretrainConfig.from_dict(settings, source)
    except UserError as error:
        told = str(error)
        raise UserError(told if told.startswith(source) else f"{source}: {told}") from None
    if row.continues and settings.get("lr") is None and config.lr is not None:
        config = replace(config, lr=GENTLER * config.lr)
    return config


def tuned_settings(scale: Scale, sweep: Sweep | None = None) -> dict[str, Any]:
    """What tuning changes in the runs that are reported: the held-out text, and what the sweep has chosen."""
    if scale.tune is None:
        return {}
    return {**REPORTING, **((sweep.chosen or {}) if sweep else {})}


def tuned_grid(row: Row, scale: Scale, config: PretrainConfig) -> dict[str, list[Any]]:
    """What is swept for a row: not what it sets itself, nor what `--set` gives."""
    return tunable(scale.grid_of(row), config, {**(row.settings_at(scale.base) or {}), **scale.given})


def tuned_names(study: Study, row: Row, size: str, scale: Scale) -> list[str]:
    """The settings that the sweep of a row chooses or takes from its relative's, once both have ended."""
    if scale.tune is None:
        return []

    def grid_of(row: Row) -> dict[str, list[Any]]:
        config = resolve(study, row, size, scale, 0, "DATA")
        return tuned_grid(row, scale, config) if config else {}

    grid, relative = grid_of(row), study.row(row.tune_from) if row.tune_from else None
    taken = tuned_names(study, relative, size, scale) if relative else []
    swept = swept_names(scale.tune, row, grid, relative is not None and bool(grid_of(relative)))
    return [name for name in grid if name in swept or name in taken]


def reported_job(
    config: PretrainConfig, row: Row, data: StudyData, sweep: Sweep | None, parent: Parent | None = None
) -> Job:
    """A run with the settings that its model's sweep has chosen."""
    job = pretrain_job(config, row, data, parent.job if parent else None)
    if sweep is None or sweep.chosen is None:
        return job
    return replace(job, settings={**job.settings, "tuned_by": sweep.key, "tuned": list(sweep.chosen)})


@dataclass(frozen=True)
class Model:
    """A row of a study at a size: its configs by seed, its sweep, and the model that it continues, if any. With
    `repeat` a run that collapsed is repeated."""

    study: Study
    row: Row
    size: str
    scale: Scale
    data: StudyData
    sweep: Sweep | None
    continues: Model | None
    collapsed: Collapsed
    repeat: bool

    @classmethod
    def find(
        cls, study: Study, row: Row, size: str, scale: Scale, data: StudyData, losses: Losses,
        collapsed: Collapsed, repeat: bool = False,
    ) -> Model | None:  # fmt: skip
        """None where the row is not run at this scale and size."""
        if resolve(study, row, size, scale, 0, data.data) is None:
            return None

        def find(label: str) -> Model | None:
            return cls.find(study, study.row(label), size, scale, data, losses, collapsed, repeat)

        continues = None
        if row.continues:
            continues = find(row.continues)
            if continues is None:
                raise UserError(
                    f"study {study.name}: row {row.label!r} continues {row.continues!r}, which has no size {size}"
                )
        model = cls(study, row, size, scale, data, None, continues, collapsed, repeat)
        model._check_parent()
        relative = find(row.tune_from) if row.tune_from and scale.tune else None
        return replace(model, sweep=model._find_sweep(losses, relative.sweep if relative else None))

    def config(self, seed: int, changes: Mapping[str, Any] = NOTHING) -> PretrainConfig:
        config = resolve(
            self.study, self.row, self.size, self.scale, seed, self.data.data, {**self._inherited(), **changes}
        )
        assert config is not None  # asked by `find`
        return config

    def reported(self, seed: int, changes: Mapping[str, Any] = NOTHING) -> PretrainConfig:
        """The config of a run that is reported; until the sweep has ended, without what it will choose."""
        return self.config(seed, {**changes, **tuned_settings(self.scale, self.sweep)})

    @property
    def settled(self) -> bool:
        """Whether its sweep, if it has one, has ended, and that of the model that it continues."""
        own = self.sweep is None or self.sweep.chosen is not None
        return own and (self.continues is None or self.continues.settled)

    def parent(self, seed: int) -> Parent | None:
        """The run that it goes on from with a seed."""
        if self.continues is None:
            return None
        dense = self.continues
        job, _ = dense.counted(dense.reported(seed), None)
        return Parent(job, dense.sweep, dense.settled and bool(self.collapsed(job.key)))

    def job(self, config: PretrainConfig, parent: Parent | None) -> Job:
        return reported_job(config, self.row, self.data, self.sweep, parent)

    def counted(self, config: PretrainConfig, parent: Parent | None) -> tuple[Job, Job | None]:
        """The run of a config; or, where that collapsed and is repeated or was, the one that repeats it and the
        one that collapsed."""
        return self.choose(self.job(config, parent), self.job(replace(config, on_spike="skip"), parent))

    def choose(self, job: Job, again: Job) -> tuple[Job, Job | None]:
        """The same of a job and what would repeat it."""
        repeated = self.repeat or self.collapsed(again.key) is not None
        if not self.collapsed(job.key) or not repeated or again.key == job.key:
            return job, None
        return replace(again, title=f"{again.title}, again without spikes"), job

    def _inherited(self) -> dict[str, Any]:
        """What was chosen for the model that it continues, but the rate, which a trained model has another of."""
        if self.continues is None or self.continues.sweep is None:
            return {}
        return {name: value for name, value in (self.continues.sweep.chosen or {}).items() if name != "lr"}

    def _find_sweep(self, losses: Losses, relative: Sweep | None) -> Sweep | None:
        tune = self.scale.tune
        if tune is None:
            return None
        grid = tuned_grid(self.row, self.scale, self.config(0))
        lengths = [variant.changes(self.study, self.row) for variant in self.scale.variants_of(self.study)]
        longest = max(lengths, key=lambda changes: changes.get("steps", 0), default={})

        def configure(changes: Mapping[str, Any]) -> PretrainConfig:
            return self.config(0, {**longest, **changes})

        parent = self.parent(tune.seed)
        return find_sweep(tune, self.row, grid, configure, self.data, losses, parent, relative)

    def _check_parent(self) -> None:
        """Only a dense model of the same shape can be widened."""
        if self.continues is None:
            return
        from altup.models.upcycling import UPCYCLE_METHODS

        own, parent = self.config(0), self.continues.config(0)
        source = f"study {self.study.name}, row {self.row.label!r} continues {self.row.continues!r}"
        check_choice(f"{source}: method", own.method, UPCYCLE_METHODS)
        if parent.method != "dense":
            raise UserError(f"{source}, which is {parent.method}; continue a dense one")
        for name in ("model", "extra_layers", "model_overrides"):
            if getattr(own, name) != getattr(parent, name):
                told = f"{name}={getattr(own, name)!r}, the other {getattr(parent, name)!r}"
                raise UserError(f"{source} with {told}; they must agree")

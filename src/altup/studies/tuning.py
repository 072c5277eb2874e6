"""Tuning: each model's own best settings, found by a sweep on one part of the held-out text.

A sweep walks through the scale's grid one setting at a time: the neighbours of the present best first, then
further in the direction that gets better. So its runs are a sum over the settings, not a product. Some settings
may then be settled in longer runs. All have a seed of their own, and what is reported comes from other seeds and
from the other part of the held-out text.

The sweep of a model whose row says `tune_from` begins where the short runs of a relative ended. It walks through
few settings, and takes the others as the relative has them. If it ends where it began, it takes what the relative
settled for; else it settles between the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from altup.studies.jobs import Job, StudyData, describe_model, key_of, pretrain_job
from altup.studies.scale import Tuning
from altup.studies.study import Row

if TYPE_CHECKING:
    from altup.training.pretraining import PretrainConfig

Point = dict[str, Any]  # setting → value; `lr_factors.embeddings` is an entry of a mapping
# Key of a run → its held-out loss, infinite if it diverged, None if not run.
Losses = Callable[[str], float | None]
Run = tuple[Point, float, str]  # of a sweep: its settings, its loss, its key
TUNING, REPORTING = {"eval_part": "tuning"}, {"eval_part": "reporting"}


@dataclass(frozen=True)
class Walk:
    """How far a sweep has come: the losses along each setting, the best point so far, and those to run next.
    There are none once it has ended."""

    curves: dict[str, list[tuple[Any, float]]]
    best: Point
    missing: list[Point]


def walk_grid(grid: Mapping[str, Sequence[Any]], start: Point, loss: Callable[[Point], float | None]) -> Walk:
    """Walk one setting at a time to a value whose neighbours are both worse, or to the edge."""
    best, curves = dict(start), {}
    for name, values in grid.items():
        first = at = list(values).index(best[name])
        known: dict[int, float] = {}
        near = {at - 1, at, at + 1}
        while wanted := sorted(i for i in near if 0 <= i < len(values) and i not in known):
            found = {i: loss({**best, name: values[i]}) for i in wanted}
            known |= {i: value for i, value in found.items() if value is not None}
            curves[name] = [(values[i], known[i]) for i in sorted(known)]
            if missing := [{**best, name: values[i]} for i in wanted if found[i] is None]:
                return Walk(curves, best, missing)
            at = min(known, key=lambda i: (known[i], abs(i - first)))  # of equals the nearest to the start
            near = {at - 1, at + 1} if math.isfinite(known[at]) else {min(known) - 1, max(known) + 1}
        best = {**best, name: values[at]}
    return Walk(curves, best, [])


def most_runs(grid: Mapping[str, Sequence[Any]]) -> int:
    """Of a sweep, if it comes past every value; settings share the point at which one ends and the next begins."""
    return sum(map(len, grid.values())) - max(0, len(grid) - 1)


def runs_left(grid: Mapping[str, Sequence[Any]], walk: Walk, runs: Sequence[Run]) -> tuple[int, int]:
    """Runs that a walk still needs, with these made: if the neighbours of where it stands are worse, and at most.
    None once it has ended."""
    if not walk.missing:
        return 0, 0
    least = most_runs({name: values[:3] for name, values in grid.items()})
    made, now = len(runs), len(walk.missing)
    return max(least - made, now), max(most_runs(grid) - made, now)


@dataclass(frozen=True)
class Parent:
    """The job from whose model another goes on. It is not `settled` while its own sweep has not ended: the job
    then stands for one of other settings. If it has `collapsed`, there is nothing to go on from."""

    job: Job
    sweep: Sweep | None
    collapsed: bool = False

    @property
    def settled(self) -> bool:
        return self.sweep is None or self.sweep.chosen is not None


@dataclass(frozen=True)
class Sweep:
    """The sweep of one model. `runs` are those made, with their losses; `todo` are the jobs that it waits for;
    `first` is the one it begins with; `parent` the job from whose model they go on, if any; `settling` its second
    walk, in longer runs, if any; `relative` the sweep at whose end it begins, if any, and `taken` what it takes
    from there, whatever its own walk ended with."""

    key: str
    title: str
    grid: dict[str, list[Any]]
    walk: Walk
    runs: list[Run]
    todo: list[Job]
    first: Job
    parent: Parent | None = None
    settling: Settling | None = None
    relative: Sweep | None = None
    taken: Point = field(default_factory=dict)

    @property
    def chosen(self) -> Point | None:
        last = self.settling.walk if self.settling else self.walk
        waits = self.relative is not None and self.relative.chosen is None
        return None if waits or self.walk.missing or last.missing else {**last.best, **self.taken}

    @property
    def chain(self) -> list[Sweep]:
        """Its relatives, each after the one that it begins with, and itself."""
        return [*(self.relative.chain if self.relative else []), self]

    @property
    def is_stuck(self) -> bool:
        """Whether it cannot end, because the model that its runs begin with has collapsed, or a relative's has."""
        lost = self.parent is not None and self.parent.collapsed
        return self.chosen is None and (lost or (self.relative is not None and self.relative.is_stuck))

    @property
    def runs_left(self) -> tuple[int, int]:
        """The least and the most that it still needs, without the longer ones."""
        return runs_left(self.grid, self.walk, self.runs)

    def describe(self, tuning: Tuning, scale: str) -> dict[str, Any]:
        """What the results keep of it."""
        found: dict[str, Any] = {
            "key": self.key, "model": self.title, "scale": scale, "steps": self.first.steps, "seed": tuning.seed,
            "grid": self.grid, "chosen": self.chosen, "curves": _finite(self.walk.curves),
            "runs": _told(self.runs),
        }  # fmt: skip
        if (longer := self.settling) and longer.runs:
            curves, runs = _finite(longer.walk.curves), _told(longer.runs)
            found["settled"] = {"steps": longer.first.steps, "curves": curves, "runs": runs}
        if self.relative:
            found["from"] = self.relative.title
        return found


@dataclass(frozen=True)
class Settling:
    """The walk through some settings in longer runs, from what the short ones chose. Its `runs` are those made."""

    grid: dict[str, list[Any]]
    walk: Walk
    runs: list[Run]
    first: Job

    @property
    def runs_left(self) -> tuple[int, int]:
        return runs_left(self.grid, self.walk, self.runs)


def _told(runs: list[Run]) -> list[list[Any]]:
    return [[point, loss if math.isfinite(loss) else None, key] for point, loss, key in runs]


def _finite(curves: Mapping[str, list[tuple[Any, float]]]) -> dict[str, list[tuple[Any, float | None]]]:
    """JSON has no infinity: None stands for a run that diverged."""
    return {
        name: [(value, loss if math.isfinite(loss) else None) for value, loss in curve]
        for name, curve in curves.items()
    }


def tunable(
    grid: Mapping[str, list[Any]], config: PretrainConfig, fixed: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """The settings of a grid that the model has, without those that a row or the user has `fixed`: of a mapping
    the entries that are named."""
    given = {
        f"{name}.{entry}" if entry else name
        for name, value in fixed.items()
        for entry in (value if isinstance(value, dict) else [""])
    }
    missing = {"lr_factors.coefficients": not config.has_coefficients, "lr_factors.positions": config.kind != "t5"}
    return {name: values for name, values in grid.items() if name not in given and not missing.get(name)}


def swept_names(tuning: Tuning, row: Row, grid: Mapping[str, Any], has_relative: bool) -> list[str]:
    """What is walked through for a row, of all that can be tuned of its model."""
    if row.tune is not None:
        return row.tune
    return (tuning.near if has_relative else []) or list(grid)


class _Runs:
    """The runs of one sweep by length and settings, each made a job once. `fixed` is what all of them have."""

    def __init__(
        self,
        configure: Callable[[Mapping[str, Any]], PretrainConfig],
        fixed: Point,
        row: Row,
        data: StudyData,
        losses: Losses,
        parent: Parent | None,
    ) -> None:
        self._configure, self._fixed, self._row = configure, fixed, row
        self._data, self._losses, self._parent = data, losses, parent
        self._found: dict[str, tuple[int, Point, Job, float | None]] = {}

    def job(self, steps: int, point: Point) -> Job:
        return self._find(steps, point)[2]

    def walk(self, steps: int, grid: Mapping[str, Sequence[Any]], start: Point) -> Walk:
        return walk_grid(grid, start, lambda point: self._find(steps, point)[3])

    def made(self, steps: int) -> list[Run]:
        """Those of a length that have a loss."""
        found = self._found.values()
        return [(point, loss, job.key) for n, point, job, loss in found if n == steps and loss is not None]

    def missing(self, steps: int, walk: Walk) -> list[Job]:
        return [self.job(steps, point) for point in walk.missing]

    def _find(self, steps: int, point: Point) -> tuple[int, Point, Job, float | None]:
        place = f"{steps} {point}"
        if place not in self._found:
            config = self._configure({"steps": steps, **self._fixed, **point})
            job = pretrain_job(config, self._row, self._data, self._parent.job if self._parent else None)
            told = ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                             for name, value in point.items())  # fmt: skip
            job = replace(_stopping(job), title=f"tuning {job.title}: {told}")
            self._found[place] = steps, point, job, self._losses(job.key)
        return self._found[place]


def find_sweep(
    tuning: Tuning,
    row: Row,
    grid: dict[str, list[Any]],
    configure: Callable[[Mapping[str, Any]], PretrainConfig],
    data: StudyData,
    losses: Losses,
    parent: Parent | None = None,
    relative: Sweep | None = None,
) -> Sweep | None:
    """The sweep through `grid`, what can be tuned of the model that `configure` makes with some settings changed;
    None where that is nothing."""
    if not grid:
        return None
    config = configure({"seed": tuning.seed, **TUNING})
    known = (relative.chosen or {}) if relative else {}
    wanted = swept_names(tuning, row, grid, relative is not None)
    taken = {name: known[name] for name in grid if name in known and name not in wanted}
    swept = {name: values for name, values in grid.items() if name in wanted}
    start = {**tuning.start, **known, **(relative.walk.best if relative else {})}
    begin = {name: _begin(values, start.get(name), _read(config, name)) for name, values in swept.items()}

    runs = _Runs(configure, {"seed": tuning.seed, **TUNING, **taken}, row, data, losses, parent)
    short, long = min(tuning.steps, config.steps), min(tuning.settle_steps, config.steps)
    first, walk = runs.job(short, begin), runs.walk(short, swept, begin)
    todo = runs.missing(short, walk)

    settles = {name: swept[name] for name in tuning.settle if name in swept} if long > short else {}
    settling = None
    if relative and walk.best == begin:
        taken |= {name: known[name] for name in settles if name in known}
    elif settles:
        near = {name: _to_settle(values, walk, name, known, tuning) for name, values in settles.items()}
        again = runs.walk(long, near, walk.best)
        settling = Settling(near, again, runs.made(long), runs.job(long, walk.best))
        todo = todo or runs.missing(long, again)

    made = runs.made(short)
    if relative and relative.chosen is None:
        made, todo = [], []  # it is not known yet where it begins
    key = key_of("sweep", first.key, swept, *([settles, long] if settles else []))

    def of_sweep(job: Job) -> Job:
        return replace(job, settings={**job.settings, "tunes": key})

    changes = {**row.settings.get("model_overrides", {}), **row.start}
    title = describe_model(config, changes) + (", going on" if parent else "")
    todo = [of_sweep(job) for job in todo]
    return Sweep(key, title, swept, walk, made, todo, of_sweep(first), parent, settling, relative, taken)


def _to_settle(values: list[Any], walk: Walk, name: str, known: Mapping[str, Any], tuning: Tuning) -> list[Any]:
    """The values of a setting that longer runs walk through: up to the relative's, or all but the far worse."""
    if name in known:
        return _between(values, walk.best[name], known[name])
    return _not_behind(values, dict(walk.curves.get(name, ())), walk.best[name], tuning.settle_within)


def _between(values: list[Any], one: Any, other: Any) -> list[Any]:
    ends = [values.index(value) for value in (one, other) if value in values]
    return values[min(ends) : max(ends) + 1]


def _not_behind(values: list[Any], curve: Mapping[Any, float], best: Any, within: float | None) -> list[Any]:
    """The values around the best of a setting, up to one that short runs had found to be far worse."""
    bar = math.inf if within is None else min(curve.values(), default=math.inf) + within
    behind = [i for i, value in enumerate(values) if curve.get(value, 0.0) > bar]
    at = values.index(best)
    first = max((i + 1 for i in behind if i < at), default=0)
    return values[first : min((i for i in behind if i > at), default=len(values))]


def _stopping(job: Job) -> Job:
    """The job, but a loss that jumps ends it: such settings are not worth the rest of their steps.

    Its key stays: a run whose loss does not jump is the same.
    """
    config = job.settings["config"]
    changed = {**config, "on_spike": "stop"} if config["on_spike"] == "ignore" else config
    return replace(job, settings={**job.settings, "config": changed})


def _read(config: PretrainConfig, name: str) -> Any:
    name, _, part = name.partition(".")
    value = getattr(config, name)
    return value.get(part, 1.0) if part else value


def _begin(values: Sequence[Any], told: Any, wanted: Any) -> Any:
    """Of a setting's values the one that is `told`, else the nearest to the one `wanted`: by their ratio, where
    they are numbers above 0; else the same one, or the first."""
    if told in values:
        return values[list(values).index(told)]  # 2 is 2.0, but a point is known by how it is written
    numbers = [value for value in [*values, wanted] if isinstance(value, int | float) and value > 0]
    if len(numbers) == len(values) + 1:
        return min(values, key=lambda value: abs(math.log(value / wanted)))
    return wanted if wanted in values else values[0]


def edges_of(sweep: Mapping[str, Any]) -> list[str]:
    """The settings of a finished sweep whose best value is the first or last of the grid, so that a better one may
    lie beyond. Values that are words have no beyond, and 0 has nothing below it."""
    return [
        name for name, values in sweep["grid"].items()
        if sweep["chosen"] and len(values) > 1 and sweep["chosen"].get(name) in (values[0], values[-1])
        and not isinstance(values[0], str) and sweep["chosen"][name] != 0
    ]  # fmt: skip

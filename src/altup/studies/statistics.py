"""Statistics of results: means over seeds, differences of models with their intervals, and whether claims hold."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from altup.core.errors import UserError
from altup.studies.results import Place, Result
from altup.studies.scale import read_variant
from altup.studies.study import COLLAPSE, COLLAPSES, FINETUNED, METRICS, SUPERSEDED, Claim, Study

CONFIDENCE = 0.95
REPRODUCED, NOT_VISIBLE, CONTRADICTED = "reproduced", "not visible", "contradicted"
ONE_SEED, NOT_RUN = "one seed, no verdict", "not run"


@dataclass(frozen=True)
class Mean:
    """A mean over seeds; `error` is its standard error, None with one seed. A speed that a study's file gives has
    no `hardware`."""

    mean: float
    seeds: int
    error: float | None
    hardware: str


@dataclass(frozen=True)
class Difference:
    """Of two means. `error` and the interval from `low` to `high` are None where a model has one seed."""

    mean: float
    seeds: tuple[int, int]
    error: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What the results say of a claim at one size; `word` says it in short."""

    claim: Claim
    size: str
    difference: Difference | None
    word: str


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean: s / √n."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def compare_means(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """The difference of two means with Student's 95 % interval, in Welch's form.

    Each model brings its own spread over seeds, so nothing is assumed about their noise: with e the standard error
    of a mean, the difference has √(e₁² + e₂²), and (e₁² + e₂²)² / (e₁⁴ / (n₁ − 1) + e₂⁴ / (n₂ − 1)) degrees of
    freedom. With few seeds the interval is wide.
    """
    mean, seeds = statistics.fmean(ours) - statistics.fmean(theirs), (len(ours), len(theirs))
    one, other = standard_error(ours), standard_error(theirs)
    if one is None or other is None:
        return Difference(mean, seeds)
    error = math.hypot(one, other)
    if error == 0:
        return Difference(mean, seeds, 0.0, mean, mean)
    a, b = (one / error) ** 4 / (seeds[0] - 1), (other / error) ** 4 / (seeds[1] - 1)
    return with_interval(mean, seeds, error, 1 / (a + b))


def compare_pairs(differences: Sequence[float]) -> Difference:
    """The mean of the differences of each seed with Student's 95 % interval.

    For models that go on from one model of each seed: what sets these apart is in both, and no noise of theirs.
    """
    mean, seeds, error = statistics.fmean(differences), (len(differences),) * 2, standard_error(differences)
    return Difference(mean, seeds) if error is None else with_interval(mean, seeds, error, len(differences) - 1)


def with_interval(mean: float, seeds: tuple[int, int], error: float, freedom: float) -> Difference:
    """A difference with Student's interval, of so many degrees of freedom."""
    from scipy import stats

    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return Difference(mean, seeds, error, mean - half, mean + half)


@dataclass(frozen=True)
class Statistics:
    """Of the results of one scale on one text. The newest run of a seed counts, and for speeds the machine most
    used. Runs that collapsed are counted, and are in no mean."""

    scale: str
    data: str
    results: Sequence[Result]

    @cached_property
    def _values(self) -> dict[tuple[str, str, str, str], dict[str, Result]]:
        """(study, label, size, metric) → seed → the result that counts."""
        collapsed = {r.run for r in self.results if r.metric in COLLAPSES}
        machines = Counter(r.hardware for r in self.results if not r.seed and r.hardware)
        usual = machines.most_common(1)[0][0] if machines else ""
        found: dict[tuple[str, str, str, str], dict[str, Result]] = {}
        for result in sorted(self.results, key=lambda r: (r.date, r.run)):
            if result.run in collapsed and result.metric not in COLLAPSES:
                continue
            if result.seed or result.hardware in (usual, ""):
                place = result.study, result.label, result.size, result.metric
                found.setdefault(place, {})[result.seed] = result
        return found

    def _by_seed(self, study: str, label: str, size: str, metric: str) -> dict[str, float]:
        return {s: result.value for s, result in self._values.get((study, label, size, metric), {}).items()}

    def values(self, study: str, label: str, size: str, metric: str) -> list[float]:
        """One number a seed."""
        return list(self._by_seed(study, label, size, metric).values())

    def sizes(self, study: str, label: str) -> list[str]:
        """The sizes at which a row was run."""
        return in_order(size for (s, l, size, _) in self._values if (s, l) == (study, label))

    def sizes_of(self, study: Study) -> list[str]:
        """The sizes at which any row was run."""
        return in_order(size for row in study.rows for size in self.sizes(study.name, row.label))

    def runs(self, study: str, label: str, size: str) -> list[str]:
        """Keys of the pretraining runs, by seed."""
        by_seed = self._values.get((study, label, size, "accuracy"), {})
        return [by_seed[seed].run for seed in sorted(by_seed)]

    def collapses(self, study: str, label: str, size: str, metric: str = COLLAPSE) -> dict[str, int]:
        """Of each seed of a model with a run that collapsed: how many did, by the `metric` that says so."""
        place = study, label, size, metric
        lost = {(r.seed, r.run) for r in self.results if (r.study, r.label, r.size, r.metric) == place}
        return Counter(seed for seed, _ in sorted(lost))

    def collapsed(self, study: str, label: str, size: str) -> int:
        """How many of a model's seeds have a run that collapsed."""
        return len(self.collapses(study, label, size))

    def describe_collapses(self, study: str, label: str, size: str) -> str:
        """`2 collapsed, 1 of them repeated and counted, 1 of them again when repeated`: seeds, and what became of
        their repetitions; then the same of fine-tuning, by its columns; "" where none collapsed."""
        place = study, label, size
        told = {"": self._describe_collapses(place, COLLAPSE, "accuracy")}
        for column in FINETUNED.values():
            told[f"fine-tuning on {column.title}: "] = self._describe_collapses(
                place, column.collapse, next(iter(column.measures))
            )
        return "; ".join(f"{what}{words}" for what, words in told.items() if words)

    def _describe_collapses(self, place: Place, collapse: str, measure: str) -> str:
        """Of runs that have one of two measures: that of a collapse, or that of what they were made for."""
        lost = self.collapses(*place, collapse)
        if not lost:
            return ""
        counted = self._values.get((*place, measure), {})
        rest = {
            "repeated and counted": len(lost.keys() & counted.keys()),
            "again when repeated": sum(runs > 1 for runs in lost.values()),
        }
        told = [f"{n} of them {what}" if len(lost) > 1 else what for what, n in rest.items() if n]
        return ", ".join([f"{len(lost)} collapsed", *told])

    def mean(self, study: str, label: str, size: str, metric: str) -> Mean | None:
        values = self.values(study, label, size, metric)
        if not values:
            return None
        hardware = next(iter(self._values[study, label, size, metric].values())).hardware
        return Mean(statistics.fmean(values), len(values), standard_error(values), hardware)

    def difference(self, study: Study, size: str, metric: str, label: str, base: str) -> Difference | None:
        """How much `label` is above `base`; None where one of them was not run."""
        ours, theirs = (self._by_seed(study.name, name, size, metric) for name in (label, base))
        if study.is_paired(label, base) and (both := [ours[s] - theirs[s] for s in ours if s in theirs]):
            return compare_pairs(both)
        return compare_means(list(ours.values()), list(theirs.values())) if ours and theirs else None

    def verdicts(self, study: Study) -> list[Verdict]:
        """For each claim and size whether it was reproduced; a claim that was run nowhere is listed once."""
        found = []
        for claim in study.expect:
            sizes = self.sizes_of(study)
            judged = [self._verdict(study, claim, size) for size in sizes]
            found += [v for v in judged if v.difference] or [Verdict(claim, (sizes or ["–"])[0], None, NOT_RUN)]
        return found

    def _verdict(self, study: Study, claim: Claim, size: str) -> Verdict:
        difference = self.difference(study, size, claim.metric, claim.better, claim.than)
        if difference is None:
            return Verdict(claim, size, None, NOT_RUN)
        if difference.low is None or difference.high is None:
            return Verdict(claim, size, difference, ONE_SEED)
        if difference.low <= 0 <= difference.high:
            return Verdict(claim, size, difference, NOT_VISIBLE)
        holds = (difference.mean > 0) == bool(METRICS[claim.metric].higher)
        return Verdict(claim, size, difference, REPRODUCED if holds else CONTRADICTED)


def in_order(sizes: Iterable[str]) -> list[str]:
    """Sizes as they come, each once, and the lengths of one from the shortest on, whichever was run first."""
    found = {name: read_variant(name) for name in sizes}
    first = list(dict.fromkeys(size for size, _ in found.values()))
    return sorted(found, key=lambda name: (first.index(found[name][0]), found[name][1]))


def choose_results(results: Sequence[Result], scale: str | None = None) -> Statistics:
    """The scale that was asked for, or the one with most results (superseded and smoke last), on the text most
    used."""
    chosen = [r for r in results if scale is None or r.scale == scale]
    if not chosen:
        known = ", ".join(sorted({r.scale for r in results})) or "none"
        raise UserError(f"no results{f' of scale {scale!r}' if scale else ''}; scales with results: {known}")
    old = [r for r in chosen if not r.scale.startswith("smoke")] or chosen
    real = [r for r in old if not r.scale.startswith(SUPERSEDED)] or old
    (name, data), _ = Counter((r.scale, r.data) for r in real).most_common(1)[0]
    return Statistics(name, data, [r for r in chosen if (r.scale, r.data) == (name, data)])

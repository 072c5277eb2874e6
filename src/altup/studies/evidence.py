"""What the results say: means over seeds, how sure they are, and whether a claim holds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from altup.core.errors import UserError
from altup.studies.metrics import METRICS
from altup.studies.results import Result
from altup.studies.study import Expectation, Study

# Two-sided 95 % points of Student's t by degrees of freedom.
STUDENT = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000,
}  # fmt: skip

REPRODUCED, NOT_VISIBLE, CONTRADICTED = "reproduced", "not visible", "contradicted"
ONE_SEED, NOT_RUN = "one seed, no verdict", "not run"


def student(freedom: int) -> float:
    """The 95 % point for at least so few degrees of freedom."""
    return next((t for known, t in reversed(STUDENT.items()) if known <= freedom), STUDENT[1])


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds; `error` is its standard error, None where the noise is not known."""

    mean: float
    seeds: int
    error: float | None
    hardware: str


@dataclass(frozen=True)
class Difference:
    """`sure` is half the width of its 95 % interval."""

    mean: float
    error: float | None
    sure: float | None


@dataclass(frozen=True)
class Verdict:
    expectation: Expectation
    size: str
    difference: Difference | None
    word: str


@dataclass(frozen=True)
class Evidence:
    """Results of one scale on one text. The newest run of a seed counts, and for speeds the machine most used.

    Standard errors come from the spread between seeds of the same model, pooled over all models of that size: with
    two or three seeds a model's own spread says too little, and a model with one seed is no surer for having none.
    """

    scale: str
    data: str
    results: Sequence[Result]

    @cached_property
    def _values(self) -> dict[tuple[str, str, str, str], dict[str, Result]]:
        """(study, label, size, metric) → seed → the result that counts."""
        machines = Counter(r.hardware for r in self.results if not r.seed)
        usual = machines.most_common(1)[0][0] if machines else ""
        found: dict[tuple[str, str, str, str], dict[str, Result]] = {}
        for result in sorted(self.results, key=lambda r: (r.date, r.run)):
            if result.seed or result.hardware == usual:
                found.setdefault((result.study, result.label, result.size, result.metric), {})[result.seed] = (
                    result
                )
        return found

    def noise(self, metric: str, size: str) -> tuple[float, int] | None:
        """Pooled standard deviation between seeds of models of a size, and its degrees of freedom."""
        models: list[dict[str, float]] = []  # run → value
        for (_, _, *place), by_seed in self._values.items():
            if place == [size, metric] and len(by_seed) > 1:
                runs = {r.run: r.value for r in by_seed.values()}
                # Studies share models, but need not show the same seeds of them: a run must count once.
                for same in [model for model in models if model.keys() & runs.keys()]:
                    models.remove(same)
                    runs = {**same, **runs}
                models.append(runs)
        freedom = sum(len(runs) - 1 for runs in models)
        if not freedom:
            return None
        squares = sum((len(runs) - 1) * statistics.variance(runs.values()) for runs in models)
        return math.sqrt(squares / freedom), freedom

    def sizes(self, study: str, label: str) -> list[str]:
        return list(dict.fromkeys(size for (s, l, size, _) in self._values if (s, l) == (study, label)))

    def runs(self, study: str, label: str, size: str) -> list[str]:
        """Keys of the pretraining runs, by seed."""
        by_seed = self._values.get((study, label, size, "accuracy"), {})
        return [by_seed[seed].run for seed in sorted(by_seed)]

    def get(self, study: str, label: str, size: str, metric: str) -> Estimate | None:
        by_seed = self._values.get((study, label, size, metric))
        if not by_seed:
            return None
        values = [r.value for r in by_seed.values()]
        noise = self.noise(metric, size)
        error = noise[0] / math.sqrt(len(values)) if noise else None
        return Estimate(statistics.fmean(values), len(values), error, next(iter(by_seed.values())).hardware)

    def difference(self, study: str, size: str, metric: str, label: str, base: str) -> Difference | None:
        """How much `label` is above `base`."""
        ours, theirs = (self.get(study, name, size, metric) for name in (label, base))
        if ours is None or theirs is None:
            return None
        noise, mean = self.noise(metric, size), ours.mean - theirs.mean
        if noise is None:
            return Difference(mean, None, None)
        error = noise[0] * math.sqrt(1 / ours.seeds + 1 / theirs.seeds)
        return Difference(mean, error, student(noise[1]) * error)

    def verdicts(self, study: Study, sizes: Sequence[str]) -> list[Verdict]:
        """For each claim and size whether it was reproduced; a claim that was run nowhere is told once."""
        found = []
        for claim in study.expect:
            run = [
                size for size in sizes if self.difference(study.name, size, claim.metric, claim.better, claim.than)
            ]
            for size in run or sizes[:1]:
                found.append(self._verdict(study, claim, size))
        return found

    def _verdict(self, study: Study, claim: Expectation, size: str) -> Verdict:
        difference = self.difference(study.name, size, claim.metric, claim.better, claim.than)
        if difference is None:
            return Verdict(claim, size, None, NOT_RUN)
        if difference.sure is None:
            return Verdict(claim, size, difference, ONE_SEED)
        gain = difference.mean if METRICS[claim.metric].higher else -difference.mean
        if abs(gain) <= difference.sure:
            return Verdict(claim, size, difference, NOT_VISIBLE)
        return Verdict(claim, size, difference, REPRODUCED if gain > 0 else CONTRADICTED)


def choose_evidence(results: Sequence[Result], scale: str | None = None) -> Evidence:
    """The scale that was asked for, or the one with most results (smoke last), on the text most used."""
    chosen = [r for r in results if scale is None or r.scale == scale]
    if not chosen:
        known = ", ".join(sorted({r.scale for r in results})) or "none"
        raise UserError(f"no results{f' of scale {scale!r}' if scale else ''}; scales with results: {known}")
    real = [r for r in chosen if not r.scale.startswith("smoke")] or chosen
    (name, data), _ = Counter((r.scale, r.data) for r in real).most_common(1)[0]
    return Evidence(name, data, [r for r in chosen if (r.scale, r.data) == (name, data)])

"""Statistics of results: means over seeds, differences of models with their intervals, and whether claims hold."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from altup.core.errors import UserError
from altup.studies.results import Result
from altup.studies.scale import read_variant
from altup.studies.study import DIVERGED, FINETUNED, METRICS, RELATIVE, SPEEDS, Claim, Study

CONFIDENCE = 0.95
BETTER, WORSE, NOT_SIGNIFICANT = "better", "worse", "no significant difference"
NOT_COMPARABLE, ONE_SEED, NOT_RUN = "not comparable", "one seed, no verdict", "not run"


@dataclass(frozen=True)
class Mean:
    """A mean over seeds; `error` is its standard error, None with one seed."""

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

    @property
    def is_significant(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Verdict:
    """What the results say of a claim at one size; `word` says it in short, `why` explains `not comparable`."""

    claim: Claim
    size: str
    difference: Difference | None
    word: str
    why: str = ""


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean: s / √n."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def compare_means(ours: Sequence[float], others: Sequence[float]) -> Difference:
    """The difference of two means with Student's 95 % interval, in Welch's form.

    Each model brings its own spread over seeds, so nothing is assumed about their noise: with e the standard error
    of a mean, the difference has √(e₁² + e₂²), and (e₁² + e₂²)² / (e₁⁴ / (n₁ − 1) + e₂⁴ / (n₂ − 1)) degrees of
    freedom. With few seeds the interval is wide.
    """
    mean, seeds = statistics.fmean(ours) - statistics.fmean(others), (len(ours), len(others))
    return combine(mean, seeds, [(standard_error(ours), len(ours)), (standard_error(others), len(others))])


def compare_pairs(differences: Sequence[float]) -> Difference:
    """The mean of the differences of each seed with Student's 95 % interval.

    For runs that start from one trained model of each seed: what sets those models apart is in both.
    """
    mean, n = statistics.fmean(differences), len(differences)
    return combine(mean, (n, n), [(standard_error(differences), n)])


def combine(mean: float, seeds: tuple[int, int], errors: Sequence[tuple[float | None, int]]) -> Difference:
    """A sum of independent terms, each with its standard error and its number of seeds: with Welch's degrees of
    freedom. There is no interval where a term has one seed."""
    known = [(error, n) for error, n in errors if error is not None]
    if len(known) < len(errors):
        return Difference(mean, seeds)
    error = math.hypot(*(e for e, _ in known))
    if error == 0:
        return Difference(mean, seeds, 0.0, mean, mean)
    from scipy import stats

    freedom = 1 / sum((e / error) ** 4 / (n - 1) for e, n in known)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return Difference(mean, seeds, error, mean - half, mean + half)


@dataclass(frozen=True)
class Statistics:
    """Of the results of one scale on one text. A mean counts the runs of the newest settings of its model, and
    speeds count on the machine most used. `elsewhere` says which results of the study are not among them."""

    scale: str
    data: str
    results: Sequence[Result]
    elsewhere: str = ""

    @cached_property
    def _lines(self) -> dict[tuple[str, str, str, str], dict[str, Result]]:
        """(study, label, size, metric) → seed → the result that counts."""
        lines = sorted(self.results, key=lambda r: r.date)
        machines = Counter(r.hardware for r in lines if not r.seed)
        usual = machines.most_common(1)[0][0] if machines else ""
        newest = {(r.study, r.label, r.size): r.model for r in lines if r.seed}
        found: dict[tuple[str, str, str, str], dict[str, Result]] = {}
        for r in lines:
            if r.model == newest.get((r.study, r.label, r.size)) if r.seed else r.hardware == usual:
                found.setdefault((r.study, r.label, r.size, r.metric), {})[r.seed] = r
        diverged = {(*place[:3], seed) for place in found if place[3] == DIVERGED for seed in found[place]}
        return {
            place: {
                seed: r for seed, r in of.items() if place[3] == DIVERGED or (*place[:3], seed) not in diverged
            }
            for place, of in found.items()
        }

    def lines(self, study: str, label: str, size: str, metric: str) -> dict[str, Result]:
        """The results that count, by seed."""
        return self._lines.get((study, label, size, metric), {})

    def values(self, study: str, label: str, size: str, metric: str) -> list[float]:
        """One number a seed."""
        return [result.value for result in self.lines(study, label, size, metric).values()]

    def sizes(self, study: str, label: str) -> list[str]:
        """The sizes at which a row was run."""
        return in_order(size for (s, l, size, _), of in self._lines.items() if (s, l) == (study, label) and of)

    def sizes_of(self, study: Study) -> list[str]:
        """The sizes at which any row was run."""
        return in_order(size for row in study.rows for size in self.sizes(study.name, row.label))

    def runs(self, study: str, label: str, size: str) -> list[str]:
        """Keys of the pretraining runs, by seed."""
        by_seed = self.lines(study, label, size, "accuracy")
        return [by_seed[seed].run for seed in sorted(by_seed)]

    def describe_diverged(self, study: str, label: str, size: str) -> str:
        """`1 diverged; fine-tuning on GLUE: 1 diverged`; empty where none did."""
        columns = {
            DIVERGED: "",
            **{f"{DIVERGED}_{n}": f"fine-tuning on {c.title}: " for n, c in FINETUNED.items()},
        }
        counts = {title: len(self.lines(study, label, size, metric)) for metric, title in columns.items()}
        return "; ".join(f"{title}{n} diverged" for title, n in counts.items() if n)

    def mean(self, study: str, label: str, size: str, metric: str) -> Mean | None:
        values = self.values(study, label, size, metric)
        if not values:
            return None
        hardware = next(iter(self.lines(study, label, size, metric).values())).hardware
        return Mean(statistics.fmean(values), len(values), standard_error(values), hardware)

    def reason_against(self, study: Study, size: str, metric: str, one: str, other: str) -> str:
        """Why the results of two rows cannot be compared; empty where they can."""
        first, second = (
            next(iter(self.lines(study.name, row, size, metric).values()), None) for row in (one, other)
        )
        if first is None or second is None:
            return ""
        if metric in SPEEDS:
            differ = metric in RELATIVE and first.setup != second.setup
            return "each is relative to another dense model" if differ else ""
        if metric in ("accuracy", "loss") and first.setup != second.setup:
            pairs = zip(first.setup.split(", "), second.setup.split(", "), strict=False)
            return "; ".join(f"{a} against {b}" for a, b in pairs if a != b) or "measured on other examples"
        if first.length != second.length and not (first.budget and first.budget == second.budget):
            return f"{first.length} against {second.length}"
        return ""

    def relative(self, study: Study, size: str, metric: str, label: str) -> float | None:
        """A speed relative to the baseline's; None where one of them was not measured, or they cannot be
        compared."""
        own, base = (self.mean(study.name, row, size, metric) for row in (label, study.baseline))
        if own is None or base is None or self.reason_against(study, size, metric, label, study.baseline):
            return None
        return own.mean / base.mean

    def difference(self, study: Study, size: str, metric: str, label: str, base: str) -> Difference | None:
        """How much `label` is above `base`; None where one of them was not run, or they cannot be compared."""
        first, second = (self.lines(study.name, row, size, metric) for row in (label, base))
        if not first or not second or self.reason_against(study, size, metric, label, base):
            return None
        if study.is_paired(label, base) and (both := [s for s in first if s in second]):
            return compare_pairs([first[seed].value - second[seed].value for seed in both])
        return compare_means([r.value for r in first.values()], [r.value for r in second.values()])

    def verdicts(self, study: Study) -> list[Verdict]:
        """For each claim and size whether it holds; a claim that was run nowhere is listed once."""
        found = []
        for claim in study.expect:
            sizes = self.sizes_of(study)
            judged = [verdict for size in sizes if (verdict := self._verdict(study, claim, size)).word != NOT_RUN]
            found += judged or [Verdict(claim, (sizes or ["–"])[0], None, NOT_RUN)]
        return found

    def _verdict(self, study: Study, claim: Claim, size: str) -> Verdict:
        difference = self.difference(study, size, claim.metric, claim.better, claim.than)
        if difference is None:
            why = self.reason_against(study, size, claim.metric, claim.better, claim.than)
            return Verdict(claim, size, None, NOT_COMPARABLE if why else NOT_RUN, why)
        if difference.low is None:
            return Verdict(claim, size, difference, ONE_SEED)
        if not difference.is_significant:
            return Verdict(claim, size, difference, NOT_SIGNIFICANT)
        holds = (difference.mean > 0) == bool(METRICS[claim.metric].higher)
        return Verdict(claim, size, difference, BETTER if holds else WORSE)


def in_order(sizes: Iterable[str]) -> list[str]:
    """Each size once, in this order, and the lengths of one from the shortest."""
    found = {name: read_variant(name) for name in sizes}
    first = list(dict.fromkeys(size for size, _ in found.values()))
    return sorted(found, key=lambda name: (first.index(found[name][0]), found[name][1]))


def choose_results(results: Sequence[Result], study: str, scale: str | None = None) -> Statistics:
    """A study's results at the scale that was asked for, or at the one it has most results of (smoke last), on the
    text most used."""
    own = [r for r in results if r.study == study]
    chosen = [r for r in own if scale in (None, r.scale)]
    real = [r for r in chosen if not r.scale.startswith("smoke")] or chosen
    if not real:
        return Statistics(scale or "", "", [])
    (name, data), _ = Counter((r.scale, r.data) for r in real).most_common(1)[0]
    found = [r for r in own if (r.scale, r.data) == (name, data)]
    others = sorted({f"scale {r.scale}" if r.scale != name else f"text {r.data}" for r in own if r not in found})
    return Statistics(name, data, found, ", ".join(others))


def check_scale(results: Sequence[Result], scale: str | None) -> None:
    """UserError if there are no results of a scale."""
    known = sorted({r.scale for r in results})
    if scale is not None and scale not in known:
        raise UserError(f"no results of scale {scale!r}; scales with results: {', '.join(known) or 'none'}")

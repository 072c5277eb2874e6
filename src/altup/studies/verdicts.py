"""The claims of studies as cards: what was claimed, what was found, and why that is the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from altup.core.text import signed
from altup.studies.charts import interval_chart
from altup.studies.comparison import paper_differences
from altup.studies.statistics import CONTRADICTED, NOT_RUN, NOT_VISIBLE, ONE_SEED, REPRODUCED, Statistics, Verdict
from altup.studies.study import METRICS, Metric, Study
from altup.studies.tables import show_difference, show_interval, show_seeds

ORDER = (REPRODUCED, CONTRADICTED, NOT_VISIBLE, ONE_SEED, NOT_RUN)


@dataclass(frozen=True)
class Card:
    """A claim with its outcome. `studies` are the names and titles of all that make it.

    `number` is the difference with its standard error, `why` says how the seeds lead from it to the verdict.
    """

    claim: str
    metric: str
    verdict: str
    number: str
    why: str
    paper: str
    picture: Markup | str
    studies: Sequence[tuple[str, str]]

    @property
    def kind(self) -> str:
        """The class of its style."""
        return {REPRODUCED: REPRODUCED, CONTRADICTED: CONTRADICTED, NOT_VISIBLE: "open"}.get(self.verdict, "small")

    @property
    def badge(self) -> str:
        """Its verdict, if it has one."""
        return "" if self.kind == "small" else self.verdict


def verdict_cards(studies: Sequence[Study], stats: Statistics) -> list[Card]:
    """Every claim once, whichever studies make it; verdicts first, what was not run last."""
    places: dict[tuple[str, ...], list[tuple[Study, Verdict]]] = {}
    for study in studies:
        for verdict in stats.verdicts(study):
            places.setdefault(_identity(study, verdict, stats), []).append((study, verdict))
    cards = [_card(found) for found in places.values()]
    return sorted(cards, key=lambda card: ORDER.index(card.verdict))


def _identity(study: Study, verdict: Verdict, stats: Statistics) -> tuple[str, ...]:
    """Studies share models: what the same runs say of the same claim is one claim."""
    claim = verdict.claim
    runs = [tuple(stats.runs(study.name, label, verdict.size)) for label in (claim.better, claim.than)]
    # Claims that were not run have no runs to know them by.
    by = runs if verdict.difference else study.name
    return claim.better, claim.than, claim.metric, verdict.size, str(by)


def _card(found: Sequence[tuple[Study, Verdict]]) -> Card:
    _, verdict = found[0]
    claim, d = verdict.claim, verdict.difference
    metric = METRICS[claim.metric]
    known = next((known for s, v in found if (known := _paper(s, v))), {})
    theirs = known.get(verdict.size) if d else None
    number, picture = "", Markup("")
    if d is not None:
        number = f"{show_difference(d, metric)} {_unit(metric)}"
    if d is not None and d.low is not None and d.high is not None:
        picture = interval_chart(d.mean, d.low, d.high, theirs, bool(metric.higher))
    return Card(
        f"{claim.better} better than {claim.than}",
        metric.title + (f", {verdict.size}" if d else ""),
        verdict.word,
        number,
        _why(verdict, metric),
        _told_by_the_paper(known, theirs, metric),
        picture,
        [(s.name, s.title) for s, _ in found],
    )


def _unit(metric: Metric) -> str:
    """Of a difference."""
    return "points" if metric.unit == "%" else metric.unit


def _why(verdict: Verdict, metric: Metric) -> str:
    """How the verdict follows from the seeds."""
    d = verdict.difference
    if d is None:
        return "Not run at this scale."
    if verdict.word == ONE_SEED:
        return f"{show_seeds(d)}: it may be chance."
    each = " each" if d.seeds[0] == d.seeds[1] else ""
    interval = f"{show_seeds(d)}{each}; 95 % interval {show_interval(d, metric)}"
    if verdict.word == NOT_VISIBLE:
        return f"{interval}. Zero lies inside: it may be chance."
    side = "above" if d.mean > 0 else "below"
    if verdict.word == REPRODUCED:
        return f"{interval}, all {side} zero{'' if metric.higher else ', and lower is better'}."
    return f"{interval}, all {side} zero: the other way round."


def _paper(study: Study, verdict: Verdict) -> dict[str, float]:
    """Size → the paper's difference."""
    claim = verdict.claim
    return paper_differences(study).get((claim.better, claim.than, claim.metric), {})


def _told_by_the_paper(known: dict[str, float], same_size: float | None, metric: Metric) -> str:
    if not known:
        return "Not asked in the paper."
    if same_size is not None:
        return f"The paper: {signed(same_size, metric.digits)}."
    told = ", ".join(f"{signed(value, metric.digits)} ({size})" for size, value in known.items())
    return f"The paper: {told}."

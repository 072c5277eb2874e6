"""Cards: every claim once, its outcome explained by seeds and interval, the paper's difference beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from altup.studies.statistics import Statistics, choose_results
from altup.studies.study import shipped
from altup.studies.verdicts import verdict_cards
from tests.studies.samples import SEEDS, TWO, result


def of(values: dict[str, list[float]], metric: str = "accuracy", study: str = "two") -> Statistics:
    return choose_results(
        [
            result(label, value, str(seed), metric, study=study)
            for label, found in values.items()
            for seed, value in enumerate(found)
        ]
    )


@pytest.mark.parametrize(
    ("dense", "altup", "verdict", "number", "why"),
    [
        ([40.0, 41.0], [42.0, 44.0], "not visible", "+2.50 ± 1.12 points", "Zero lies inside"),
        ([40.0, 40.1, 40.2], [42.0, 42.1, 42.2], "reproduced", "+2.00 ± 0.08 points", "all above zero."),
        ([42.0, 42.1, 42.2], [40.0, 40.1, 40.2], "contradicted", "−2.00 ± 0.08 points", "the other way round"),
        ([40.0, 41.0], [42.0], "one seed, no verdict", "+1.50 points", "1 seed against 2: it may be chance."),
    ],
)
def test_a_card_explains_its_verdict(
    dense: list[float], altup: list[float], verdict: str, number: str, why: str
) -> None:
    (card,) = verdict_cards([TWO], of({"Dense": dense, "AltUp K=2": altup}))
    assert (card.verdict, card.number) == (verdict, number)
    assert why in card.why
    if verdict != "one seed, no verdict":
        assert card.why.startswith(f"{len(dense)} seeds each; 95 % interval ")
        assert card.picture.startswith("<svg")


def test_lower_is_better_where_it_is() -> None:
    study = replace(TWO, expect=(replace(TWO.expect[0], metric="loss"),))
    (card,) = verdict_cards([study], of({"Dense": [4.0, 4.01], "AltUp K=2": [3.5, 3.51]}, "loss"))
    assert card.verdict == "reproduced"
    assert "all below zero, and lower is better" in card.why
    assert card.number == "−0.500 ± 0.007 nats a token"


def test_a_claim_of_two_studies_is_one_card_with_both() -> None:
    """The same runs, told by two studies; what was not run stays apart, because nothing says it is one."""
    twin = replace(TWO, name="twin", title="Twin")
    shown = [replace(r, study=name) for r in SEEDS for name in ("two", "twin")]
    (card,) = verdict_cards([TWO, twin], choose_results(shown))
    assert card.studies == [("two", "Two"), ("twin", "Twin")]
    other = [replace(r, study="twin", run=f"other-{r.run}") for r in SEEDS]
    assert len(verdict_cards([TWO, twin], choose_results([*shown[::2], *other]))) == 2
    assert len(verdict_cards([TWO, twin], choose_results([result("Sum", 1.0)]))) == 2


def test_the_paper_stands_beside_at_its_size_or_at_all_of_them() -> None:
    first, _ = verdict_cards([shipped()["varying-k"]], choose_results(SEEDS))
    assert first.paper == "The paper: +0.65."
    assert first.claim == "AltUp K=2 better than Dense"
    found = verdict_cards([shipped()["experts"]], choose_results([result("Dense", 40.0, study="experts")]))
    assert {card.verdict for card in found} == {"not run"}
    assert all("(small), " in card.paper and "(large)" in card.paper for card in found)


def test_verdicts_come_before_what_was_not_run() -> None:
    found = [card.verdict for card in verdict_cards(list(shipped().values()), choose_results(SEEDS))]
    assert found[:2] == ["not visible", "one seed, no verdict"]
    assert set(found[2:]) == {"not run"}

"""What results say: arithmetic by hand, and that nothing is mixed that does not belong together."""

from __future__ import annotations

import math

import pytest

from altup.core.errors import UserError
from altup.studies.comparison import compare
from altup.studies.results import Result
from altup.studies.statistics import choose_results, compare_means, compare_pairs, in_order
from altup.studies.study import shipped
from tests.studies.samples import SEEDS, result


def test_means_errors_and_differences_by_hand() -> None:
    """Variances 0.5 and 2 of two seeds each: errors ½ and 1, so √1.25 of the difference; Welch's freedom is
    1.25² / (¼² + 1²) = 1.4706, for which a table of Student's t has 6.3 between 12.71 (one) and 4.30 (two)."""
    stats = choose_results(SEEDS)
    dense = stats.mean("varying-k", "Dense", "small", "accuracy")
    assert dense is not None
    assert (dense.mean, dense.seeds, dense.error) == (40.5, 2, pytest.approx(0.5))
    once = stats.mean("varying-k", "AltUp K=4", "small", "accuracy")
    assert once is not None
    assert (once.seeds, once.error) == (1, None)
    gain = stats.difference(shipped()["varying-k"], "small", "accuracy", "AltUp K=2", "Dense")
    assert gain is not None
    assert (gain.mean, gain.error, gain.seeds) == (2.5, pytest.approx(math.sqrt(1.25)), (2, 2))
    assert gain.low is not None
    assert gain.high is not None
    half = (gain.high - gain.low) / 2
    assert 4.303 < half / math.sqrt(1.25) < 12.706
    assert gain.high + gain.low == pytest.approx(5.0)
    single = stats.difference(shipped()["varying-k"], "small", "accuracy", "AltUp K=4", "Dense")
    assert single is not None
    assert (single.mean, single.error, single.low, single.seeds) == (2.5, None, None, (1, 2))


@pytest.mark.parametrize(("seeds", "t"), [(2, 4.303), (3, 2.776), (6, 2.228), (31, 2.000)])
def test_few_seeds_ask_for_wide_intervals(seeds: int, t: float) -> None:
    """Where both models spread alike Welch's freedom is 2 (n − 1), whose t stands in every table."""
    values = [float(i % 2) + i / 1000 for i in range(seeds)]
    found = compare_means([v + 5 for v in values], values)
    assert found.high is not None
    assert found.error is not None
    assert (found.high - found.mean) / found.error == pytest.approx(t, abs=6e-4)


def test_it_is_the_interval_that_scipy_gives() -> None:
    from scipy import stats

    ours, theirs = [3.1, 2.7, 3.6], [2.2, 2.3, 2.1, 2.6]
    interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    found = compare_means(ours, theirs)
    assert (found.low, found.high) == pytest.approx(tuple(interval))


def test_seeds_that_agree_exactly_have_no_noise() -> None:
    found = compare_means([2.0, 2.0], [1.0, 1.0])
    assert (found.error, found.low, found.high) == (0.0, 1.0, 1.0)


def test_runs_that_share_their_parent_are_compared_in_pairs() -> None:
    """Parents of 10 and 30 points, and a gain of 1 and 1.2: by pairs 0.1 of standard error, with one degree of
    freedom 12.7 of them; Welch's interval would be ten points to each side and more."""
    dense = [result("Dense", v, s, study="continuing", run=f"d{s}") for s, v in (("0", 10.0), ("1", 30.0))]
    wide = [result("AltUp K=2", v, s, study="continuing", run=f"a{s}") for s, v in (("1", 31.2), ("0", 11.0))]
    third = result("AltUp K=2", 90.0, "7", study="continuing", run="a7")  # no dense run has its parent
    found = choose_results([*dense, *wide, third]).difference(
        shipped()["continuing"], "small", "accuracy", "AltUp K=2", "Dense"
    )
    assert found is not None
    assert (found.mean, found.error, found.seeds) == (pytest.approx(1.1), pytest.approx(0.1), (2, 2))
    assert found.low == pytest.approx(1.1 - 12.706 * 0.1, abs=1e-3)


def test_pairs_give_the_interval_that_scipy_gives() -> None:
    from scipy import stats

    ours, theirs = [3.1, 2.7, 3.6], [2.2, 2.3, 2.6]
    interval = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    found = compare_pairs([a - b for a, b in zip(ours, theirs, strict=True)])
    assert (found.low, found.high) == pytest.approx(tuple(interval))
    assert compare_pairs([1.0]).low is None


def test_only_the_two_models_compared_count() -> None:
    """A third one that spreads wildly, or another size, says nothing of them."""
    third = [result("AltUp K=4", v, str(i), run=f"w{i}") for i, v in enumerate((0.0, 99.0))]
    base = [result("Dense", v, str(i), size="base", run=f"b{i}") for i, v in enumerate((1.0, 99.0))]
    place = (shipped()["varying-k"], "small", "accuracy", "AltUp K=2", "Dense")
    assert choose_results([*SEEDS, *third, *base]).difference(*place) == choose_results(SEEDS).difference(*place)


def verdict(results: list[Result]) -> str:
    return choose_results(results).verdicts(shipped()["varying-k"])[0].word


def test_verdicts() -> None:
    far = [result("Dense", v, str(i)) for i, v in enumerate((40.0, 40.1, 39.9, 40.0))]
    better = [result("AltUp K=2", v, str(i)) for i, v in enumerate((40.6, 40.7, 40.5, 40.6))]
    same = [result("AltUp K=2", v, str(i)) for i, v in enumerate((40.0, 40.1, 39.9, 40.05))]
    worse = [result("AltUp K=2", v, str(i)) for i, v in enumerate((39.4, 39.5, 39.3, 39.4))]
    assert verdict(far + better) == "reproduced"
    assert verdict(far + same) == "not visible"
    assert verdict(far + worse) == "contradicted"
    assert verdict(far[:1] + better[:1]) == "one seed, no verdict"
    assert verdict(far + better[:1]) == "one seed, no verdict"
    assert verdict(far) == "not run"


def test_the_newest_run_of_a_seed_counts() -> None:
    newer = result("Dense", 50.0, "0", run="other", date="2025-02-01")
    found = choose_results([newer, *SEEDS]).mean("varying-k", "Dense", "small", "accuracy")
    assert found is not None
    assert (found.mean, found.seeds) == (45.5, 2)
    on_one_day = [
        result("Dense", value, "0", run=run, date=f"2025-02-01 {time}")
        for value, run, time in ((50.0, "b", "09:59:59"), (60.0, "a", "10:00:00"))
    ]
    found = choose_results([*on_one_day, *SEEDS]).mean("varying-k", "Dense", "small", "accuracy")
    assert found is not None
    assert found.mean == 50.5


def test_scales_texts_and_machines_are_not_mixed() -> None:
    other = [
        *[result("Dense", 1.0, str(i), scale="smoke", run=f"s{i}") for i in range(9)],
        result("Dense", 2.0, "5", data="another text", run="t"),
        result("Dense", 100.0, "", "train_seq_per_s", hardware="CPU", run="c"),
        result("Dense", 900.0, "", "train_seq_per_s", run="g"),
        result("AltUp K=2", 800.0, "", "train_seq_per_s", run="h"),
    ]
    stats = choose_results([*other, *SEEDS])
    assert (stats.scale, stats.data) == ("mini", "text")
    dense = stats.mean("varying-k", "Dense", "small", "accuracy")
    speed = stats.mean("varying-k", "Dense", "small", "train_seq_per_s")
    assert dense is not None
    assert speed is not None
    assert (dense.mean, speed.mean) == (40.5, 900.0)
    assert choose_results(other, "smoke").scale == "smoke"
    with pytest.raises(UserError, match="mini, smoke"):
        choose_results([*other, *SEEDS], "paper")
    with pytest.raises(UserError, match="no results"):
        choose_results([])


def test_lengths_come_from_the_shortest_on_whichever_was_run_first() -> None:
    told = ["small, 8,000 steps", "tiny", "small, 900 steps", "base, 4 steps", "small, 8,000 steps", "odd, size"]
    assert in_order(told) == ["small, 900 steps", "small, 8,000 steps", "tiny", "base, 4 steps", "odd, size"]


def test_a_run_that_collapsed_is_counted_and_in_no_mean() -> None:
    lost = [result("Dense", 9.0, "2", run="lost"), result("Dense", 3.5, "2", "collapse", run="lost")]
    stats = choose_results([*SEEDS, *lost])
    dense = stats.mean("varying-k", "Dense", "small", "accuracy")
    assert dense is not None
    assert (dense.mean, dense.seeds, stats.collapsed("varying-k", "Dense", "small")) == (40.5, 2, 1)
    again = result("Dense", 42.0, "2", run="again", date="2024-01-01")  # even if an older one
    dense = choose_results([*SEEDS, *lost, again]).mean("varying-k", "Dense", "small", "accuracy")
    assert dense is not None
    assert (dense.mean, dense.seeds) == (41.0, 3)


def test_a_seed_that_collapsed_and_one_that_collapsed_twice_are_told_apart() -> None:
    lost = [result("Dense", 3.5, "2", "collapse", run="lost")]
    place = "varying-k", "Dense", "small"
    assert choose_results([*SEEDS, *lost]).describe_collapses(*place) == "1 collapsed"
    again = result("Dense", 42.0, "2", run="again")
    assert choose_results([*SEEDS, *lost, again]).describe_collapses(*place) == "1 collapsed, repeated and counted"
    lost.append(result("Dense", 2.5, "2", "collapse", run="lost again"))
    twice = choose_results([*SEEDS, *lost])
    assert twice.describe_collapses(*place) == "1 collapsed, again when repeated"
    assert compare(shipped()["varying-k"], twice)[0].count == "2, 1 collapsed, again when repeated"
    more = [result("Dense", 3.5, "3", "collapse", run="third"), result("Dense", 42.0, "3", run="fourth")]
    told = choose_results([*SEEDS, *lost, *more]).describe_collapses(*place)
    assert told == "2 collapsed, 1 of them repeated and counted, 1 of them again when repeated"
    assert choose_results(SEEDS).describe_collapses(*place) == ""


def test_fine_tuning_that_collapsed_is_told_beside_pretraining_that_did() -> None:
    """Each by itself: a seed whose fine-tuning collapsed has counted pretraining, which repeats nothing."""
    place = "varying-k", "Dense", "small"
    lost = [
        result("Dense", 3, "0", "collapse_glue", run="g0"),
        result("Dense", 3, "0", "collapse_squad", run="s0"),
    ]
    told = "fine-tuning on GLUE: 1 collapsed; fine-tuning on SQuAD: 1 collapsed"
    assert choose_results([*SEEDS, *lost]).describe_collapses(*place) == told
    lost += [result("Dense", 80.0, "0", "glue", run="g1"), result("Dense", 3.5, "2", "collapse", run="lost")]
    told = "1 collapsed; fine-tuning on GLUE: 1 collapsed, repeated and counted; fine-tuning on SQuAD: 1 collapsed"
    assert choose_results([*SEEDS, *lost]).describe_collapses(*place) == told

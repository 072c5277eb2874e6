"""What results say: arithmetic by hand, and that nothing is mixed that does not belong together."""

from __future__ import annotations

import math

import pytest

from altup.core.errors import UserError
from altup.studies.frontier import frontier_points
from altup.studies.results import Result
from altup.studies.statistics import check_scale, compare_means, compare_pairs, in_order
from altup.studies.study import shipped
from altup.studies.tables import study_table
from tests.studies.samples import NOTHING, SEEDS, read_study, result, statistics


def test_means_errors_and_differences_by_hand() -> None:
    """Variances 0.5 and 2 of two seeds each: errors ½ and 1, so √1.25 of the difference; Welch's freedom is
    1.25² / (¼² + 1²) = 1.4706, for which a table of Student's t has 6.3 between 12.71 (one) and 4.30 (two)."""
    stats = statistics(SEEDS)
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
    found = statistics([*dense, *wide, third], "continuing").difference(
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
    assert statistics([*SEEDS, *third, *base]).difference(*place) == statistics(SEEDS).difference(*place)


def verdict(results: list[Result]) -> str:
    return statistics(results).verdicts(shipped()["varying-k"])[0].word


def test_verdicts() -> None:
    far = [result("Dense", v, str(i)) for i, v in enumerate((40.0, 40.1, 39.9, 40.0))]
    better = [result("AltUp K=2", v, str(i)) for i, v in enumerate((40.6, 40.7, 40.5, 40.6))]
    same = [result("AltUp K=2", v, str(i)) for i, v in enumerate((40.0, 40.1, 39.9, 40.05))]
    worse = [result("AltUp K=2", v, str(i)) for i, v in enumerate((39.4, 39.5, 39.3, 39.4))]
    assert verdict(far + better) == "better"
    assert verdict(far + same) == "no significant difference"
    assert verdict(far + worse) == "worse"
    assert verdict(far[:1] + better[:1]) == "one seed, no verdict"
    assert verdict(far + better[:1]) == "one seed, no verdict"
    assert verdict(far) == "not run"


def test_the_newest_run_of_a_seed_counts() -> None:
    newer = result("Dense", 50.0, "0", run="other", date="2025-02-01")
    found = statistics([newer, *SEEDS]).mean("varying-k", "Dense", "small", "accuracy")
    assert found is not None
    assert (found.mean, found.seeds) == (45.5, 2)
    on_one_day = [
        result("Dense", value, "0", run=run, date=f"2025-02-01 {time}")
        for value, run, time in ((50.0, "b", "09:59:59"), (60.0, "a", "10:00:00"))
    ]
    found = statistics([*on_one_day, *SEEDS]).mean("varying-k", "Dense", "small", "accuracy")
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
    stats = statistics([*other, *SEEDS])
    assert (stats.scale, stats.data) == ("mini", "text")
    dense = stats.mean("varying-k", "Dense", "small", "accuracy")
    speed = stats.mean("varying-k", "Dense", "small", "train_seq_per_s")
    assert dense is not None
    assert speed is not None
    assert (dense.mean, speed.mean) == (40.5, 900.0)
    assert stats.elsewhere == "scale smoke, text another text"
    assert statistics(other, scale="smoke").scale == "smoke"
    with pytest.raises(UserError, match="mini, smoke"):
        check_scale([*other, *SEEDS], "paper")


def test_lengths_come_from_the_shortest_on_whichever_was_run_first() -> None:
    told = ["small, 8,000 steps", "tiny", "small, 900 steps", "base, 4 steps", "small, 8,000 steps", "odd, size"]
    assert in_order(told) == ["small, 900 steps", "small, 8,000 steps", "tiny", "base, 4 steps", "odd, size"]


def test_a_run_that_diverged_is_counted_and_in_no_mean() -> None:
    """Also where an older run of the same seed has a measure, and beside fine-tuning that diverged."""
    lost = [result("Dense", 9.0, "2"), result("Dense", 35.0, "2", "diverged", date="2025-02-01")]
    tuned = result("Dense", 400.0, "1", "diverged_glue")
    stats = statistics([*SEEDS, *lost, tuned])
    dense = stats.mean("varying-k", "Dense", "small", "accuracy")
    assert dense is not None
    assert (dense.mean, dense.seeds) == (40.5, 2)
    found = stats.describe_diverged("varying-k", "Dense", "small")
    assert found == "1 diverged; fine-tuning on GLUE: 1 diverged"
    assert stats.describe_diverged("varying-k", "AltUp K=2", "small") == ""


def test_runs_with_other_settings_are_in_no_mean() -> None:
    """A sweep of a changed grid may choose others: a mean is of the newest alone."""
    newer = [result("Dense", v, s, model="other rate", date="2025-02-01") for s, v in (("1", 50.0), ("2", 52.0))]
    dense = statistics([*SEEDS, *newer]).mean("varying-k", "Dense", "small", "accuracy")
    assert dense is not None
    assert (dense.mean, dense.seeds) == (51.0, 2)


def compare_with(**changes: str) -> tuple[str, str]:
    """The verdict on AltUp K=2, clearly better, if its runs differ from dense's, and why."""
    dense = [result("Dense", v, str(i)) for i, v in enumerate((40.0, 40.1, 39.9))]
    altup = [result("AltUp K=2", v, str(i), **changes) for i, v in enumerate((44.0, 44.1, 43.9))]
    stats = statistics([*dense, *altup])
    verdict = stats.verdicts(shipped()["varying-k"])[0]
    gain = stats.difference(shipped()["varying-k"], "small", "accuracy", "AltUp K=2", "Dense")
    assert (gain is None) == (verdict.word == "not comparable")
    return verdict.word, verdict.why


def test_what_is_not_alike_is_not_compared() -> None:
    """Another family, another length of text, more steps, a larger batch."""
    assert compare_with() == ("better", "")
    assert compare_with(setup="model bert, inputs_length 512") == ("not comparable", "model bert against model t5")
    assert compare_with(setup="model t5, inputs_length 128")[1] == "inputs_length 128 against inputs_length 512"
    assert compare_with(length="4,000 steps of 128")[1] == "4,000 steps of 128 against 2,000 steps of 128"
    assert compare_with(length="2,000 steps of 256")[0] == "not comparable"


def test_equal_time_makes_unequal_steps_comparable() -> None:
    budget = "the time of AltUp K=2's 2,000 steps of 128"
    dense = [
        result("Dense", v, str(i), length="2,500 steps of 128", budget=budget) for i, v in enumerate((1.0, 2.0))
    ]
    altup = [result("AltUp K=2", v, str(i), budget=budget) for i, v in enumerate((3.0, 4.0))]
    stats, study = statistics([*dense, *altup]), shipped()["varying-k"]
    gain = stats.difference(study, "small", "accuracy", "AltUp K=2", "Dense")
    assert gain is not None
    assert gain.mean == 2.0


def test_speeds_relative_to_other_dense_models_are_not_compared() -> None:
    """Not in claims, in the table, or on the frontier; sequences a second are."""
    study, results = shipped()["varying-k"], list(SEEDS)
    for label, value, dense in (("Dense", 1.0, "one"), ("AltUp K=2", 0.8, "one"), ("AltUp K=4", 0.7, "other")):
        results.append(result(label, value, "", "relative_speed", setup=dense))
        results.append(result(label, 100 * value, "", "train_seq_per_s", setup=dense))
    stats = statistics(results)

    def compared(label: str, metric: str) -> tuple[float | None, bool]:
        return (
            stats.relative(study, "small", metric, label),
            stats.difference(study, "small", metric, label, "Dense") is not None,
        )

    assert compared("AltUp K=2", "relative_speed") == (0.8, True)
    assert compared("AltUp K=4", "relative_speed") == (None, False)
    assert compared("AltUp K=4", "train_seq_per_s") == (0.7, True)
    shown = {
        row[0].line: [cell.text for cell in row] for row in study_table(study, stats, NOTHING, run_alone=True).rows
    }
    assert "0.80" in shown["small · AltUp K=2"]
    assert "0.70" not in shown["small · AltUp K=4"]
    timed = frontier_points(study, stats, "accuracy", "relative_speed")
    assert [label for _, label, _, _ in timed] == ["Dense", "AltUp K=2"]


@pytest.mark.parametrize("metric", ["loss", "relative_speed"])
def test_claims_about_rows_of_different_families_are_refused(metric: str) -> None:
    rows = "{Dense: {method: dense}, D: {model: decoder, method: dense}}"
    text = f"title: T\nquestion: Q?\nrows: {rows}\nexpect: [{{better: D, than: Dense, metric: {metric}}}]\n"
    with pytest.raises(UserError, match="have different"):
        read_study(text)

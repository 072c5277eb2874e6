"""Speedup at equal accuracy: examples worked by hand, and what must not be extrapolated."""

from __future__ import annotations

import random
import statistics

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from altup.core.errors import UserError
from altup.studies import paper
from altup.studies.frontier import (
    NO_LINE,
    NOT_RUN,
    OUTSIDE,
    OutsideDenseRangeError,
    compare_speedups,
    dense_latency,
    speedup,
    speedup_percent,
)
from altup.studies.results import Result
from altup.studies.statistics import Mean
from altup.studies.study import shipped
from tests.studies.samples import read_study, result
from tests.studies.samples import statistics as choose

DENSE = [(10.0, 60.0), (20.0, 64.0), (60.0, 70.0)]


def test_a_hand_worked_example() -> None:
    """65 is a sixth of the way from 64 to 70: 20 + 40/6 = 26.667 ms; the model needs 16, so (26.667 - 16)/16."""
    assert dense_latency(DENSE, 65.0) == pytest.approx(26.6667, abs=1e-4)
    assert speedup(DENSE, 16.0, 65.0) == pytest.approx(0.6667, abs=1e-4)


def test_the_papers_printed_numbers_give_what_paper_and_pencil_gives() -> None:
    """Base + AltUp on GLUE: 85.32 between B (84.25, 1/52.4 s) and L (87.23, 1/17.1 s) is 33.24 ms of dense; AltUp
    takes 1/42.3 s = 23.64 ms: 40.6 % faster. On SuperGLUE: 30.62 ms, 29.5 %."""
    rows = [row for row in paper.table("parameters_and_speed") if row["pretrain_steps"] == 500_000]
    latency = {(r["model"], r["method"]): 1 / r["train_speed_examples_per_s_per_core"] for r in rows}
    scores = {(r["model"], r["method"]): r for r in paper.table("varying_k") if r["k"] != 4}
    for benchmark, percent in (("glue", 40.6), ("superglue", 29.5)):
        dense = [(latency[s, "dense"], scores[s, "dense"][benchmark]) for s in ("small", "base", "large")]
        found = 100 * speedup(dense, latency["base", "altup"], scores["base", "altup"][benchmark])
        assert found == pytest.approx(percent, abs=0.05)


def test_a_slower_model_of_the_same_accuracy_has_a_negative_speedup() -> None:
    assert speedup(DENSE, 40.0, 64.0) == -0.5


@pytest.mark.parametrize("score", [59.99, 70.01, -1.0, 100.0])
def test_outside_the_dense_range_there_is_no_answer(score: float) -> None:
    with pytest.raises(OutsideDenseRangeError, match="nothing is extrapolated"):
        speedup(DENSE, 15.0, score)


@pytest.mark.parametrize("dense", [[], [(10.0, 60.0)]])
def test_too_few_dense_models(dense: list[tuple[float, float]]) -> None:
    with pytest.raises(OutsideDenseRangeError):
        speedup(dense, 5.0, 61.0)


def test_latencies_must_be_times() -> None:
    with pytest.raises(UserError, match="above 0"):
        speedup(DENSE, 0.0, 65.0)
    with pytest.raises(UserError, match="above 0"):
        speedup([(0.0, 60.0), (1.0, 61.0)], 1.0, 60.5)


def test_a_dense_model_that_got_worse_is_passed_by() -> None:
    """The largest model may be under-trained; a score is reached at the first place that has it."""
    dense = [(10.0, 60.0), (20.0, 66.0), (40.0, 64.0)]
    assert dense_latency(dense, 65.0) == pytest.approx(10 + 10 * 5 / 6)
    with pytest.raises(OutsideDenseRangeError):
        dense_latency([(10.0, 60.0), (20.0, 58.0), (40.0, 64.0)], 59.0)  # the fastest is already better


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 100)), min_size=2, max_size=6), st.floats(0, 1))
def test_the_answer_lies_on_the_line(dense: list[tuple[float, float]], part: float) -> None:
    """For rising dense models, the latency found reaches exactly the score asked for."""
    rising = sorted({round(l, 2): 0.0 for l, _ in dense})
    points = [(latency, 10.0 * i) for i, latency in enumerate(rising)]
    score = part * points[-1][1]
    found = dense_latency(points, score)
    below = max((p for p in points if p[0] <= found + 1e-9), default=points[0])
    after = min((p for p in points if p[0] >= found - 1e-9), default=points[-1])
    slope = (after[1] - below[1]) / (after[0] - below[0]) if after[0] > below[0] else 0.0
    assert below[1] + slope * (found - below[0]) == pytest.approx(score, abs=1e-3)


def mean(value: float, error: float | None, seeds: int = 3) -> Mean:
    return Mean(value, seeds if error is not None else 1, error, "H200")


def test_the_error_of_a_speedup_by_hand() -> None:
    """65 ± 0.2 lies a sixth of the way from 64 ± 0.3 (20 ms) to 70 ± 0.6 (60 ms): 40 / 6 ms a point, times the
    error √(0.2² + (5/6 · 0.3)² + (1/6 · 0.6)²) of the difference, over 16 ms. Of three seeds each has two degrees
    of freedom: 2 (0.04 + 0.0625 + 0.01)² / (0.04² + 0.0625² + 0.01²) = 4.5 in all."""
    dense = [(10.0, mean(60, None)), (20.0, mean(64, 0.3)), (60.0, mean(70, 0.6))]
    found = speedup_percent(dense, 16.0, mean(65, 0.2))
    error = 100 * 40 / 6 * 0.1125**0.5 / 16
    assert found.mean == pytest.approx(66.667, abs=1e-3)
    assert found.error == pytest.approx(error)
    freedom = 2 * 0.1125**2 / (0.04**2 + 0.0625**2 + 0.01**2)
    half = float(scipy.stats.t.ppf(0.975, freedom)) * error
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half))
    assert found.seeds == (3, 3)
    assert speedup_percent(dense, 16.0, mean(65, None)).error is None
    assert speedup_percent(dense, 16.0, mean(62, 0.2)).error is None  # one of its dense neighbours has one seed
    exact = [(10.0, mean(60, 0.0)), (20.0, mean(64, 0.0))]
    assert speedup_percent(exact, 10.0, mean(62, 0.0)).high == pytest.approx(50.0)


def test_the_error_of_a_speedup_is_how_far_it_scatters() -> None:
    """Drawn scores, each with its noise: the standard deviation of their speedups is the formula's error."""
    draw = random.Random(0)
    noise = {10.0: 0.1, 20.0: 0.2, 60.0: 0.15}
    found = []
    for _ in range(4000):
        dense = [(time, draw.gauss(score, noise[time])) for time, score in DENSE]
        found.append(100 * speedup(dense, 16.0, draw.gauss(66.0, 0.25)))
    told = speedup_percent([(time, mean(score, noise[time])) for time, score in DENSE], 16.0, mean(66.0, 0.25))
    assert statistics.stdev(found) == pytest.approx(told.error, rel=0.06)


def test_models_are_compared_with_dense_ones_that_trained_as_long() -> None:
    """At twice the length all are better by 10 points; the speedup at each length is what it is there. By its
    loss, half way between theirs, AltUp is as good as a dense model that takes 1.5 times as long as dense."""
    text = "title: T\nquestion: Q\nrows:\n  Dense: {method: dense}\n  Twice: {method: dense, extra_layers: 2}\n"
    study = read_study(text + "  AltUp: {method: altup, k: 2}\nfrontier: [Dense, Twice]\n")
    ends = {"Dense": (40.0, 3.0, 1.0), "Twice": (42.0, 2.8, 0.5), "AltUp": (41.0, 2.9, 0.8)}
    results = []
    for size, better in (("small, 5 steps", 0.0), ("small, 10 steps", 10.0)):
        place = {"study": "own", "size": size}
        for label, (accuracy, loss, speed) in ends.items():
            results += [result(label, accuracy + better, **place), result(label, loss, metric="loss", **place)]
            results.append(result(label, speed, "", "relative_speed", **place))
            results.append(result(label, 100 * speed, "", "train_seq_per_s", **place))
    rows = compare_speedups(study, choose(results, "own"))
    assert {row.benchmark for row in rows} == {"accuracy", "loss"}
    assert [row.ours["relative_speed"].mean for row in rows] == pytest.approx([20.0] * 4)


def test_dense_models_of_one_latency_leave_no_interval_that_depends_on_their_order() -> None:
    dense = [(10.0, mean(60, 0.1)), (20.0, mean(64, 0.1)), (20.0, mean(66, 9.0)), (60.0, mean(70, 0.2))]
    for score in (62.0, 65.0, 68.0):
        found = {
            (d.mean, d.error)
            for order in (dense, dense[::-1])
            for d in [speedup_percent(order, 16.0, mean(score, 0.1))]
        }
        assert len(found) == 1
    assert speedup_percent(dense, 16.0, mean(65.0, 0.1)).error is None


def test_speedups_beside_the_papers() -> None:
    """Dense at 10 and 20 ms with 60 and 64 %; a model at 10 ms with 62 % is as good as dense at 15 ms: +50 %.

    The machine was three times as slow while it compared dense with AltUp, both equally, which must not count."""

    def model(label: str, accuracy: float, speed: float, slow: float = 1.0) -> list[Result]:
        study = {"study": "speed-accuracy"}
        return [
            result(label, accuracy, **study),
            result(label, 100 * speed / slow, "", "train_seq_per_s", **study),
            result(label, speed, "", "relative_speed", **study),
        ]

    results = [*model("Dense", 60, 1.0), *model("Dense + 4 layers", 64, 0.5)]
    results += [*model("AltUp K=2", 62, 1.0, slow=3.0), *model("Recycled K=2", 64.5, 1.0)]
    rows = {
        (r.size, r.label, r.benchmark): r
        for r in compare_speedups(shipped()["speed-accuracy"], choose(results, "speed-accuracy"))
    }
    assert rows["small", "AltUp K=2", "accuracy"].ours["relative_speed"].mean == pytest.approx(50.0)
    assert rows["small", "AltUp K=2", "accuracy"].ours["relative_forward"] == NOT_RUN
    assert rows["small", "Recycled K=2", "accuracy"].ours["relative_speed"] == OUTSIDE
    alone = [r for r in results if r.label != "Dense + 4 layers"]
    ours = {
        r.label: r.ours
        for r in compare_speedups(shipped()["speed-accuracy"], choose(alone, "speed-accuracy"))
        if r.size == "small"
    }
    assert ours["AltUp K=2"]["relative_speed"] == NO_LINE  # nothing was found to be outside of anything
    assert rows["large", "AltUp K=2", "SQuAD"].paper == 87
    assert rows["large", "AltUp K=2", "SQuAD"].ours["relative_speed"] == NOT_RUN

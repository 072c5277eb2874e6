"""What the plots of a study show."""

from __future__ import annotations

import pytest

from altup.studies.drawings import Lines
from altup.studies.plots import study_plots
from altup.studies.statistics import choose_results
from altup.studies.study import read_study
from tests.studies.samples import TEXT, result

GIVEN = "equal_time: AltUp K=2\nspeeds: {Dense: 1, AltUp K=2: 0.8}\nlengths: {smoke: [4, 800]}\n"
STUDY = read_study("two", TEXT + GIVEN, "two")
# By length and label: the steps of a run, and the losses of two seeds. The longer runs were made first.
ENDS = {
    (800, "Dense"): (1000, (2.0, 2.2)),
    (800, "AltUp K=2"): (800, (2.1, 2.1)),
    (4, "Dense"): (5, (3.0, 3.2)),
    (4, "AltUp K=2"): (4, (3.3, 3.5)),
}


def test_the_difference_to_the_baseline_is_drawn_against_time() -> None:
    """In steps of the row whose time all rows take, as nobody has measured minutes."""
    results = []
    for day, ((length, label), (steps, losses)) in enumerate(ENDS.items(), start=1):
        for seed, loss in enumerate(losses):
            about = {"study": "two", "size": f"tiny, {length} steps", "date": f"2025-01-0{day}"}
            results += [
                result(label, value, str(seed), metric, **about)
                for metric, value in (("loss", loss), ("steps", steps))
            ]
    stats = choose_results(results)
    assert stats.sizes_of(STUDY) == ["tiny, 4 steps", "tiny, 800 steps"]
    plots = {plot.name: plot for plot in study_plots(STUDY, stats, lambda key: None)}
    drawn = plots["two-loss-difference"]
    assert isinstance(drawn, Lines)
    zero, altup = drawn.series
    assert (zero.name, list(zero.points)) == ("Dense", [(4, 0), (800, 0)])
    assert [x for x, _ in altup.points] == [4, 800]
    assert [y for _, y in altup.points] == pytest.approx([0.3, 0.0])
    assert altup.errors == pytest.approx([0.02**0.5, 0.1])  # of two means with an error of 0.1, and of one
    assert drawn.x_label == "time, in steps of AltUp K=2"
    against = plots["two-loss-against-time"]
    assert isinstance(against, Lines)
    assert [x for s in against.series for x, _ in s.points] == [4, 800, 4, 800]
    assert "tiny, 800 steps" in plots["two-ends"].caption  # the longest, not what was run last

"""The scripts in benchmarks/ that time in turns: when they build, and when they time."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from altup.bench.problem import Work
from altup.bench.runner import TimeIsUp
from altup.bench.timing import Ratio, Stopwatch

CPU = torch.device("cpu")
SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """The module `turns`."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("turns")
    sys.modules.pop("turns", None)


def test_a_gate_ends_building_when_its_file_comes(scripts, tmp_path):
    gate = scripts.Gate(tmp_path / "go", time_s=100)
    threading.Timer(0.2, (tmp_path / "go").touch).start()
    begun = time.monotonic()
    with pytest.raises(TimeIsUp), gate.building():
        time.sleep(30)
    assert time.monotonic() - begun < 20
    assert not gate.may_build
    assert gate.left == 100
    gate.wait()
    assert gate.left < 100


def test_a_gate_without_a_file_opens_after_its_seconds(scripts, tmp_path):
    gate = scripts.Gate(build_s=0.2)
    with pytest.raises(TimeIsUp), gate.building():
        time.sleep(30)
    gate.wait()
    (tmp_path / "go").touch()
    with pytest.raises(SystemExit, match="exists already"):
        scripts.Gate(tmp_path / "go")


def test_ratios_have_intervals_that_hold_the_median():
    """Of ten rounds the second lowest and the second highest bound it with 97.9 %; of five, the extremes."""
    times = [2.0, 9.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 1.0, 10.0]
    assert Ratio.of(times, [1.0] * 10) == Ratio(5.5, 2.0, 9.0)
    assert Ratio.of(times[:5], [2.0] * 5) == Ratio(2.0, 1.0, 4.5)
    assert Ratio.of([2.0], [1.0]) == Ratio(2.0, 2.0, 2.0)


def test_a_burst_by_the_host_is_one_time():
    watch = Stopwatch(Work(lambda i: time.sleep(0.01), lambda out: time.sleep(0.01)), CPU, 3, together=True)
    watch.burst()
    assert list(watch.samples) == ["both"]
    assert 19 < watch.samples["both"][0] < 200
    watch.forget()
    assert not watch.samples
    assert not watch.rounds


def test_rounds_hold_the_middle_of_each_burst():
    pauses = iter([0.0, 0.03, 0.001, 0.001, 0.03, 0.03])
    watch = Stopwatch(Work(lambda i: time.sleep(next(pauses))), CPU, 3)
    watch.burst()
    watch.burst()
    first, second = watch.rounds["forward"]
    assert first < 20 < second
    assert len(watch.samples["forward"]) == 6


def test_ratios_are_taken_round_by_round(scripts):
    middle, error = scripts.ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    assert middle == 2.0
    assert error == pytest.approx(1.25 * (1 / 3) ** 0.5 / 3**0.5)

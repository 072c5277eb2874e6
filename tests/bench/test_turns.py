"""The scripts in benchmarks/ that time in turns: when they build, and when they time."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from altup.bench.runner import TimeIsUp

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """The modules `turns` and `step_turns`."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("turns"), importlib.import_module("step_turns")
    for name in ("turns", "step_turns", "step_variants"):
        sys.modules.pop(name, None)


def test_a_gate_ends_building_when_its_file_comes(scripts, tmp_path):
    gate = scripts[0].Gate(tmp_path / "go", time_s=100)
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
    gate = scripts[0].Gate(build_s=0.2)
    with pytest.raises(TimeIsUp), gate.building():
        time.sleep(30)
    gate.wait()
    (tmp_path / "go").touch()
    with pytest.raises(SystemExit, match="exists already"):
        scripts[0].Gate(tmp_path / "go")


class Process:
    """Answers at once, but for what never gets built."""

    is_alive = True

    def __init__(self, endless=()):
        self.endless, self.asked, self.waiting, self.signals = endless, [], [], []
        self.builds = None

    def ask(self, line):
        self.asked.append(line)
        word, name = line.split(" ", 1)
        if word == "burst":
            self.waiting.append({"burst": name, "ms": [1.0, 2.0]})
        elif name in self.endless:
            self.builds = name
        else:
            self.waiting.append({"build": name, "s": 0.0, "GiB": 0.0, "loss": None})

    def answers(self):
        found, self.waiting = self.waiting, []
        return found

    def send(self, number):
        self.signals.append(number)
        if number == signal.SIGUSR1 and self.builds:
            self.waiting.append({"build": self.builds, "stopped": True})
            self.builds = None


def test_what_is_important_is_timed_before_the_rest_is_built(scripts):
    turns, step = scripts
    process = Process()
    made = step.Turns([step.Worker("large", process)], turns.Gate(time_s=60), 3, lambda made: None)
    made.build()
    made.run()
    important = [v.name for v in step.GROUPS["large"].variants if v.important]
    first = process.asked.index(f"burst {important[0]}")
    assert process.asked[:first] == [f"build {name}" for name in important]
    assert {name for _, name in made.samples} == {v.name for v in step.GROUPS["large"].variants}
    assert all(len(bursts) >= 3 for bursts in made.samples.values())
    assert made.medians("large", "dense") == (1.0, 1.5)


def test_what_is_not_built_in_time_does_not_stop_the_rounds(scripts, tmp_path):
    turns, step = scripts
    process = Process(endless=("recycled k2",))
    gate = turns.Gate(tmp_path / "go", time_s=1)
    made = step.Turns([step.Worker("large", process)], gate, 3, lambda made: None)
    threading.Timer(0.3, (tmp_path / "go").touch).start()
    made.build()
    made.run()
    assert signal.SIGUSR1 in process.signals
    assert {name for _, name in made.samples} == {v.name for v in step.GROUPS["large"].variants if v.important}
    assert all(len(bursts) >= 2 for bursts in made.samples.values())


def test_groups_of_a_race_are_parted_by_a_stroke(scripts):
    steps = importlib.import_module("gemma3n_steps")
    assert steps.groups_of(["a", "b", "/", "b", "c"]) == [["a", "b"], ["b", "c"]]


def test_every_group_of_a_race_has_its_share_of_the_seconds(scripts, monkeypatch):
    steps = importlib.import_module("gemma3n_steps")
    race = steps.Race(1, 8, "E2B", "all", None)
    monkeypatch.setattr(race, "prepare", lambda name: race.watches.update({name: None}))
    monkeypatch.setattr(race, "tell", lambda: told.append({name: len(t) for name, t in race.clock.items()}))
    told: list[dict[str, int]] = []

    def turn(name):
        time.sleep(0.05)
        race.clock[name].append(50.0)

    monkeypatch.setattr(race, "turn", turn)
    race.run([["a", "b"], ["b", "c"], ["d"]], 1000, steps.Gate(time_s=1.2))
    assert [set(group) for group in told] == [{"a", "b"}, {"b", "c"}, {"d"}]
    assert all(1 <= rounds < 12 for group in told for rounds in group.values())


def test_steps_are_timed_once_they_ask_for_no_more_memory(scripts, monkeypatch):
    steps = importlib.import_module("gemma3n_steps")
    asked, taken = iter([0, 9, 9, 10, 10, 10]), []
    monkeypatch.setattr(steps, "allocations", lambda: next(asked))
    steps.settle(SimpleNamespace(refill=lambda: taken.append(1)))
    assert len(taken) == 3


def test_a_stage_that_ends_early_says_so(scripts, capsys):
    steps = importlib.import_module("gemma3n_steps")
    with pytest.raises(TimeIsUp), steps.stage("first forward"):
        raise TimeIsUp
    assert "first forward: 0.0 s" in capsys.readouterr().out


def test_ratios_are_taken_round_by_round(scripts):
    middle, error = scripts[0].ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    assert middle == 2.0
    assert error == pytest.approx(1.25 * (1 / 3) ** 0.5 / 3**0.5)

"""A loss spike costs the batches since the checkpoint before it, and the same ones in every life of a run."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from altup.core.errors import DivergedError
from altup.core.runs import list_checkpoints
from altup.core.sealed_folders import damage
from altup.training.loop import Loop
from altup.training.spikes import has_collapsed, is_spike, rise_above_lowest, stays_collapsed
from tests.torchrun import train_together
from tests.training import spoiled
from tests.training.compare import assert_same_bits, assert_same_run, records, weights
from tests.training.spoiled import Spoiled, loop
from tests.training.tiny import build


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("spikes") / "whole"
    assert loop(out).run().finished
    return out


def test_the_batches_since_the_checkpoint_are_left_out(whole: Path, tmp_path: Path) -> None:
    """As if they had never been there: step 31 reads what was to be step 35."""
    left_out = [record for record in records(whole) if record["split"] == "left out"]
    assert [(one["step"], one["batches"], one["spike"]) for one in left_out] == [(30, 4, 34)]
    loop(tmp_path / "without", Spoiled(gap=(30, 4)), on_spike="ignore").run()
    assert_same_bits(weights(tmp_path / "without"), weights(whole))
    rest = [record for record in records(whole) if record["split"] != "left out"]
    assert rest == records(tmp_path / "without")


def test_spikes_are_trained_on_by_default(whole: Path, tmp_path: Path) -> None:
    loop(tmp_path / "run", on_spike="ignore").run()
    assert not [record for record in records(tmp_path / "run") if record["split"] == "left out"]
    losses = {r["step"]: r["loss"] for r in records(tmp_path / "run") if r["split"] == "train"}
    assert losses[34] > 2 * losses[32]


def stopping(after: int) -> Any:
    """`build`, whose models together send SIGTERM in the `after`-th training pass."""
    passes = itertools.count(1)

    def make(checkpoint: Path | None) -> torch.nn.Module:
        model = build(checkpoint)

        def hook(module: torch.nn.Module, _: Any) -> None:
            if module.training and next(passes) == after:
                os.kill(os.getpid(), signal.SIGTERM)

        model.register_forward_pre_hook(hook)
        return model

    return make


@pytest.mark.parametrize("after", [33, pytest.param(36, marks=pytest.mark.slow), 41])
def test_a_run_that_is_stopped_leaves_out_the_same(whole: Path, tmp_path: Path, after: int) -> None:
    """In the spike; behind it, before the next checkpoint; and later. The 4 steps that are repeated count too."""
    cut = loop(tmp_path / "run")
    cut.build_model = stopping(after)
    assert not cut.run().finished
    assert loop(tmp_path / "run").run(resume=True).finished
    assert_same_run(whole, tmp_path / "run", 40)


def test_a_kill_while_it_goes_back(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the removal of later checkpoints and the note in the one before the spike."""

    def die(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("altup.training.spikes.replace_state", die)
        with pytest.raises(KeyboardInterrupt):
            loop(tmp_path / "run").run()
    loop(tmp_path / "run").run(resume=True)
    assert_same_run(whole, tmp_path / "run", 40)


def test_a_run_that_a_spike_has_spoiled_may_turn_it_on(tmp_path: Path) -> None:
    """A checkpoint behind the spike is no way out; one before it is."""
    loop(tmp_path / "run", on_spike="ignore", keep_last=9).run()
    for late in ("step-35", "step-40"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / late)
    shutil.rmtree(tmp_path / "run" / "final")
    assert loop(tmp_path / "run", keep_last=9).run(resume=True).finished


def test_a_spike_may_stop_the_run_and_then_be_left_out(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"the loss jumped to [\d.]+ by step 34 \(on_spike=stop\)"):
        loop(tmp_path / "run", on_spike="stop").run()
    assert loop(tmp_path / "run").run(resume=True).finished
    assert_same_run(whole, tmp_path / "run", 40)


def test_spikes_without_end_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"6 loss spikes came one after the other behind step 30"):
        loop(tmp_path, Spoiled(bad=frozenset(range(32, 1000)))).run()


def losing(out: Path, stops_collapsed: bool) -> Loop:
    """A run that learns for 20 steps, and then from labels that nobody can know."""
    made = loop(out, Spoiled(bad=frozenset(range(20, 40))), on_spike="ignore", eval_every=4, lr=0.1)
    made.stops_collapsed = stops_collapsed
    return made


def test_a_run_that_stays_above_its_lowest_stops_if_asked(tmp_path: Path) -> None:
    """At the second evaluation in a row; until there it is the run that goes on, and so it is after a stop."""
    told = r"by step 28 the held-out loss was more than a nat above its own lowest twice in a row"
    assert losing(tmp_path / "on", stops_collapsed=False).run().finished
    with pytest.raises(DivergedError, match=told):
        losing(tmp_path / "stopped", stops_collapsed=True).run()
    until = [record for record in records(tmp_path / "on") if record["step"] <= 28]
    assert records(tmp_path / "stopped") == until
    cut = losing(tmp_path / "cut", stops_collapsed=True)
    cut.build_model = stopping(27)  # between the two evaluations
    assert not cut.run().finished
    for _ in range(2):  # a kill before the error was noted: the run meets it again
        with pytest.raises(DivergedError, match=told):
            losing(tmp_path / "cut", stops_collapsed=True).run(resume=True)
        assert records(tmp_path / "cut") == until


def test_a_run_that_is_lost_at_its_end_is_finished(tmp_path: Path) -> None:
    made = losing(tmp_path, stops_collapsed=True)
    made.config.steps = 28
    assert made.run().finished


def test_what_counts_as_a_collapse() -> None:
    assert not has_collapsed([4.0, 2.5, 3.5])
    assert has_collapsed([4.0, 2.5, 3.6])
    assert rise_above_lowest([4.0, 2.5, 6.0]) == 3.5
    assert stays_collapsed([4.0, 2.5, 3.6, 3.6])
    assert not stays_collapsed([4.0, 2.5, 3.6, 3.4])
    assert not stays_collapsed([2.5, 3.6, 2.4, 3.6])
    assert not stays_collapsed([9.0, 5.0])
    assert stays_collapsed([2.5, math.inf, math.inf])
    assert not stays_collapsed([math.inf, 4.0, 3.0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_go_back_together(tmp_path: Path, kind: str) -> None:
    """The same batches are left out, so the losses agree up to rounding."""
    loop(tmp_path / "alone", model={"dropout_rate": 0.0}).run()
    train_together(spoiled.__file__, tmp_path / "together", kind, out=tmp_path / "together")
    for ours, theirs in zip(records(tmp_path / "alone"), records(tmp_path / "together"), strict=True):
        assert theirs.pop("split") == ours.pop("split")
        assert theirs == pytest.approx(ours, rel=1e-3)
    assert [r["split"] for r in records(tmp_path / "together")].count("left out") == 1


def test_a_checkpoint_is_whole_behind_a_spike(whole: Path) -> None:
    assert all(damage(path) is None for path in list_checkpoints(whole / "checkpoints"))


def test_what_counts_as_a_spike() -> None:
    falling = [4.0, 3.6, 3.3, 3.1, 2.9, 2.8, 2.7, 2.6, 2.55, 2.5]
    steady = [2.50, 2.52, 2.49, 2.51, 2.50, 2.48, 2.51, 2.50, 2.49, 2.50]
    assert not is_spike(9.0, steady[:4])
    assert not is_spike(2.6, steady)
    assert is_spike(2.8, steady)
    assert not is_spike(2.9, falling)
    assert is_spike(6.0, falling)

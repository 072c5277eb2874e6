"""Loss spikes. With `on_spike: skip` a run goes back to the checkpoint before one and leaves out the batches
since; with `stop` it ends.

The loss of a record is a spike where it is above m + max(5 s, m / 10). Of the ten records before it, m is the
median and s = 1.4826 / √2 · the median difference of neighbours: the standard deviation, whatever single records
do and while the loss falls. These losses and what was left out are part of the checkpoint: a run that is killed
and resumed leaves out the same batches.

Going on from step c, step s reads the batch of s + n, with n the number of batches left out so far.

A run has collapsed where its held-out loss lies more than a nat above its own lowest: it has lost what it had
learned. Where a run is asked to stop then (`pretrain(…, stop_collapsed=True)`), it does once two evaluations in a
row say so.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from altup.core.errors import DivergedError
from altup.core.runs import list_checkpoints, step_of
from altup.core.sealed_folders import remove
from altup.core.text import number_of
from altup.training.checkpoints import TrainingState, read_state, replace_state
from altup.training.metrics import VALIDATION, read_records

RECORDS, LEAST = 10, 5  # losses that one is compared with
DEVIATIONS, SHARE = 5.0, 0.1
MOST = 5  # times that a run goes back to the same checkpoint
LEFT_OUT = "left out"  # the split of a record
COLLAPSED = 1.0  # nats a token above its own lowest: seeds differ by hundredths, a lost model by three


class SpikeError(Exception):
    """The loss at `step` is a spike, and the run goes back to `checkpoint`."""

    def __init__(self, step: int, loss: float, checkpoint: Path) -> None:
        super().__init__(f"loss spike at step {step}")
        self.step, self.loss, self.checkpoint = step, loss, checkpoint


def is_spike(loss: float, recent: Sequence[float]) -> bool:
    """Whether a loss is far above those of the records before it."""
    if len(recent) < LEAST:
        return False
    usual = statistics.median(recent)
    deviation = 1.4826 / math.sqrt(2) * statistics.median(abs(a - b) for a, b in itertools.pairwise(recent))
    return loss > usual + max(DEVIATIONS * deviation, SHARE * usual)


def rise_above_lowest(losses: Sequence[float]) -> float:
    """How far the last of a run's held-out losses lies above the lowest of them, in nats; infinite where it is not
    finite."""
    return losses[-1] - min(losses) if math.isfinite(losses[-1]) else math.inf


def has_collapsed(losses: Sequence[float]) -> bool:
    """Whether a run had lost what it had learned when the last of its held-out losses was measured."""
    return rise_above_lowest(losses) > COLLAPSED


def stays_collapsed(losses: Sequence[float]) -> bool:
    """Whether two evaluations in a row say so: a single one may be a spike that passes."""
    return len(losses) > 1 and has_collapsed(losses) and has_collapsed(losses[:-1])


def held_out_losses(metrics: Path) -> list[float]:
    """Those that a run has recorded, in their order."""
    found = [r["loss"] for r in read_records(metrics) if r["split"] == VALIDATION and "loss" in r]
    return [math.inf if loss is None else loss for loss in found]  # null is a number that is not finite


def remember(recent: Sequence[float], loss: float) -> list[float]:
    return [*recent, loss][-RECORDS:]


def count_left_out(state: TrainingState) -> int:
    return sum(one["batches"] for one in state.left_out)


def state_before(spike: SpikeError, now: TrainingState) -> TrainingState:
    """The state of the spike's checkpoint, which leaves out what was read between it and the spike."""
    state = read_state(spike.checkpoint)
    batches = spike.step + count_left_out(now) - state.step - count_left_out(state)
    entry = {"step": state.step, "batches": batches, "spike": spike.step, "loss": spike.loss}
    state = replace(state, left_out=[*state.left_out, entry])
    if sum(one["step"] == state.step for one in state.left_out) > MOST:
        raise DivergedError(
            f"{number_of(MOST + 1, 'loss spike')} came one after the other behind step {state.step:,}, and "
            "leaving out batches did not help. Start again with a lower lr or with clip_norm"
        )
    return state


def go_back(checkpoint: Path, state: TrainingState) -> None:
    """Give the checkpoint that state, once no rank reads it; done by one.

    Later checkpoints are removed first, because a run resumes from the newest. A kill in between costs nothing:
    the run meets the same spike once more.
    """
    for later in list_checkpoints(checkpoint.parent):
        if step_of(later) > state.step:
            remove(later)
    replace_state(checkpoint, state)


def describe_left_out(entry: dict[str, Any]) -> str:
    return (
        f"loss spike at step {entry['spike']:,} ({entry['loss']:.4f}): back at step {entry['step']:,}, and what "
        f"was read since then is left out ({entry['batches']:,} batches)"
    )


def new_records(state: TrainingState, metrics: Path) -> list[dict[str, Any]]:
    """Records of what was left out behind this checkpoint, those that are not in the metrics yet."""
    written = [r for r in read_records(metrics) if r.get("split") == LEFT_OUT and r["step"] == state.step]
    mine = [one for one in state.left_out if one["step"] == state.step]
    return [{"split": LEFT_OUT, **one} for one in mine[len(written) :]]

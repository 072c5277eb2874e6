"""The training loop, one for pretraining and fine-tuning: it knows a model, batches and a folder, no task."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from altup.core.errors import UserError
from altup.core.text import number_of
from altup.data.batches import Batches
from altup.models.compiling import left_uncompiled
from altup.training import checkpoints
from altup.training.config import TrainConfig
from altup.training.determinism import numerics
from altup.training.engine import Engine
from altup.training.hardware import peak_flops
from altup.training.heldout import Evaluate
from altup.training.metrics import JsonLines, cut_after, means
from altup.training.parallel import ProcessGroup, check_share
from altup.training.prefetch import prefetch
from altup.training.progress import Clock, Console, Sink, tracker
from altup.training.run import RunFolder, disk_errors, read_state
from altup.training.signals import StopRequest
from altup.training.state import load_optimizer, save_checkpoint, save_final
from altup.training.turns import Turn

AnySink = TypeVar("AnySink", bound=Sink)


@dataclass(frozen=True)
class TrainOutcome:
    """How a run ended: `finished`, or stopped on request after `step` steps with everything saved.

    `skipped` of the steps changed nothing, because their gradients were not finite.
    """

    step: int
    finished: bool
    evaluation: dict[str, float] | None
    skipped: int


def lowest_loss(evaluation: dict[str, float]) -> float:
    return -evaluation["loss"]


@dataclass
class Loop:
    """A run in a folder.

    `build_model(checkpoint)` gives the model: fresh for None, else that checkpoint's. `make_evaluate(engine)`
    gives the callback that measures it on held-out data, called on every process; the checkpoint with the
    highest `score` of what it returns is the best, and so is, each for itself, the one with the highest value of
    every name in `also_best`; they are forgotten where a run goes on with another `yardstick`, which says what
    is measured. `flops` is the cost of one training example, for the share
    of the device's peak. `afterwards` writes what belongs to the folder of a run that has ended, on the first
    process.
    """

    config: TrainConfig
    folder: RunFolder
    process_group: ProcessGroup
    batches: Batches
    build_model: Callable[[Path | None], nn.Module]
    make_evaluate: Callable[[Engine], Evaluate] | None = None
    tokenizer: Any = None
    flops: float | None = None
    sinks: Sequence[Sink] = ()
    score: Callable[[dict[str, float]], float] = lowest_loss
    also_best: Sequence[str] = ()
    yardstick: str = ""
    afterwards: Callable[[TrainOutcome], None] | None = None

    def run(self, resume: bool = False) -> TrainOutcome:
        """Train to the end, or until a signal asks to stop."""
        assert self.config.micro_batch is not None
        check_share(self.config.micro_batch, self.process_group.world_size)
        if self.process_group.is_first:
            self.folder.refuse_foreign(type(self.config))
        with disk_errors(self.folder), self.folder.lock(self.process_group), StopRequest() as self._stop:
            checkpoint = self.folder.open(self.config, resume, self.process_group)
            self.state: dict[str, Any] = read_state(checkpoint) if checkpoint else {"step": 0, "best": None}
            self._saved_at = self.state["step"] if checkpoint else None
            done = checkpoint is not None and self.state["step"] == self.config.steps
            finished = done and checkpoints.same_model(checkpoint, self.folder.final)
            if not finished:
                finished = self._run(checkpoint)
            skipped = int(self.state["meter"]["skipped"])
            outcome = TrainOutcome(self.state["step"], finished, self.state.get("evaluation"), skipped)
            if self.afterwards and self.process_group.is_first:
                with self._stop.while_saving():
                    self.afterwards(outcome)
        return outcome

    def _run(self, checkpoint: Path | None) -> bool:
        with (
            numerics(self.config.deterministic, self.config.precision == "bf16"),
            contextlib.ExitStack() as self._open,
        ):
            self._build(checkpoint)
            self._open_sinks(checkpoint)
            self._check_yardstick()
            return self._train()

    def _build(self, checkpoint: Path | None) -> None:
        torch.manual_seed(self.config.seed)
        self.engine = Engine(self.build_model(checkpoint), self.config, self.process_group)
        self.evaluate = self.make_evaluate(self.engine) if self.make_evaluate else None
        if checkpoint:
            load_optimizer(self.engine, checkpoint)
            self.engine.meter.restore(self.state["meter"], self.process_group)

    def _open_sinks(self, checkpoint: Path | None) -> None:
        step = self.state["step"]
        self._all_sinks: list[Any] = []
        if not self.process_group.is_first:
            return
        cut_after(self.folder.metrics, step)
        self.records = self._use(JsonLines(self.folder.metrics))
        self.console = self._use(Console(self.config.steps, step))
        for sink in self.sinks:
            self._use(sink)
        for name in self.config.trackers:
            self._use(tracker(name, self.folder.path, step, asdict(self.config)))
        if checkpoint:
            self.console.say(f"resuming from {checkpoint}")

    def _check_yardstick(self) -> None:
        """What was measured otherwise cannot be the best any more."""
        if self.state.get("yardstick", self.yardstick) != self.yardstick:
            self.state |= {"best": None, "best_of": {}}
            if self.process_group.is_first:
                self.console.say("held-out data or its limits have changed: the best so far do not count any more")
        self.state["yardstick"] = self.yardstick

    def _use(self, sink: AnySink) -> AnySink:
        self._all_sinks.append(sink)
        self._open.callback(sink.close)
        return sink

    def _train(self) -> bool:
        config, process_group = self.config, self.process_group
        first = self.state["step"]
        assert config.micro_batch is not None
        data = prefetch(self.batches, range(first, config.steps), config.micro_batch, process_group)
        self.clock, self._logged_at, self._tokens = Clock(process_group.device), first, 0.0
        self._told = set(left_uncompiled() if self.engine.compiles else ())  # before this run
        turn = Turn()
        try:
            for step, batch in enumerate(data, start=first):
                # One small message between hosts: the processes agree on the numbers of tokens and on stopping.
                ours = [batch.tokens, batch.inputs, self._stop.requested]
                tokens, inputs, asked = process_group.all_reduce(torch.tensor(ours, dtype=torch.float64)).tolist()
                if asked:
                    self._stop.saving = True  # to the end: trackers are closed after it
                    self._save()
                    return False
                self.engine.step(step, batch, max(tokens, 1.0))
                if step == first and process_group.world_size == 1:  # this step has compiled
                    with self.clock.paused():
                        turn.wait(lambda: self._stop.requested, self.console.say)
                self._tokens += inputs + (tokens if self.engine.reads_labels else 0)
                self._after_step(step + 1)
        finally:
            data.close()
            turn.end()
        self._stop.saving = True
        save_final(self.engine, self.folder, self.tokenizer)
        return True

    def _after_step(self, done: int) -> None:
        """Log, evaluate and save, in this order, when `done` steps say so."""
        config = self.config
        self.state["step"] = done
        if self.process_group.is_first:
            self.console.tick(done)
        last = done == config.steps
        if done % config.log_every == 0 or last:
            self._log(done)
        if self.evaluate and (done % config.eval_every == 0 or last):
            self._evaluate(done)
        if done % config.save_every == 0 or last:
            self._save()

    def _log(self, done: int) -> None:
        values = self.engine.meter.read(self.process_group)
        if values["longest"] >= self.config.max_skipped:
            raise UserError(
                f"{number_of(int(values['longest']), 'step')} in a row had a gradient that is not finite "
                f"(max_skipped={self.config.max_skipped}), the last of them by step {done:,}; none of them "
                "changed a weight. Start again with a lower lr or with clip_norm"
            )
        seconds = self.clock.lap()
        per_second = (done - self._logged_at) * self.config.batch_size / seconds
        record = {
            "step": done,
            "split": "train",
            **means(values),
            "grad_norm": values["grad_norm"] / values["steps"] if values["steps"] else None,
            "lr": self.engine.schedule(done - 1),
            "epoch": done * self.config.batch_size / self.batches.sequences_per_epoch,
            "skipped": int(values["skipped"]),
            "seconds": seconds,
            "steps_per_s": (done - self._logged_at) / seconds,
            "seq_per_s": per_second,
            "tokens_per_s": self._tokens / seconds,
        }
        peak = peak_flops(self.process_group.device)
        if self.flops and peak:
            record["mfu"] = per_second * self.flops / (peak * self.process_group.world_size)
        self._record(record)
        self._warn_of_uncompiled()
        self.engine.meter.start_window()
        self._logged_at, self._tokens = done, 0.0

    def _warn_of_uncompiled(self) -> None:
        """Once for each reason."""
        if self.process_group.is_first and self.engine.compiles:
            for reason in left_uncompiled():
                if reason not in self._told:
                    self.console.say(f"slower than it could be, because torch.compile gave up: {reason}")
                    self._told.add(reason)

    def _evaluate(self, done: int) -> None:
        assert self.evaluate is not None
        with self.clock.paused():
            values = self.evaluate(self.engine.plain, done)
        self._record({"step": done, "split": "validation", **values})
        self.state["evaluation"] = {"step": done, **values}

    def _record(self, record: dict[str, Any]) -> None:
        for sink in self._all_sinks:
            sink.record(record)

    def _save(self) -> None:
        """Publish a checkpoint of the present step, and remove those that nobody asked to keep."""
        if self._saved_at == self.state["step"]:
            return
        with self.clock.paused(), self._stop.while_saving():
            self.state["meter"] = self.engine.meter.read(self.process_group)
            self._choose_best()
            if self.process_group.is_first:
                self.records.sync()
            save_checkpoint(self.engine, self.folder, self.tokenizer, self.state)
            self._saved_at = self.state["step"]
            if self.process_group.is_first:
                best = [self.state["best"], *self.state.get("best_of", {}).values()]
                keep = [f"step-{one['step']}" for one in best if one and self.config.keep_best]
                checkpoints.prune(self.folder.checkpoints, self.config.keep_last, keep)

    def _choose_best(self) -> None:
        """A checkpoint is the best if it was just measured and its score is the highest so far."""
        measured = self.state.get("evaluation")
        if not measured or measured["step"] != self.state["step"]:
            return
        self.state["best"] = _better(self.state["best"], measured["step"], self.score(measured))
        if self.also_best:
            known = self.state.get("best_of", {})
            self.state["best_of"] = {
                name: _better(known.get(name), measured["step"], measured[name]) for name in self.also_best
            }


def _better(best: dict[str, Any] | None, step: int, score: float) -> dict[str, Any] | None:
    return {"step": step, "score": score} if math.isfinite(score) and (not best or score > best["score"]) else best

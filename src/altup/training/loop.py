"""The training loop, one for pretraining and fine-tuning: it knows a model, batches and a folder, no task."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from altup.core.errors import DivergedError
from altup.core.hardware import peak_flops
from altup.core.text import number_of
from altup.data.batches import Batches
from altup.models.stack import left_uncompiled
from altup.training import checkpoints
from altup.training.checkpoints import TrainingState
from altup.training.config import TrainConfig
from altup.training.deferred import NotDeferredError, defer_weights
from altup.training.engine import Engine, numerics
from altup.training.memory import MemoryAdvice
from altup.training.metrics import (
    FAILED,
    VALIDATION,
    Evaluate,
    EvaluationError,
    describe_error,
    lost_records,
    means,
)
from altup.training.parallel import ProcessGroup, check_share, shards_weights
from altup.training.preemption import GpuTurn, StopRequest
from altup.training.prefetch import StepBatch, prefetch
from altup.training.progress import Clock, Reporter, Sink
from altup.training.run_folder import FolderLock, RunFolder, disk_errors
from altup.training.sharded import load_weights
from altup.training.spikes import (
    SpikeError,
    count_left_out,
    describe_left_out,
    go_back,
    held_out_losses,
    is_spike,
    new_records,
    remember,
    state_before,
    stays_collapsed,
)
from altup.training.watchdog import Watchdog

log = logging.getLogger(__name__)


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
    """A run in a folder: trains a model on batches, saves, evaluates, records, and resumes exactly.

    `run(resume)` does it. docs/extend.md shows an objective, batches and a model of one's own.

    Args:
        config: Settings of the training.
        folder: Where everything is written.
        process_group: The processes that train together (`join_process_group`).
        batches: What each step reads: a pure function of the step and the position.
        build_model: Gives the model: fresh for None, else that of the checkpoint.
        skeleton: Gives the model with fresh weights in any case. Under FSDP no process then holds all weights:
            they are drawn, or read from the checkpoint, row by row.
        make_evaluate: Gives the callback that measures the model on held-out data, called on every rank.
        tokenizer: Saved beside the model.
        flops: Cost of one training example, for the share of the device's peak.
        introduction: Lines that are printed once nothing more can be refused.
        sinks: Where records go beside metrics.jsonl.
        score: The checkpoint with the highest score of what the evaluation returns is the best.
        also_best: Names of measures for each of which the checkpoint with the highest value is kept too.
        yardstick: What the evaluation measures. Best checkpoints are forgotten where a run resumes with another.
        afterwards: Writes, on the first rank, what belongs to the folder of a run that has ended.
        measures_start: Whether the model is evaluated before the first step too.
        saves_first: Whether a checkpoint is saved before the first evaluation, which may fail. One that fails is
            reported and recorded, and the run continues.
        stops_collapsed: Whether a run that has lost what it had learned ends before its last step, with a
            DivergedError.

    Examples:
        >>> from pathlib import Path
        >>> import altup, numpy as np
        >>> from altup.training.config import TrainConfig
        >>> from altup.training.parallel import join_process_group
        >>> from altup.training.run_folder import RunFolder
        >>> class Counting:
        ...     batch_size, sequences_per_epoch = 4, 100
        ...     def examples(self, step, start, stop):
        ...         rows = (np.arange(start, stop)[:, None] + step + np.arange(9)) % 10 + 2
        ...         rows = rows.astype(np.int32)
        ...         return {"input_ids": rows[:, :-1], "shift_labels": rows[:, 1:]}
        ...     def describe(self):
        ...         return {"batches": "counting"}
        >>> shape = {"vocab_size": 12, "d_model": 16, "d_ff": 32}
        >>> def build(checkpoint):
        ...     if checkpoint is not None:
        ...         return altup.AltUpDecoderForCausalLM.from_pretrained(checkpoint)
        ...     return altup.AltUpDecoderForCausalLM(altup.AltUpDecoderConfig.from_preset("tiny", **shape))
        >>> config = TrainConfig(steps=3, batch_size=4, optimizer="adamw", trackers=["none"])
        >>> with join_process_group() as group:
        ...     outcome = altup.Loop(config, RunFolder(Path("run")), group, Counting(), build).run(resume=True)
        >>> outcome.step
        3
    """

    config: TrainConfig
    folder: RunFolder
    process_group: ProcessGroup
    batches: Batches
    build_model: Callable[[Path | None], nn.Module]
    skeleton: Callable[[Path | None], nn.Module] | None = None
    make_evaluate: Callable[[Engine], Evaluate | None] | None = None
    tokenizer: Any = None
    flops: float | None = None
    introduction: Sequence[str] = ()
    sinks: Sequence[Sink] = ()
    score: Callable[[dict[str, float]], float] = lowest_loss
    also_best: Sequence[str] = ()
    yardstick: str = ""
    afterwards: Callable[[TrainOutcome], None] | None = None
    measures_start: bool = False
    saves_first: bool = False
    stops_collapsed: bool = False

    def run(self, resume: bool = False) -> TrainOutcome:
        """Train to the end, or until a signal asks to stop."""
        config, folder, process_group = self.config, self.folder, self.process_group
        assert config.micro_batch is not None
        check_share(config.micro_batch, process_group.world_size)
        if process_group.is_first:
            folder.refuse_foreign(type(config))
        with disk_errors(folder), folder.lock(process_group) as held, StopRequest() as stop:
            checkpoint = folder.open(config, resume, process_group)
            state = checkpoints.read_state(checkpoint) if checkpoint else TrainingState()
            if process_group.is_first:
                self.prune(state)  # what a kill between a save and its pruning left
                if warning := lost_records(folder.metrics, state):
                    log.warning(warning)
            finished = checkpoint is not None and self._has_ended(checkpoint, state)
            if not finished:
                same_numbers = numerics(config.deterministic, config.low_precision)
                with same_numbers, MemoryAdvice(config, process_group) as memory:
                    finished, state = self._train(checkpoint, state, stop, held, memory)
            outcome = TrainOutcome(state.step, finished, state.evaluation, int(state.meter["skipped"]))
            if self.afterwards and process_group.is_first:
                with stop.while_saving():
                    held.check()
                    self.afterwards(outcome)
        return outcome

    def _train(
        self,
        checkpoint: Path | None,
        state: TrainingState,
        stop: StopRequest,
        held: FolderLock,
        memory: MemoryAdvice,
    ) -> tuple[bool, TrainingState]:
        """Whether all steps are done, and the last state. After a loss spike it begins anew from a checkpoint."""
        while True:
            try:
                return _Training(self, checkpoint, state, stop, held, memory).run(), state
            except SpikeError as spike:
                checkpoint, state = spike.checkpoint, state_before(spike, state)
            self.process_group.barrier()
            if self.process_group.is_first:
                held.check()
                go_back(checkpoint, state)
            self.process_group.barrier()
            gc.collect()  # the model of before, whose memory the next one needs
            if self.process_group.device.type == "cuda":
                torch.cuda.empty_cache()

    def prune(self, state: TrainingState) -> None:
        """Remove the checkpoints that need not be kept."""
        kept = state.best_checkpoints if self.config.keep_best else ()
        checkpoints.prune(self.folder.checkpoints, self.config.keep_last, kept)

    def _has_ended(self, checkpoint: Path, state: TrainingState) -> bool:
        """Whether all steps are done and their model is in `final`, whole; the first rank looks."""
        if state.step < self.config.steps:
            return False
        wrong = checkpoints.final_damage(self.folder.final, checkpoint) if self.process_group.is_first else None
        wrong = self.process_group.broadcast(wrong)
        if wrong and self.process_group.is_first:
            log.warning("%s: %s; it is made again from %s", self.folder.final, wrong, checkpoint.name)
        return wrong is None


class _Training:
    """A running loop: the engine, its reports, and its state."""

    def __init__(
        self,
        loop: Loop,
        checkpoint: Path | None,
        state: TrainingState,
        stop: StopRequest,
        held: FolderLock,
        memory: MemoryAdvice,
    ) -> None:
        self.loop, self.state, self.stop, self.held, self.memory = loop, state, stop, held, memory
        self.config, self.process_group, self.folder = loop.config, loop.process_group, loop.folder
        state.config = asdict(self.config)
        self.engine = self._build(checkpoint)
        self.evaluate = loop.make_evaluate(self.engine) if loop.make_evaluate else None
        if checkpoint:
            checkpoints.restore(self.engine, checkpoint, state)
        self.saved_at = state.step if checkpoint else None
        self.logged_at, self.tokens = state.step, 0.0  # the step of the last log, and the tokens since
        self.clock = Clock(self.process_group.device)
        self.known_uncompiled = set(left_uncompiled() if self.engine.compiles else ())  # before this run
        self.reporter = Reporter(
            self.folder, self.config, state.step, loop.sinks, self.process_group.is_first, state.evaluation_due
        )
        for line in loop.introduction:
            self.reporter.say(line)
        if self.process_group.is_first:
            for record in new_records(state, self.folder.metrics):
                self.reporter.say(describe_left_out(record))
                self.reporter.record(record)
        self.watchdog = Watchdog(self.config.watchdog, self.process_group, self.reporter.say)
        if checkpoint:
            self.reporter.say(f"resuming from {checkpoint}")

    def _build(self, checkpoint: Path | None) -> Engine:
        """The engine with its weights: fresh, or those of a checkpoint."""
        config, skeleton = self.config, self.loop.skeleton
        torch.manual_seed(config.seed)
        if skeleton and shards_weights(config.parallel, self.process_group):
            with contextlib.suppress(NotDeferredError):
                model, weights = defer_weights(lambda: skeleton(checkpoint), wanted=checkpoint is None)
                fill = functools.partial(load_weights, folder=checkpoint) if checkpoint else weights.fill
                return Engine(model, config, self.process_group, fill)
            torch.manual_seed(config.seed)
        return Engine(self.loop.build_model(checkpoint), config, self.process_group)

    def run(self) -> bool:
        """Whether all steps are done; if not, the loop was asked to stop, and has saved."""
        try:
            self._check_yardstick()
            with self.watchdog:
                done = self._train()
            if done:
                self.stop.saving = True
                self.held.check()
                checkpoints.save_final(self.engine, self.folder.final, self.loop.tokenizer)
            return done
        finally:
            self.reporter.close()

    def _check_yardstick(self) -> None:
        """Forget the best checkpoints if their scores were measured on other data."""
        if self.state.yardstick not in (None, self.loop.yardstick):
            self.state.best, self.state.best_of = None, {}
            self.reporter.say("held-out data or its limits have changed: the best so far do not count any more")
        self.state.yardstick = self.loop.yardstick

    def _train(self) -> bool:
        config, process_group, first = self.config, self.process_group, self.state.step
        assert config.micro_batch is not None
        left_out = count_left_out(self.state)
        steps = range(first + left_out, config.steps + left_out)
        data = prefetch(self.loop.batches, steps, config.micro_batch, process_group)
        turn = GpuTurn()
        before = None
        if self.loop.measures_start and first == 0:
            before = self._evaluate(0)
        if self.state.evaluation_due:
            self._evaluate_and_save(first)
        self.clock.lap()
        try:
            for step, batch in enumerate(data, start=first):
                tokens, inputs, asked, lost = self._agree(batch)
                if lost:
                    raise self.held.error()
                if asked:
                    self.stop.saving = True  # to the end: trackers are closed after it
                    self._save()
                    return False
                if step == first and (warning := self.memory.compare(self.engine, batch)):
                    self.reporter.say(warning)
                self.engine.step(step, batch, max(tokens, 1.0))
                if step == 0 and before:  # now, because a run that fails in its first step leaves no record
                    self.reporter.record(before)
                if step == first and process_group.world_size == 1:  # this step has compiled
                    with self._aside("waiting for its turn"):
                        turn.wait(lambda: self.stop.requested, self.reporter.say)
                self.tokens += inputs + (tokens if self.engine.reads_labels else 0)
                self._after_step(step + 1)
                self.watchdog.beat(step + 1)
        finally:
            data.close()
            turn.end()
        return True

    @contextlib.contextmanager
    def _aside(self, what: str) -> Iterator[None]:
        """Around what is no training: neither the clock nor the watchdog counts it."""
        with self.clock.paused(), self.watchdog.excused(what):
            yield

    def _agree(self, batch: StepBatch) -> tuple[float, float, float, float]:
        """Labels, input tokens, requests to stop and whether the folder is lost, summed over the ranks: one small
        message between hosts."""
        own = [batch.tokens, batch.inputs, self.stop.requested, self.held.is_lost()]
        tokens, inputs, asked, lost = self.process_group.all_reduce(
            torch.tensor(own, dtype=torch.float64)
        ).tolist()
        return tokens, inputs, asked, lost

    def _after_step(self, done: int) -> None:
        """Log, evaluate and save, in this order, when `done` steps say so."""
        config = self.config
        self.state.step = done
        self.reporter.tick(done)
        last = done == config.steps
        if done % config.log_every == 0 or last:
            self._log(done)
        self._evaluate_and_save(done)

    def _evaluate_and_save(self, done: int) -> None:
        config, state, last = self.config, self.state, done == self.config.steps
        if self.evaluate and (done % config.eval_every == 0 or last or state.evaluation_due):
            self.held.check()
            if self.loop.saves_first and not state.evaluation and not state.evaluation_due:
                state.evaluation_due = True
                self._save()
            if record := self._evaluate(done):
                self.reporter.record(record)
            if self.loop.stops_collapsed and not last:  # a run that has made all its steps may as well end
                self._check_collapse(done)
            if state.evaluation_due:
                state.evaluation_due, self.saved_at = False, None
        if done % config.save_every == 0 or last:
            self._save()

    def _evaluate(self, done: int) -> dict[str, Any] | None:
        """The record of an evaluation, or that of its failure; a rank that fails alone cannot go on."""
        if self.evaluate is None:
            return None
        try:
            with self._aside("evaluating"):
                values = self.evaluate(self.engine.plain, done)
        except Exception as error:  # of a metric, a task's own code, or a lack of memory for long answers
            if self.process_group.world_size > 1 and not isinstance(error, EvaluationError):
                raise
            self.engine.plain.train()
            return {"step": done, "split": FAILED, "error": describe_error(error)}
        if done:
            self.state.evaluation = {"step": done, **values}
        return {"step": done, "split": VALIDATION, **values}

    def _log(self, done: int) -> None:
        values = self.engine.meter.read(self.process_group)
        if values["longest"] >= self.config.max_skipped:
            raise DivergedError(
                f"{number_of(int(values['longest']), 'step')} in a row had a gradient that is not finite "
                f"(max_skipped={self.config.max_skipped}), the last of them by step {done:,}; none of them "
                "changed a weight. Start again with a lower lr or with clip_norm"
            )
        seconds = self.clock.lap()
        per_second = (done - self.logged_at) * self.config.batch_size / seconds
        record = {
            "step": done,
            "split": "train",
            **means(values),
            "grad_norm": values["grad_norm"] / values["steps"] if values["steps"] else None,
            "lr": self.engine.schedule(done - 1),
            "epoch": done * self.config.batch_size / self.loop.batches.sequences_per_epoch,
            "skipped": int(values["skipped"]),
            "seconds": seconds,
            "steps_per_s": (done - self.logged_at) / seconds,
            "seq_per_s": per_second,
            "tokens_per_s": self.tokens / seconds,
        }
        device = self.process_group.device
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        if self.loop.flops and peak:
            record["mfu"] = per_second * self.loop.flops / (peak * self.process_group.world_size)
        self.reporter.record(record)
        self._warn_of_uncompiled()
        if self.config.on_spike != "ignore" and values["num_tokens"]:
            self._check_spike(done, values["nll_sum"] / values["num_tokens"])
        self.engine.meter.start_window()
        self.logged_at, self.tokens = done, 0.0

    def _check_spike(self, done: int, loss: float) -> None:
        """Where the loss of the steps since the last record is a spike, stop, or go back if a checkpoint is from
        before."""
        if is_spike(loss, self.state.recent):
            if self.config.on_spike == "stop":
                raise DivergedError(
                    f"the loss jumped to {loss:.4f} by step {done:,} (on_spike=stop). Start again with a lower "
                    "lr, or continue with --resume --on-spike skip"
                )
            last_record = (done - 1) // self.config.log_every * self.config.log_every
            if checkpoint := self.folder.newest_checkpoint(self.process_group, at_most=last_record):
                raise SpikeError(done, loss, checkpoint)
            self.reporter.say(f"the loss at step {done:,} is a spike, but no checkpoint is from before it")
        self.state.recent = remember(self.state.recent, loss)

    def _check_collapse(self, done: int) -> None:
        """Stop a run that does not come back. The first rank looks: it writes the records."""
        message = None
        if self.process_group.is_first and stays_collapsed(losses := held_out_losses(self.folder.metrics)):
            message = (
                f"by step {done:,} the held-out loss was more than a nat above its own lowest twice in a row "
                f"({losses[-1]:.4f}, lowest {min(losses):.4f}): the model has lost what it had learned. Start "
                "again with a lower lr"
            )
        if message := self.process_group.broadcast(message):
            raise DivergedError(message)

    def _warn_of_uncompiled(self) -> None:
        """Report each reason once."""
        for reason in left_uncompiled() if self.engine.compiles else ():
            if reason not in self.known_uncompiled:
                self.reporter.say(f"slower than it could be, because torch.compile gave up: {reason}")
                self.known_uncompiled.add(reason)

    def _save(self) -> None:
        """Save a checkpoint of the current step, and remove those that need not be kept."""
        state = self.state
        if self.saved_at == state.step:
            return
        with self._aside("saving"), self.stop.while_saving():
            self.held.check()
            state.meter = self.engine.meter.read(self.process_group)
            state.choose_best(self.loop.score, self.loop.also_best)
            state.records = self.reporter.sync()
            checkpoints.save_checkpoint(self.engine, self.folder.checkpoints, self.loop.tokenizer, state)
            self.saved_at = state.step
            if self.process_group.is_first:
                self.loop.prune(state)

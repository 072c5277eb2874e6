"""Memory of a run: what its first step will need beside what is free, and advice where there was not enough.

The estimate is one from below: buffers of libraries and what a backward pass holds for a moment come on top.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from altup.core.errors import UserError, is_out_of_memory
from altup.core.hardware import free_memory
from altup.core.text import shorten
from altup.models.accounting import account
from altup.models.config import AltUpConfig
from altup.training.config import TrainConfig
from altup.training.parallel import ProcessGroup
from altup.training.prefetch import StepBatch, label_name
from altup.training.step_memory import GIB, Plan, kept_bytes

if TYPE_CHECKING:
    from altup.training.engine import Engine

LONG = 300  # characters of an error that are shown


class MemoryAdvice:
    """Context of a run: an error for lack of memory becomes one that says what to change.

    Call `compare` before the first step; it warns where that will hardly fit.
    """

    def __init__(self, config: TrainConfig, process_group: ProcessGroup) -> None:
        self.config, self.process_group = config, process_group
        self._estimate = ""

    def compare(self, engine: Engine, batch: StepBatch) -> str | None:
        """What a step will need beside what is free now, if it is more; else None."""
        device = self.process_group.device
        needed = step_bytes(engine, batch)
        free = free_bytes(device)
        if device.type == "cpu":  # which the ranks of a machine share
            free //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        parts = ", ".join(f"{name} {_gib(number)}" for name, number in needed.items())
        total = sum(needed.values())
        self._estimate = f"A step was thought to need {_gib(total)} ({parts}), and {_gib(free)} were free"
        if total <= free:
            return None
        return (
            f"warning: a step needs at least {_gib(total)} ({parts}; `altup params` counts them), and "
            f"{_gib(free)} are free on {_name(device)}. If memory runs out: {self.remedies()}"
        )

    def remedies(self) -> str:
        config, world = self.config, self.process_group.world_size
        assert config.micro_batch is not None
        smaller = [
            size for size in range(world, config.micro_batch // 2 + 1, world) if config.batch_size % size == 0
        ]
        found = (
            [f"--micro-batch {smaller[-1]} (now {config.micro_batch}; the update stays the same)"]
            if smaller
            else []
        )
        if not config.activation_checkpointing:
            found.append("--activation-checkpointing")
        if world > 1 and config.parallel == "ddp":
            found.append("--parallel fsdp")
        if self.process_group.device.type == "cuda" and config.precision == "fp32":
            found.append("a new run with --precision bf16")
        return ", ".join(found) or "a smaller model, shorter sequences, or more processes with --parallel fsdp"

    def __enter__(self) -> MemoryAdvice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not is_out_of_memory(error):
            return
        place, reason = _name(self.process_group.device), shorten(str(error) or type(error).__name__, LONG)
        estimate = f" {self._estimate}." if self._estimate else ""
        raise UserError(
            f"out of memory on {place}: {reason}.{estimate} Continue from the last checkpoint (--resume) with "
            f"less: {self.remedies()}"
        ) from error


def step_bytes(engine: Engine, batch: StepBatch) -> dict[str, int]:
    """What one step of this rank allocates beside weights and optimizer, which are there: gradients, and what the
    forward pass of a micro-batch keeps for the backward pass. Of models of transformers only the first is known.

    On a CPU the optimizer's zeros take memory once they are written.
    """
    mine = [local_bytes(p) for p in engine.plain.parameters() if p.requires_grad]
    found = {"gradients": sum(mine)}
    if engine.process_group.device.type == "cpu":
        state = (t for one in engine.optimizer.state.values() for t in one.values() if isinstance(t, torch.Tensor))
        found["optimizer"] = sum(map(local_bytes, state))
    config = getattr(engine.plain, "config", None)
    if isinstance(config, AltUpConfig):
        found["activations"] = max(activation_bytes(config, micro, engine.config) for micro in batch.micro)
    return found


def activation_bytes(config: AltUpConfig, batch: dict[str, torch.Tensor], training: TrainConfig) -> int:
    """As `altup params` counts them for a sequence, of all rows; with recomputed layers the inputs of all layers
    and the inside of one."""
    rows, inputs = batch["input_ids"].shape
    cost = account(config, inputs, batch[label_name(batch)].shape[1])
    precision = "bf16" if training.low_precision else "fp32"
    plan = Plan(rows, precision=precision, activation_checkpointing=training.activation_checkpointing)
    return kept_bytes(cost, plan)


def local_bytes(tensor: torch.Tensor) -> int:
    """Of this rank's part."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor.numel() * tensor.element_size()


def free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return free_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _name(device: torch.device) -> str:
    return str(device) if device.type == "cuda" else "this machine"


def _gib(number: int) -> str:
    return f"{number / GIB:,.1f} GiB"

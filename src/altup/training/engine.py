"""One training step: forward, backward, skip or update. The host only queues work; it waits for no result.

Every forward pass seeds itself from where it stands, so that a resumed run repeats its random numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from altup.core.errors import UserError
from altup.core.hardware import ensure_bf16
from altup.models.stack import compile_layers
from altup.nn.linear import enable_fp8, join_maps
from altup.training.config import TrainConfig
from altup.training.flat_gradients import FlatGradients, share_buffers
from altup.training.graphs import Graphs
from altup.training.metrics import Meter, output_sums
from altup.training.optimizers.build import build_optimizer, set_rate
from altup.training.parallel import ProcessGroup, distribute, full_tensor, gradient_sync, shards_weights
from altup.training.prefetch import StepBatch


class Engine:
    """A model distributed over the ranks, its optimizer, and the step that joins them.

    A step is its passes (forward and backward of every micro-batch), the sum of the gradients over the ranks, and
    the update. Where nothing forbids it, passes and update are replayed as CUDA graphs, and ranks exchange
    gradients between the two.

    The loss of a step is Σ loss_sum / (labels that count in the whole global batch), so that neither the
    number of ranks nor that of micro-batches changes the update.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        process_group: ProcessGroup,
        fill: Callable[[nn.Module], None] | None = None,
        exchanges: bool | None = None,
    ) -> None:
        """`fill` gives a model that was built without weights its own, once it is sharded. `exchanges` tells
        whether gradients go through flat buffers: by default where several ranks hold all weights each."""
        self.config, self.process_group = config, process_group
        if config.activation_checkpointing:
            if not getattr(model, "supports_gradient_checkpointing", True):
                raise UserError(
                    f"activation_checkpointing: {type(model).__name__} cannot recompute its layers; leave it "
                    "out, and give a smaller micro_batch to save memory"
                )
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        model.train()
        if config.precision == "fp8":
            enable_fp8(model, process_group.device)
        sharded = shards_weights(config.parallel, process_group)
        join_maps(model, not sharded)
        self.compiles = config.compile and process_group.device.type == "cuda"
        if self.compiles:
            # Code for any size is made once two have been seen, so what a step runs depends on the steps before.
            dynamic = None if config.SHAPES_VARY and not config.deterministic else False
            compile_layers(model, dynamic=dynamic)
        self.plain = distribute(model, config.parallel, config.low_precision, process_group)
        if fill:
            fill(self.plain)
        if exchanges is None:
            exchanges = process_group.world_size > 1 and not sharded
        self._flat = FlatGradients(self.plain) if exchanges else None
        # Sharded and recomputed layers do not go into a graph.
        records = self.compiles and not sharded and not config.activation_checkpointing
        records = records and getattr(self.plain, "records_graphs", True)
        self._graphs = Graphs(self.plain, self._forward_backward, self._update, self._flat) if records else None
        self.optimizer = build_optimizer(config, self.plain, lr=torch.zeros((), device=process_group.device))
        self.schedule = config.rate()
        self.meter = Meter(process_group.device)

    def autocast(self) -> Any:
        """Autocast to bf16 where it is safe, over float32 master weights."""
        if not self.config.low_precision:
            return contextlib.nullcontext()
        return torch.autocast(self.process_group.device.type, dtype=torch.bfloat16)

    def step(self, step: int, batch: StepBatch, tokens: float) -> None:
        """Global step `step` (from 0) on this process's share; `tokens` counts the labels of all shares."""
        sums = torch.zeros(4, dtype=torch.float64, device=self.process_group.device)
        last = len(batch.micro) - 1
        set_rate(self.optimizer, self.schedule(step))
        # FSDP gives the mean over ranks, flat buffers the sum.
        ranks = self.process_group.world_size if self._flat is None else 1
        scale = torch.full((), ranks / tokens, device=self.process_group.device)
        if self._flat is not None:
            share_buffers(self.plain, self.process_group)
        replays = self._graphs is not None and len({_shapes(micro) for micro in batch.micro}) == 1
        keeps = last > 0 or not self.config.SHAPES_VARY
        for i, micro in enumerate(batch.micro):
            seed_forward(self.config.seed, step, i, self.process_group.rank)
            if replays:
                sums += self._graphs(micro, scale, add=i > 0, keep=keeps)  # type: ignore[misc]
            else:
                inputs = {name: t.to(self.process_group.device, non_blocking=True) for name, t in micro.items()}
                with gradient_sync(self.plain, i == last):
                    sums += self._forward_backward(inputs, scale)
        if self._flat is not None:
            if not replays:
                self._flat.take()
            self._flat.exchange()
            self._flat.give()
        norm, skip = self._graphs.update() if replays else self._update()  # type: ignore[union-attr]
        # Graphs keep their gradients in places of their own: left here, a launched step would add to them.
        self.optimizer.zero_grad(set_to_none=True)
        self.meter.add(sums, norm, skip)

    def _update(self, frozen: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step, skipped where the gradient is not finite; gives its norm, and whether it is."""
        parameters = [p for p in self.plain.parameters() if p.grad is not None]
        norm = full_tensor(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        skip = ~torch.isfinite(norm)
        if frozen is not None:
            skip = skip | frozen
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.clip_norm, norm)
        with self._flat.leave_unreached(self.optimizer) if self._flat else contextlib.nullcontext():
            self.optimizer.step(skip=skip)  # type: ignore[call-overload]
        return norm, skip

    def _forward_backward(self, inputs: dict[str, torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
        """Add the gradient of scale · loss_sum to the parameters'; gives the sums of the output."""
        with self.autocast():
            out = self.plain(**inputs, return_logits=False)
        (out.loss_sum * scale).backward()
        return output_sums(out)

    @property
    def reads_labels(self) -> bool:
        """Whether targets go through a decoder, beside the inputs."""
        return getattr(getattr(self.plain, "config", None), "is_encoder_decoder", False)


def _shapes(batch: dict[str, torch.Tensor]) -> tuple:
    return tuple((name, tensor.shape) for name, tensor in sorted(batch.items()))


def seed_forward(seed: int, step: int, micro: int, rank: int) -> None:
    """Make dropout and expert jitter a pure function of (seed, step, micro-batch, process)."""
    key = hashlib.blake2b(f"{seed}/{step}/{micro}/{rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(key, "little") >> 1)


@contextlib.contextmanager
def numerics(deterministic: bool, low_precision: bool) -> Iterator[None]:
    """Set TF32 for float32 products beside bf16, and deterministic algorithms; restore both at the end."""
    if low_precision:
        ensure_bf16("cuda" if torch.cuda.is_available() else "cpu")
    before = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("high" if low_precision else "highest")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.use_deterministic_algorithms(before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]

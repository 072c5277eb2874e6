"""The models that step_turns.py times, and how each is built."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from altup.bench.cases.attention import Inputs
from altup.bench.cases.step import BATCH, QUICK, Models, share_weights
from altup.bench.problem import Setup, Work, autograd_work
from altup.bench.timing import Stopwatch
from altup.kernels import attention
from altup.models import AltUpT5Config, AltUpT5ForConditionalGeneration
from altup.models.accounting import INPUTS, TARGETS
from altup.models.stack import compile_layers
from altup.nn.linear import use_fp8
from altup.training.graphs import Graphs

ON_GPU = torch.cuda.is_available()
SETUP = Setup(torch.device("cuda" if ON_GPU else "cpu"), quick=not ON_GPU, compiles=ON_GPU, runs_triton=ON_GPU)
BURST, PAUSE = 4, 0.3  # steps, and seconds before them


class Variant(NamedTuple):
    """A model, and how it is trained."""

    name: str
    method: str = "dense"
    fp8: bool = False
    dropout: float = 0.0
    important: bool = False
    per_sequence: bool = False  # whether dropout decides for all tokens of a sequence at once


class Group(NamedTuple):
    """The variants of one process, in the order in which they are built."""

    size: str
    variants: tuple[Variant, ...]


BF16 = (
    Variant("dense", important=True),
    Variant("altup k2", "altup k2", important=True),
    Variant("recycled k2", "recycled k2"),
)
FP8 = (
    Variant("dense fp8", fp8=True, important=True),
    Variant("altup k2 fp8", "altup k2", fp8=True),
)
DROPOUT = (
    Variant("dense dropout 0.1", dropout=0.1),
    Variant("dense dropout 0.1 by sequence", dropout=0.1, per_sequence=True),
)
PEER = Variant("hf sdpa compiled", "hf", important=True)
GROUPS = {
    "base": Group("base", (*BF16, *DROPOUT)),
    "base-fp8": Group("base", FP8),
    "base-hf": Group("base", (PEER,)),
    "large": Group("large", BF16),
    "large-fp8": Group("large", FP8),
    "large-hf": Group("large", (PEER,)),
    "xl": Group("xl", (*BF16, *FP8)),
    "attention": Group(
        "attention",
        (
            Variant("attention", important=True),
            Variant("attention dropout 0.1", dropout=0.1, important=True),
            Variant("attention dropout 0.1 by sequence", dropout=0.1, per_sequence=True, important=True),
        ),
    ),
}
ATTENTION = (BATCH["base"], 12, INPUTS, 64) if ON_GPU else (2, 2, 24, 16)  # rows, heads, tokens, d
USUAL = ("base", "base-fp8", "base-hf", "attention")
# What is divided by what, where both were timed.
COMPARED = (
    ("hf sdpa compiled", "dense"), ("hf sdpa compiled", "dense fp8"), ("altup k2", "dense"),
    ("recycled k2", "dense"), ("dense dropout 0.1", "dense"), ("dense", "dense fp8"),
    ("altup k2 fp8", "dense fp8"), ("attention dropout 0.1", "attention"),
    ("dense dropout 0.1 by sequence", "dense"), ("attention dropout 0.1 by sequence", "attention"),
)  # fmt: skip


class Builder:
    """Variants of one size: weights once, all graphs in one pool of memory, no gradients."""

    def __init__(self, size: str) -> None:
        self.size = size
        self.device = SETUP.device
        self.models: Any = None if size == "attention" else Models(SETUP, size)
        self.watches: dict[str, Stopwatch] = {}
        self._pool: Any = None

    def build(self, variant: Variant) -> dict[str, Any]:
        begun = time.monotonic()
        losses: list[torch.Tensor] = []
        try:
            watch = Stopwatch(self._work(variant, losses), self.device)
            watch.start_up()
            watch.warm_up(1)
        finally:
            self.free()
        if self.models is not None:
            watch.head_start = min(watch.head_start * BURST // watch.burst_size, 2 * 10**9)
            watch.burst_size = BURST
        self.watches[variant.name] = watch
        return {
            "s": time.monotonic() - begun,
            "GiB": torch.cuda.memory_reserved() / 2**30 if ON_GPU else 0.0,
            "loss": float(losses[-1]) if losses else None,
        }

    def burst(self, variant: Variant) -> dict[str, Any]:
        watch = self.watches[variant.name]
        watch.samples = {}
        time.sleep(PAUSE if ON_GPU else 0)
        watch.burst()
        return {"ms": watch.samples[watch.work.whole]}

    def free(self) -> None:
        gc.collect()
        if ON_GPU:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _work(self, variant: Variant, losses: list[torch.Tensor]) -> Work:
        """`losses` receives the last one."""
        if self.models is None:
            return self._attention(variant)
        if variant.method == "hf":
            work = self.models.hugging_face("sdpa", compiled=ON_GPU)
            forward: Callable[[int], Any] = work.forward
        else:
            forward = self._ours(variant)
            work = Work(forward, mode="both")

        def keep(i: int) -> Any:
            out = forward(i)
            losses[:] = [out.detach()]
            return out

        work.forward = keep
        return work

    def _ours(self, variant: Variant) -> Callable[[int], torch.Tensor]:
        """As training runs it: compiled layers, recorded as a graph."""
        master = self._with_dropout(variant) if variant.dropout else self.models.master(variant.method)
        model, batch = share_weights(master), self.models.batch.whole()
        if variant.fp8:
            use_fp8(model)
        if ON_GPU:
            compile_layers(model)
        one = torch.ones((), device=self.device)

        def both(inputs: dict[str, torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
            loss = model(**inputs, return_logits=False).loss
            (loss * scale).backward()
            return loss.detach()

        graphs = Graphs(model, both)
        graphs._pool = self._pool  # they never run at the same time

        def forward(_: int) -> torch.Tensor:
            if ON_GPU:
                loss = graphs(batch, one, keep=False)
                self._pool = graphs._pool
            else:
                loss = both(batch, one)
                model.zero_grad(set_to_none=True)
            return loss

        return forward

    def _with_dropout(self, variant: Variant) -> Any:
        fields = {} if ON_GPU else QUICK
        drops = {"dropout_rate": variant.dropout, "sequence_dropout": variant.per_sequence}
        config = AltUpT5Config.from_preset(self.size, "dense", None, **fields, **drops)
        torch.manual_seed(1)
        with self.device:
            model: Any = AltUpT5ForConditionalGeneration(config)
        return model.to(SETUP.dtype).train()

    def _attention(self, variant: Variant) -> Work:
        """As `altup bench attention` times it: the encoder's."""
        inputs = Inputs(SETUP, *ATTENTION, False, None)

        def run() -> torch.Tensor:
            return attention(
                *inputs.qkv,
                by_distance=inputs.by_distance,
                constant_beyond=inputs.relative.constant_beyond(),
                dropout=variant.dropout,
                per_sequence=variant.per_sequence,
                implementation="triton" if ON_GPU else "plain",
            )

        return autograd_work(run, [*inputs.qkv, inputs.by_distance], inputs.upstream, None)


def sizes_of(size: str) -> dict[str, int | str]:
    """As rows of `altup bench` have them."""
    if size == "attention":
        return {**dict(zip(("batch", "heads", "tokens", "d"), ATTENTION, strict=True)), "method": "full"}
    return (
        {"size": size, "batch": BATCH[size], "inputs": INPUTS, "targets": TARGETS} if ON_GPU else {"size": "tiny"}
    )

"""One site of hyper-connections, as DeepSeek-V4 has it: coefficients, what the layer is given, and the update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from altup.bench.cases.floors import copy_bytes, copy_work
from altup.bench.problem import (
    Answer,
    Fact,
    Problem,
    Provider,
    Setup,
    Timings,
    Work,
    autograd_work,
    doubled,
    errors,
)
from altup.kernels.hyper import Maps, coefficients, read, write

K, ROUNDS, EPS = 4, 20, 1e-6
NAMES = ("state", "weight", "base", "scale", "layer")


def problems(setup: Setup) -> Iterator[Problem]:
    tokens = 24 if setup.quick else 8192
    for d in (16,) if setup.quick else (4096, 7168):
        site = Site(setup, tokens, d)
        providers = [
            Provider("triton", partial(site.work, partial(run, implementation="triton")), triton=True),
            Provider("plain eager", partial(site.work, partial(run, implementation="plain")), "plain"),
            Provider("hf eager", site.transformers, "peer"),
            Provider("hf compiled", partial(site.transformers, compiled=True), "peer", compiled=True),
            Provider("copy", partial(copy_work, setup.device, setup.quick), "floor"),
        ]
        yield Problem(
            "streams",
            {"method": "mhc", "tokens": tokens, "d": d, "k": K},
            providers,
            tolerances={"": 3e-2, "base": 0.1, "scale": 0.1} if setup.dtype == torch.bfloat16 else {"": 1e-4},
            derive=partial(over_copy, state=tokens * K * d * setup.dtype.itemsize, quick=setup.quick),
        )


def over_copy(timings: Timings, state: int, quick: bool) -> Iterator[Fact]:
    """Forward reads a state twice and writes one; backward reads two twice and writes one; and a block for the
    layer each time, four in all: 9 + 4/K states at the speed of a copy."""
    if "copy" not in timings or quick:
        return
    floor = (9 + 4 / K) * state * timings["copy"]["copy"].p50 / copy_bytes(quick)
    for name, modes in timings.items():
        if "both" in modes:
            yield Fact(name, "fraction", floor / modes["both"].p50, "9 + 4/K states at copy speed over the time")


def run(x: Tensor, weight: Tensor, base: Tensor, scale: Tensor, y: Tensor, implementation: str) -> Tensor:
    """The layer is z + y, so that its gradient reaches what it was given."""
    a, b, A = coefficients(x, Maps(weight, base, scale, EPS, EPS, ROUNDS), implementation)
    return write(x, read(x, a, implementation) + y, b, A, implementation)


class Site:
    """State [1, tokens, K, d], the maps of its coefficients, what a layer adds, and the new state's gradient."""

    def __init__(self, setup: Setup, tokens: int, d: int) -> None:
        torch.manual_seed(0)
        self.d, M = d, 2 * K + K * K

        def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, device=setup.device)).to(dtype).requires_grad_()

        self.inputs = [
            random(1, tokens, K, d, dtype=setup.dtype),
            random(M, K * d, scale=(K * d) ** -0.5),
            random(M),
            random(3),
            random(1, tokens, d, dtype=setup.dtype),
        ]
        self.upstream = torch.randn_like(self.inputs[0])
        self.reference = cache(self._reference)

    def work(self, site: Any) -> Work:
        return autograd_work(
            lambda: site(*self.inputs),
            self.inputs,
            self.upstream,
            lambda out, gradients: errors(self._answer(out, gradients), self.reference()),
            per_repetition=self.upstream.shape[1],
            unit="tokens/s",
        )

    def transformers(self, compiled: bool = False) -> Work:
        """Their module, and the update as their layer writes it."""
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

        config: Any = SimpleNamespace(
            hc_mult=K, hc_sinkhorn_iters=ROUNDS, hc_eps=EPS, rms_norm_eps=EPS, hidden_size=self.d
        )
        module = DeepseekV4HyperConnection(config)

        def site(x: Tensor, weight: Tensor, base: Tensor, scale: Tensor, y: Tensor) -> Tensor:
            given = {"fn": weight, "base": base, "scale": scale}
            post, comb, z = torch.func.functional_call(module, given, (x,))
            kept = torch.matmul(comb.to(x.dtype).transpose(-1, -2), x)
            return post.to(x.dtype).unsqueeze(-1) * (z + y).unsqueeze(-2) + kept

        return self.work(torch.compile(site, dynamic=False) if compiled else site)

    def _reference(self) -> Answer:
        inputs = doubled(self.inputs)
        out = partial(run, implementation="plain")(*inputs)
        return self._answer(out, torch.autograd.grad(out, inputs, self.upstream.double()))

    def _answer(self, out: Tensor, gradients: Sequence[Tensor]) -> Answer:
        return {"result": out, **dict(zip(NAMES, gradients, strict=True))}

"""The AltUp update: plain, fused, and Gemma 3n's variant of it, theirs and ours, against the speed of a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from altup.bench.cases.floors import copy_bytes, copy_work
from altup.bench.problem import Answer, Fact, Problem, Provider, Setup, Timings, Work, doubled, errors
from altup.kernels import altup_update, altup_update_reference

ACTIVE = 0
SETS = 2  # of inputs, taken in turns
Update = Callable[..., Any]


def problems(setup: Setup) -> Iterator[Problem]:
    kernel, plain = (partial(altup_update, implementation=name) for name in ("triton", "plain"))
    batch, length = (2, 8) if setup.quick else (64, 512)
    for d in (16,) if setup.quick else (768, 2048):
        for k in (2,) if setup.quick else (2, 4):
            inputs = Inputs(setup, k, (batch, length, d))
            compiled = setup.compiles
            dynamic = partial(inputs.dynamic, compiled=compiled)
            yield Problem(
                "rule",
                {"tokens": batch * length, "d": d, "k": k},
                [
                    Provider("triton", partial(inputs.work, kernel), triton=True),
                    Provider("plain eager", partial(inputs.work, plain), "plain"),
                    Provider("plain compiled", partial(inputs.work, plain, compiled=True), "plain", compiled=True),
                    Provider("triton dynamic", partial(dynamic, "triton"), compiled=compiled, triton=True),
                    Provider("auto dynamic", partial(dynamic, "auto"), compiled=compiled),
                    Provider("plain dynamic", partial(dynamic, "plain"), "plain", compiled=compiled),
                    Provider("gemma3n eager", inputs.gemma, "peer"),
                    Provider("gemma3n compiled", partial(inputs.gemma, compiled=True), "peer", compiled=True),
                    Provider("copy", partial(copy_work, setup.device, setup.quick), "floor"),
                ],
                baseline="plain compiled" if setup.compiles else "plain eager",
                tolerances={"": 2e-2 if setup.dtype == torch.bfloat16 else 1e-4},
                derive=partial(of_copy_speed, k=k, block=inputs.block_bytes, quick=setup.quick),
            )


def of_copy_speed(timings: Timings, k: int, block: int, quick: bool) -> Iterable[Fact]:
    """Speed over the speed of a copy, where a rule moves (5K + 3) blocks: forward it reads the K blocks and the
    layer's output and writes K; backward it reads K gradients and all inputs and writes K + 1 gradients.

    Toy sizes say nothing of it: there, most of the time goes into starting operations."""
    if quick or "copy" not in timings:
        return
    speed = copy_bytes(quick) / timings["copy"]["copy"].p50
    for name, modes in timings.items():
        if name != "copy":
            fraction = (5 * k + 3) * block / modes["both"].p50 / speed
            yield Fact(name, "fraction", fraction, f"of copy speed, as {5 * k + 3} blocks")


class Inputs:
    """States as tuples of blocks, the layer's output, coefficients, and upstream gradients."""

    def __init__(self, setup: Setup, k: int, shape: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.k, self.d, self.device, self.dtype = k, shape[-1], setup.device, setup.dtype

        def random(*size: int, **more: Any) -> Tensor:
            return torch.randn(*size, device=setup.device, **{"dtype": setup.dtype, **more})

        self.sets = [
            (
                [random(*shape).requires_grad_() for _ in range(k)],
                random(*shape).requires_grad_(),
                [random(*shape) for _ in range(k)],
            )
            for _ in range(SETS)
        ]
        self.P = (torch.eye(k) + 0.3 * torch.randn(k, k)).to(setup.device).requires_grad_()
        self.g = (1 + 0.3 * torch.randn(k)).to(setup.device).requires_grad_()
        self.block_bytes = self.sets[0][1].numel() * self.sets[0][1].element_size()
        self.reference = cache(self._reference)
        self.gemma_reference = cache(self._gemma_reference)

    def work(self, update: Update, compiled: bool = False) -> Work:
        run = torch.compile(update, dynamic=False) if compiled else update
        coefficients = [self.P, self.g]
        return self._work(lambda x, y: run(tuple(x), y, self.P, self.g, ACTIVE), coefficients, self.reference)

    def dynamic(self, implementation: str, compiled: bool = False) -> Work:
        """Our module with the weights of Gemma 3n's: only its mixture of blocks is a kernel, so it is compiled."""
        from altup.nn.dynamic import DynamicUpdate

        module = self._gemma_module()
        ours = DynamicUpdate.from_gemma3n(module, implementation)
        run = torch.compile(ours, dynamic=False) if compiled else ours
        weights = [ours.C, ours.A, ours.R, ours.norm]  # in the order of theirs
        return self._work(lambda x, y: run(tuple(x), y), weights, self.gemma_reference)

    def gemma(self, compiled: bool = False) -> Work:
        """Hugging Face's own module."""
        module = self._gemma_module()
        run = torch.compile(_gemma_update, dynamic=False) if compiled else _gemma_update
        stacked = [(torch.stack(x).detach().requires_grad_(), torch.stack(g)) for x, _, g in self.sets]

        def forward(i: int) -> tuple[Tensor, int]:
            i %= SETS
            return run(module, stacked[i][0], self.sets[i][1]), i

        def backward(out: tuple[Tensor, int]) -> tuple[Tensor, ...]:
            new, i = out
            return torch.autograd.grad(
                new, [stacked[i][0], self.sets[i][1], *module.parameters()], stacked[i][1], allow_unused=True
            )

        def compare() -> dict[str, float]:
            out = forward(0)
            state, *others = backward(out)
            answer = _answer(out[0], [*state.unbind(0), *others], self.k)
            return errors(answer, self.gemma_reference())

        return Work(forward, backward, compare)

    def _gemma_module(self) -> Any:
        """Always the same weights."""
        from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
        from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp

        config = Gemma3nTextConfig(hidden_size=self.d, altup_num_inputs=self.k, altup_active_idx=ACTIVE)
        torch.manual_seed(1)
        module = Gemma3nTextAltUp(config).to(self.device, self.dtype)
        del module.correct_output_scale  # used elsewhere in that model
        return module

    def _gemma_reference(self) -> Answer:
        """Another function (coefficients from the data), so its reference is itself in float64."""
        module = self._gemma_module()
        wide = type(module)(module.config).to(self.device, torch.float64)
        wide.load_state_dict(module.state_dict(), strict=False)
        del wide.correct_output_scale
        x, y, upstream = self.sets[0]
        (*blocks, output) = doubled([*x, y])
        new = _gemma_update(wide, torch.stack(blocks), output)
        gradients = torch.autograd.grad(new, [*blocks, output, *wide.parameters()], torch.stack(upstream).double())
        return _answer(new, gradients, self.k)

    def _work(self, run: Update, coefficients: Sequence[Tensor], reference: Callable[[], Answer]) -> Work:
        def forward(i: int) -> tuple[Sequence[Tensor], int]:
            x, y, _ = self.sets[i % SETS]
            return run(x, y), i % SETS

        def backward(out: tuple[Sequence[Tensor], int]) -> tuple[Tensor, ...]:
            new, i = out
            x, y, upstream = self.sets[i]
            return torch.autograd.grad(list(new), [*x, y, *coefficients], upstream)

        def compare() -> dict[str, float]:
            out = forward(0)
            return errors(_answer(torch.stack(list(out[0])), backward(out), self.k), reference())

        return Work(forward, backward, compare)

    def _reference(self) -> Answer:
        x, y, upstream = self.sets[0]
        (*blocks, output, P, g) = inputs = doubled([*x, y, self.P, self.g])
        new = altup_update_reference(torch.stack(blocks), output, P, g, ACTIVE)
        return _answer(new, torch.autograd.grad(new, inputs, torch.stack(upstream).double()), self.k)


def _gemma_update(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return module.correct(module.predict(x), y)


def _answer(new: Tensor, gradients: Sequence[Tensor], k: int) -> Answer:
    return {
        "new state": new,
        "state's gradient": list(gradients[:k]),
        "output's gradient": gradients[k],
        "coefficients' gradients": [gradient.flatten() for gradient in gradients[k + 1 :]],
    }

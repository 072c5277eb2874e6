"""How to cut the kernels of Sequence-AltUp's fused update: each configuration is checked, then timed.

    PYTHONPATH=src python3 benchmarks/tune_sequence_update.py

Under TRITON_INTERPRET=1 it runs on a CPU at a toy size and times nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tune_altup_update import DEVICE, INTERPRETED, SETS, copy_speed, error, milliseconds, use_interpreter

from altup.kernels.launch import Config
from altup.kernels.sequence_update import sequence_update
from altup.kernels.sequence_update import triton as kernels

STRIDE = 4
SHAPES = [(2, 11, 24)] if INTERPRETED else [(64, 512, 768), (32, 512, 1024)]
FORWARD = [Config(4, 1), Config(4, 2), Config(8, 1), Config(2, 1)]
BACKWARD = [
    Config(4, 1, 7),
    Config(4, 1, 5),
    Config(1, 1, 28),
    Config(2, 1, 14),
    Config(8, 1, 3),
    Config(4, 2, 4),
    Config(4, 1, 7, 2),
]


class Inputs:
    """One problem in bfloat16 with room for its results."""

    def __init__(self, batch: int, tokens: int, d: int) -> None:
        def block(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE).bfloat16()

        self.x, self.grad = block(batch, tokens, d), block(batch, tokens, d)
        self.computed = block(batch, -(-tokens // STRIDE), d)
        self.a, self.b = torch.randn(2, device=DEVICE), torch.randn(1, device=DEVICE)
        self.given = self.x, self.computed, self.a, self.b
        self.new = torch.empty_like(self.x)
        self.gradients = [torch.empty_like(t) for t in self.given]

    def forward(self) -> None:
        kernels.forward(self.new, *self.given, STRIDE)

    def backward(self) -> None:
        dx, d_computed, da, db = self.gradients
        kernels.backward(dx, d_computed, da, db, self.grad, *self.given, STRIDE)

    def exact(self) -> dict[str, list[Tensor]]:
        x, computed, a, b = (t.float().clone().requires_grad_() for t in self.given)
        new = sequence_update(x, computed, a, b, STRIDE, "plain")
        return {
            "forward": [new.detach()],
            "backward": list(torch.autograd.grad(new, (x, computed, a, b), self.grad.float())),
        }


def main() -> None:
    use_interpreter()
    speed = 0.0 if INTERPRETED else copy_speed()
    for batch, tokens, d in SHAPES:
        torch.manual_seed(0)
        sets = [Inputs(batch, tokens, d) for _ in range(SETS)]
        exact = sets[0].exact()
        size = 2 * batch * tokens * d
        for part, configs, blocks in (
            ("forward", FORWARD, 2 + 1 / STRIDE),
            ("backward", BACKWARD, 3 + 2 / STRIDE),
        ):
            results = [sets[0].new] if part == "forward" else sets[0].gradients
            for config in configs:
                if part == "forward":
                    kernels.FORWARD = config
                else:
                    kernels.BACKWARD[STRIDE] = config
                for tensor in results:
                    tensor.fill_(float("nan"))
                getattr(sets[0], part)()
                distance = error(results, exact[part])
                line = f"{batch} {tokens} {d}  {part:9s} {tuple(config)!s:14s}"
                if distance > 5e-3 or INTERPRETED:
                    print(f"{line} off by {distance:.1e}: not timed")
                    continue
                ms = milliseconds([getattr(inputs, part) for inputs in sets])
                print(f"{line} {ms:7.4f} ms  {blocks * size / ms * 1e3 / speed:4.0%} of copy speed")


if __name__ == "__main__":
    main()

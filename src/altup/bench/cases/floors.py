"""Lower bounds on time: a plain copy, and all matrix products of a T5 and nothing else."""

from __future__ import annotations

from collections import Counter

import torch

from altup.bench.problem import Setup, Work
from altup.models import AltUpT5Config
from altup.models.accounting import list_layers

Shape = tuple[int, int, int]  # rows, columns in, columns out


def product_shapes(config: AltUpT5Config, batch: int, inputs: int, targets: int) -> Counter[Shape]:
    """The linear maps of one forward pass and how often each occurs; attention's scores are not among them."""
    d, inner, out, ff = config.layer_width, config.num_heads * config.d_kv, config.output_width, config.d_ff
    shapes: Counter[Shape] = Counter()
    for layer in list_layers(config, inputs, targets):
        rows = batch * layer.tokens
        shapes[rows, d, inner] += 3  # q, k, v
        shapes[rows, inner, d] += 1
        shapes[rows, d, ff] += 2
        shapes[rows, ff, d] += 1
        if layer.decoder:
            shapes[rows, d, inner] += 1
            shapes[batch * layer.memory, out, inner] += 2  # k, v of the encoder's output
            shapes[rows, inner, d] += 1
    shapes[batch * targets, out, config.vocab_size] += 1
    return shapes


def extra_shapes(config: AltUpT5Config, batch: int, inputs: int, targets: int) -> Counter[Shape]:
    """The products that the extra columns of a wide output add to those of a dense model."""
    width, out = config.layer_width, config.output_width
    shapes = product_shapes(config, batch, inputs, targets)
    return Counter(
        {(r, out - width, n): count for (r, columns, n), count in shapes.items() if columns == out > width}
    )


def product_work(shapes: Counter[Shape], setup: Setup) -> Work:
    """Forward one product for each linear map, backward two."""
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=setup.device, dtype=setup.dtype)

    operands = [
        (random(rows, wide), random(out, wide), random(rows, out), count)
        for (rows, wide, out), count in shapes.items()
    ]

    def forward(i: int) -> None:
        for x, weight, _, count in operands:
            for _ in range(count):
                torch.mm(x, weight.t())

    def backward(out: None) -> None:
        for x, weight, gradient, count in operands:
            for _ in range(count):
                torch.mm(gradient, weight)
                torch.mm(gradient.t(), x)

    return Work(forward, backward)


def copy_work(device: torch.device, quick: bool) -> Work:
    """A plain copy of a large tensor: the speed of memory. `copy_bytes` says how much it moves."""
    source = torch.randn(copy_bytes(quick) // 8, device=device)
    target = torch.empty_like(source)
    return Work(lambda i: target.copy_(source), mode="copy", per_repetition=copy_bytes(quick) / 1e9, unit="GB/s")


def copy_bytes(quick: bool) -> int:
    """Bytes read plus bytes written."""
    return 2**23 if quick else 2**31

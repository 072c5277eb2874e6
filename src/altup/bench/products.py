"""All matrix products of a T5 and nothing else: what no implementation gets around."""

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
    """What the extra columns of a wide output add; all other maps are those of a dense model."""
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

"""AltUp on a Vision Transformer: a wider representation for the same layers.

    python examples/vision.py

A small ViT learns which way the stripes in a noisy image run: as it is, and widened in one call. For a real one
use `ViTForImageClassification.from_pretrained("google/vit-base-patch16-224")` and your own images.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification

import altup


def images(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """[number, 3, 16, 16] of noise over faint stripes, and which of four ways the stripes run."""
    labels = torch.randint(4, (number,), generator=generator)
    rows, columns = torch.arange(16)[:, None], torch.arange(16)[None]
    ways = torch.stack([torch.broadcast_to(w, (16, 16)) for w in (rows, columns, rows + columns, rows - columns)])
    stripes = (ways[labels] * torch.pi / 2).cos()[:, None]
    return stripes + torch.randn(number, 3, 16, 16, generator=generator), labels


def train(model: PreTrainedModel, steps: int = 20) -> float:
    """Accuracy on fresh images after `steps` of training."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.0)
    model.train()
    for _ in range(steps):
        pixels, labels = images(32, generator)
        loss = model(pixel_values=pixels, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pixels, labels = images(500, generator)
    with torch.no_grad():
        return (model.eval()(pixel_values=pixels).logits.argmax(-1) == labels).float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
    )
    config.num_labels = 4
    dense = ViTForImageClassification(config)
    for name, model in (
        ("dense", copy.deepcopy(dense)),
        ("recycled, K=2", altup.widen(copy.deepcopy(dense), "recycled", 2)),
        ("altup, K=2", altup.widen(copy.deepcopy(dense), "altup", 2)),
    ):
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name:14} {parameters:6} parameters, accuracy {train(model):.2f} (chance: 0.25)")


if __name__ == "__main__":
    main()

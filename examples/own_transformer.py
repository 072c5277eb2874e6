"""AltUp in a transformer of one's own: a table and a head K times as wide, and one rule around the layers.

    python examples/own_transformer.py

Two small decoders learn to count on from a random number, one plain (`num_blocks=1` is exactly that) and one with
two blocks. Both run layers of the same width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from altup import AltUp


class Layer(nn.Module):
    """An ordinary pre-norm layer: causal attention and a feed-forward."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.feed_forward(self.norms[1](x))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, width: int = 32, depth: int = 4, num_blocks: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, num_blocks * width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(depth)])
        self.rule = AltUp(num_blocks, depth)
        self.norm = nn.LayerNorm(num_blocks * width)
        self.head = nn.Linear(num_blocks * width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.rule.lift(self.table(tokens))
        for i, layer in enumerate(self.layers):
            state = self.rule(state, layer, i)
        return self.head(self.norm(self.rule.lower(state)))


def train(num_blocks: int, steps: int = 60) -> float:
    torch.manual_seed(0)
    model = Decoder(vocabulary=64, num_blocks=num_blocks)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.0)
    for _ in range(steps):
        tokens = (torch.randint(64, (16, 1)) + torch.arange(9)) % 64
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    for num_blocks in (1, 2):
        print(f"num_blocks={num_blocks}: loss {train(num_blocks):.3f} (chance: {torch.tensor(64.0).log():.3f})")

"""Multi-head attention as T5 has it: no biases, no 1/√d_kv (it is folded into q's initial values)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from altup.kernels import attention

if TYPE_CHECKING:
    from transformers import Cache


class Attention(nn.Module):
    """Attention of `width`-wide queries over themselves, or over a memory that is `memory_width` wide.

    `index` is the layer's place in its stack, under which keys and values are kept in a cache.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        d_kv: int,
        memory_width: int | None = None,
        dropout: float = 0.0,
        index: int = 0,
    ) -> None:
        super().__init__()
        inner = num_heads * d_kv
        self.d_kv = d_kv
        self.dropout = dropout
        self.index = index
        self.q = nn.Linear(width, inner, bias=False)
        self.k = nn.Linear(memory_width or width, inner, bias=False)
        self.v = nn.Linear(memory_width or width, inner, bias=False)
        self.o = nn.Linear(inner, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """By fan-in, as T5 does, with q smaller by √d_kv."""
        nn.init.normal_(self.q.weight, std=(self.q.in_features * self.d_kv) ** -0.5)
        for linear in (self.k, self.v, self.o):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        memory: Tensor | None = None,
        cache: Cache | None = None,
        cached: bool = False,
    ) -> Tensor:
        """x: [batch, queries, width]; bias: broadcastable to [batch, heads, queries, keys].

        New keys and values are appended to `cache`; with `cached=True` they are only read from it.
        """
        if cache is not None and cached:
            k, v = cache.layers[self.index].keys, cache.layers[self.index].values  # type: ignore[union-attr]
        else:
            source = x if memory is None else memory
            k, v = self._heads(self.k(source)), self._heads(self.v(source))
            if cache is not None:
                k, v = cache.update(k, v, self.index)
        dropout = self.dropout if self.training else 0.0
        mixed = attention(self._heads(self.q(x)), k, v, bias, dropout)  # type: ignore[arg-type]
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, tokens, heads·d_kv] → [batch, heads, tokens, d_kv]."""
        return x.unflatten(-1, (-1, self.d_kv)).transpose(1, 2)

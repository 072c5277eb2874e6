"""Multi-head attention, as T5 has it and as BERT and today's decoders do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from altup.kernels.attention import PEAKS, WIDTHS, apart, attention, joined, joined_attention
from altup.kernels.launch import runs_triton
from altup.kernels.rotary import rotary_heads, rotate
from altup.nn.linear import Fp8Maps, Rounding, apply_linears, is_bare, joined_linear, multiplies_in_fp8

if TYPE_CHECKING:
    from transformers import Cache


class Seen(NamedTuple):
    """Which keys a query sees.

    Those of its own segment, [batch, queries] and [batch, keys], and none of the future where `causal`; a padding
    mask is the segments of keys, where all queries are of segment 1. Where a cache makes it less regular,
    `additive` says it all: what is added to the scores, broadcastable to [batch, heads, queries, keys].
    """

    causal: bool = False
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    additive: Tensor | None = None


EVERYTHING = Seen()


class Projected(NamedTuple):
    """A memory's keys and values for one layer, each [batch, keys, heads·d_kv]."""

    keys: Tensor
    values: Tensor


class Joined(NamedTuple):
    """A memory's keys and values for one layer in one tensor [batch, keys, 2, heads, d_kv]."""

    both: Tensor


class _OfEachLayer(torch.autograd.Function):
    """[batch, keys, layers, 2, heads, d_kv] → one part a layer. Their gradients are written side by side by the
    attention's kernels, and are then one tensor already."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor) -> tuple[Tensor, ...]:
        ctx.shape = projected.shape
        return projected.unbind(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return joined([gradient.flatten(2) for gradient in gradients]).view(ctx.shape)


def project_memory(memory: Tensor, layers: Sequence[Attention]) -> Sequence[Projected | Joined]:
    """The keys and values of many layers in one product, so that the memory's gradient is one product too.

    Layer by layer it would be a sum of twice as many products as there are layers, each as wide as the memory.
    """
    linears = [linear for layer in layers for linear in (layer.k, layer.v)]
    projected: Sequence[Tensor]
    if layers[0].in_fp8("memory"):
        projected = apply_linears(memory, linears, fp8=True)
    elif all(layer.joins("memory", memory) for layer in layers):
        together = joined_linear(memory, linears).unflatten(-1, (len(layers), 2, -1, layers[0].d_kv))
        return [Joined(both) for both in _OfEachLayer.apply(together)]
    else:
        projected = joined_linear(memory, linears).unflatten(-1, (len(linears), -1)).unbind(-2)
    return [Projected(*projected[i : i + 2]) for i in range(0, 2 * len(layers), 2)]


def can_share_memory(layers: Sequence[Attention]) -> bool:
    """Whether `project_memory` may take the weights themselves: not where they are sharded, wrapped or watched."""
    return all(
        is_bare(linear) and type(linear.weight) is nn.Parameter
        for layer in layers
        for linear in (layer.k, layer.v)
    )


class Attention(Fp8Maps):
    """T5's attention of `width`-wide queries over themselves, or over a memory that is `memory_width` wide.

    No biases, no 1/√d_kv (it is folded into q's initial values). `index` is the layer's place in its stack, under
    which keys and values are kept in a cache.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        d_kv: int,
        memory_width: int | None = None,
        dropout: float = 0.0,
        index: int = 0,
        per_sequence: bool = False,
    ) -> None:
        super().__init__()
        inner = num_heads * d_kv
        self.d_kv = d_kv
        self.dropout = dropout
        self.per_sequence = per_sequence
        self.index = index
        self.has_memory = memory_width is not None
        self.q = nn.Linear(width, inner, bias=False)
        self.k = nn.Linear(memory_width or width, inner, bias=False)
        self.v = nn.Linear(memory_width or width, inner, bias=False)
        self.o = nn.Linear(inner, width, bias=False)
        self.reset_parameters()

    def takes_fp8(self, x: Tensor) -> bool:
        maps = (self.q,) if self.has_memory else (self.k, self.v, self.q)
        wanted = self.in_fp8("projections") and (self.in_fp8("memory") or not self.has_memory)
        return wanted and multiplies_in_fp8(x, maps)

    def maps_of_one_input(self) -> dict[str, Sequence[nn.Linear]]:
        queries: dict[str, Sequence[nn.Linear]] = (
            {"memory": (self.q,)} if self.has_memory else {"own": (self.k, self.v, self.q)}
        )
        return {**queries, "output": (self.o,)}

    def reset_parameters(self) -> None:
        """By fan-in, as T5 does, with q smaller by √d_kv."""
        nn.init.normal_(self.q.weight, std=(self.q.in_features * self.d_kv) ** -0.5)
        for linear in (self.k, self.v, self.o):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        seen: Seen = EVERYTHING,
        memory: Tensor | Projected | Joined | None = None,
        cache: Cache | None = None,
        cached: bool = False,
        constant_beyond: int | None = None,
        rounding: Rounding = None,
    ) -> Tensor:
        """x: [batch, queries, width]; bias: [heads, queries + keys − 1], the bias of query i and key j at j − i +
        queries − 1. It does not change where |j − i| is `constant_beyond` or more, which saves time.

        `memory` is what is attended to, [batch, keys, memory_width], or its keys and values already.
        New keys and values are appended to `cache`; with `cached=True` they are only read from it.
        """
        own = (self.k, self.v) if memory is None and not cached else ()
        options: dict[str, Any] = {
            "by_distance": bias,
            "causal": seen.causal,
            "query_segments": seen.query_segments,
            "key_segments": seen.key_segments,
            "constant_beyond": constant_beyond,
            "dropout": self.dropout if self.training else 0.0,
            "per_sequence": self.per_sequence,
        }
        if isinstance(memory, Joined) or (own and cache is None and self.joins("projections", x)):
            return self._output(self._attend_joined(x, seen, memory, options))
        slots = PEAKS if own and cache is None and self._takes_kernels(x, bias, seen) else 0
        rounded = self.rounded_maps("memory" if memory is not None or cached else "own")
        mapped = apply_linears(x, (*own, self.q), self.in_fp8("projections"), rounding, slots, rounded)
        (*projected, queries), peaks = mapped[: len(own) + 1], mapped[len(own) + 1 :]
        if cache is not None and cached:
            k, v = cache.layers[self.index].keys, cache.layers[self.index].values  # type: ignore[union-attr]
        elif isinstance(memory, Projected):
            k, v = self._heads(memory.keys), self._heads(memory.values)
        else:
            k, v = self.project(memory) if memory is not None else map(self._heads, projected)
            if cache is not None:
                k, v = cache.update(k, v, self.index)
        options["peaks"] = peaks[0] if peaks else None
        return self._output(attention(self._heads(queries), k, v, seen.additive, **options))  # type: ignore[arg-type]

    def _takes_kernels(self, x: Tensor, bias: Tensor | None, seen: Seen) -> bool:
        """Whether `attention` will take its own kernels for 16 bits."""
        wanted = bias is not None or seen.query_segments is not None
        return wanted and seen.additive is None and self.d_kv in WIDTHS and runs_triton(x.device)

    def _attend_joined(self, x: Tensor, seen: Seen, memory: Any, options: dict[str, Any]) -> Tensor:
        """What `attention` gives without a cache, where as much as possible is one product."""
        maps = (self.q,) if memory is not None else (self.q, self.k, self.v)
        parts = [joined_linear(x, maps).unflatten(-1, (len(maps), -1, self.d_kv))]
        if memory is not None:
            parts.append(memory.both)
        if seen.additive is None:
            return joined_attention(*parts, **options)
        return attention(*apart(parts), seen.additive, **options)

    def _output(self, mixed: Tensor) -> Tensor:
        """[batch, heads, tokens, d_kv] → [batch, tokens, width]."""
        fp8, rounded = self.in_fp8("output"), self.rounded_maps("output")
        return apply_linears(mixed.transpose(1, 2).flatten(2), (self.o,), fp8, rounded=rounded)[0]

    def project(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of what is attended to, each [batch, heads, tokens, d_kv]."""
        k, v = apply_linears(source, (self.k, self.v), self.in_fp8("memory"))
        return self._heads(k), self._heads(v)

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, tokens, heads·d_kv] → [batch, heads, tokens, d_kv]."""
        return x.unflatten(-1, (-1, self.d_kv)).transpose(1, 2)


class GroupedAttention(Fp8Maps):
    """BERT's and today's decoders': softmax(q·kᵀ/√d_kv + mask)·v, where each of `num_kv_heads` keys and values
    serves a group of query heads.

    `index` is the layer's place in its stack, under which keys and values are kept in a cache.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        d_kv: int,
        num_kv_heads: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        index: int = 0,
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        self.d_kv = d_kv
        self.group = num_heads // num_kv_heads
        self.dropout = dropout
        self.index = index
        self.q = nn.Linear(width, num_heads * d_kv, bias=bias)
        self.k = nn.Linear(width, num_kv_heads * d_kv, bias=bias)
        self.v = nn.Linear(width, num_kv_heads * d_kv, bias=bias)
        self.o = nn.Linear(num_heads * d_kv, width, bias=bias)

    def maps_of_one_input(self) -> dict[str, Sequence[nn.Linear]]:
        return {"own": (self.q, self.k, self.v), "output": (self.o,)}

    def takes_fp8(self, x: Tensor) -> bool:
        return self.in_fp8("projections") and multiplies_in_fp8(x, (self.q, self.k, self.v))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        causal: bool = False,
        rounding: Rounding = None,
    ) -> Tensor:
        """x: [batch, tokens, width]; mask: what is added to scores, broadcastable to [batch, heads, tokens, keys].

        `causal` hides the future where there is no mask; a mask must hide it itself.
        """
        q, k, v = self._project(x, rotation, rounding)
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        if self.group > 1 and mask is not None:
            # With a mask, no fused kernel reads shared heads.
            k, v = k.repeat_interleave(self.group, dim=1), v.repeat_interleave(self.group, dim=1)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None else mask.to(q.dtype),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal and mask is None,
            enable_gqa=self.group > 1 and mask is None,
        )
        fp8, rounded = self.in_fp8("output"), self.rounded_maps("output")
        return apply_linears(mixed.transpose(1, 2).flatten(2), (self.o,), fp8, rounded=rounded)[0]

    def _project(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, rounding: Rounding
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [batch, heads, tokens, d_kv]; where `rotation` is given, queries and keys
        are turned."""
        maps = (self.q, self.k, self.v)
        if self.joins("projections", x):
            joined = joined_linear(x, maps)
            heads = [linear.out_features // self.d_kv for linear in maps]
            if rotation is not None:
                return rotary_heads(joined, *rotation, heads[0], heads[1])
            q, k, v = joined.unflatten(-1, (-1, self.d_kv)).transpose(1, 2).split(heads, dim=1)
            return q, k, v
        fp8, rounded = self.in_fp8("projections"), self.rounded_maps("own")
        projected = apply_linears(x, maps, fp8, rounding, rounded=rounded)
        q, k, v = (part.unflatten(-1, (-1, self.d_kv)).transpose(1, 2) for part in projected)
        return (q, k, v) if rotation is None else (rotate(q, *rotation), rotate(k, *rotation), v)

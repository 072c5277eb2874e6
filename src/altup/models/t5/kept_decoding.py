"""Greedy decoding that an accelerated T5 keeps from call to call: a step with few kernels, recorded once.

A layer is eight kernels of our own (`kernels/decoding`) for up to seven rows, one of AltUp's, and twelve for eight
rows and more. Where neither can run, or they choose worse tokens than plain code in a trial, the plain step is
compiled. In all of them products that read the same input are one: queries, keys and values, and both maps into
the feed-forward. What such a step needs beside its inputs is made by a second graph at the beginning of each call:
the joined weights, in the dtype that is computed in, and the keys and values of cross-attention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from altup.kernels.altup_update import FUSED_BLOCKS
from altup.kernels.cuda_graph import Replay, can_record, record, try_recording, warm_up
from altup.kernels.decoding import (
    add_and_norm,
    attend_to_cache,
    attend_to_memory,
    can_decode,
    can_decode_many,
    choose,
    gate,
    linear,
    linear_and_update,
    product,
    update_and_norm,
)
from altup.models.stack import COMPILED
from altup.nn.altup import AltUp, AltUpUpdate, Sum
from altup.nn.layers import GatedFeedForward, RMSNorm
from altup.nn.linear import is_bare, is_unhooked
from altup.nn.positions import distance_bucket

log = logging.getLogger(__name__)
LAUNCHED = "decoding is slower than it could be, because it cannot be recorded as a CUDA graph"
ALIGNED = 8  # places of a cache: attention copies a bias whose rows are of other lengths
# Of a trial of the kernels: its tokens, and how far theirs may be below the highest logit, in standard deviations.
TRIAL, REGRET = 3, 0.5


class Prompts(NamedTuple):
    """What is decoded: rows that begin with `input_ids` and get `limit` tokens at most, from the encoder's
    `memory`."""

    input_ids: Tensor
    limit: int
    eos: Tensor | None
    pad: int
    memory: Tensor
    mask: Tensor | None

    @property
    def shapes(self) -> tuple[Any, ...]:
        """What two of a kind share."""
        tensors = (self.input_ids, self.memory, self.mask, self.eos)
        return (*(None if t is None else (t.shape, t.dtype) for t in tensors), self.limit, self.pad)


def can_keep(model: Any) -> bool:
    """Whether the decoder is made of plain parts, whose weights may be taken for them, and drops nothing."""
    whole_layers = not model.decoder.by_sublayer
    return not model.training and whole_layers and all(_is_plain(layer) for layer in model.decoder.layers)


def _is_plain(layer: Any) -> bool:
    attentions, forward = (layer.attention, layer.cross_attention), layer.feed_forward
    if layer.experts is not None or type(forward) is not GatedFeedForward or not is_unhooked(layer):
        return False
    linears = [getattr(attention, name) for attention in attentions for name in "qkvo"]
    return all(map(is_bare, [*linears, forward.wi_0, forward.wi_1, forward.wo]))


def can_fuse(model: Any) -> bool:
    """Whether norms and head are plain too, so that they may be parts of other kernels."""
    decoder = model.decoder
    names = ("attention_norm", "cross_norm", "feed_forward_norm")
    norms = [*(getattr(layer, name) for layer in decoder.layers for name in names), decoder.final_norm]
    return is_bare(model.lm_head) and all(type(norm) is RMSNorm and is_unhooked(norm) for norm in norms)


def is_dense(rule: Any) -> bool:
    """Whether a layer's output is the next state."""
    return type(rule) is Sum or (type(rule) is AltUp and rule.num_blocks == 1)


def joins_update(rule: Any) -> bool:
    """Whether the update of the blocks may be part of a layer's last kernel."""
    plain = all(type(update) is AltUpUpdate and is_unhooked(update) for update in getattr(rule, "updates", ()))
    return type(rule) is AltUp and 1 < rule.num_blocks <= FUSED_BLOCKS and plain


class Layer:
    """A decoder's layer for one new token of each row."""

    def __init__(self, layer: Any, memory: Tensor, places: int, dtype: torch.dtype) -> None:
        self._layer, self._memory = layer, memory
        own, cross, forward = layer.attention, layer.cross_attention, layer.feed_forward
        self.d_kv = own.d_kv
        self._parts = [
            [own.q.weight, own.k.weight, own.v.weight], [own.o.weight], [cross.q.weight], [cross.o.weight],
            [forward.wi_0.weight, forward.wi_1.weight], [forward.wo.weight],
        ]  # fmt: skip
        self.weights = [
            part[0] if len(part) == 1 and part[0].dtype == dtype else torch.cat(part).to(dtype)
            for part in self._parts
        ]
        batch, heads = len(memory), own.q.out_features // own.d_kv
        shape = (batch, heads, places, own.d_kv)
        self.keys, self.values = (memory.new_zeros(shape, dtype=dtype) for _ in range(2))
        shape = (batch, heads, memory.shape[1], own.d_kv)
        self.memory_keys, self.memory_values = (memory.new_zeros(shape, dtype=dtype) for _ in range(2))

    def fill(self) -> None:
        """Weights as they are now, and the keys and values of the memory."""
        for weight, part in zip(self.weights, self._parts, strict=True):
            if weight is not part[0]:
                weight.copy_(torch.cat(part) if len(part) > 1 else part[0])
        keys, values = self._layer.cross_attention.project(self._memory)
        self.memory_keys.copy_(keys)
        self.memory_values.copy_(values)

    def __call__(self, x: Tensor, place: Tensor, bias: Tensor, mask: Tensor | None) -> Any:
        """x: [batch, 1, d], the token at `place`; bias: [1, heads, 1, places]; mask: [batch, 1, 1, inputs]."""
        layer, (joined, own_out, query, cross_out, into, out) = self._layer, self.weights
        q, k, v = self._heads(F.linear(layer.attention_norm(x), joined)).chunk(3, dim=1)
        self.keys.index_copy_(2, place, k)
        self.values.index_copy_(2, place, v)
        mixed = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=bias, scale=1.0)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), own_out)
        q = self._heads(F.linear(layer.cross_norm(x), query))
        mixed = F.scaled_dot_product_attention(q, self.memory_keys, self.memory_values, attn_mask=mask, scale=1.0)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), cross_out)
        gate, hidden = F.linear(layer.feed_forward_norm(x), into).chunk(2, dim=-1)
        update = F.linear(F.gelu(gate, approximate="tanh") * hidden, out)
        return x, update

    def fused(
        self, x: Tensor, place: Tensor, near: Tensor, mask: Tensor | None, update: tuple[Any, ...] | None = None
    ) -> Any:
        """The same as eight kernels; place: [batch], near: [heads, places], mask: [batch, inputs].

        With AltUp's `update`, (state, P, g, active), it gives the new state.
        """
        layer, (joined, own_out, query, cross_out, into, out) = self._layer, self.weights
        shape, x = x.shape, x.flatten(0, 1)
        norms = (
            (norm.weight, norm.eps) for norm in (layer.attention_norm, layer.cross_norm, layer.feed_forward_norm)
        )
        mixed = attend_to_cache(linear(x, joined, *next(norms)), self.keys, self.values, place, near)
        x = linear(mixed, own_out, residual=x)
        seen = attend_to_memory(linear(x, query, *next(norms)), self.memory_keys, self.memory_values, mask)
        x = linear(seen, cross_out, residual=x)
        hidden = linear(x, into, *next(norms), gated=True)
        if update is not None:
            state, *coefficients = update
            blocks = tuple(block.flatten(0, 1) for block in state)
            return tuple(new.view(shape) for new in linear_and_update(hidden, out, x, blocks, *coefficients))
        return linear(hidden, out, residual=x).view(shape)

    def between_products(
        self, x: Tensor, normed: Tensor, place: Tensor, near: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same for many rows [batch, d], whose first norm is known, as products and kernels between them.

        Gives x before the last addition, and parts of what is to be added.
        """
        layer, (joined, own_out, query, cross_out, into, out) = self._layer, self.weights
        cross, forward, dtype = layer.cross_norm, layer.feed_forward_norm, joined.dtype
        mixed = attend_to_cache(product(normed, joined), self.keys, self.values, place, near)
        x, normed = add_and_norm(x, product(mixed, own_out), cross.weight, cross.eps, dtype)
        seen = attend_to_memory(product(normed, query), self.memory_keys, self.memory_values, mask)
        x, normed = add_and_norm(x, product(seen, cross_out), forward.weight, forward.eps, dtype)  # type: ignore[arg-type]
        return x, product(gate(product(normed, into), dtype), out)

    @property
    def first_norm(self) -> RMSNorm:
        return self._layer.attention_norm

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, 1, heads·d_kv] → [batch, heads, 1, d_kv]."""
        return x.unflatten(-1, (-1, self.d_kv)).transpose(1, 2)


class KeptDecoding:
    """For one shape of inputs: each batch is copied to the places of the first.

    Two graphs: what a call begins with, and a step, which feeds itself. Where they cannot be recorded, both are
    launched.
    """

    def __init__(self, model: Any, prompts: Prompts) -> None:
        input_ids, limit, eos, pad, memory, mask = prompts
        self.model, self.limit, self.pad = model, limit, pad
        self.latest, self.memory = input_ids.clone(), memory.clone()
        self.eos, self.mask = (None if tensor is None else tensor.clone() for tensor in (eos, mask))
        batch, device = len(input_ids), input_ids.device
        kind = device.type
        self.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
        self.tokens = input_ids.new_full((batch, limit), pad)
        self.place = torch.zeros(batch, dtype=torch.long, device=device)  # of the token that is fed
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self.places = -(-limit // ALIGNED) * ALIGNED
        self.layers = [Layer(layer, self.memory, self.places, self.dtype) for layer in model.decoder.layers]
        self.hidden = None if mask is None else memory.new_zeros(batch, 1, 1, memory.shape[1], dtype=self.dtype)
        head = model.lm_head.weight
        self.head = head if head.dtype == self.dtype else head.to(self.dtype)
        table = model.decoder.relative_bias
        self.near = table.weight.new_zeros(table.weight.shape[1], self.places, dtype=torch.float32)
        self.logits: Callable[[Tensor], Tensor] = self._logits
        self.begin: Callable[[], Any] = self._begin
        self.step: Callable[[], Any] = self._step
        d_kv, rule = self.layers[0].d_kv, model.decoder.rule
        fused = None
        if can_fuse(model):
            if can_decode_many(device, self.dtype, batch, d_kv) and (is_dense(rule) or joins_update(rule)):
                fused = self._step_of_many_rows
            elif can_decode(device, self.dtype, batch, d_kv, rule.num_blocks):
                fused = self._fused_step
        self.is_fused = fused is not None and self._kernels_work(fused)
        if fused is not None and self.is_fused:
            self.step = fused
        if can_record(device):
            if getattr(model, COMPILED, False) and not self.is_fused:
                self._compile()
            if recorded := try_recording(lambda: self._record(device), device, LAUNCHED, owner=model):
                self.begin, self.step = recorded

    def _kernels_work(self, step: Callable[[], None]) -> bool:
        """Whether the kernels give the tokens of plain code in a trial, or nearly as likely ones."""
        try:
            with torch.compiler.set_stance("force_eager"):
                regret = self._try_kernels(step)
        except Exception as error:
            log.warning("decoding is slower than it could be, because its kernels failed: %s", error)
            return False
        if not regret <= REGRET:
            log.warning("decoding is slower than it could be, because its kernels are wrong by %.2g", regret)
        return regret <= REGRET

    def _try_kernels(self, step: Callable[[], None]) -> float:
        self._begin()
        worst = torch.zeros((), device=self.latest.device)
        for _ in range(TRIAL):
            logits = self._logits(self.latest).float()
            step()
            self.ended.zero_()
            chosen = logits.gather(1, self.latest).squeeze(1)
            worst = torch.maximum(worst, ((logits.amax(dim=1) - chosen) / logits.std(dim=1)).max())
        return float(worst)

    def _record(self, device: torch.device) -> tuple[Replay, Replay]:
        """`begin` and `step` as graphs."""
        with self.stance():
            step = self.step

            def run() -> None:
                self._begin()
                step()

            warm_up(run, device)
            begin = record(self._begin)
            return begin, record(step, begin.graph.pool())

    def _compile(self) -> None:
        """The step as fewer kernels; where that fails it stays as it is."""
        self.logits = torch.compile(self._logits, dynamic=False)
        try:
            self._begin()
            self._step()
        except Exception as error:
            log.warning("decoding is slower than it could be, because torch.compile failed: %s", error)
            self.logits = self._logits

    def stance(self) -> Any:
        """Parts that were compiled for training are not compiled again for a step that is not."""
        compiled = self.logits != self._logits
        return nullcontext() if compiled else torch.compiler.set_stance("force_eager")

    def _begin(self) -> None:
        for layer in self.layers:
            layer.fill()
        if self.mask is not None and self.hidden is not None:
            seen = self.model._memory_mask(self.mask, self.memory)
            self.hidden.copy_(torch.where(seen != 0, 0.0, torch.finfo(self.dtype).min)[:, None, None])
        if self.head is not self.model.lm_head.weight:
            self.head.copy_(self.model.lm_head.weight)
        self.near.copy_(self._bias(-torch.arange(self.places, device=self.near.device)))
        self.tokens.fill_(self.pad)
        self.tokens[:, :1] = self.latest
        self.place.zero_()
        self.ended.zero_()

    def _logits(self, latest: Tensor) -> Tensor:
        """[batch, vocabulary], of the token behind `latest` [batch, 1]."""
        model, decoder = self.model, self.model.decoder
        state = decoder.lift(model.encoder.embed_tokens(latest))
        place = self.place[:1]
        distance = torch.arange(self.places, device=latest.device) - place
        bias = self._bias(distance).to(self.dtype)[None, :, None]
        bias = bias.masked_fill(distance > 0, torch.finfo(self.dtype).min)
        for index, layer in enumerate(self.layers):
            state = decoder.rule(state, layer, index, place, bias, self.hidden)
        hidden = decoder.lower(state)
        if model.config.scale_decoder_outputs:
            hidden = hidden * model.config.d_model**-0.5
        return model.logits(hidden)[:, -1]

    def _bias(self, distance: Tensor) -> Tensor:
        """[heads, places] of keys that lie at `distance` from the query."""
        table = self.model.decoder.relative_bias
        bucket = distance_bucket(distance, table.num_buckets, table.max_distance, bidirectional=False)
        return table.weight[bucket].t()

    def _step(self) -> None:
        found = self.logits(self.latest).float().argmax(dim=-1).masked_fill(self.ended, self.pad)
        self.place.add_(1)
        self.tokens.index_copy_(1, self.place[:1], found[:, None])
        if self.eos is not None:
            self.ended.logical_or_((found[:, None] == self.eos).any(dim=1))
        self.latest.copy_(found[:, None])

    def _fused_step(self) -> None:
        """The norm behind the layers is part of the head; a scale before it changes no maximum."""
        decoder = self.model.decoder
        state = decoder.lift(self.model.encoder.embed_tokens(self.latest))
        hidden = None if self.hidden is None else self.hidden.flatten(1)
        inputs = (self.place, self.near, hidden)
        for index, layer in enumerate(self.layers):
            if joins_update(decoder.rule):
                update, active = decoder.rule.updates[index], decoder.rule.active[index]
                state = layer.fused(state[active], *inputs, (state, update.P, update.g, active))
            else:
                state = decoder.rule(state, layer.fused, index, *inputs)
        norm = decoder.final_norm
        self._choose(decoder.rule.lower(state).flatten(0, 1), norm.weight, norm.eps)

    def _step_of_many_rows(self) -> None:
        """Each layer's last addition, AltUp's update and the next layer's norm are one kernel."""
        decoder, rule = self.model.decoder, self.model.decoder.rule
        state = decoder.lift(self.model.encoder.embed_tokens(self.latest))
        blocks = tuple(block.flatten(0, 1).contiguous() for block in state)
        widened = len(blocks) > 1
        active = [*rule.active, 0] if widened else [0] * (len(self.layers) + 1)
        hidden = None if self.hidden is None else self.hidden.flatten(1)
        norms = [layer.first_norm for layer in self.layers]
        normed: Any  # of the block that comes next
        _, normed = add_and_norm(blocks[active[0]], None, norms[0].weight, norms[0].eps, self.dtype)
        for index, layer in enumerate(self.layers):
            x, parts = layer.between_products(blocks[active[index]], normed, self.place, self.near, hidden)
            is_last = index + 1 == len(self.layers)
            norm = decoder.final_norm if is_last else norms[index + 1]
            if widened:
                update = rule.updates[index]
                blocks, normed = update_and_norm(
                    x, parts, blocks, update.P, update.g, active[index], following=active[index + 1],
                    norm=None if is_last else norm.weight, eps=norm.eps, dtype=self.dtype,
                )  # fmt: skip
            else:
                x, normed = add_and_norm(x, parts, norm.weight, norm.eps, self.dtype)
                blocks = (x,)
        if widened:
            norm = decoder.final_norm
            _, normed = add_and_norm(rule.lower(blocks).contiguous(), None, norm.weight, norm.eps, self.dtype)
        self._choose(normed)

    def _choose(self, hidden: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> None:
        choose(
            hidden, self.head, norm, eps, tokens=self.tokens, latest=self.latest, place=self.place,
            ended=self.ended, eos=self.eos, pad=self.pad,
        )  # fmt: skip

    def set_inputs(self, prompts: Prompts) -> None:
        self.latest.copy_(prompts.input_ids)
        self.memory.copy_(prompts.memory)
        if self.eos is not None and prompts.eos is not None:
            self.eos.copy_(prompts.eos)
        if self.mask is not None and prompts.mask is not None:
            self.mask.copy_(prompts.mask)

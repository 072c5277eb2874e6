"""Greedy decoding on a GPU: after the first few tokens, a step is one CUDA graph that is replayed.

A step of a decoder is hundreds of small kernels, and launching them one by one takes many times as long as running
them. Everything a step reads or writes has a fixed place here: a static cache, the tokens so far, where they end.

An accelerated model (`altup.accelerate`) keeps what it has recorded for the next call with inputs of that shape,
and compiles the step before it is recorded, so that it is fewer kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.modeling_outputs import BaseModelOutput

from altup.kernels.cuda_graph import record, warm_up
from altup.models.recorded_calls import RecordedCalls
from altup.models.recorded_decoding import (
    fits_memory,
    free_memory,
    is_hooked,
    repeatable_attention,
    uncached_autocast,
)

log = logging.getLogger(__name__)
EAGER_STEPS = 3  # steps that are run one by one: they warm up what a graph records, and short answers end here
ALIGNED = 8  # places of a cache: attention copies a bias whose rows are of other lengths
KEPT = 2  # recordings that an accelerated model keeps: each holds the caches of a batch
CHECK_EVERY = 8  # replayed steps between two checks whether all rows have ended, for which the host waits


class ReplayedGeneration:
    """Put before Hugging Face's GenerationMixin: plain greedy decoding on a CUDA GPU takes the fast way."""

    @repeatable_attention()
    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **kwargs: Any,
    ) -> Any:
        plain = _is_greedy(generation_config, logits_processor, stopping_criteria, kwargs)
        fast = input_ids.is_cuda and plain and not is_hooked(self)
        if not (fast and fits(self, len(input_ids), stopping_criteria.max_length, free_memory(input_ids.device))):
            there: Any = super()
            return there._sample(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        eos = [criteria.eos_token_id for criteria in stopping_criteria if isinstance(criteria, EosTokenCriteria)]
        return decode_greedily(
            self,
            input_ids,
            limit=stopping_criteria.max_length,
            eos=torch.cat([numbers.flatten() for numbers in eos]).to(input_ids.device) if eos else None,
            pad=generation_config.pad_token_id,
            encoder_outputs=kwargs["encoder_outputs"],
            attention_mask=kwargs.get("attention_mask"),
            kept=_kept(self),
        )


def _kept(model: Any) -> dict[Any, Any] | None:
    """What an accelerated model has recorded, as long as its weights lie where they lay."""
    calls = model._compiled_call_impl
    return calls.decodings(model) if isinstance(calls, RecordedCalls) else None


def _is_greedy(config: Any, logits_processor: Any, stopping_criteria: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the caller wants tokens alone, chosen by the largest logit alone."""
    cache = kwargs.get("past_key_values")
    own_cache = getattr(cache, "self_attention_cache", cache)
    return (
        not config.do_sample
        and not len(logits_processor)
        and not (kwargs.get("synced_gpus") or kwargs.get("streamer"))
        and config.pad_token_id is not None
        and not {"decoder_attention_mask", "decoder_segments"} & kwargs.keys()
        and not config.return_dict_in_generate
        and config.use_cache
        and config.cache_implementation is None
        and (own_cache is None or (type(own_cache) is DynamicCache and own_cache.get_seq_length() == 0))
        and all(isinstance(criteria, MaxLengthCriteria | EosTokenCriteria) for criteria in stopping_criteria)
        and stopping_criteria.max_length is not None
    )


def fits(model: Any, batch: int, limit: int, free: int) -> bool:
    """Whether a static cache for `limit` tokens a row is a small part of `free` bytes.

    It has 2 · layers · batch · heads · d_kv · limit numbers, in the type that the model computes in.
    """
    config = model.config
    numbers = 2 * config.num_decoder_layers * batch * config.num_heads * config.d_kv * limit
    return fits_memory(numbers, model.dtype, model.device, free)


@torch.no_grad()
def decode_greedily(
    model: Any,
    input_ids: Tensor,
    *,
    limit: int,
    eos: Tensor | None,
    pad: int,
    encoder_outputs: Any,
    attention_mask: Tensor | None,
    kept: dict[Any, Any] | None = None,
) -> Tensor:
    """[batch, ≤ limit]: `input_ids` and the likeliest tokens behind them, with `pad` behind an end.

    What is recorded for the second call of a kind stays in `kept` for the next ones. On a CPU the same steps run
    without a graph.
    """
    given, device = input_ids.shape[1], input_ids.device
    memory, kind = encoder_outputs[0], device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    with uncached_autocast(device):
        if kept is not None and given == 1:
            shapes = [None if t is None else (t.shape, t.dtype) for t in (input_ids, memory, attention_mask, eos)]
            key = (*shapes, limit, pad, autocast, torch.is_inference_mode_enabled())
            if key in kept:
                decoding = kept.pop(key) or KeptDecoding(model, input_ids, limit, eos, pad, memory, attention_mask)
                kept[key] = decoding  # the latest one is the last
                return decoding.decode(input_ids, eos, memory, attention_mask)
            kept[key] = None
            while len(kept) > KEPT:
                kept.pop(next(iter(kept)))
        with torch.compiler.set_stance("force_eager"):
            return Decoding(model, input_ids, limit, eos, pad, memory, attention_mask).decode_once()


class Decoding:
    """A batch that is decoded: its caches, its tokens so far, and which rows have ended."""

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        limit: int,
        eos: Tensor | None,
        pad: int,
        memory: Tensor,
        mask: Tensor | None,
    ) -> None:
        self.model, self.limit, self.pad = model, limit, pad
        self.eos, self.memory, self.mask = eos, memory, mask
        batch, self.given = input_ids.shape
        self.device = input_ids.device
        places = -(-limit // ALIGNED) * ALIGNED
        self.cache = EncoderDecoderCache(StaticCache(model.config, max_cache_len=places), DynamicCache())
        self.tokens = input_ids.new_full((batch, limit), pad)
        self.tokens[:, : self.given] = input_ids
        self.latest = input_ids.clone()
        self.place = torch.tensor([self.given], device=self.device)
        self.ended = torch.zeros(batch, dtype=torch.bool, device=self.device)
        self.logits: Callable[[Tensor], Tensor] = self._logits

    def _logits(self, latest: Tensor) -> Tensor:
        """[batch, vocabulary], of the token behind `latest`."""
        output = self.model.forward(
            decoder_input_ids=latest,
            encoder_outputs=BaseModelOutput(self.memory),  # type: ignore[arg-type]
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def step(self, latest: Tensor) -> Tensor:
        """The next token [batch, 1], which also goes to its place."""
        found = self.logits(latest).float().argmax(dim=-1).masked_fill(self.ended, self.pad)
        self.tokens.index_copy_(1, self.place, found[:, None])
        self.place.add_(1)
        if self.eos is not None:
            self.ended.logical_or_((found[:, None] == self.eos).any(dim=1))
        return found[:, None]

    def feed_itself(self) -> None:
        self.latest.copy_(self.step(self.latest))

    def decode_once(self) -> Tensor:
        done = self.given
        while done < min(self.limit, self.given + EAGER_STEPS) and not bool(self.ended.all()):
            self.latest = self.step(self.latest)
            done += 1
        if done < self.limit and not bool(self.ended.all()):
            self.latest = self.latest.clone()
            done = self.go_on(record(self.feed_itself) if self.device.type == "cuda" else self.feed_itself, done)
        return self.tokens[:, : _end(self.tokens, self.given, done, self.eos)]

    def go_on(self, step: Callable[[], Any], done: int) -> int:
        """Until all rows have ended; gives the number of tokens."""
        while done < self.limit and ((done - self.given) % CHECK_EVERY or not bool(self.ended.all())):
            step()
            done += 1
        return done


class KeptDecoding(Decoding):
    """Recorded for one shape of inputs, and used again: each batch is copied to the places of the first.

    Two graphs: the keys and values of cross-attention, and a step, which feeds itself.
    """

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        limit: int,
        eos: Tensor | None,
        pad: int,
        memory: Tensor,
        mask: Tensor | None,
    ) -> None:
        own = [None if tensor is None else tensor.clone() for tensor in (eos, memory, mask)]
        super().__init__(model, input_ids, limit, own[0], pad, own[1], own[2])  # type: ignore[arg-type]
        self._look: Callable[[], Any] = self._look_at_memory
        self._next: Callable[[], Any] = self.feed_itself
        with torch.compiler.set_stance("force_eager"):
            self.feed_itself()  # which also makes the caches
        if limit < 4:
            return
        if self.device.type != "cuda":
            return
        if getattr(model, "altup_compiled", False):
            self._compile()
        with self._stance():
            warm_up(self._try, self.device)
            look = record(self._look_at_memory)
            self._look, self._next = look, record(self.feed_itself, look.graph.pool())

    def _stance(self) -> Any:
        """Layers are not compiled one by one: each has a number of its own in the cache."""
        compiled = self.logits != self._logits
        return nullcontext() if compiled else torch.compiler.set_stance("force_eager")

    def _compile(self) -> None:
        """The step as fewer kernels; where that fails it stays as it is."""
        self.logits = torch.compile(self._logits, dynamic=False)
        try:
            self._try()
        except Exception as error:
            log.warning("decoding is slower than it could be, because torch.compile failed: %s", error)
            self.logits = self._logits

    def _try(self) -> None:
        self._reset()
        self._look_at_memory()
        self.feed_itself()

    def _look_at_memory(self) -> None:
        cached: Any = self.cache.cross_attention_cache
        for layer in self.model.decoder.layers:
            attention = layer.cross_attention
            keys, values = attention.project(self.memory)
            cached.layers[attention.index].keys.copy_(keys)
            cached.layers[attention.index].values.copy_(values)

    def _reset(self) -> None:
        self.cache.self_attention_cache.reset()
        self.tokens[:, self.given :] = self.pad
        self.place.fill_(self.given)
        self.ended.zero_()

    def decode(self, input_ids: Tensor, eos: Tensor | None, memory: Tensor, mask: Tensor | None) -> Tensor:
        """As `decode_greedily`, for a batch of the same shape."""
        self._reset()
        self.tokens[:, : self.given] = input_ids
        for place, tensor in (
            (self.latest, input_ids), (self.eos, eos), (self.memory, memory), (self.mask, mask),
        ):  # fmt: skip
            if place is not None and tensor is not None:
                place.copy_(tensor)
        self._look()
        with self._stance():
            done = self.go_on(self._next, self.given)
        return self.tokens[:, : _end(self.tokens, self.given, done, self.eos)].clone()


def _end(tokens: Tensor, given: int, done: int, eos: Tensor | None) -> int:
    """Where the longest text ends; the steps decoded after it hold padding alone."""
    if eos is None or done == given:
        return done
    ends = (tokens[:, given:done, None] == eos).any(dim=2)
    longest = torch.where(ends.any(dim=1), ends.int().argmax(dim=1) + 1, done - given).max()
    return given + int(longest)

"""Greedy decoding on a GPU: after the first few tokens, a step is one CUDA graph that is replayed.

A step of a decoder is hundreds of small kernels, and launching them one by one takes many times as long as running
them. Everything a step reads or writes has a fixed place here: a static cache, the tokens so far, where they end.

An accelerated model (`altup.accelerate`) keeps what it has recorded for the next call with inputs of that shape
(`kept_decoding.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.modeling_outputs import BaseModelOutput

from altup.kernels.cuda_graph import can_record, record, try_recording
from altup.models.recorded_calls import RecordedCalls
from altup.models.recorded_decoding import (
    fits_memory,
    free_memory,
    is_hooked,
    repeatable_attention,
    uncached_autocast,
)
from altup.models.t5.kept_decoding import ALIGNED, LAUNCHED, KeptDecoding, Prompts, can_keep

EAGER_STEPS = 3  # steps that are run one by one: they warm up what a graph records, and short answers end here
KEPT = 2  # recordings that an accelerated model keeps: each holds the caches of a batch
# In place of one whose weights and caches do not fit into the memory, and what is said then.
NO_ROOM = "decoding is slower than it could be, because nothing can be kept for the next call"
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
    without a graph, as they do where recording fails.
    """
    given, device = input_ids.shape[1], input_ids.device
    prompts, kind = Prompts(input_ids, limit, eos, pad, encoder_outputs[0], attention_mask), device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    with uncached_autocast(device):
        if kept is not None and given == 1 and limit > EAGER_STEPS and can_keep(model):
            key = (prompts.shapes, autocast, torch.is_inference_mode_enabled())
            if key in kept:
                decoding = kept.pop(key)
                if decoding is None:
                    decoding = try_recording(lambda: KeptDecoding(model, prompts), device, NO_ROOM) or NO_ROOM
                kept[key] = decoding  # the latest one is the last
                if decoding is not NO_ROOM:
                    decoding.set_inputs(prompts)
                    with decoding.stance():
                        decoding.begin()
                        done = _go_on(decoding.step, decoding.ended, given, given, limit, eos)
                    return decoding.tokens[:, : _end(decoding.tokens, given, done, eos)].clone()
            else:
                kept[key] = None
                while len(kept) > KEPT:
                    kept.pop(next(iter(kept)))
        with torch.compiler.set_stance("force_eager"):
            return Decoding(model, prompts).decode_once()


class Decoding:
    """A batch that is decoded: its caches, its tokens so far, and which rows have ended."""

    def __init__(self, model: Any, prompts: Prompts) -> None:
        input_ids, limit, eos, pad, memory, mask = prompts
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

    def step(self, latest: Tensor) -> Tensor:
        """The next token [batch, 1], which also goes to its place."""
        output = self.model.forward(
            decoder_input_ids=latest,
            encoder_outputs=BaseModelOutput(self.memory),  # type: ignore[arg-type]
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        found = output.logits[:, -1].float().argmax(dim=-1).masked_fill(self.ended, self.pad)
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
            replay = None
            if can_record(self.device):
                replay = try_recording(lambda: record(self.feed_itself), self.device, LAUNCHED, owner=self.model)
            step = replay or self.feed_itself
            done = _go_on(step, self.ended, self.given, done, self.limit, self.eos)
        return self.tokens[:, : _end(self.tokens, self.given, done, self.eos)]


def _go_on(step: Callable[[], Any], ended: Tensor, given: int, done: int, limit: int, eos: Tensor | None) -> int:
    """Steps until all rows have ended, if any can; gives the number of tokens."""
    while done < limit and (eos is None or (done - given) % CHECK_EVERY or not bool(ended.all())):
        step()
        done += 1
    return done


def _end(tokens: Tensor, given: int, done: int, eos: Tensor | None) -> int:
    """Where the longest text ends; the steps decoded after it hold padding alone."""
    if eos is None or done == given:
        return done
    ends = (tokens[:, given:done, None] == eos).any(dim=2)
    longest = torch.where(ends.any(dim=1), ends.int().argmax(dim=1) + 1, done - given).max()
    return given + int(longest)

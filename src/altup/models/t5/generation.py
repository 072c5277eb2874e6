"""Greedy decoding on a GPU: after the first few tokens, a step is one CUDA graph that is replayed.

A step of a decoder is hundreds of small kernels, and launching them one by one takes many times as long as running
them. Everything a step reads or writes has a fixed place here: a static cache, the tokens so far, where they end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from altup.kernels.cuda_graph import record
from altup.models.recorded_decoding import eager_steps, fits_memory, free_memory, is_hooked, repeatable_attention

EAGER_STEPS = 3  # steps that are run one by one: they warm up what a graph records, and short answers end here
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
        )


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
) -> Tensor:
    """[batch, ≤ limit]: `input_ids` and the likeliest tokens behind them, with `pad` behind an end.

    On a CPU the same steps run without a graph.
    """
    batch, given = input_ids.shape
    device = input_ids.device
    cache = EncoderDecoderCache(StaticCache(model.config, max_cache_len=limit), DynamicCache())
    tokens = input_ids.new_full((batch, limit), pad)
    tokens[:, :given] = input_ids
    place = torch.tensor([given], device=device)
    ended = torch.zeros(batch, dtype=torch.bool, device=device)

    def step(latest: Tensor) -> Tensor:
        output = model(
            decoder_input_ids=latest,
            encoder_outputs=encoder_outputs,
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=True,
        )
        found = output.logits[:, -1].float().argmax(dim=-1).masked_fill(ended, pad)
        tokens.index_copy_(1, place, found[:, None])
        place.add_(1)
        if eos is not None:
            ended.logical_or_((found[:, None] == eos).any(dim=1))
        return found[:, None]

    with eager_steps(device):
        latest, done = input_ids, given
        while done < min(limit, given + EAGER_STEPS) and not bool(ended.all()):
            latest = step(latest)
            done += 1
        if done < limit and not bool(ended.all()):
            latest = latest.clone()

            def feed_itself() -> None:
                latest.copy_(step(latest))

            replay = record(feed_itself) if device.type == "cuda" else feed_itself
            while done < limit and ((done - given) % CHECK_EVERY or not bool(ended.all())):
                replay()
                done += 1
    return tokens[:, : _end(tokens, given, done, eos)]


def _end(tokens: Tensor, given: int, done: int, eos: Tensor | None) -> int:
    """Where the longest text ends; the steps decoded after it hold padding alone."""
    if eos is None or done == given:
        return done
    ends = (tokens[:, given:done, None] == eos).any(dim=2)
    longest = torch.where(ends.any(dim=1), ends.int().argmax(dim=1) + 1, done - given).max()
    return given + int(longest)

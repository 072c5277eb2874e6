"""`generate` of an accelerated Gemma 3n: a token is one CUDA graph that is replayed.

A token is thousands of small kernels, and launching them one by one takes many times as long as running them. The
loop is Hugging Face's own, with its sampling, its processors, stopping criteria and streamers; only the model
inside it is replayed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache

from altup.core.errors import warn_once
from altup.kernels.launch import runs_triton
from altup.models.gemma3n.fixed_cache import FixedCache
from altup.models.recorded_decoding import eager_steps, fits_memory, free_memory, is_hooked, repeatable_attention


class RecordedGeneration:
    """Put before Hugging Face's GenerationMixin."""

    config: Any
    dtype: Any

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **kwargs: Any,
    ) -> Any:
        there: Any = super()
        given = (input_ids, logits_processor, stopping_criteria, generation_config)
        if not runs_triton(input_ids.device) or _leaves_to_compiler(generation_config):
            return there._sample(*given, **kwargs)
        cache = FixedCache(self.config.get_text_config(), stopping_criteria.max_length or 0)
        if reason := _reason_against(self, cache, len(input_ids), generation_config, kwargs):
            _tell(reason)
            return there._sample(*given, **kwargs)
        try:
            with repeatable_attention(), eager_steps(input_ids.device):
                made = there._sample(*given, **{**kwargs, "past_key_values": cache})
        finally:
            cache.release()
        if generation_config.return_dict_in_generate:
            made.past_key_values = cache.as_dynamic()
        return made

    def replay_obstacle(self) -> str | None:
        """Why no call of `generate` is replayed, if so."""
        if self.config.get_text_config()._attn_implementation != "sdpa":
            return "its attention is not SDPA"
        return "a module has a hook, which a replayed step does not call" if is_hooked(self) else None

    def _beam_search(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._unrecorded("_beam_search", "beam search moves its cache about", input_ids, *args, **kwargs)

    def _assisted_decoding(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        reason = "assisted decoding takes several tokens at once"
        return self._unrecorded("_assisted_decoding", reason, input_ids, *args, **kwargs)

    def _unrecorded(self, name: str, reason: str, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if runs_triton(input_ids.device):
            _tell(reason)
        return getattr(super(), name)(input_ids, *args, **kwargs)


def _tell(reason: str) -> None:
    warn_once(f"altup.accelerate: tokens are not recorded as CUDA graphs here, as {reason}")


def _leaves_to_compiler(config: Any) -> bool:
    """Whether the caller asked for a static cache, with which transformers compiles the model itself."""
    return config.cache_implementation is not None and not config.disable_compile


def _reason_against(model: Any, cache: FixedCache, rows: int, config: Any, kwargs: dict[str, Any]) -> str | None:
    """Why a call of `generate` cannot be recorded, if it cannot."""
    given: Any = kwargs.get("past_key_values")
    is_own = type(given) is DynamicCache and not getattr(given, "_is_user_defined", False)
    device = model.device
    if reason := model.replay_obstacle():
        return reason
    reasons = {
        "use_cache=False": not config.use_cache,
        "it was given a cache": config.use_cache and not (is_own and given.get_seq_length() == 0),
        "no length ends it": not cache.limit,
        "attentions or hidden states are asked for": config.output_attentions or config.output_hidden_states,
        "the prompt comes in chunks": config.prefill_chunk_size is not None,
        "it assists another model": getattr(config, "is_assistant", False),
        "several processes wait for each other": kwargs.get("synced_gpus", False),
    }
    for reason, applies in reasons.items():
        if applies:
            return reason
    if not fits_memory(cache.numbers(rows), model.dtype, device, free_memory(device)):
        return "a cache for the longest text allowed would take too much memory (max_new_tokens, max_length)"
    return None

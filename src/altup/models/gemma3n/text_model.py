"""`Gemma3nTextModel` with one pass before the first layer and one behind the last; its own code takes dozens."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from altup.kernels.gemma3n import flash_takes, match_magnitudes, uses_kernels
from altup.models.gemma3n.parts import Fused, FusedAttention
from altup.models.gemma3n.rows import as_one_row

# Layers write keys and values here that later ones read. No plain dict, which FSDP2 would copy. Since transformers
# 5.23 accelerate moves them from device to device by a method of the class.
SharedKeys: Any = getattr(cache_utils, "KVSharingDict", UserDict)


class FusedTextModel(Fused):
    """Embeddings are projected K − 1 times, brought to one magnitude and stacked; behind the last layer each block
    is projected back, brought to the magnitude of block 0, and averaged."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        per_layer_inputs: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        given = {
            "input_ids": input_ids,
            "per_layer_inputs": per_layer_inputs,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            **kwargs,
        }
        run = self._run if self._fuses() and (input_ids is None) != (inputs_embeds is None) else super().forward
        return run(**given)

    def _fuses(self) -> bool:
        """The kernels take any projection, adapted or hooked: only its output is theirs."""
        model: Any = self
        K = self.config.altup_num_inputs
        return K > 1 and (
            self.implementation == "plain" or uses_kernels(self.implementation, K, model.embed_tokens.weight)
        )

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def _run(
        self,
        input_ids: Tensor | None = None,
        per_layer_inputs: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        model: Any = self
        whole = input_ids if input_ids is not None else inputs_embeds
        asked = past_key_values is not None or use_cache or _asks_for_outputs(self.config, kwargs)
        rows = None
        if not asked and self.joins_rows(
            model.embed_tokens.weight.dtype if input_ids is not None else whole.dtype
        ):
            rows = as_one_row(attention_mask, position_ids, whole)
        if rows is not None:
            if position_ids is None:
                position_ids = torch.arange(rows.tokens, device=whole.device).unsqueeze(0)
            position_ids, attention_mask = rows.join(position_ids), None
            input_ids, inputs_embeds, per_layer_inputs = (
                None if x is None else rows.join(x) for x in (input_ids, inputs_embeds, per_layer_inputs)
            )
        if input_ids is not None:
            inputs_embeds, per_layer_inputs = model.embed_tokens(input_ids), model.get_per_layer_inputs(input_ids)
        per_layer_inputs = model.project_per_layer_inputs(inputs_embeds, per_layer_inputs)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        is_plain = attention_mask is None and position_ids is None and past_key_values is None
        is_plain = is_plain and not torch.compiler.is_compiling()  # there masks are always made
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            places = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
            position_ids = (places + seen).unsqueeze(0)
        if rows is not None:
            masks: Any = dict.fromkeys(("full_attention", "sliding_attention"), rows.segments)
        else:
            masks = self._masks(inputs_embeds, attention_mask, past_key_values, position_ids, is_plain)

        state = self._lift(inputs_embeds)
        rotations = {kind: model.rotary_emb(state, position_ids, kind) for kind in set(self.config.layer_types)}
        shared = SharedKeys()
        layers = model.layers[: self.config.num_hidden_layers]
        # Apart, so that the gradient of a layer's input is not one of all layers' inputs.
        inputs = per_layer_inputs.unbind(2)
        for layer, kind, per_layer_input in zip(layers, self.config.layer_types, inputs, strict=True):
            state = layer(
                state,
                rotations[kind],
                per_layer_input,
                shared_kv_states=shared,
                attention_mask=masks[kind],
                position_ids=position_ids,
                past_key_values=past_key_values,
                **kwargs,
            )
        hidden: Any = model.norm(self._lower(state))
        if rows is not None:
            hidden = rows.split(hidden)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)

    def _masks(
        self, embeddings: Tensor, mask: Any, cache: Any, position_ids: Tensor, is_plain: bool = False
    ) -> Any:
        """By kind of attention; `generate` may have made them already.

        `is_plain` says that nothing but tokens was given. Then nobody has to look at numbers on the device, for
        which the host would wait, and which a recorded pass cannot.
        """
        if isinstance(mask, dict):
            return mask
        without = embeddings.shape[1] > 1 and self.masks_obstacle() is None
        if is_plain and without:
            return dict.fromkeys(("full_attention", "sliding_attention"))
        given = {
            "config": self.config,
            "inputs_embeds": embeddings,
            "attention_mask": mask,
            "past_key_values": cache,
            "position_ids": position_ids,
        }
        full = create_causal_mask(**given)
        # None says that all tokens are there, one text a row, which is all that `FusedAttention` asks for.
        if full is None and without:
            return {"full_attention": None, "sliding_attention": None}
        return {"full_attention": full, "sliding_attention": create_sliding_window_causal_mask(**given)}

    def masks_obstacle(self) -> str | None:
        """Why attention needs masks, if it does: without one every layer has to know what is meant, and attention
        with dropout is the original's."""
        model: Any = self
        if self.config._attn_implementation != "sdpa":
            return f"attn_implementation is {self.config._attn_implementation!r}, not 'sdpa'"
        if self.training and self.config.attention_dropout:
            return f"attention has dropout ({self.config.attention_dropout})"
        if not all(isinstance(layer.self_attn, FusedAttention) for layer in model.layers):
            return "attention is not altup's"
        return None

    def rows_obstacle(self, dtype: torch.dtype) -> str | None:
        """Why padded and packed rows of numbers in `dtype` are computed with masks, if they are."""
        if (reason := self.masks_obstacle()) or self.implementation == "plain":
            return reason
        device = next(self.parameters()).device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        if not flash_takes(dtype, self.config.head_dim):
            return f"FlashAttention takes no heads of {self.config.head_dim} in {dtype}"
        return None

    def joins_rows(self, dtype: torch.dtype) -> bool:
        return not torch.compiler.is_compiling() and self.rows_obstacle(dtype) is None

    def _lift(self, embeddings: Tensor) -> Tensor:
        """[batch, tokens, d] → [K, batch, tokens, d]."""
        model: Any = self
        projected = [project(embeddings) for project in model.altup_projections]
        return self._match(embeddings, projected, mean=False)

    def _lower(self, state: Tensor) -> Tensor:
        """[K, batch, tokens, d] → [batch, tokens, d]."""
        model: Any = self
        first, *others = state.unbind(0)
        projected = [project(x) for project, x in zip(model.altup_unembed_projections, others, strict=True)]
        return self._match(first, projected, mean=True)

    def _match(self, block: Tensor, projected: list[Tensor], mean: bool) -> Tensor:
        projected = [p.to(block.device, block.dtype) for p in projected]
        return match_magnitudes(block, projected, mean, self.implementation)


def _asks_for_outputs(config: Any, given: dict[str, Any]) -> bool:
    """Whether someone wants what layers make, row by row."""
    names = ("output_hidden_states", "output_attentions")
    return any(given.get(name) or getattr(config, name, False) for name in names)

"""The parts of Hugging Face's Gemma 3n with their computation fused: mixed into their own classes, so that
weights, names and hooks stay, and a part goes back to what it was by getting its own class back.

Where the kernels cannot run (a CPU, an old GPU, float64), or an adapter or hook sits on a weight that they would
read, a part computes as its own class does, bit for bit.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma3n.modeling_gemma3n import (
    ALL_ATTENTION_FUNCTIONS,
    Gemma3nRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from altup.kernels import gemma3n as fused
from altup.kernels.launch import FUSED_DTYPES, runs_triton
from altup.models.gemma3n import small_maps
from altup.models.gemma3n.remaking import Remaking, can_remake, remake
from altup.models.gemma3n.small_maps import is_bare, is_unwatched


def is_bare_norm(norm: nn.Module) -> bool:
    """Whether a norm's weight and ε may be taken for the norm."""
    return type(norm).forward in (Gemma3nRMSNorm.forward, FusedNorm.forward) and is_unwatched(norm)


def is_eager() -> bool:
    """Not compiled, where a GPU has not shown kernels of additions and rotary positions."""
    return not torch.compiler.is_compiling()


def remade_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """What a norm makes of x, which is made again rather than kept by those who read it."""
    return remake(norm(x), norm, x) if is_bare_norm(norm) else norm(x)


class Fused(nn.Module):
    """What all fused parts share. `implementation` is that of the kernels; "plain" is our formulas in PyTorch.
    `remakes`: whether the backward pass makes cheap activations again."""

    implementation: str
    remakes: bool = False
    config: Any

    def obstacle(self) -> str | None:
        """Why this part computes as the original whatever it is given, if so."""
        return None

    def runs(self, x: Tensor) -> bool:
        """Whether altup's formulas take x at all: in plain PyTorch, or as kernels."""
        return self.implementation == "plain" or fused.uses_kernels(self.implementation, 2, x)


class FusedNorm(Fused):
    """`Gemma3nRMSNorm`, one kernel of PyTorch's instead of eight."""

    eps: float
    with_scale: bool
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight if self.with_scale else None
        fits = hidden_states.dtype in FUSED_DTYPES and (weight is None or weight.dtype == hidden_states.dtype)
        if not (fits and (self.implementation == "plain" or runs_triton(hidden_states.device))):
            return super().forward(hidden_states)
        normed = F.rms_norm(hidden_states, hidden_states.shape[-1:], weight, self.eps)
        return normed.to(hidden_states.dtype)  # which autocast may have made float32


def _other_activation(config: Any) -> str | None:
    kind = config.hidden_activation
    return None if kind == "gelu_pytorch_tanh" else f"hidden_activation is {kind!r}, not 'gelu_pytorch_tanh'"


class FusedMLP(Fused):
    """`Gemma3nTextMLP`: between its matrices one pass, which waits for nothing. Its own code waits for the GPU to
    look whether the share of zeros is a probability."""

    activation_sparsity: float
    down_proj: Any

    def obstacle(self) -> str | None:
        return _other_activation(self.config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        part: Any = self
        if self.obstacle() or not self.runs(hidden_states):
            return super().forward(hidden_states)
        gate, up = part.gate_proj(hidden_states), part.up_proj(hidden_states)
        if self._trains_bare_map(gate):
            return fused.gated_linear(
                gate, up, part.down_proj.weight, self.activation_sparsity, self.implementation
            )
        return part.down_proj(fused.gated(gate, up, self.activation_sparsity, self.implementation))

    def _trains_bare_map(self, gate: Tensor) -> bool:
        """Whether the last map would keep its input, which can be made again."""
        down = self.down_proj
        return (
            self.remakes
            and is_eager()
            and torch.is_grad_enabled()
            and is_bare(down)
            and down.weight.requires_grad
            and down.weight.dtype == gate.dtype
        )


class FusedAttention(Fused):
    """`Gemma3nTextAttention`: norm and rotary positions in one pass and, on a sliding layer without a mask or with
    the bounds of texts instead, FlashAttention, which skips what lies outside of the window and the text.

    No mask means that a token sees the window before it and that no token is padding: `FusedTextModel` makes none
    then. Other attention is Hugging Face's.
    """

    is_sliding: bool
    head_dim: int
    sliding_window: Any

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        shared_kv_states: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        part: Any = self
        segments = attention_mask if isinstance(attention_mask, fused.Segments) else None
        without_mask = segments is not None or self._is_windowed(attention_mask, hidden_states.shape[1])
        if not (without_mask or self.runs(hidden_states)):
            return super().forward(
                hidden_states, position_embeddings, attention_mask, past_key_values, shared_kv_states, **kwargs
            )
        q = self._heads(part.q_proj, part.q_norm, hidden_states, position_embeddings)
        if part.is_kv_shared_layer:
            keys, values = (x.to(q.device) for x in shared_kv_states[self._shared_name()])
        else:
            keys = self._heads(part.k_proj, part.k_norm, hidden_states, position_embeddings).transpose(1, 2)
            values = part.v_norm(self._split(part.v_proj(hidden_states))).transpose(1, 2)
            if past_key_values is not None:
                keys, values = past_key_values.update(keys, values, part.layer_idx)
            if part.store_full_length_kv:
                shared_kv_states[self._shared_name()] = keys, values
        if without_mask:
            keys, values = (x[:, :, : q.shape[1]].transpose(1, 2) for x in (keys, values))
            attended = fused.causal_attention(
                q, keys, values, part.scaling, self.sliding_window, segments, self.implementation
            )
            return part.o_proj(attended.flatten(2)), None
        attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attended, weights = attend(
            self,
            q.transpose(1, 2),
            keys,
            values,
            attention_mask,
            dropout=part.attention_dropout if self.training else 0.0,
            scaling=part.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return part.o_proj(attended.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    def _shared_name(self) -> Any:
        """Of the keys and values that layers share: their kind of attention since transformers 5.23, before it the
        number of the layer that makes them."""
        part: Any = self
        if not hasattr(part, "kv_shared_layer_index"):
            return part.layer_type
        return part.kv_shared_layer_index if part.is_kv_shared_layer else part.layer_idx

    def _is_windowed(self, mask: Any, tokens: int) -> bool:
        is_causal = mask is None and self.config._attn_implementation == "sdpa"
        return self.is_sliding and is_causal and tokens > self.sliding_window

    def obstacle(self) -> str | None:
        part: Any = self
        if not all(is_bare_norm(norm) for norm in (part.q_norm, getattr(part, "k_norm", part.q_norm))):
            return "q_norm or k_norm: another module, or a hook"
        return None if is_eager() else "the model is compiled"

    def _split(self, x: Tensor) -> Tensor:
        """[batch, tokens, heads · D] → [batch, tokens, heads, D]."""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def _heads(self, project: Any, norm: Any, hidden_states: Tensor, positions: Any) -> Tensor:
        x, (cos, sin) = self._split(project(hidden_states)), positions
        if is_eager() and self.runs(x) and is_bare_norm(norm):
            weight, eps, kind = norm.weight, norm.eps, self.implementation
            made = fused.norm_rotary(x, weight, eps, cos, sin, kind)
            return remake(made, lambda x: fused.norm_rotary(x, weight, eps, cos, sin, kind), x)
        return apply_rotary_pos_emb(norm(x), cos, sin, unsqueeze_dim=2)


class FusedAltUp(Fused):
    """`Gemma3nTextAltUp`: one pass over the state to predict, two to correct."""

    correct_output_scale: Tensor
    prediction_coefs: nn.Linear
    correction_coefs: nn.Linear
    modality_router: nn.Linear
    router_norm: Any
    router_input_scale: Tensor

    def obstacle(self) -> str | None:
        """Why the kernels, which read weights, cannot take this part's, if so."""
        for name in small_maps.SMALL:
            if reason := small_maps.obstacle(getattr(self, name)):
                return f"{name}: {reason}"
        if not is_bare_norm(self.router_norm):
            return "router_norm: another module, or a hook"
        return None if is_unwatched(self) else "a hook is registered on it"

    def fuses(self, state: Tensor) -> bool:
        if self.obstacle() is not None:
            return False
        K = self.config.altup_num_inputs
        return self.implementation == "plain" or fused.uses_kernels(self.implementation, K, state)

    @property
    def router(self) -> fused.Router:
        weight = small_maps.folded_weight(self.modality_router)
        return fused.Router(weight, self.router_norm.weight, self.router_norm.eps)

    @property
    def clip(self) -> float | None:
        """In training alone, as Hugging Face has it."""
        return self.config.altup_coef_clip if self.training else None

    def predict_blocks(self, state: Tensor, stacked: bool = False) -> Any:
        """The K predicted blocks apart, so that the gradient of one is not a gradient of all."""
        if self.clip is not None:  # as the original does it: the weight itself changes
            small_maps.base_weight(self.prediction_coefs).data.clamp_(-self.clip, self.clip)
        weight = small_maps.folded_weight(self.prediction_coefs)
        active = self.config.altup_active_idx
        return fused.predict(state, self.router, weight, active, self.implementation, stacked)

    def correction(self, y: Tensor, predicted: Tensor | None = None) -> tuple[Tensor, Any]:
        """g and, where x̂ᵃ is given, the corrected active block times the output scale."""
        if self.clip is not None:  # in the original, too, the clipped weight is the one without adapters
            weight = small_maps.base_weight(self.correction_coefs).clamp(-self.clip, self.clip)
        else:
            weight = small_maps.folded_weight(self.correction_coefs)
        scale = self.correct_output_scale if self.config.altup_correct_scale else None
        active = self.config.altup_active_idx
        return fused.correction(y, self.router, weight, predicted, active, scale, self.implementation)

    def predict(self, hidden_states: Tensor) -> Tensor:
        if not self.fuses(hidden_states):
            return super().predict(hidden_states)  # type: ignore[misc]
        return self.predict_blocks(hidden_states, stacked=True)

    def correct(self, predictions: Tensor, activated: Tensor) -> Tensor:
        if not self.fuses(activated):
            return super().correct(predictions, activated)  # type: ignore[misc]
        g, _ = self.correction(activated)
        active = self.config.altup_active_idx
        return fused.correct(predictions, activated, g, active, implementation=self.implementation)


class FusedDecoderLayer(Fused):
    """`Gemma3nTextDecoderLayer`: correction, the norm of the per-layer input's branch and its addition are one.

    Attention, Laurel, the feed-forward network and their norms are the layer's own. Where `remakes` is set, what
    a pass or two can make again, the backward pass makes again (`remaking.py`).
    """

    altup: FusedAltUp
    laurel: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        per_layer_input: Any = None,
        shared_kv_states: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        given = {
            "position_embeddings": position_embeddings,
            "shared_kv_states": shared_kv_states,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            **kwargs,
        }
        if not self.runs(hidden_states):
            return super().forward(hidden_states, per_layer_input=per_layer_input, **given)
        part: Any = self
        altup, norm = self.altup, part.post_per_layer_input_norm
        active = self.config.altup_active_idx
        if self.obstacle() or not altup.fuses(hidden_states):
            predicted = part.altup.predict(hidden_states)
            corrected = part.altup.correct(predicted, self._compute(predicted[active], given))
            return self._add_branch(corrected, per_layer_input)
        remakes = self.remakes and can_remake(hidden_states.device)
        with Remaking() if remakes else nullcontext():
            blocks = altup.predict_blocks(hidden_states)
            y = self._compute(blocks[active], given)
            g, corrected = altup.correction(y, blocks[active])
            remake(corrected, lambda y, x: altup.correction(y, x)[1], y, blocks[active])
            gated = self._gate(part.per_layer_input_gate(corrected), per_layer_input)
            branch = part.per_layer_projection(gated)
            if is_bare(part.per_layer_projection):
                remake(branch, part.per_layer_projection, gated)
            return fused.correct(blocks, y, g, active, branch, norm.weight, norm.eps, self.implementation)

    def obstacle(self) -> str | None:
        """Of the correction with the per-layer input's branch; additions have reasons of their own."""
        part: Any = self
        if not isinstance(part.altup, FusedAltUp):
            return "AltUp is the original's"
        if not is_bare_norm(part.post_per_layer_input_norm):
            return "post_per_layer_input_norm: another module, or a hook"
        return part.altup.obstacle()

    def _add_branch(self, corrected: Tensor, per_layer_input: Tensor) -> Tensor:
        """The branch of the per-layer input, as the original adds it to all blocks but the first."""
        part: Any = self
        first = corrected[self.config.altup_active_idx].clone()
        if self.config.altup_correct_scale:
            first = part.altup.scale_corrected_output(first)
        gated = self._gate(part.per_layer_input_gate(first), per_layer_input)
        corrected[1:] += part.post_per_layer_input_norm(part.per_layer_projection(gated))
        return corrected

    def _gate(self, gate: Tensor, per_layer_input: Tensor) -> Tensor:
        part: Any = self
        if _other_activation(self.config) is None:
            return fused.gated(gate, per_layer_input.to(gate.dtype), implementation=self.implementation)
        return part.act_fn(gate) * per_layer_input

    def _compute(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        """The layer proper on the active block: attention beside Laurel, then the feed-forward network."""
        part: Any = self
        fuses, norm = self.additions_obstacle() is None, part.input_layernorm
        if fuses and is_bare_norm(norm):
            x, normed = fused.norm_beside(x, norm.weight, norm.eps, self.implementation)
            remake(normed, norm, x)
        else:
            normed = remade_norm(norm, x)
        beside = self._laurel(normed, fuses)
        attended, _ = part.self_attn(hidden_states=normed, **given)
        x, normed = self._add_attention(x, normed, attended, beside, fuses)
        made, norm = part.mlp(normed), part.post_feedforward_layernorm

        def add(x: Tensor, made: Tensor) -> Tensor:
            if fuses:
                return fused.residual(x, made, norm.weight, norm.eps, implementation=self.implementation)[0]
            return x + norm(made)

        return remake(add(x, made), add, x, made) if is_bare_norm(norm) else add(x, made)

    def additions_obstacle(self) -> str | None:
        part: Any = self
        norms = {
            "post_attention_layernorm": part.post_attention_layernorm,
            "post_laurel_norm": part.laurel.post_laurel_norm,
            "pre_feedforward_layernorm": part.pre_feedforward_layernorm,
            "post_feedforward_layernorm": part.post_feedforward_layernorm,
        }
        for name, norm in norms.items():
            if not is_bare_norm(norm) or norm.eps != part.post_attention_layernorm.eps:
                return f"{name}: another module, or a hook"
        if not is_unwatched(self.laurel):
            return "laurel: a hook"
        return None if is_eager() else "the model is compiled"

    def _laurel(self, x: Tensor, leaves: bool) -> Tensor:
        """`Gemma3nTextLaurelBlock`, or what comes before its norm and its addition."""
        laurel: Any = self.laurel
        if not is_unwatched(laurel):
            return laurel(x)
        left = laurel.linear_left(x)
        right = laurel.linear_right(left)
        if is_bare(laurel.linear_right):
            remake(right, laurel.linear_right, left)
        return right if leaves else x + laurel.post_laurel_norm(right)

    def _add_attention(
        self, x: Tensor, normed: Tensor, attended: Tensor, beside: Tensor, fuses: bool
    ) -> tuple[Tensor, Tensor]:
        """The sum of block, attention and Laurel, and it normed for the feed-forward network."""
        part: Any = self
        of_attention, before = part.post_attention_layernorm, part.pre_feedforward_layernorm
        if not fuses:
            x = (x + of_attention(attended) + beside) / math.sqrt(2)
            return x, remade_norm(before, x)
        of_laurel = part.laurel.post_laurel_norm.weight
        x, made = fused.residual(
            x, attended, of_attention.weight, before.eps, normed, beside, of_laurel, before.weight,
            self.implementation,
        )  # fmt: skip
        return x, remake(made, before, x)

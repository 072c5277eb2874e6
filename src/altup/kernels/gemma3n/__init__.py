"""Gemma 3n's AltUp, fused: the router's norm, projection and tanh, the coefficients, and the mixture of blocks.

A layer needs three passes over its state, each with a backward pass of its own:

- `predict`: reads the K blocks, writes the K predicted ones;
- `correction`: reads the layer's output, writes g and the corrected active block, from which the branch of the
  per-layer input starts;
- `correct`: reads predicted blocks, output and branch, norms the branch, and writes the K new blocks.

`match_magnitudes` serves the projections before the first layer and behind the last, `gated` the feed-forward
network, `residual` the additions around it, `norm_rotary` queries and keys, `causal_attention` the layers that
see a window of tokens, and texts end to end.

`implementation` is "plain" (the definition), "triton" (the kernels, or an error) or "auto" (the kernels where they
can run). Sums run in float32 (float64 for float64 states), whatever the state's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from altup.core.errors import UserError, check_choice
from altup.kernels.altup_update import FUSED_BLOCKS, State
from altup.kernels.gemma3n.attention import Segments, attention_flash, attention_reference, flash_takes
from altup.kernels.gemma3n.reference import (
    Router,
    correct_reference,
    corrected_active_reference,
    correction_reference,
    gated_reference,
    match_reference,
    norm_rotary_reference,
    predict_reference,
    residual_reference,
    rms_norm,
)
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, can_launch, runs_triton

__all__ = [
    "Router",
    "Segments",
    "causal_attention",
    "correct",
    "correction",
    "flash_takes",
    "gated",
    "gated_linear",
    "match_magnitudes",
    "norm_beside",
    "norm_rotary",
    "predict",
    "residual",
    "uses_kernels",
]

WIDEST = 8192  # columns of `residual` and `norm_beside`, which a program holds at once


def predict(
    x: State, router: Router, A: Tensor, active: int, implementation: str = "auto", stacked: bool = False
) -> State:
    """The K predicted blocks, or one tensor. x: [K, ..., d], or K blocks [..., d]; A: [K², K]."""
    K, block = len(x), x[0]
    if A.shape != (K * K, K) or router.weight.shape != (K, block.shape[-1]) or not 0 <= active < K:
        raise UserError(
            f"A {list(A.shape)}, router {list(router.weight.shape)} and active={active} do not fit a state of {K} "
            f"blocks {list(block.shape)}"
        )
    parts = [x] if isinstance(x, Tensor) else list(x)
    if uses_kernels(implementation, K, *parts):
        from altup.kernels.gemma3n import predict_kernels

        predicted, _, _ = predict_kernels.predict(parts, *router, A, active, stacked)
        return predicted[0] if stacked else predicted
    with torch.autocast(block.device.type, enabled=False):
        predicted = predict_reference(list(x), router, A, active)
        return torch.stack(predicted) if stacked else predicted


def correction(
    y: Tensor,
    router: Router,
    C: Tensor,
    predicted: Tensor | None = None,
    active: int = 0,
    scale: Tensor | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """g: [..., K] for the layer's output y: [..., d] and, given x̂ᵃ, the corrected active block times scale.

    The block is in y's dtype, g in float32 or wider.
    """
    K = len(C)
    if C.shape != (K, K) or router.weight.shape != (K, y.shape[-1]) or not 0 <= active < K:
        raise UserError(
            f"C {list(C.shape)}, router {list(router.weight.shape)} and active={active} do not fit the layer's "
            f"output {list(y.shape)}"
        )
    given = [y] if predicted is None else [y, predicted]
    if uses_kernels(implementation, K, *given):
        from altup.kernels.gemma3n import coefficients_kernels

        g, corrected, _, _ = coefficients_kernels.correction(y, *router, C, predicted, scale, active)
        return g, None if predicted is None else corrected
    with torch.autocast(y.device.type, enabled=False):
        g = correction_reference(y, router, C)
        return g, None if predicted is None else corrected_active_reference(predicted, y, g, active, scale)


def correct(
    predicted: State,
    y: Tensor,
    g: Tensor,
    active: int,
    branch: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """The new state [K, ..., d] in y's dtype. predicted: K blocks [..., d], or stacked; branch: p, [..., d]."""
    K = len(predicted)
    fits = predicted[0].shape == y.shape and g.shape == (*y.shape[:-1], K) and 0 <= active < K
    if not fits or (branch is None) != (norm is None) or (branch is not None and branch.shape != y.shape):
        raise UserError(
            f"g {list(g.shape)}, branch {None if branch is None else list(branch.shape)} and active={active} do "
            f"not fit {K} blocks {list(predicted[0].shape)} and the layer's output {list(y.shape)}"
        )
    parts = [predicted] if isinstance(predicted, Tensor) else list(predicted)
    if uses_kernels(implementation, K, y, *parts, *([] if branch is None else [branch])):
        from altup.kernels.gemma3n import correct_kernels

        return correct_kernels.correct(parts, y, g.float(), branch, norm, active, eps)[0]
    with torch.autocast(y.device.type, enabled=False):
        return correct_reference(list(predicted), y, g, active, branch, norm, eps)


def match_magnitudes(h: Tensor, projected: Sequence[Tensor], mean: bool, implementation: str = "auto") -> Tensor:
    """h: [..., d] and K − 1 blocks brought to its magnitude, stacked [K, ..., d], or their mean [..., d]."""
    if not projected or any(p.shape != h.shape for p in projected):
        raise UserError(f"projected {[list(p.shape) for p in projected]} do not fit h {list(h.shape)}")
    if uses_kernels(implementation, 1 + len(projected), h, *projected):
        from altup.kernels.gemma3n import ends_kernels

        return ends_kernels.match(h, list(projected), mean)[0]
    with torch.autocast(h.device.type, enabled=False):
        return match_reference(h, projected, mean)


def gated(gate: Tensor, up: Tensor, sparsity: float = 0.0, implementation: str = "auto") -> Tensor:
    """gelu(gate) ∘ up, [..., d], in gate's dtype; a `sparsity` above 0 is about the share of a token's numbers
    that become 0."""
    if gate.shape != up.shape or not 0 <= sparsity < 1:
        raise UserError(f"gate {list(gate.shape)}, up {list(up.shape)} and sparsity={sparsity} do not fit")
    z = _quantile(sparsity) if sparsity else None
    if uses_kernels(implementation, 2, gate, up):
        from altup.kernels.gemma3n import gate_kernels

        return gate_kernels.gate(gate, up, z)[0]
    with torch.autocast(gate.device.type, enabled=False):
        return gated_reference(gate, up, z)


def gated_linear(
    gate: Tensor, up: Tensor, weight: Tensor, sparsity: float = 0.0, implementation: str = "auto"
) -> Tensor:
    """`gated(gate, up, sparsity)`·weightᵀ: [..., n], for a trained weight [n, d] of their dtype."""
    if gate.shape != up.shape or not 0 <= sparsity < 1 or weight.shape[1:] != gate.shape[-1:]:
        raise UserError(
            f"gate {list(gate.shape)}, up {list(up.shape)}, weight {list(weight.shape)} and sparsity={sparsity} "
            "do not fit"
        )
    if uses_kernels(implementation, 2, gate, up, weight):
        from altup.kernels.gemma3n import gate_kernels

        return gate_kernels.gated_linear(gate, up, weight, _quantile(sparsity) if sparsity else None)[0]
    return F.linear(gated(gate, up, sparsity, implementation), weight)


def residual(
    x: Tensor,
    a: Tensor,
    a_norm: Tensor,
    eps: float,
    n: Tensor | None = None,
    r: Tensor | None = None,
    r_norm: Tensor | None = None,
    norm: Tensor | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Any]:
    """x + N(a) or, with n and r, (x + N(a) + n + N(r)) / √2, and N of it where there is a `norm`: [..., d].

    Both are in x's dtype; under autocast a and r, made by linear maps, may be narrower.
    N(v) = w ∘ v / rms(v), with the weights `a_norm`, `r_norm` and `norm`: [d].
    """
    given = [t for t in (a, n, r) if t is not None]
    if len({t is None for t in (n, r, r_norm)}) > 1 or any(t.shape != x.shape for t in given):
        raise UserError(f"{[list(t.shape) for t in given]} do not fit x {list(x.shape)}: n, r, r_norm all or none")
    if uses_kernels(implementation, 2, x, *given) and x.shape[-1] <= WIDEST:
        from altup.kernels.gemma3n import residual_kernels

        out, normed, _ = residual_kernels.residual(x, a, a_norm, n, r, r_norm, norm, eps)
        return out, None if norm is None else normed
    with torch.autocast(x.device.type, enabled=False):
        return residual_reference(x, a, a_norm, n, r, r_norm, norm, eps)


def norm_beside(x: Tensor, norm: Tensor, eps: float, implementation: str = "auto") -> tuple[Tensor, Tensor]:
    """x: [..., d] and it normed with the weight `norm`. Read x from here: then one pass adds up its gradients."""
    if uses_kernels(implementation, 2, x) and x.shape[-1] <= WIDEST:
        from altup.kernels.gemma3n import residual_kernels

        return residual_kernels.NormBeside.apply(x, norm, eps)
    with torch.autocast(x.device.type, enabled=False):
        return x, rms_norm(x, norm, eps).to(x.dtype)


def norm_rotary(
    x: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, implementation: str = "auto"
) -> Tensor:
    """Heads x normed with the scale `norm` and turned by their places: [batch, tokens, heads, D], in x's dtype.

    norm: [D]; cos and sin: [batch or 1, tokens, D]. With n the normed head, n ∘ cos + (−n₂, n₁) ∘ sin.
    """
    batch, tokens, _, D = x.shape
    if (
        D % 2
        or norm.shape != (D,)
        or cos.shape != sin.shape
        or cos.shape not in ((batch, tokens, D), (1, tokens, D))
    ):
        raise UserError(f"x {list(x.shape)}, norm {list(norm.shape)} and cos {list(cos.shape)} do not fit")
    if uses_kernels(implementation, 2, x):
        from altup.kernels.gemma3n import rotary_kernels

        return rotary_kernels.rotary(x, norm, cos, sin, eps)
    with torch.autocast(x.device.type, enabled=False):
        return norm_rotary_reference(x, norm, eps, cos, sin)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    segments: Segments | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Causal attention: [batch, tokens, heads, D]; k and v have as many heads or fewer.

    Given a `window`, a token sees so many tokens, itself included; given `segments`, for one row, its text's.
    Where FlashAttention does not take them, by SDPA and a mask.
    """
    if (
        k.shape != v.shape
        or k.shape[:2] != q.shape[:2]
        or q.shape[2] % k.shape[2]
        or (window is not None and window < 1)
        or (segments is not None and len(q) > 1)
    ):
        raise UserError(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} and window={window} do not fit")
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:  # as SDPA does it
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if uses_kernels(implementation, 2, q) and q.is_cuda and flash_takes(q.dtype, q.shape[-1]):
        return attention_flash(q, k, v, scale, window, segments)
    return attention_reference(q, k, v, scale, window, segments)


@torch.compiler.assume_constant_result
def _quantile(share: float) -> float:
    return NormalDist().inv_cdf(share)


def uses_kernels(implementation: str, K: int, *tensors: Tensor) -> bool:
    """Whether the kernels take K blocks and these tensors; an error if they are asked for and cannot."""
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "plain":
        return False
    fits = 2 <= K <= FUSED_BLOCKS and all(t.dtype in FUSED_DTYPES for t in tensors)
    if implementation == "auto":
        return fits and runs_triton(tensors[0].device)
    if not (fits and can_launch(tensors[0].device)):
        raise UserError(
            f"implementation='triton' needs a CUDA GPU, Triton, 2 to {FUSED_BLOCKS} blocks and float16, bfloat16 "
            f"or float32, not {K} blocks of {tensors[0].dtype} on {tensors[0].device}; use 'auto' or 'plain'"
        )
    return True

"""Softmax attention with a bias that depends on the distance, as T5 has it: scores are not divided by √d."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from altup.core.errors import UserError, check_choice, check_range
from altup.kernels.attention.launch import PEAKS, WIDTHS, apart, draws_once
from altup.kernels.attention.reference import attention_reference, hidden_keys, keep_mask, lay_out
from altup.kernels.attention.slots import joined
from altup.kernels.dropout.reference import draw_kept, keep_scale
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, can_launch, runs_triton

__all__ = [
    "PEAKS",
    "WIDTHS",
    "apart",
    "attention",
    "attention_reference",
    "joined",
    "joined_attention",
    "keep_mask",
    "lay_out",
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    by_distance: Tensor | None = None,
    causal: bool = False,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    constant_beyond: int | None = None,
    dropout: float = 0.0,
    per_sequence: bool = False,
    scale: float = 1.0,
    implementation: str = "auto",
    peaks: Tensor | None = None,
) -> Tensor:
    """softmax(scale·q·kᵀ + bias)·v over the keys that a query sees; zero for a query that sees none.

    q: [batch, heads, queries, d]; k, v: [batch, heads, keys, d]; the result is as q. All may be views of
    [batch, tokens, heads, d], and the kernels' result and gradients are.

    bias: broadcastable to [batch, heads, queries, keys]. by_distance: [heads, queries + keys − 1], whose entry
    j − i + queries − 1 is added to the score of query i and key j. From |j − i| = `constant_beyond` on it is
    constant, if that is given: its gradient is then right as a sum over the constant part, and may stand
    anywhere in it.

    causal: key j is seen by the queries i ≥ j. query_segments [batch, queries], key_segments [batch, keys]: a key
    is seen by the queries of its segment; a padding mask is the segments of keys, where all queries are of
    segment 1. dropout: on the weights. per_sequence: a key is dropped for all queries of its sequence and head or
    for none, as in T5's own code: that is, its value is.

    implementation: "triton", the kernels, on Ampere GPUs or later; "plain", PyTorch's own function; "auto", the
    kernels for float16 and bfloat16 where there is a by_distance or there are segments, else "plain".

    peaks: float32 numbers, of the kernels only. What comes back as their gradient are the largest numbers of the
    gradients of q, k and v.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    check_range("dropout", dropout, 0.0, 1.0)
    if (query_segments is None) != (key_segments is None):
        missing = "key_segments" if key_segments is None else "query_segments"
        raise UserError(f"{missing}=None makes no sense beside the other's segments; give both or neither")
    query_segments = _of_each_row("query_segments", query_segments, q)
    key_segments = _of_each_row("key_segments", key_segments, k)
    distances = (q.shape[1], q.shape[2] + k.shape[2] - 1)
    if by_distance is not None and tuple(by_distance.shape) != distances:
        shape = list(by_distance.shape)
        raise UserError(
            f"by_distance has the shape {shape}; make it [heads, queries + keys − 1] = {list(distances)}"
        )
    if implementation == "auto":
        wanted = by_distance is not None or query_segments is not None
        half = q.dtype in (torch.float16, torch.bfloat16)
        fits = bias is None and q.shape[-1] in WIDTHS and half and _fit(q, k, v) and runs_triton(q.device)
        implementation = "triton" if wanted and fits else "plain"
    kept = draw_kept(k.shape[:3], dropout, k.device) if dropout and per_sequence else None
    if implementation == "plain":
        return _plain(q, k, v, bias, by_distance, causal, query_segments, key_segments, dropout, kept, scale)
    _check_kernels(q, k, v, bias, scale, constant_beyond)
    tensors = _for_kernels(q, k, by_distance, query_segments, key_segments, dropout, kept)
    from altup.kernels.attention.op import attend

    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]
    return attend(rows, *tensors, peaks, causal, dropout, scale, constant_beyond)[0]


def joined_attention(
    *parts: Tensor,
    by_distance: Tensor | None = None,
    causal: bool = False,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    constant_beyond: int | None = None,
    dropout: float = 0.0,
    per_sequence: bool = False,
    scale: float = 1.0,
    implementation: str = "auto",
) -> Tensor:
    """`attention` of what few products gave: [batch, tokens, 3, heads, d] holds queries, keys and values; or
    [batch, queries, 1, heads, d] and [batch, keys, 2, heads, d]. The result is [batch, heads, queries, d].

    The kernels' gradients have the parts' shapes, so that the products' backward passes need not join them first.
    Where a part is cut out of longer rows, its gradient lies in rows as long (see `joined`).
    """
    q, k, v = apart(parts)
    if implementation == "auto":
        half = q.dtype in (torch.float16, torch.bfloat16)
        fits = q.shape[-1] in WIDTHS and half and _fit(q, k, v) and runs_triton(q.device)
        implementation = "triton" if fits else "plain"
    query_segments = _of_each_row("query_segments", query_segments, q)
    key_segments = _of_each_row("key_segments", key_segments, k)
    kept = draw_kept(k.shape[:3], dropout, k.device) if dropout and per_sequence else None
    if implementation == "plain":
        return _plain(q, k, v, None, by_distance, causal, query_segments, key_segments, dropout, kept, scale)
    _check_kernels(q, k, v, None, scale, constant_beyond)
    tensors = _for_kernels(q, k, by_distance, query_segments, key_segments, dropout, kept)
    from altup.kernels.attention.op import attend

    return attend(list(parts), *tensors, None, causal, dropout, scale, constant_beyond)[0]


def _for_kernels(
    q: Tensor,
    k: Tensor,
    by_distance: Tensor | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    dropout: float,
    kept: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Bias, segments and the seed of dropout, or its decisions, as the kernels read them."""
    seed = torch.randint(2**62, (1,), device=q.device) if dropout and kept is None else kept
    if seed is not None and kept is None and draws_once(q.device, k.shape[2]):
        from altup.kernels.attention.kept import keep_bits_op

        seed = keep_bits_op(seed, q.shape[0] * q.shape[1], q.shape[2], k.shape[2], dropout)
    return (
        None if by_distance is None else by_distance.float().contiguous(),
        None if query_segments is None else query_segments.to(torch.int32).contiguous(),
        None if key_segments is None else key_segments.to(torch.int32).contiguous(),
        seed,
    )


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    by_distance: Tensor | None,
    causal: bool,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    dropout: float,
    kept: Tensor | None,
    scale: float,
) -> Tensor:
    """Through PyTorch's own function, with bias and mask in one dense tensor where there are any."""
    if kept is not None:
        v, dropout = (v * (kept * keep_scale(dropout))[..., None]).to(v.dtype), 0.0
    if bias is None and by_distance is None and query_segments is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal, scale=scale)
    queries, keys = q.shape[2], k.shape[2]
    if by_distance is not None:
        dense = lay_out(by_distance, queries, keys)
        bias = dense if bias is None else bias + dense
    if bias is not None:
        bias = bias.to(q.dtype)
    hidden = hidden_keys(queries, keys, causal, query_segments, key_segments, q.device)
    if hidden is not None:
        bias = (q.new_zeros(()) if bias is None else bias).masked_fill(hidden, torch.finfo(q.dtype).min)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
    if query_segments is not None and hidden is not None:
        out = out.masked_fill(hidden.all(-1, keepdim=True), 0)
    return out


def _fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels can take them: they see addresses, and there must be something to see."""
    alike = (*q.shape[:2], q.shape[3]) == (*k.shape[:2], k.shape[3]) and k.shape == v.shape
    of_a_kind = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    return alike and of_a_kind and q.numel() > 0 and k.numel() > 0


def _of_each_row(name: str, segments: Tensor | None, x: Tensor) -> Tensor | None:
    """`segments` [batch or 1, tokens] of x [batch, heads, tokens, d] → [batch, tokens]."""
    if segments is None:
        return None
    # Not `in`: traced by torch.compile, it never finds a dynamic size equal to a static one.
    rows_fit = segments.dim() == 2 and (segments.shape[0] == 1 or segments.shape[0] == x.shape[0])
    if not rows_fit or segments.shape[1] != x.shape[2]:
        raise UserError(f"{name} has the shape {list(segments.shape)}; make it {[x.shape[0], x.shape[2]]}")
    return segments.expand(x.shape[0], -1)


def _check_kernels(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, constant_beyond: int | None
) -> None:
    if not can_launch(q.device):
        raise UserError(f'implementation="triton" needs Triton and a GPU since Ampere, not {q.device}; use "auto"')
    if bias is not None:
        raise UserError('implementation="triton" has no dense bias; give it by distance, or use "auto"')
    if not _fit(q, k, v):
        found = ", ".join(f"{list(x.shape)} {x.dtype}" for x in (q, k, v))
        raise UserError(
            f'implementation="triton" takes q, k and v [batch, heads, tokens, d] alike, not {found}; use "auto"'
        )
    if q.shape[-1] not in WIDTHS:
        raise UserError(f'implementation="triton" is for heads {WIDTHS} wide, not {q.shape[-1]}; use "auto"')
    if q.dtype not in FUSED_DTYPES:
        raise UserError(f'implementation="triton" computes in 16 or 32 bits, not {q.dtype}; use "auto"')
    if scale <= 0:
        raise UserError(f"scale={scale!r} makes no sense; give a positive number")
    if constant_beyond is not None and constant_beyond < 1:
        raise UserError(f"constant_beyond={constant_beyond!r} makes no sense; give a distance of at least 1")

"""The update of `altup_update` with coefficients that differ from token to token, as Gemma 3n has them.

For every token, with its own P and g, the layer's output y and the active block a,

    x̂ⁱ = Σⱼ Pᵢⱼ xʲ,    x_newⁱ = x̂ⁱ + gᵢ (y − x̂ᵃ)      =      Σⱼ Mᵢⱼ xʲ + gᵢ y      with M = P − g ⊗ P[a].

M is K² numbers a token beside K·d of the state, so it is made by ordinary operations, and one mixture of blocks
serves prediction (M = P, no y), correction (P = I) and both at once. Sums run in float32 (float64 for float64
states), whatever the state's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from altup.core.errors import UserError, check_choice
from altup.kernels.altup_update import FUSED_BLOCKS, State, check_triton
from altup.kernels.altup_update_dynamic.reference import altup_update_dynamic_reference
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, runs_triton

# From this width on, compiled plain code is the faster: the compiler joins it to what makes the coefficients
# (forward and backward of 32,768 tokens on an H200: 1.17 ms, with the kernels 1.40).
COMPILED_WIDTH = 2048

__all__ = ["altup_update_dynamic", "altup_update_dynamic_reference", "mix_blocks"]


def altup_update_dynamic(
    x: State, y: Tensor, P: Tensor | None, g: Tensor, active: int, implementation: str = "auto"
) -> State:
    """`altup_update_dynamic_reference` in one pass over the state, which may also be a tuple of K blocks [..., d].

    Without P the blocks are corrected as they are (P = I). There is no `residual` as in `altup_update`, because g
    is made from the layer's whole output, which therefore is in memory already. "auto" takes the Triton kernels on
    CUDA GPUs where they can run and are the faster, "triton" requires them, and "plain" does not use them.
    """
    K, tokens = len(x), y.shape[:-1]
    if g.shape != (*tokens, K) or not 0 <= active < K or (P is not None and P.shape != (*tokens, K, K)):
        raise UserError(
            f"P {None if P is None else list(P.shape)}, g {list(g.shape)}, active={active} do not fit a state of "
            f"{K} blocks and the layer's output {list(y.shape)}: P is [..., K, K], g is [..., K], a token each"
        )
    dtype = _sum_dtype(x)
    g = g.to(dtype)
    P = torch.eye(K, dtype=dtype, device=g.device).expand(*tokens, K, K) if P is None else P.to(dtype)
    return mix_blocks(x, P - g.unsqueeze(-1) * P[..., active, None, :], y, g, implementation)


def mix_blocks(
    x: State,
    M: Tensor,
    y: Tensor | None = None,
    g: Tensor | None = None,
    implementation: str = "auto",
    dim: int = 0,
) -> State:
    """Σⱼ Mᵢⱼ xʲ + gᵢ y with M: [..., rows, K] and g: [..., rows] for each token, or without the last term: as many
    blocks as M has rows.

    x: [K, ..., d], or with `dim` -2 [..., K, d]; or K blocks [..., d] as a tuple or list, which gives a tuple.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    blocks = x.unbind(dim) if isinstance(x, Tensor) else tuple(x)
    _check_shapes(blocks, M, y, g)
    parts = [x] if isinstance(x, Tensor) else list(x)
    dtypes = {parts[0].dtype, parts[0].dtype if y is None else y.dtype}
    fits = len(blocks) <= FUSED_BLOCKS and dtypes <= set(FUSED_DTYPES)
    if implementation == "triton":
        check_triton(fits, parts[0], parts[0] if y is None else y)
    joined = torch.compiler.is_compiling() and M.shape[-2] > 1 and blocks[0].shape[-1] >= COMPILED_WIDTH
    if implementation == "triton" or (implementation == "auto" and fits and not joined and runs_triton(M.device)):
        from altup.kernels.altup_update_dynamic.triton import mix

        new = mix(parts, y, M.float(), None if g is None else g.float(), dim)
        return new[0] if isinstance(x, Tensor) else tuple(new)
    mixed = _plain(blocks, M, y, g)
    return torch.stack(mixed, dim) if isinstance(x, Tensor) else mixed


def _plain(x: Sequence[Tensor], M: Tensor, y: Tensor | None, g: Tensor | None) -> tuple[Tensor, ...]:
    dtype = _sum_dtype(x)
    M, blocks = M.to(dtype), [block.to(dtype) for block in x]
    rows = []
    for i in range(M.shape[-2]):
        row = M[..., i, 0, None] * blocks[0]
        for j in range(1, len(blocks)):
            row = row + M[..., i, j, None] * blocks[j]
        if y is not None and g is not None:
            row = row + g[..., i, None].to(dtype) * y
        rows.append(row.to(x[0].dtype))
    return tuple(rows)


def _sum_dtype(x: State) -> torch.dtype:
    return torch.promote_types(x[0].dtype, torch.float32)


def _check_shapes(parts: Sequence[Tensor], M: Tensor, y: Tensor | None, g: Tensor | None) -> None:
    """The kernels see flat arrays and cannot check shapes, so it is done here."""
    K, block = len(parts), parts[0]
    given = [tensor for tensor in (M, y, g) if tensor is not None]
    alike = all(part.shape == parts[0].shape and part.dtype == parts[0].dtype for part in parts)
    if not alike or any(tensor.device != block.device for tensor in [*parts, *given]):
        found = ", ".join(f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}" for tensor in [*parts, *given])
        raise UserError(f"blocks, coefficients and the layer's output do not fit together: {found}")
    tokens = block.shape[:-1]
    fits = M.dim() > 1 and M.shape == (*tokens, M.shape[-2], K) and (y is None) == (g is None)
    if y is not None and g is not None:
        fits = fits and y.shape == block.shape and g.shape == M.shape[:-1]
    if not fits:
        found = ", ".join(f"{name} {list(t.shape)}" for name, t in (("M", M), ("y", y), ("g", g)) if t is not None)
        raise UserError(f"{found} do not fit a state of {K} blocks {list(block.shape)}")

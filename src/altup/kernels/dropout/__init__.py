"""Dropout whose random bits are cheap.

Compiled code spends ten rounds of Philox on every number; here seven rounds of a smaller one serve four.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from altup.core.errors import UserError, check_choice, check_range
from altup.kernels.dropout.reference import draw_kept, keep_mask_reference, keep_scale
from altup.kernels.launch import IMPLEMENTATIONS, can_launch, runs_triton

__all__ = ["block_dropout", "decisions", "dropout", "keep_mask_reference", "sequence_factors"]


def dropout(
    x: Tensor, p: float, training: bool = True, implementation: str = "auto", *, per_sequence: bool = False
) -> Tensor:
    """As `torch.nn.functional.dropout`, with p kept to 2⁻¹⁶.

    per_sequence: all tokens of x, [..., tokens, d], lose the same of their d numbers, as in T5's own code.
    implementation: "triton", the kernel, on Ampere GPUs or later; "plain", PyTorch's own, which is one launch;
    "auto", the kernel where code is compiled for such a GPU.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if p != 1:
        check_range("p", p, 0, 1)
    if implementation == "triton" and not can_launch(x.device):
        raise UserError(f'implementation="triton" needs Triton and a GPU since Ampere, not {x.device}; use "auto"')
    if not training or p == 0:
        return x
    if per_sequence and p != 1:
        return (x * sequence_factors(x, p)).to(x.dtype)
    compiles = torch.compiler.is_compiling() and runs_triton(x.device)
    if implementation == "plain" or p == 1 or not (implementation == "triton" or compiles):
        return F.dropout(x, p)
    from altup.kernels.dropout.triton import keep_mask_op

    seed = torch.randint(2**62, (1,), device=x.device)
    return torch.where(keep_mask_op(seed, x.shape, p), x, 0) * keep_scale(p)


def sequence_factors(x: Tensor, p: float) -> Tensor:
    """What dropout with one decision for all tokens multiplies x [..., tokens, d] by: [..., 1, d], float32."""
    if x.dim() < 2:
        raise UserError(f"per_sequence=True needs tokens, [..., tokens, d], and x is {list(x.shape)}")
    return draw_kept((*x.shape[:-2], 1, x.shape[-1]), p, x.device) * keep_scale(p)


def decisions(x: Tensor, p: float, per_sequence: bool) -> Tensor:
    """What kernels over the rows of x take for their dropout: a seed [1], or in its place `sequence_factors`."""
    return sequence_factors(x, p) if per_sequence else torch.randint(2**62, (1,), device=x.device)


def block_dropout(
    x: Tensor, num_blocks: int, p: float, training: bool = True, *, per_sequence: bool = False
) -> Tensor:
    """Dropout of K blocks side by side, [..., K·d], that drops the same of every block.

    While P = I and g = 1 layers take the same steps on all blocks, so what tells blocks apart when they enter the
    first layer stays up to the last: with a mask for each, noise that the layers of an upcycled model have never
    seen. With one it trains at first as the dense model would, with the same draws.
    """
    if num_blocks == 1 or not training or p == 0:
        return dropout(x, p, training, per_sequence=per_sequence)
    like = x[..., :1, :] if per_sequence else x
    ones = torch.ones(*like.shape[:-1], x.shape[-1] // num_blocks, device=x.device)
    kept = dropout(ones, p, per_sequence=per_sequence)  # 0 or 1 / (1 - p)
    return (x.unflatten(-1, (num_blocks, -1)) * kept.unsqueeze(-2)).flatten(-2).to(x.dtype)

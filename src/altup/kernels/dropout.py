"""Dropout whose random bits are cheap.

Compiled code spends ten rounds of Philox on every number; here seven rounds of a smaller one serve four.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from altup.core.errors import UserError, check_choice, check_range
from altup.kernels.availability import interprets_triton, runs_triton
from altup.kernels.dropout_op import keep_mask_op
from altup.kernels.philox import is_kept, keep_scale, stream_keys, stream_words

LANES = 1024  # counters of a program; each counter's four numbers are as far apart, so that neighbours are written


def dropout(x: Tensor, p: float, training: bool = True, implementation: str = "auto") -> Tensor:
    """As `torch.nn.functional.dropout`, with p kept to 2⁻¹⁶.

    implementation: "triton", the kernel, on Ampere GPUs or later; "plain", PyTorch's own, which is one launch;
    "auto", the kernel where code is compiled for such a GPU.
    """
    check_choice("implementation", implementation, ("auto", "plain", "triton"))
    if p != 1:
        check_range("p", p, 0, 1)
    if implementation == "triton" and not (runs_triton(x.device) or interprets_triton()):
        raise UserError(f'implementation="triton" needs Triton and a GPU since Ampere, not {x.device}; use "auto"')
    if not training or p == 0:
        return x
    compiles = torch.compiler.is_compiling() and runs_triton(x.device)
    if implementation == "plain" or p == 1 or not (implementation == "triton" or compiles):
        return F.dropout(x, p)
    seed = torch.randint(2**62, (1,), device=x.device)
    return torch.where(keep_mask_op(seed, x.shape, p), x, 0) * keep_scale(p)


def keep_mask_reference(numel: int, seed: int, p: float) -> Tensor:
    """Which of `numel` numbers in a row the kernel keeps under a seed.

    They are cut into pieces of four times LANES. The counter n = LANES · piece + lane gives two words, and their
    halves, the lower first, belong to the places `lane`, LANES + `lane` and so on of the piece.
    """
    place = torch.arange(numel)
    piece, quarter, lane = place // (4 * LANES), place // LANES % 4, place % LANES
    counter = piece * LANES + lane
    stream = stream_keys(seed, torch.zeros((), dtype=torch.long))
    words = stream_words(stream, counter & 0xFFFFFFFF, counter >> 32)
    word = torch.where(quarter < 2, words[0], words[1])
    return is_kept(torch.where(quarter % 2 == 0, word & 0xFFFF, word >> 16), p)

"""The definition of dropout's masks, and of the kernels' random numbers: Philox 2×32 (Salmon and others, 2011).

A counter of two words and a key of one give two random words. Seven rounds are the fewest that pass BigCrush.
Attention draws its masks from the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDS = 7
KEY_ROUNDS = 10
MULTIPLIER, WEYL = 0xD256D193, 0x9E3779B9
LOW = 0xFFFFFFFF
LANES = 1024  # counters of a program; a counter's four numbers are as far apart, so that neighbours are written


def philox(c0: Tensor, c1: Tensor, key: Tensor | int, rounds: int = ROUNDS) -> tuple[Tensor, Tensor]:
    """Two words of 32 bits, in int64 as the counters are."""
    for _ in range(rounds):
        # 32 × 32 bits do not fit in a signed 64-bit word: multiply by halves.
        upper, lower = (MULTIPLIER >> 16) * c0, (MULTIPLIER & 0xFFFF) * c0
        total = lower + ((upper & 0xFFFF) << 16)
        c0, c1 = ((upper >> 16) + (total >> 32)) ^ key ^ c1, total & LOW
        key = (key + WEYL) & LOW
    return c0, c1


def stream_words(stream: tuple[Tensor, Tensor], c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor]:
    """The two words of a counter in a stream: one of its keys is Philox's, the other changes the counter."""
    return philox(c0, c1 ^ stream[1], stream[0])


def stream_keys(seed: int, stream: Tensor) -> tuple[Tensor, Tensor]:
    """The two keys of each stream of numbers under a 64-bit seed."""
    return philox(stream * 0 + (seed & LOW), stream * 0 + (seed >> 32 & LOW), stream & LOW, KEY_ROUNDS)


def is_kept(half: Tensor, dropout: float) -> Tensor:
    """Whether a half of a word, 16 bits read as a signed number, is not among the lowest `dropout` of all."""
    return (half ^ 2**15) >= dropped(dropout)


def drop_below(dropout: float) -> int:
    """The lowest signed word whose upper half is kept."""
    return (dropped(dropout) << 16) - 2**31


def keep_scale(dropout: float) -> float:
    """What those that are kept are multiplied by, so that the mean stays."""
    return 2**16 / (2**16 - dropped(dropout))


def dropped(dropout: float) -> int:
    """How many of the 2¹⁶ halves are dropped; not all."""
    return min(round(dropout * 2**16), 2**16 - 1)


def draw_kept(shape: Sequence[int], p: float, device: torch.device) -> Tensor:
    """1 where a number is kept, else 0, in float32: few decisions that many share."""
    return (torch.randint(2**16, shape, device=device) >= dropped(p)).float()


def keep_mask_reference(numel: int, seed: int, p: float) -> Tensor:
    """Which of `numel` numbers in a row the kernel keeps under a seed.

    They are cut into pieces of four times LANES. The counter n = LANES · piece + lane gives two words, and their
    halves, the lower first, belong to the positions `lane`, LANES + `lane` and so on of the piece.
    """
    offset = torch.arange(numel)
    piece, quarter, lane = offset // (4 * LANES), offset // LANES % 4, offset % LANES
    counter = piece * LANES + lane
    stream = stream_keys(seed, torch.zeros((), dtype=torch.long))
    words = stream_words(stream, counter & 0xFFFFFFFF, counter >> 32)
    word = torch.where(quarter < 2, words[0], words[1])
    return is_kept(torch.where(quarter % 2 == 0, word & 0xFFFF, word >> 16), p)

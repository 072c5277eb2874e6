"""The parts that the kernels share. A tile holds queries × keys, or keys × queries where the keys come first.

Tiles are cut where the matrix units' registers are: the numbers of a thread differ in bit 3 of both indices and in
the higher bits of the column, and a warp holds 16 rows. What is split or joined along those bits moves nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from altup.kernels.dropout.triton import stream_words, upper_halves

LOG2E = tl.constexpr(1.4426950408889634)
SCANNED = tl.constexpr(1024)  # segments read at a time


@triton.jit
def load_rows(x, rows, stride, count, D: tl.constexpr, EVEN: tl.constexpr):
    """Rows of x, [len(rows), D], zero from `count` on; EVEN promises that there are no such rows."""
    offsets = x + rows[:, None] * stride + tl.arange(0, D)[None, :]
    if EVEN:
        return tl.load(offsets)
    else:
        return tl.load(offsets, mask=rows[:, None] < count, other=0.0)


@triton.jit
def load_tile(
    x, descriptor, batch, head, start, stride, count, N: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr
):
    """N rows of x from `start` on, [N, D], zero from `count` on; by the copy engine where there is a descriptor of
    the whole tensor."""
    if descriptor is None:
        return load_rows(x, start + tl.arange(0, N), stride, count, D, EVEN)
    else:
        return tl.reshape(descriptor.load([batch, head, start, 0]), [N, D])


@triton.jit
def load_numbers(x, rows, count, other, EVEN: tl.constexpr):
    """One number for each row, `other` from `count` on."""
    if EVEN:
        return tl.load(x + rows)
    else:
        return tl.load(x + rows, mask=rows < count, other=other)


@triton.jit
def load_pairs(x, rows, count, EVEN: tl.constexpr):
    """What `store_pairs` wrote for each row; ∞ and 0 from `count` on. Two numbers at a time are read by as many
    threads as there are numbers; one at a time, every thread would read all that it needs."""
    offsets = x + rows[:, None] * 2 + tl.arange(0, 2)[None, :]
    if EVEN:
        return tl.split(tl.load(offsets))
    else:
        a, b = tl.split(tl.load(offsets, mask=rows[:, None] < count, other=0.0))
        return tl.where(rows < count, a, float("inf")), b


@triton.jit
def store_pairs(x, rows, count, a, b):
    """Two numbers for each row, side by side."""
    tl.store(x + rows[:, None] * 2 + tl.arange(0, 2)[None, :], tl.join(a, b), mask=rows[:, None] < count)


@triton.jit
def load_segments(segments, rows, count, SEGMENTS: tl.constexpr):
    """The segment of each row; without segments all are one."""
    if SEGMENTS:
        return tl.load(segments + rows, mask=rows < count, other=0)
    else:
        return rows * 0


@triton.jit
def _ranked(segments):
    """Move padding (segment 0) behind all others, where packed rows have it."""
    return tl.where(segments == 0, 2147483647, segments)


@triton.jit
def meeting_tiles(own, segments, count, first, last, TILE: tl.constexpr, SEGMENTS: tl.constexpr):
    """Of the tiles first … last − 1 of the other side, those between the first and the last one that may hold a
    segment of `own`; at least one. Where the segments of a row rise, as in packed rows, they are few."""
    if not SEGMENTS:
        return first, last
    else:
        low = tl.min(_ranked(own))
        high = tl.max(_ranked(own))
        begin = tl.full([SCANNED], count, tl.int32)
        end = tl.zeros([SCANNED], tl.int32)
        for start in range(0, count, SCANNED):
            offset = start + tl.arange(0, SCANNED)
            segment = _ranked(tl.load(segments + offset, mask=offset < count, other=0))
            met = (offset < count) & (segment >= low) & (segment <= high)
            begin = tl.minimum(begin, tl.where(met, offset, count))
            end = tl.maximum(end, tl.where(met, offset + 1, 0))
        first = tl.minimum(tl.maximum(first, tl.min(begin) // TILE), last - 1)
        return first, tl.maximum(tl.minimum(last, tl.cdiv(tl.max(end), TILE)), first + 1)


@triton.jit
def store_rows(x, rows, stride, count, value, D: tl.constexpr):
    """Rows of x up to `count`, in its dtype."""
    offsets = x + rows[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(offsets, value.to(x.dtype.element_ty), mask=rows[:, None] < count)


@triton.jit
def note_peak(peaks, value, SLOTS: tl.constexpr):
    """The largest |value| into a slot of the program's, if it is larger than what is there. Sizes are compared as
    integers, which order NaN above all numbers, so the order of programs does not matter."""
    sizes = tl.abs(value).to(tl.int32, bitcast=True)
    tl.atomic_max(peaks + tl.program_id(0) % SLOTS, tl.max(tl.max(sizes, 1), 0), sem="relaxed")


@triton.jit
def bias_row(bias, first, count, LENGTH: tl.constexpr):
    """The bias at LENGTH successive distances, zero outside [0, count); `first` may be negative."""
    offsets = first + tl.arange(0, LENGTH)
    return tl.load(bias + offsets, mask=(offsets >= 0) & (offsets < count), other=0.0).to(tl.float32)


@triton.jit
def side_by_side(pieces, G: tl.constexpr, FIRST: tl.constexpr, N: tl.constexpr):
    """N tensors [G, 8, 8], from number FIRST on → [G, 8, 8, N]."""
    if N == 2:
        return tl.join(pieces[FIRST], pieces[FIRST + 1])
    else:
        a = side_by_side(pieces, G, FIRST, N // 2)
        b = side_by_side(pieces, G, FIRST + N // 2, N // 2)
        return tl.reshape(tl.permute(tl.join(a, b), 0, 1, 2, 4, 3), [G, 8, 8, N])


@triton.jit
def bias_tile(row, QUERIES: tl.constexpr, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Lays a row of biases, from the tile's least distance on, out along the tile's diagonals.

    The offsets consist of 8 × 8 squares, those on one diagonal being the same, so that the compiler sees
    which of a thread's biases are equal and reads each once: 18 instead of 32 in a tile of 64 × 64."""
    ROWS: tl.constexpr = KEYS if KEYS_FIRST else QUERIES
    COLUMNS: tl.constexpr = QUERIES if KEYS_FIRST else KEYS
    G: tl.constexpr = ROWS // 16
    N: tl.constexpr = COLUMNS // 8
    group = tl.arange(0, G)[:, None, None]
    a = tl.arange(0, 8)[None, :, None]
    b = tl.arange(0, 8)[None, None, :]
    offsets = 16 * group + a - b + 8 if KEYS_FIRST else b - a - 16 * group - 8
    squares = ()
    for n in tl.static_range(N + 1):
        squares += (offsets + (QUERIES - 1 + (-8 * n if KEYS_FIRST else 8 * n)),)  # type: ignore[assignment]
    upper = side_by_side(squares, G, 1, N)
    lower = side_by_side(squares, G, 0, N)
    offsets = tl.permute(tl.join(upper, lower), 0, 4, 1, 3, 2)
    return tl.reshape(tl.gather(row, tl.reshape(offsets, [ROWS * COLUMNS]), 0), [ROWS, COLUMNS])


@triton.jit
def hide(x, i, j, i_segment, j_segment, keys, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, EVEN: tl.constexpr):
    """−∞ where key j is not for query i; i and j, like their segments, stand along the tile's two sides."""
    if not EVEN:
        x = tl.where(j < keys, x, float("-inf"))
    if CAUSAL:
        x = tl.where(j <= i, x, float("-inf"))
    if SEGMENTS:
        x = tl.where(i_segment == j_segment, x, float("-inf"))
    return x


@triton.jit
def random_bits(stream, i0, j0, QUERIES: tl.constexpr, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """A random signed word for each query i and key j of the tile at (i0, j0), of which the upper 16 bits count.

    The two words of the counter (i, j) serve (i, j) and (i, j + 8), then (i + 8, j) and (i + 8, j + 8).
    """
    ROWS: tl.constexpr = KEYS if KEYS_FIRST else QUERIES
    COLUMNS: tl.constexpr = QUERIES if KEYS_FIRST else KEYS
    row = tl.arange(0, ROWS // 2)
    column = tl.arange(0, COLUMNS // 2)
    row = tl.broadcast_to((row // 8 * 16 + row % 8)[:, None], [ROWS // 2, COLUMNS // 2])
    column = tl.broadcast_to((column // 8 * 16 + column % 8)[None, :], [ROWS // 2, COLUMNS // 2])
    if KEYS_FIRST:
        upper, lower = stream_words(stream, i0 + column, j0 + row)
    else:
        upper, lower = stream_words(stream, i0 + row, j0 + column)
    a, b = upper_halves(upper)
    c, d = upper_halves(lower)
    bits = tl.join(tl.join(a, c), tl.join(b, d)) if KEYS_FIRST else tl.join(tl.join(a, b), tl.join(c, d))
    bits = tl.permute(tl.reshape(bits, [ROWS // 16, 8, COLUMNS // 16, 8, 2, 2]), 0, 5, 1, 2, 4, 3)
    return tl.reshape(bits, [ROWS, COLUMNS])


@triton.jit
def _pieces(x, G: tl.constexpr, N: tl.constexpr):
    """[G, 8, 8, N] → N tensors [G, 8, 8]."""
    if N == 2:
        a, b = tl.split(x)
        return (a, b)
    else:
        a, b = tl.split(tl.permute(tl.reshape(x, [G, 8, 8, 2, N // 2]), 0, 1, 2, 4, 3))
        return _pieces(a, G, N // 2) + _pieces(b, G, N // 2)


@triton.jit
def stack(pieces, G: tl.constexpr, FIRST: tl.constexpr, N: tl.constexpr):
    """N tensors [G, 8], from number FIRST on → [G, 8, N]."""
    if N == 2:
        return tl.join(pieces[FIRST], pieces[FIRST + 1])
    else:
        a = stack(pieces, G, FIRST, N // 2)
        b = stack(pieces, G, FIRST + N // 2, N // 2)
        return tl.reshape(tl.permute(tl.join(a, b), 0, 1, 3, 2), [G, 8, N])


@triton.jit
def diagonal_sums(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums along the diagonals of each 16 rows of a tile: COLUMNS/8 + 2 tensors [ROWS/16, 8].

    Number k holds the diagonals column − row = 8·(k − 2) + (0 … 7), rows being counted within their 16. First the
    8 × 8 squares on one diagonal are added up, within each thread. Then each square's columns are turned until its
    diagonals are rows; what was turned over the edge belongs to the diagonals eight below.
    """
    G: tl.constexpr = ROWS // 16
    N: tl.constexpr = COLUMNS // 8
    upper, lower = tl.split(tl.permute(tl.reshape(x, [G, 2, 8, N, 8]), 0, 2, 4, 3, 1))
    upper = _pieces(upper, G, N)
    lower = _pieces(lower, G, N)
    diagonal = tl.arange(0, 8)[None, :, None]
    column = tl.arange(0, 8)[None, None, :]
    turn = tl.broadcast_to((column - diagonal) & 7, [G, 8, 8])
    inside = column >= diagonal
    square = tl.gather(lower[0], turn, 1)
    sums = (tl.sum(tl.where(inside, 0.0, square), 2),)
    for n in tl.static_range(N):
        following = upper[n]
        if n + 1 < N:
            following += lower[n + 1]
        following = tl.gather(following, turn, 1)
        sums += (tl.sum(tl.where(inside, square, following), 2),)  # type: ignore[assignment]
        square = following
    sums += (tl.sum(tl.where(inside, square, 0.0), 2),)  # type: ignore[assignment]
    return sums

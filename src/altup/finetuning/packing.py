"""Packing: several short examples in one row, so that little of a batch is padding.

Each token carries the number of its example within the row, in `segments` and `decoder_segments`, and in all three
attentions it sees its own number alone; 0 is padding. Positions are relative, so that an example reads the same
wherever in a row it stands.

Rows are wide or narrow. The attention kernels skip what a token does not see, so that for them a row may have any
width; wide rows hold many examples, and are filled evenly. Any other attention looks at the whole row, so that
narrow ones are as wide as the longest input asks for, or as some examples to fit together.

On a GPU each shape of batch is recorded as a graph of its own; so that there are few, sizes are rounded up.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from altup.training.prefetch import IGNORED

NARROW, WIDEST = 8, 512  # usual examples of a narrow row, and tokens unless an input is longer
WIDTHS = (32, 64, 128, 192, 256, 384)  # of padded rows, below the longest: few, as each is recorded for itself
LONG = 1 / 4  # of a narrow row: inputs beyond this are fitted in tightly, those below it evenly
WIDE = 4096  # tokens of a wide row, or about as many


@dataclass(frozen=True)
class Sizes:
    """Of a mixture's inputs, or of its targets, in tokens."""

    mean: float
    spread: float  # standard deviation
    most: int


@dataclass(frozen=True)
class Usual:
    """What the examples of a mixture are like."""

    inputs: Sizes
    targets: Sizes


# What makes, of the sizes of a mixture, its padding and one of LAYOUTS (None: an example a row), the function that
# lays out a batch: (inputs, targets) → the model's arguments.
Arrange = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], dict[str, np.ndarray]]
MakeRows = Callable[[Usual, int, str | None], Arrange]


@dataclass(frozen=True)
class Rows:
    """Which examples go into each row, and the shapes of it all; the last rows may be empty."""

    examples: list[list[int]]
    number: int
    width: int
    target_width: int

    @property
    def positions(self) -> int:
        return self.number * (self.width + self.target_width)


def narrow_rows(inputs: Sequence[int], targets: Sequence[int], usual: Usual) -> Rows:
    """As many rows of one width as it takes, with the room for targets that makes the fewest positions."""
    width = round_up(max(min(math.ceil(NARROW * usual.inputs.mean), WIDEST), usual.inputs.most))
    quantum = max(1, round(len(inputs) * usual.inputs.mean / width / 32))
    found = []
    for target_width in target_widths(usual, width):
        if target_width >= max(targets, default=0):
            examples = fit_rows(inputs, targets, width, target_width)
            found.append(Rows(examples, round_up(len(examples), quantum), width, target_width))
    return min(found, key=lambda rows: rows.positions)


def wide_rows(inputs: Sequence[int], targets: Sequence[int], usual: Usual) -> Rows:
    """As many rows as the examples usually need, and as wide as the fullest of them."""
    number = max(1, round(len(inputs) * usual.inputs.mean / max(WIDE, usual.inputs.most)))
    examples = balance_rows(inputs, number)

    def width(sizes: Sequence[int], like: Sizes, share: float) -> int:
        fullest = max(1, *(sum(sizes[example] for example in row) for row in examples))
        return round_up(fullest, _quantum(like, len(sizes), number, share))

    return Rows(examples, number, width(inputs, usual.inputs, 1 / 32), width(targets, usual.targets, 1 / 4))


def _quantum(sizes: Sizes, examples: int, rows: int, share: float) -> int:
    """What the width of rows is rounded up to: a `share` of the usual width, or as much as that varies from batch
    to batch if it is more; a power of two, because that is where the kernels' tiles end."""
    size = max(share * examples * sizes.mean, math.sqrt(examples) * sizes.spread) / rows
    return 2 ** max(round(math.log2(max(size, 1.0))), 3)


LAYOUTS: dict[str, Callable[[Sequence[int], Sequence[int], Usual], Rows]] = {
    "narrow": narrow_rows,
    "wide": wide_rows,
}


def balance_rows(inputs: Sequence[int], number: int) -> list[list[int]]:
    """Examples by row, longest first, each into the row that holds least: lengths mix, and so do targets."""
    rows: list[list[int]] = [[] for _ in range(number)]
    filled = [(0, row) for row in range(number)]
    for example in np.argsort(-np.asarray(inputs, np.int64), kind="stable").tolist():
        tokens, row = filled[0]
        rows[row].append(example)
        heapq.heapreplace(filled, (tokens + inputs[example], row))
    return rows


def fit_rows(inputs: Sequence[int], targets: Sequence[int], width: int, target_width: int) -> list[list[int]]:
    """Examples by row, so that both the inputs and the targets of a row fit; longest inputs first.

    A long one goes to the first row where it fits, which leaves few gaps. A short one goes to the row with most
    room, which mixes lengths: a row of nothing but short inputs would have too many targets.
    """
    rows: list[list[int]] = [[] for _ in range(max(1, -(-sum(inputs) // width)))]
    free, target_free = np.full(len(rows), width), np.full(len(rows), target_width)
    for example in np.argsort(-np.asarray(inputs, np.int64), kind="stable").tolist():
        needs, target_needs = inputs[example], targets[example]
        fits = (free >= needs) & (target_free >= target_needs)
        row = int(fits.argmax() if needs > LONG * width else np.where(fits, free, -1).argmax())
        if not fits[row]:
            row = len(rows)
            rows.append([])
            free, target_free = np.append(free, width), np.append(target_free, target_width)
        rows[row].append(example)
        free[row] -= needs
        target_free[row] -= target_needs
    return rows


def pack(
    inputs: Sequence[np.ndarray], targets: Sequence[np.ndarray], rows: Rows, pad_id: int
) -> dict[str, np.ndarray]:
    """input_ids, segments: [rows, width]; labels (−100 behind the end), decoder_segments: [rows, target_width]."""
    shape, target_shape = (rows.number, rows.width), (rows.number, rows.target_width)
    packed = {
        "input_ids": np.full(shape, pad_id, np.int32),
        "segments": np.zeros(shape, np.int32),
        "labels": np.full(target_shape, IGNORED, np.int32),
        "decoder_segments": np.zeros(target_shape, np.int32),
    }
    lay_out(rows.examples, inputs, packed["input_ids"], packed["segments"])
    lay_out(rows.examples, targets, packed["labels"], packed["decoder_segments"])
    return packed


def lay_out(
    rows: Sequence[Sequence[int]], pieces: Sequence[np.ndarray], tokens: np.ndarray, segments: np.ndarray
) -> None:
    """Write the pieces of each row behind each other, and their numbers within the row, from 1."""
    counts = np.array([len(row) for row in rows], np.int64)
    if not counts.sum():
        return
    ordered = [pieces[example] for row in rows for example in row]
    lengths = np.array([len(piece) for piece in ordered], np.int64)
    begins = np.cumsum(lengths) - lengths  # of each piece among all tokens
    first = np.cumsum(counts) - counts  # piece of each row
    row_of = np.repeat(np.arange(len(rows)), counts)
    within = begins - begins[np.minimum(first, len(begins) - 1)][row_of]
    place = np.arange(lengths.sum()) + np.repeat(row_of * tokens.shape[1] + within - begins, lengths)
    tokens.reshape(-1)[place] = np.concatenate(ordered)
    segments.reshape(-1)[place] = np.repeat(np.arange(len(ordered)) - first[row_of] + 1, lengths)


def target_widths(usual: Usual, width: int) -> list[int]:
    """Widths for the targets of rows of `width` tokens.

    The first is a little more than belongs to `width` tokens of inputs on average, the last holds all targets.
    """
    widths = [round_up(math.ceil(1.1 * width * usual.targets.mean / usual.inputs.mean))]
    while widths[-1] < usual.targets.most:
        widths.append(min(round_up(int(1.5 * widths[-1])), round_up(usual.targets.most)))
    return widths


def choose_width(inputs: Sequence[np.ndarray], usual: Usual) -> int:
    """The narrowest of a few widths that holds these rows, each an example."""
    longest = max((len(row) for row in inputs), default=0)
    most = usual.inputs.most
    return next(width for width in (*(w for w in WIDTHS if w < most), round_up(most)) if width >= longest)


def mark_real(inputs: Sequence[np.ndarray], width: int) -> np.ndarray:
    """[rows, width]: 1 for tokens, 0 for padding behind them."""
    lengths = np.array([len(row) for row in inputs])
    return (np.arange(width) < lengths[:, None]).astype(np.int32)


def round_up(length: int, quantum: int = 8) -> int:
    return -(-length // quantum) * quantum

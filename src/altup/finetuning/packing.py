"""Several short examples in one row, so that little of a batch is padding.

Each token carries the number of its example within the row, in `segments` and `decoder_segments`, and in all three
attentions it sees its own number alone; 0 is padding. Positions are relative, so that an example reads the same
wherever in a row it stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

IGNORED = -100
LONG = 1 / 4  # of a row: inputs beyond this are fitted in tightly, those below it evenly


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
    inputs: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    width: int,
    target_width: int,
    quantum: int,
    pad_id: int,
) -> dict[str, np.ndarray]:
    """input_ids, segments: [rows, width]; labels (−100 behind the end), decoder_segments: [rows, target_width].

    Empty rows fill up to a multiple of `quantum`: few shapes, because each is recorded as a graph of its own.
    """
    rows = fit_rows([len(x) for x in inputs], [len(y) for y in targets], width, target_width)
    number = -(-len(rows) // quantum) * quantum
    packed = {
        "input_ids": np.full((number, width), pad_id, np.int32),
        "segments": np.zeros((number, width), np.int32),
        "labels": np.full((number, target_width), IGNORED, np.int32),
        "decoder_segments": np.zeros((number, target_width), np.int32),
    }
    _lay_out(rows, inputs, packed["input_ids"], packed["segments"])
    _lay_out(rows, targets, packed["labels"], packed["decoder_segments"])
    return packed


def _lay_out(
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


def target_widths(mean_input: float, mean_target: float, longest: int, width: int) -> list[int]:
    """Widths for the targets of rows of `width` tokens, of which a batch takes the first that holds its longest.

    The first is a little more than belongs to `width` tokens of inputs on average, the last holds all targets.
    """
    widths = [round_up(math.ceil(1.1 * width * mean_target / mean_input))]
    while widths[-1] < longest:
        widths.append(min(round_up(int(1.5 * widths[-1])), round_up(longest)))
    return widths


def round_up(length: int) -> int:
    return -(-length // 8) * 8

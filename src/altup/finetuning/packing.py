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
    rows: list[list[int]] = [[] for _ in range(-(-sum(inputs) // width))]
    free = np.tile((width, target_width), (len(rows), 1))
    for example in np.argsort(-np.asarray(inputs, np.int64), kind="stable").tolist():
        needs = (inputs[example], targets[example])
        fits = (free >= needs).all(axis=1)
        if not fits.any():
            row = len(rows)
            rows.append([])
            free = np.vstack([free, (width, target_width)])
        elif inputs[example] > LONG * width:
            row = int(fits.argmax())
        else:
            row = int(np.where(fits, free[:, 0], -1).argmax())
        rows[row].append(example)
        free[row] -= needs
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
    number = max(1, -(-len(rows) // quantum)) * quantum
    packed = {
        "input_ids": np.full((number, width), pad_id, np.int32),
        "segments": np.zeros((number, width), np.int32),
        "labels": np.full((number, target_width), IGNORED, np.int32),
        "decoder_segments": np.zeros((number, target_width), np.int32),
    }
    for row, examples in enumerate(rows):
        at = target_at = 0
        for segment, example in enumerate(examples, start=1):
            end, target_end = at + len(inputs[example]), target_at + len(targets[example])
            packed["input_ids"][row, at:end] = inputs[example]
            packed["segments"][row, at:end] = segment
            packed["labels"][row, target_at:target_end] = targets[example]
            packed["decoder_segments"][row, target_at:target_end] = segment
            at, target_at = end, target_end
    return packed


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

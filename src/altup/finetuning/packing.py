"""Several short examples in one row, so that little of a batch is padding.

Each token carries the number of its example within the row, in `segments` and `decoder_segments`, and every
attention keeps to its own number; 0 is padding. Relative positions need nothing else: they only count distances
within an example.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

IGNORED = -100


def fit_rows(inputs: Sequence[int], targets: Sequence[int], width: int, target_width: int) -> list[list[int]]:
    """Examples by row: longest first, each into the first row where both its input and its target fit."""
    rows: list[list[int]] = []
    free = np.zeros((0, 2), np.int64)
    for example in np.argsort(-np.asarray(inputs, np.int64), kind="stable").tolist():
        needs = (inputs[example], targets[example])
        fits = np.flatnonzero((free >= needs).all(axis=1))
        if len(fits):
            row = int(fits[0])
        else:
            row = len(rows)
            rows.append([])
            free = np.vstack([free, (width, target_width)])
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

    Empty rows fill up to a multiple of `quantum`: few shapes, because each is compiled for itself.
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


def room_for_targets(inputs: np.ndarray, targets: np.ndarray, width: int) -> int:
    """Tokens of targets in a row: half as many again as belong to `width` tokens of inputs on average."""
    usual = 1.5 * width * targets.sum() / inputs.sum()
    return int(min(max(targets.max(), usual), max(width, targets.max())))

"""Causal language modelling: every token from those before it."""

from __future__ import annotations

from typing import Any

import numpy as np

from altup.core.errors import check_whole


class Causal:
    """`[n, length]` → `input_ids`, the raw tokens behind a start token, and `shift_labels`, the raw tokens.

    `shift_labels[t]` is the token after `input_ids[t]`; so every token of the text is asked for once an epoch.
    They bear Hugging Face's name for labels that are shifted already: those called `labels` the model shifts.
    """

    def __init__(self, start: int, length: int = 512):
        check_whole("length", length, 1)
        self.raw_length, self.targets, self._start = length, length, start

    def describe(self) -> dict[str, Any]:
        lengths = dict.fromkeys(("input_length", "target_length", "raw_length"), self.raw_length)
        return {"objective": "causal", **lengths}

    def __call__(self, raw: np.ndarray, key: np.ndarray) -> dict[str, np.ndarray]:
        labels = raw.astype(np.int32)
        inputs = np.empty_like(labels)
        inputs[:, 0], inputs[:, 1:] = self._start, labels[:, :-1]
        return {"input_ids": inputs, "shift_labels": labels}

"""T5s: the encoder reads the input, and the decoder writes the answer, greedily."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from altup.data.tasks.examples import Tokens, pad, tokenise
from altup.data.tasks.task import Task
from altup.models.upcycling import T5S, find_class, load_pretrained

BUCKET = 64  # inputs are padded to a multiple of this, so that there are few shapes


@dataclass(frozen=True)
class Seq2SeqAnswering:
    tokenizer: Any
    config: Any = None
    place: str = ""
    kind = "t5"

    def __post_init__(self) -> None:
        if self.config is not None:
            find_class(self.config, self.place, only=T5S)

    def load(self) -> Any:
        return load_pretrained(self.place, only=T5S)

    def check(self, task: Task, inputs_length: int, targets_length: int) -> None:
        """Every task is text to text, and positions are relative."""

    def inputs(self, texts: Sequence[str], most: int) -> Tokens:
        return tokenise(self.tokenizer, texts, most)

    def targets(self, texts: Sequence[str], most: int) -> Tokens:
        return tokenise(self.tokenizer, texts, most)

    def answer(self, model: Any, rows: list[np.ndarray], task: Task | None, lengths: tuple[int, int]) -> Tensor:
        """Without the start token."""
        inputs_length, targets_length = lengths
        longest = max(len(row) for row in rows)
        width = min(inputs_length, -(-longest // BUCKET) * BUCKET)
        inputs = torch.from_numpy(pad(rows, width, self.tokenizer.pad_token_id)).long().to(model.device)
        sizes = torch.tensor([len(row) for row in rows], device=model.device)
        mask = (torch.arange(width, device=model.device) < sizes[:, None]).long()
        found: Tensor = model.generate(
            input_ids=inputs,
            attention_mask=mask,
            max_new_tokens=targets_length,
            do_sample=False,
            num_beams=1,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return found[:, 1:]

    def read(self, numbers: list[int], task: Task | None) -> str:
        return read_answer(self.tokenizer, numbers)


def read_answer(tokenizer: Any, tokens: list[int]) -> str:
    """The text before the first eos."""
    if tokenizer.eos_token_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()

"""Causal models: prompt and answer are one text, `start, input, "answer:", target, eos`, and the model writes on.

A model that was never fine-tuned may be asked too: the words before the answer are there for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from altup.core.errors import UserError, named
from altup.data.tasks.examples import Tokens, tokenise
from altup.data.tasks.task import Task
from altup.evaluation.answering.seq2seq import read_answer
from altup.models.foreign import check_positions, load_language_model

ASK = "\nanswer:"  # between input and answer; vocabularies that know no line ends read a space


@dataclass(frozen=True)
class CausalAnswering:
    tokenizer: Any
    config: Any
    place: str = ""
    kind: str = "decoder"

    def __post_init__(self) -> None:
        if self.tokenizer.eos_token_id is None:
            raise UserError(
                f"the tokenizer of {self.place} has no eos_token, which ends an answer; set one "
                "(tokenizer.eos_token = …), and save it beside the model"
            )

    def load(self) -> Any:
        return load_language_model(self.place, self.config)

    def check(self, task: Task, inputs_length: int, targets_length: int) -> None:
        check_positions(self.config, inputs_length + targets_length, "inputs_length + targets_length", self.place)
        if inputs_length <= 1 + len(self.ask):
            raise UserError(
                f"{named('inputs_length', inputs_length)} leaves no room for an input between the start token "
                "and the "
                f"{len(self.ask)} of {ASK.strip()!r}; give more"
            )

    @functools.cached_property
    def ask(self) -> list[int]:
        return list(self.tokenizer(ASK, add_special_tokens=False)["input_ids"])

    @property
    def pad(self) -> int:
        token: int | None = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if token is None else token

    def inputs(self, texts: Sequence[str], most: int) -> Tokens:
        return tokenise(self.tokenizer, texts, most, [start_token(self.config, self.tokenizer)], self.ask)

    def targets(self, texts: Sequence[str], most: int) -> Tokens:
        """Each answer and eos, with the tokens that it has behind "answer:"."""
        size = len(self.ask)
        whole = tokenise(self.tokenizer, [f"{ASK} {text}" for text in texts], most + size)
        rows = [whole[i] for i in range(len(whole))]
        if any(row[:size].tolist() != self.ask for row in rows):  # a vocabulary with pieces of several words
            return tokenise(self.tokenizer, [f" {text}" for text in texts], most)
        return Tokens.of([row[size:] for row in rows], whole.cut)

    def answer(self, model: Any, rows: list[np.ndarray], task: Task | None, lengths: tuple[int, int]) -> Tensor:
        ids, mask = pad_left([row.tolist() for row in rows], self.pad)
        found: Tensor = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=lengths[1],
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.pad,
        )
        return found[:, ids.shape[1] :]

    def read(self, numbers: list[int], task: Task | None) -> str:
        return read_answer(self.tokenizer, numbers)


def start_token(config: Any, tokenizer: Any) -> int:
    """What texts begin with, as in pretraining: the model's start token, or eos."""
    start: int | None = config.get_text_config().bos_token_id
    return tokenizer.eos_token_id if start is None else start


def pad_left(rows: Sequence[Sequence[int]], filler: int) -> tuple[Tensor, Tensor]:
    """Rows that end together, [rows, width], and 1 for each token that is no padding."""
    width = max(map(len, rows))
    ids = torch.tensor([[filler] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask

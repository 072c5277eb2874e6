"""Encoders with decoders: the encoder reads the input, and the decoder writes the answer, greedily.

T5s are run as our own. Other models (BART, mT5, widened ones) are as transformers has them, and their texts have
the special tokens that their tokenizer gives them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from altup.core.errors import UserError
from altup.data.tasks.examples import Tokens, pad, tokenise
from altup.data.tasks.task import Task
from altup.models.foreign import check_positions, load_language_model
from altup.models.t5.config import AltUpT5Config
from altup.models.t5.convert import CONVERTED
from altup.models.t5.family import T5S
from altup.models.upcycling import load_pretrained
from altup.transformers_hooks import is_widened

# What checkpoints for summaries and translations ask of `generate`, and an answer has no use for.
NO_HABITS = {"min_length": 0, "no_repeat_ngram_size": 0, "early_stopping": False, "length_penalty": 1.0}
BUCKET = 64  # inputs are padded to a multiple of this, so that there are few shapes


@dataclass(frozen=True)
class Seq2SeqAnswering:
    tokenizer: Any
    config: Any = None
    place: str = ""
    kind: str = "t5"

    def __post_init__(self) -> None:
        for name in ("pad_token", "eos_token"):
            if getattr(self.tokenizer, f"{name}_id") is None:
                raise UserError(
                    f"the tokenizer of {self.place} has no {name}; set one (tokenizer.{name} = …), and save it "
                    "beside the model"
                )

    @property
    def is_t5(self) -> bool:
        """Whether it is altup's, or can be converted to it: a T5 1.1 that was not widened."""
        if self.config is None or self.config.model_type == AltUpT5Config.model_type:
            return True
        converts = getattr(self.config, "feed_forward_proj", "") == CONVERTED
        return self.config.model_type == "t5" and converts and not is_widened(self.config)

    def load(self) -> Any:
        if self.is_t5:
            return load_pretrained(self.place, only=T5S)
        return load_language_model(self.place, self.config)

    def check(self, task: Task, inputs_length: int, targets_length: int) -> None:
        """Every task is text to text."""
        if not self.is_t5:
            check_positions(self.config, inputs_length, "inputs_length", self.place)
            check_positions(self.config, targets_length, "targets_length", self.place)

    def inputs(self, texts: Sequence[str], most: int) -> Tokens:
        return tokenise(self.tokenizer, texts, most, *self.around_inputs)

    def targets(self, texts: Sequence[str], most: int) -> Tokens:
        return tokenise(self.tokenizer, texts, most, *self.around_targets)

    @functools.cached_property
    def around_inputs(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        return ([], [self.tokenizer.eos_token_id]) if self.is_t5 else special_tokens(self.tokenizer, "text")

    @functools.cached_property
    def around_targets(self) -> tuple[list[int], list[int]]:
        if self.is_t5:
            return [], [self.tokenizer.eos_token_id]
        before, after = special_tokens(self.tokenizer, "text_target")
        end = self.tokenizer.eos_token_id
        return before, after if end in after else [*after, end]

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
            **({} if self.is_t5 else NO_HABITS),
        )
        return found[:, 1:]

    def read(self, numbers: list[int], task: Task | None) -> str:
        return read_answer(self.tokenizer, numbers)


def special_tokens(tokenizer: Any, argument: str) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after a text that it is given as `argument`; nothing and eos where its
    own are not seen."""
    plain = tokenizer(**{argument: "a"}, add_special_tokens=False)["input_ids"]
    whole = tokenizer(**{argument: "a"})["input_ids"]
    for i in range(len(whole) - len(plain) + 1):
        if whole[i : i + len(plain)] == plain:
            return whole[:i], whole[i + len(plain) :]
    return [], [tokenizer.eos_token_id]


def read_answer(tokenizer: Any, tokens: list[int]) -> str:
    """The text before the first eos."""
    if tokenizer.eos_token_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()

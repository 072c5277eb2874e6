"""How a model reads a task's inputs and answers them: one module a way, which the model's family names.

How it learns a task is in `altup.finetuning.learning`, with a module of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from altup.core.errors import UserError
from altup.core.hub import find_pretrained
from altup.core.pretrained import lacks_tokenizer, load_config, load_tokenizer
from altup.data.tasks.examples import Tokens
from altup.data.tasks.task import Task
from altup.models.classifiers import is_encoder
from altup.models.families import family, learner, load_part
from altup.models.foreign import kind_of


class Answering(Protocol):
    """What evaluation and fine-tuning ask of a model. `config` and `tokenizer` are the model's, `kind` is the
    family that answers as it does."""

    kind: str
    place: str
    config: Any
    tokenizer: Any

    def load(self) -> Any:
        """The model, to be evaluated."""

    def check(self, task: Task, inputs_length: int, targets_length: int) -> None:
        """UserError for a task that such a model cannot answer, or for more tokens than it has positions for."""

    def inputs(self, texts: Sequence[str], most: int) -> Tokens:
        """What the model reads: each text as at most `most` tokens."""

    def targets(self, texts: Sequence[str], most: int) -> Tokens:
        """What the model is to answer, as it would: each text as at most `most` tokens."""

    def answer(self, model: Any, rows: list[np.ndarray], task: Task | None, lengths: tuple[int, int]) -> Tensor:
        """The answers to a batch of inputs, [rows, ≤ targets] whole numbers; `lengths` are the most tokens of
        inputs and of targets."""

    def read(self, numbers: list[int], task: Task | None) -> str:
        """An answer as text."""


def answering_of(place: str) -> Answering:
    """How the model in a folder or on the hub answers; its weights are not read yet."""
    place = find_pretrained(place)
    kind = kind_at(place)
    if lacks_tokenizer(place):
        raise UserError(f"{place} has no tokenizer; save it beside the model (tokenizer.save_pretrained)")
    build = load_part(family(kind).answering)
    answering: Answering = build(load_tokenizer(place), load_config(place), place, kind)
    return answering


def kind_at(place: str) -> str:
    """The family as which the model in a folder or on the hub reads and answers."""
    config = load_config(place)
    return learner("masked") if is_encoder(config) else kind_of(config, place)

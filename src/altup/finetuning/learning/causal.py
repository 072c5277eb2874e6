"""Causal models: prompt and answer in one row, and a loss on the answer alone.

An example is the text start p₁ … pₙ a₁ … aₘ eos. The model reads all of it but eos, and token t is to name token
t + 1 where that belongs to the answer; elsewhere `shift_labels` is −100, which does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from altup.core.pretrained import load_config
from altup.data.tasks.examples import Tokens, pad
from altup.data.tasks.task import Example, Task
from altup.evaluation.answering import Answering
from altup.finetuning.config import FinetuneConfig
from altup.finetuning.packing import IGNORED, Sizes, Usual, choose_width, lay_out, mark_real, narrow_rows
from altup.finetuning.scoring import copy_to_score, foreign_to_score
from altup.models.config import AltUpConfig
from altup.models.foreign import TokenSumsModel, answer_in_sums, keeps_texts_apart, load_language_model
from altup.training.from_model import set_dropout


class CausalRows:
    """input_ids and shift_labels [rows, width]; with `packing` also segments, the number of each token's example
    within its row, and 0 for padding, else attention_mask."""

    def __init__(self, usual: Usual, pad_id: int, packing: str | None) -> None:
        self.usual, self.pad_id, self.packs = usual, pad_id, packing is not None
        self.one_text = Usual(usual.inputs, Sizes(0, 0, 0))  # answers stand in the rows of their inputs

    def __call__(self, inputs: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        if not self.packs:
            width = choose_width(inputs, self.usual)
            return {
                "input_ids": pad(inputs, width, self.pad_id),
                "attention_mask": mark_real(inputs, width),
                "shift_labels": pad(targets, width, IGNORED),
            }
        rows = narrow_rows([len(x) for x in inputs], [0] * len(inputs), self.one_text)
        shape = (rows.number, rows.width)
        packed = {
            "input_ids": np.full(shape, self.pad_id, np.int32),
            "segments": np.zeros(shape, np.int32),
            "shift_labels": np.full(shape, IGNORED, np.int32),
        }
        lay_out(rows.examples, inputs, packed["input_ids"], packed["segments"])
        lay_out(rows.examples, targets, packed["shift_labels"], packed["segments"])
        return packed


@dataclass
class CausalLearning:
    answering: Answering
    config: FinetuneConfig
    rows = CausalRows
    auto_class = "AutoModelForCausalLM"
    _built: dict[str, torch.nn.Module] = field(default_factory=dict)

    @property
    def pad(self) -> int:
        return int(self.answering.pad)  # type: ignore[attr-defined]

    def prepare(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self.answering.check(task, *task.lengths(self.config.inputs_length, self.config.targets_length))

    def packing(self, device: torch.device, say: Callable[[str], None]) -> str | None:
        """Whether a model of others keeps texts apart is tried on it; it is not loaded twice for that."""
        place = self.answering.place
        model = self._built[place] = load_to_learn(place, self.config)
        if isinstance(model, TokenSumsModel) and not keeps_texts_apart(model):
            name = type(model).__name__
            say(f"{name} does not tell the examples of a packed row apart: they are padded, not packed")
            return None
        return "narrow"

    def tokenise(self, task: Task, examples: Sequence[Example]) -> tuple[Tokens, Tokens, dict[str, int]]:
        lengths = task.lengths(self.config.inputs_length, self.config.targets_length)
        prompts = self.answering.inputs([e.input for e in examples], lengths[0])
        answers = self.answering.targets([e.target for e in examples], lengths[1])
        pairs = [one_row(prompts[i], answers[i]) for i in range(len(prompts))]
        cut = {"inputs": prompts.cut, "targets": answers.cut}
        return Tokens.of([read for read, _ in pairs]), Tokens.of([learnt for _, learnt in pairs]), cut

    def build(self, checkpoint: Path | None) -> torch.nn.Module:
        place = str(checkpoint or self.answering.place)
        return self._built.pop(place, None) or load_to_learn(place, self.config)

    def to_score(self, model: torch.nn.Module) -> Any:
        if isinstance(model, TokenSumsModel):
            return foreign_to_score(model)
        return copy_to_score(model, low_precision=self.config.low_precision)


def load_to_learn(place: str, config: FinetuneConfig) -> Any:
    """The model at `place`, altup's or another, with float32 weights and the dropout and z-loss of `config`."""
    logging.disable_progress_bar()
    own = load_config(place)
    set_dropout(own, config.dropout)
    if isinstance(own, AltUpConfig):
        own.z_loss = config.z_loss
    model = load_language_model(place, own, dtype=torch.float32)
    return model if isinstance(own, AltUpConfig) else answer_in_sums(model, config.z_loss)


def one_row(prompt: np.ndarray, answer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the model reads of an example, and what each token of it is to name."""
    hidden = np.full(len(prompt) - 1, IGNORED, np.int32)
    return np.concatenate([prompt, answer[:-1]]), np.concatenate([hidden, answer])

"""Encoders: one example a row, and a head that names the label of the whole input, or its score.

Several tasks with labels share a head, which names the labels of all; each is answered with one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from altup.core.errors import UserError
from altup.core.pretrained import load_config
from altup.data.tasks.examples import Tokens, pad
from altup.data.tasks.task import Example, Task
from altup.evaluation.answering.encoder import EncoderAnswering, check_answers
from altup.finetuning.config import FinetuneConfig
from altup.finetuning.packing import Usual, choose_width, mark_real
from altup.finetuning.scoring import foreign_to_score
from altup.models.classifiers import is_classifier, labels_of, load_classifier, set_labels
from altup.models.foreign import ExampleSumsModel, answer_in_sums, check_positions
from altup.training.from_model import set_dropout


class EncoderRows:
    """input_ids and attention_mask [rows, width]; labels [rows, 1], whole numbers or scores."""

    def __init__(self, usual: Usual, pad_id: int, packing: str | None) -> None:
        self.usual, self.pad_id = usual, pad_id

    def __call__(self, inputs: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        width = choose_width(inputs, self.usual)
        return {
            "input_ids": pad(inputs, width, self.pad_id),
            "attention_mask": mark_real(inputs, width),
            "labels": np.stack(targets),
        }


@dataclass
class EncoderLearning:
    answering: EncoderAnswering
    config: FinetuneConfig
    labels: tuple[str, ...] = ()  # of all tasks; none where they ask for a score
    rows = EncoderRows
    auto_class = "AutoModelForSequenceClassification"

    @property
    def pad(self) -> int:
        return self.answering.pad

    def prepare(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            check_answers(task)
        scored = [task.name for task in tasks if not task.labels]
        named = [task.name for task in tasks if task.labels]
        if scored and named:
            raise UserError(
                f"{scored[0]} asks for a score and {named[0]} for a label, and an encoder has one head; fine-tune "
                "it on each of them, in runs of their own"
            )
        place = self.answering.place
        check_positions(self.answering.config, self.config.inputs_length, "inputs_length", place)
        self.labels = tuple(dict.fromkeys(label for task in tasks for label in task.labels))
        set_labels(self.answering.config, self.labels)  # what it will answer with

    def packing(self, device: torch.device, say: Callable[[str], None]) -> str | None:
        say("an encoder reads one example a row: they are padded, not packed")
        return None

    def tokenise(self, task: Task, examples: Sequence[Example]) -> tuple[Tokens, Tokens, dict[str, int]]:
        most, _ = task.lengths(self.config.inputs_length, self.config.targets_length)
        inputs = self.answering.inputs([e.input for e in examples], most)
        if task.labels:
            answers = [np.array([self.labels.index(e.target)], np.int32) for e in examples]
        else:
            answers = [np.array([e.references[0]], np.float32) for e in examples]
        return inputs, Tokens.of(answers), {"inputs": inputs.cut, "targets": 0}

    def build(self, checkpoint: Path | None) -> torch.nn.Module:
        """A head for other labels is replaced by a new one, but not within a run."""
        logging.disable_progress_bar()
        place = str(checkpoint or self.answering.place)
        config = load_config(place)
        new_head = not is_classifier(config) or labels_of(config) != self.labels
        if new_head and checkpoint is not None:
            raise UserError(
                f"the head of {checkpoint} has other labels than the tasks of the data now; restore the data, or "
                "begin a new run"
            )
        if new_head:
            set_labels(config, self.labels)
        set_dropout(config, self.config.dropout)
        model = load_classifier(place, config, new_head, dtype=torch.float32)
        return answer_in_sums(model, self.config.z_loss, ExampleSumsModel)

    def to_score(self, model: torch.nn.Module) -> Any:
        return foreign_to_score(model)

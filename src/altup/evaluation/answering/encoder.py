"""Encoders: the answer is one of a task's labels, or a score, which the head names for the whole input."""

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
from altup.evaluation.metrics import SCORE_METRICS
from altup.models.classifiers import is_classifier, labels_of, load_classifier
from altup.models.foreign import check_positions

DECIMALS = 4  # of a score


@dataclass(frozen=True)
class EncoderAnswering:
    tokenizer: Any
    config: Any
    place: str = ""
    kind: str = "bert"

    def load(self) -> Any:
        return load_classifier(self.place, self.config)

    def check(self, task: Task, inputs_length: int, targets_length: int) -> None:
        check_answers(task)
        check_positions(self.config, inputs_length, "inputs_length", self.place)
        if not is_classifier(self.config):
            raise UserError(
                f"{self.place} is an encoder without a head for tasks; fine-tune it first: "
                f"altup finetune {self.place} --task {task.name} --out RUN"
            )
        self.columns(task)

    def columns(self, task: Task) -> list[int]:
        """The numbers that the head has for a task's labels; that of its score where it has none."""
        names = labels_of(self.config)
        if not task.labels and not names:
            return [0]
        if names == tuple(f"LABEL_{i}" for i in range(len(task.labels))):  # they have no names
            return list(range(len(names)))
        if not task.labels or not set(task.labels) <= set(names):
            knows = f"names {', '.join(names)}" if names else "gives a score"
            asks = f"asks for {', '.join(task.labels)}" if task.labels else "asks for a score"
            raise UserError(f"the head of {self.place} {knows}, and {task.name} {asks}; fine-tune it on the task")
        return [names.index(label) for label in task.labels]

    @functools.cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and behind a text: [CLS] and [SEP], say."""
        plain = list(self.tokenizer("a", add_special_tokens=False)["input_ids"])
        whole = list(self.tokenizer("a")["input_ids"])
        for begin in range(len(whole) - len(plain) + 1):
            if whole[begin : begin + len(plain)] == plain:
                return whole[:begin], whole[begin + len(plain) :]
        return [], []

    def inputs(self, texts: Sequence[str], most: int) -> Tokens:
        return tokenise(self.tokenizer, texts, most, *self.around)

    def targets(self, texts: Sequence[str], most: int) -> Tokens:
        """One number each."""
        return Tokens.of([np.zeros(1, np.int32)] * len(texts))

    @property
    def pad(self) -> int:
        token: int | None = self.tokenizer.pad_token_id
        return 0 if token is None else token

    def answer(self, model: Any, rows: list[np.ndarray], task: Task | None, lengths: tuple[int, int]) -> Tensor:
        """[rows, 1]: the number of the task's label, or the score times 10⁴."""
        assert task is not None
        width = max(len(row) for row in rows)
        ids = torch.from_numpy(pad(rows, width, self.pad)).long().to(model.device)
        sizes = torch.tensor([len(row) for row in rows], device=model.device)
        mask = (torch.arange(width, device=model.device) < sizes[:, None]).long()
        logits = model(input_ids=ids, attention_mask=mask).logits[:, self.columns(task)].float()
        if task.labels:
            return logits.argmax(dim=1, keepdim=True)
        return (logits * 10**DECIMALS).round().long()

    def read(self, numbers: list[int], task: Task | None) -> str:
        assert task is not None
        return task.labels[numbers[0]] if task.labels else f"{numbers[0] / 10**DECIMALS:.{DECIMALS}f}"


def check_answers(task: Task) -> None:
    """UserError for a task whose answers are neither labels nor scores."""
    if not task.labels and not SCORE_METRICS & set(task.metrics):
        raise UserError(
            f"task {task.name} is answered with text, and an encoder names labels or a score; give a T5 or a "
            "causal model, or declare the labels in a Python file: Task(…, labels=(…))"
        )

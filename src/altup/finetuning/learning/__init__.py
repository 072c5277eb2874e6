"""How a model learns a task: what its rows hold and how it is built. One module a way, which its family names.

How it reads and answers is in `altup.evaluation.answering`, with a module of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from altup.data.tasks.examples import Tokens
from altup.data.tasks.task import Example, Task
from altup.evaluation.answering import Answering, answering_of
from altup.finetuning.config import FinetuneConfig
from altup.finetuning.packing import MakeRows
from altup.models.families import family, load_part


class Learning(Protocol):
    """What a fine-tuning run asks of a kind of model."""

    answering: Answering
    config: FinetuneConfig
    rows: MakeRows  # makes the layout of a mixture's examples
    auto_class: str  # of transformers, which loads what was trained

    @property
    def pad(self) -> int:
        """The token behind the end of a row."""

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Called with the tasks before they are read: UserError for some that such a model cannot learn."""

    def packing(self, device: torch.device, say: Callable[[str], None]) -> str | None:
        """The layout of packed rows, or None, with a note, for a model that would mix their examples."""

    def tokenise(self, task: Task, examples: Sequence[Example]) -> tuple[Tokens, Tokens, dict[str, int]]:
        """What the model reads and what it is to learn, for every example, and how many texts were cut."""

    def build(self, checkpoint: Path | None) -> torch.nn.Module:
        """The model to train, with float32 weights: that of the run's beginning, or a checkpoint's."""

    def to_score(self, model: torch.nn.Module) -> Any:
        """The model that `answering` asks, with the present weights of `model`."""


def learning_of(config: FinetuneConfig, place: str) -> Learning:
    """How the model at `place`, that of `config` or a checkpoint of it, learns."""
    answering = answering_of(place)
    learning: Learning = load_part(family(answering.kind).learning)(answering, config)
    return learning

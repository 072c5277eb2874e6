"""Encoders with decoders: inputs go to the encoder and targets to the decoder, each in rows of their own.

T5s are trained as our own. Other models are trained as transformers has them, with examples that are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from altup.core.pretrained import load_config, load_model
from altup.data.tasks.examples import Tokens, pad
from altup.data.tasks.task import Example, Task
from altup.evaluation.answering import Answering
from altup.finetuning.config import FinetuneConfig
from altup.finetuning.learning.causal import load_to_learn
from altup.finetuning.packing import IGNORED, LAYOUTS, Usual, choose_width, mark_real, pack, round_up
from altup.finetuning.scoring import copy_to_score, foreign_to_score
from altup.kernels.attention import WIDTHS
from altup.kernels.launch import runs_triton
from altup.models.foreign import TokenSumsModel
from altup.models.t5.config import AltUpT5Config
from altup.models.t5.convert import from_hugging_face
from altup.models.t5.family import T5S
from altup.models.t5.model import AltUpT5ForConditionalGeneration
from altup.models.upcycling import load_pretrained


class Seq2SeqRows:
    """Padded, a row is an example: input_ids and attention_mask, as wide as the narrowest of a few widths that
    holds the rows asked for, and labels (−100 behind the end), as wide as the longest target of all.

    With `packing`, rows hold several examples: input_ids, segments, labels, decoder_segments.
    """

    def __init__(self, usual: Usual, pad_id: int, packing: str | None) -> None:
        self.usual, self.pad_id = usual, pad_id
        self.layout = None if packing is None else LAYOUTS[packing]
        self.target_width = round_up(usual.targets.most)

    def __call__(self, inputs: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        if self.layout is not None:
            rows = self.layout([len(x) for x in inputs], [len(y) for y in targets], self.usual)
            return pack(inputs, targets, rows, self.pad_id)
        width = choose_width(inputs, self.usual)
        return {
            "input_ids": pad(inputs, width, self.pad_id),
            "attention_mask": mark_real(inputs, width),
            "labels": pad(targets, self.target_width, IGNORED),
        }


@dataclass
class Seq2SeqLearning:
    answering: Answering
    config: FinetuneConfig
    rows = Seq2SeqRows
    auto_class = "AutoModelForSeq2SeqLM"

    @property
    def pad(self) -> int:
        return int(self.answering.tokenizer.pad_token_id)

    @property
    def is_t5(self) -> bool:
        return bool(self.answering.is_t5)  # type: ignore[attr-defined]

    def prepare(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self.answering.check(task, *task.lengths(self.config.inputs_length, self.config.targets_length))

    def packing(self, device: torch.device, say: Callable[[str], None]) -> str | None:
        if not self.is_t5:
            say("models with an encoder and a decoder other than T5s: examples are padded, not packed")
            return None
        found = choose_packing(self.answering.place, self.config, device)
        if found is None:
            say("this model would mix the examples of a row, or drop the same of all: they are padded, not packed")
        return found

    def tokenise(self, task: Task, examples: Sequence[Example]) -> tuple[Tokens, Tokens, dict[str, int]]:
        lengths = task.lengths(self.config.inputs_length, self.config.targets_length)
        inputs = self.answering.inputs([e.input for e in examples], lengths[0])
        targets = self.answering.targets([e.target for e in examples], lengths[1])
        return inputs, targets, {"inputs": inputs.cut, "targets": targets.cut}

    def build(self, checkpoint: Path | None) -> torch.nn.Module:
        if not self.is_t5:
            return load_to_learn(str(checkpoint or self.answering.place), self.config)
        return build_model(self.config, self.answering.place, checkpoint)

    def to_score(self, model: torch.nn.Module) -> Any:
        if isinstance(model, TokenSumsModel):
            return foreign_to_score(model)
        return copy_to_score(model, low_precision=self.config.low_precision)


def build_model(config: FinetuneConfig, place: str, checkpoint: Path | None = None) -> torch.nn.Module:
    """The T5 at `place`, altup's or converted to it, or that of a checkpoint; float32, with dropout."""
    logging.disable_progress_bar()
    if checkpoint is not None:
        resumed: torch.nn.Module = load_model(AltUpT5ForConditionalGeneration, checkpoint, dtype=torch.float32)
        return resumed
    found: Any = load_pretrained(place, only=T5S)
    if not isinstance(found, AltUpT5ForConditionalGeneration):
        found = from_hugging_face(found)
    fields = {**found.config.to_dict(), "dropout_rate": config.dropout, "z_loss": config.z_loss}
    model = AltUpT5ForConditionalGeneration(AltUpT5Config(**{**fields, "dtype": "float32"}))
    model.load_state_dict(found.state_dict())
    model.generation_config = found.generation_config
    return model


def choose_packing(place: str, config: FinetuneConfig, device: torch.device) -> str | None:
    """The layout of packed rows for the model at `place`, or None for one that would mix their examples, or drop
    the same of all of them.

    Wide rows have more shapes, and a deterministic run compiles its layers for each.
    """
    model = load_config(place)
    drops_alike = config.dropout > 0 and getattr(model, "sequence_dropout", False)
    if getattr(model, "sequence", "none") != "none" or drops_alike:
        return None
    by_kernels = runs_triton(device) and config.low_precision and getattr(model, "d_kv", None) in WIDTHS
    return "wide" if by_kernels and not config.deterministic else "narrow"

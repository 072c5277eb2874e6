"""Trained models by name, ready to run: weights, tokenizer and precision; and where their scores go."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import altup.models  # noqa: F401  registers our models with the Auto classes
from altup.core.errors import UserError
from altup.core.hardware import ensure_bf16
from altup.core.pretrained import load_config, load_tokenizer
from altup.core.runs import RunPaths, find_model, newest_model
from altup.core.schema import read_yaml
from altup.data.tasks.task import INPUTS_LENGTH, TARGETS_LENGTH
from altup.evaluation.answering import Answering
from altup.evaluation.decoding import round_weights
from altup.models.accounting import refuse_too_large
from altup.models.base import AltUpPreTrainedModel
from altup.models.config import AltUpConfig
from altup.models.families import family
from altup.models.foreign import kind_of, load_language_model
from altup.models.t5.family import T5S


@dataclass(frozen=True)
class LoadedModel:
    """A model of a `family` on its device, its tokenizer, and the context to run it in."""

    family: str
    model: Any
    tokenizer: Any
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def objective(self) -> str:
        """By which models of its family learn, and how they answer a prompt."""
        return family(self.family).objective


def load_to_answer(answering: Answering, precision: str | None = None) -> LoadedModel:
    """A model that answers tasks, altup's or Hugging Face's; `precision` is bf16 on GPUs, else fp32."""
    transformers.utils.logging.disable_progress_bar()
    device = _device()
    model = answering.load().to(device).eval()
    check_vocabulary(model, answering.tokenizer)
    if (precision or ("bf16" if device == "cuda" else "fp32")) == "fp32":
        return LoadedModel(answering.kind, model, answering.tokenizer)
    ensure_bf16(device)
    if isinstance(model, (*T5S, AltUpPreTrainedModel)):  # others may use their weights outside of autocast
        round_weights(model, torch.bfloat16)
    return LoadedModel(
        answering.kind, model, answering.tokenizer, lambda: torch.autocast(device, dtype=torch.bfloat16)
    )


def load_any(path: Path) -> LoadedModel:
    """The model of a run or of a model folder: of any family, or of transformers, widened or not."""
    transformers.utils.logging.disable_progress_bar()
    folder, device = newest_model(path), _device()
    config = load_config(folder)
    if isinstance(config, AltUpConfig):
        refuse_too_large(config)
    model = load_language_model(folder, config).to(device).eval()
    tokenizer = load_tokenizer(folder)
    if model.dtype == torch.bfloat16:
        ensure_bf16(device)
    return LoadedModel(kind_of(config, folder), check_vocabulary(model, tokenizer), tokenizer)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_vocabulary(model: Any, tokenizer: Any) -> Any:
    """The model, if it has a row for every token."""
    rows = model.config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer has {len(tokenizer):,} tokens, the model's tables {rows:,} rows; "
            "put the model's own tokenizer beside it"
        )
    return model


@dataclass(frozen=True)
class ModelPlace:
    """Where a model lies, where its scores go, and how many tokens of inputs and answers it was tuned with."""

    place: str
    scores: Path
    inputs_length: int
    targets_length: int


def find_model_place(model: str) -> ModelPlace:
    """The place of a run, a model folder or a model on the hub.

    A checkpoint is sealed with hashes, so nothing is written into a model's folder itself.
    """
    place, path = Path(find_model(model)), Path(model).expanduser()
    if not path.exists():
        return ModelPlace(model, Path("evaluation") / path.name, INPUTS_LENGTH, TARGETS_LENGTH)
    inside = place == path
    scores = Path("evaluation") / _own_name(path.resolve()) if inside else path / "evaluation" / place.name
    return ModelPlace(str(place), scores, *_tuned_lengths(place))


def _tuned_lengths(place: Path) -> tuple[int, int]:
    """The lengths that a fine-tuning run used, by the folder of its final model or of a checkpoint."""
    run = RunPaths(place.parent.parent if place.parent.name == "checkpoints" else place.parent)
    settings = read_yaml(run.config) if run.config.is_file() else {}
    if "tasks" not in settings:
        return INPUTS_LENGTH, TARGETS_LENGTH
    return settings.get("inputs_length", INPUTS_LENGTH), settings.get("targets_length", TARGETS_LENGTH)


def _own_name(path: Path) -> str:
    """A model folder's name, with that of its run where every run has one of this name."""
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}-{path.name}"
    return f"{path.parent.name}-final" if path.name == "final" else path.name

"""`widen` and `narrow` from folder to folder: the model, its tokenizer, and what prepares images and sound."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from altup.core.errors import MOST_SEED, UserError, check_choice, check_whole
from altup.core.files import check_regular
from altup.core.pretrained import copy_tokenizer, load_config, load_model
from altup.core.sealed_folders import new_sealed_folder
from altup.models.config import AltUpConfig
from altup.models.methods import MOST
from altup.models.widening.description import describe
from altup.models.widening.loading import load_widened, named_class
from altup.models.widening.parameters import METHODS
from altup.models.widening.widen import narrow, widen
from altup.transformers_hooks import is_widened

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True)
class Written:
    """A model that was saved: `describe` of it, its parameters and whether its tokenizer came along."""

    description: str
    parameters: int
    parameters_before: int
    no_tokenizer: str  # why it did not come along; empty where it did


def widen_folder(
    place: str,
    out: Path,
    method: str,
    num_blocks: int,
    seed: int,
    layers: slice | None = None,
    say: Callable[[str], Any] = print,
) -> Written:
    """Widen the model of a folder or of the hub into a new folder. `say` is told what goes on."""
    check_choice("method", method, METHODS)
    check_whole("num_blocks", num_blocks, 2, MOST["num_blocks"])
    check_whole("seed", seed, 0, MOST_SEED)
    with new_sealed_folder(out) as folder:
        say(f"Loading {place}")
        model = _load(place)
        before = model.num_parameters()
        say("Widening, and comparing with the original")
        return _save(widen(model, method, num_blocks, layers=layers, seed=seed), before, place, folder)


def narrow_folder(place: str, out: Path, say: Callable[[str], Any] = print) -> Written:
    """Write the model that was widened, as it was, into a new folder."""
    with new_sealed_folder(out) as folder:
        say(f"Loading {place}")
        model = load_widened(place)
        before = model.num_parameters()
        return _save(narrow(model), before, place, folder)


def _load(place: str) -> PreTrainedModel:
    config = load_config(place)
    if isinstance(config, AltUpConfig):
        raise UserError(
            f"{place!r} holds a {config.model_type!r} model, which has AltUp built in; use altup upcycle"
        )
    if is_widened(config):
        return load_widened(place, config=config)
    model: PreTrainedModel = load_model(named_class(config, place), place, config=config)
    return model


def _save(model: PreTrainedModel, before: int, place: str, out: Path) -> Written:
    model.save_pretrained(out)
    for name in PROCESSOR_FILES:
        if (Path(place) / name).is_file():
            shutil.copyfile(check_regular(Path(place) / name), out / name)
    return Written(describe(model), model.num_parameters(), before, copy_tokenizer(place, out))

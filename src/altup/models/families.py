"""The model families by the names that the command line uses: `t5`, `bert` and `decoder`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from altup.core.errors import check_choice


@dataclass(frozen=True)
class Family:
    """Where a family's classes are, and what it is called elsewhere. Nothing is imported before it is used."""

    title: str
    home: str
    config_name: str
    model_name: str
    auto_class: str
    default_size: str

    @property
    def config_class(self) -> Any:
        return getattr(importlib.import_module(f"{self.home}.config"), self.config_name)

    @property
    def model_class(self) -> Any:
        return getattr(importlib.import_module(f"{self.home}.model"), self.model_name)


FAMILIES = {
    "t5": Family(
        "T5 1.1",
        "altup.models.t5",
        "AltUpT5Config",
        "AltUpT5ForConditionalGeneration",
        "AutoModelForSeq2SeqLM",
        "small",
    ),
    "bert": Family(
        "BERT", "altup.models.bert", "AltUpBertConfig", "AltUpBertForMaskedLM", "AutoModelForMaskedLM", "light"
    ),
    "decoder": Family(
        "decoder",
        "altup.models.decoder",
        "AltUpDecoderConfig",
        "AltUpDecoderForCausalLM",
        "AutoModelForCausalLM",
        "small",
    ),
}


def family(model: str) -> Family:
    check_choice("model", model, FAMILIES)
    return FAMILIES[model]


def family_name(model_type: object) -> str | None:
    """The name of the family whose saved configs bear `model_type`."""
    names = (name for name, one in FAMILIES.items() if one.config_class.model_type == model_type)
    return next(names, None)

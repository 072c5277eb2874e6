"""The model families by the names that the command line uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from altup.core.errors import check_choice
from altup.models.bert import AltUpBertConfig, AltUpBertForMaskedLM, AltUpBertModel
from altup.models.decoder import AltUpDecoderConfig, AltUpDecoderForCausalLM, AltUpDecoderModel
from altup.models.t5 import AltUpT5Config, AltUpT5EncoderModel, AltUpT5ForConditionalGeneration


@dataclass(frozen=True)
class Family:
    """A family's classes, with its head and without, and the Auto class that finds the one with a head."""

    title: str
    config_class: Any
    model_class: Any
    headless_class: Any
    auto_class: Any
    default_size: str


FAMILIES = {
    "t5": Family(
        "T5 1.1",
        AltUpT5Config,
        AltUpT5ForConditionalGeneration,
        AltUpT5EncoderModel,
        AutoModelForSeq2SeqLM,
        "small",
    ),
    "bert": Family("BERT", AltUpBertConfig, AltUpBertForMaskedLM, AltUpBertModel, AutoModelForMaskedLM, "light"),
    "decoder": Family(
        "decoder",
        AltUpDecoderConfig,
        AltUpDecoderForCausalLM,
        AltUpDecoderModel,
        AutoModelForCausalLM,
        "small",
    ),
}


def family(model: str) -> Family:
    check_choice("model", model, FAMILIES)
    return FAMILIES[model]


def family_name(model_type: object) -> str | None:
    """The name of the family whose saved configs have this `model_type`."""
    names = (name for name, one in FAMILIES.items() if one.config_class.model_type == model_type)
    return next(names, None)

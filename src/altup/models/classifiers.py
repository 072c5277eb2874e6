"""Encoders with a head for whole texts, of altup, of transformers or widened: loaded, with a new head or not.

The labels are the config's `id2label`; a head of one number has the `problem_type` "regression".
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from altup.core.errors import UserError
from altup.core.pretrained import load_model
from altup.models.families import FAMILIES, family_of
from altup.models.foreign import CLASSES
from altup.models.widening import load_widened
from altup.transformers_hooks import is_widened

HEADS = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
REGRESSION, CLASSIFICATION = "regression", "single_label_classification"


def is_encoder(config: PreTrainedConfig) -> bool:
    """Whether the model is an encoder that sees whole texts, with a masked head, another one or none."""
    if (found := family_of(config)) is not None:
        return found.classifier_class is not None
    name = (config.architectures or [""])[0]
    causal = getattr(config, "is_decoder", False) or name in CLASSES["causal"].values()
    return config.model_type in CLASSES["masked"] and not config.is_encoder_decoder and not causal


def is_classifier(config: PreTrainedConfig) -> bool:
    """Whether the model that was saved has a head for whole texts."""
    name = (config.architectures or [""])[0]
    own = [one.classifier_class.__name__ for one in FAMILIES.values() if one.classifier_class]
    return name in (*own, HEADS.get(config.model_type))


def classifier_class(config: PreTrainedConfig, place: str | Path) -> Any:
    if (found := family_of(config)) is not None and found.classifier_class:
        return found.classifier_class
    if config.model_type not in HEADS:
        raise UserError(
            f"{str(place)!r} holds a {config.model_type!r} model, for which transformers has no classification "
            "head; give another encoder"
        )
    return getattr(transformers, HEADS[config.model_type])


def labels_of(config: Any) -> tuple[str, ...]:
    """The labels of a saved head in the order of its numbers; none for one that gives a score."""
    if config.problem_type == REGRESSION or config.num_labels == 1:
        return ()
    return tuple(config.id2label[number] for number in range(config.num_labels))


def set_labels(config: Any, labels: Sequence[str]) -> None:
    """Ask for a head that names one of `labels` or, without any, gives a number."""
    config.num_labels = len(labels) or 1
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = CLASSIFICATION if labels else REGRESSION


def load_classifier(place: str | Path, config: PreTrainedConfig, new_head: bool = False, **options: Any) -> Any:
    """The encoder at `place` with its head or, with `new_head`, one that `config` describes, which starts at
    random. `options` are those of `from_pretrained`."""
    cls = classifier_class(config, place)
    if is_widened(config):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*start at random")
            return load_widened(place, cls, config=config, **options)
    body = f"{cls.base_model_prefix}."
    may_lack = (lambda name: not name.startswith(body) or ".pooler." in name) if new_head else None
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would report the weights of the new head and of the old one
    try:
        return load_model(cls, place, config=config, may_lack=may_lack, **options)
    finally:
        logging.set_verbosity(verbosity)

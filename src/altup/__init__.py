"""Wider transformers for hardly more time: Alternating Updates (AltUp) for PyTorch and Hugging Face.

The public names are loaded when they are first used, so `import altup` is quick and touches no GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "AltUp": "altup.nn",
    "AveragePooling": "altup.nn",
    "DynamicAltUp": "altup.nn",
    "PartialExperts": "altup.nn",
    "SequenceAltUp": "altup.nn",
    "StrideAndSkip": "altup.nn",
    "AltUpBertConfig": "altup.models",
    "AltUpBertForMaskedLM": "altup.models",
    "AltUpBertModel": "altup.models",
    "AltUpDecoderConfig": "altup.models",
    "AltUpDecoderForCausalLM": "altup.models",
    "AltUpDecoderModel": "altup.models",
    "AltUpT5Config": "altup.models",
    "AltUpT5EncoderModel": "altup.models",
    "AltUpT5ForConditionalGeneration": "altup.models",
    "upcycle": "altup.models",
    "Structure": "altup.models.widening",
    "load_widened": "altup.models.widening",
    "narrow": "altup.models.widening",
    "register_handler": "altup.models.widening",
    "widen": "altup.models.widening",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'altup' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

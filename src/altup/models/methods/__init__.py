"""The methods that make a representation wide, a sequence short or a layer sparse: one file each."""

import importlib
import pkgutil

from altup.models.methods.registry import (
    MOST,
    OTHERS,
    PRESETS,
    SEQUENCES,
    WIDENINGS,
    Method,
    Preset,
    Sequence,
    Widening,
    all_methods,
    list_presets,
    preset_fields,
    register,
    unregister,
)

__all__ = [
    "MOST",
    "OTHERS",
    "PRESETS",
    "SEQUENCES",
    "WIDENINGS",
    "Method",
    "Preset",
    "Sequence",
    "Widening",
    "all_methods",
    "list_presets",
    "preset_fields",
    "register",
    "unregister",
]

# The paper's order first: it is that of every list of methods.
_FIRST = ("dense", "altup", "recycled", "sum", "wide", "sequence", "experts")
_FOUND = {module.name for module in pkgutil.iter_modules(__path__)} - {"registry"}
for _name in (*_FIRST, *sorted(_FOUND - set(_FIRST))):
    importlib.import_module(f"{__name__}.{_name}")

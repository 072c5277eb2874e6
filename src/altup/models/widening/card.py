"""The part of a model card that says how a widened model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from altup.core.files import atomic_write
from altup.core.sealed_folders import UNFINISHED
from altup.core.text import fenced, markdown
from altup.models.widening.description import describe

TITLE = "## How to load this widened model"
HEAD = "---\nlibrary_name: transformers\ntags: [altup]\n---\n"


def write_card(model: PreTrainedModel, folder: Path, name: str = "") -> None:
    """README.md in `folder`; to a card that is there already the part is added, once."""
    path, name = folder / "README.md", name or folder.resolve().name.removeprefix(UNFINISHED)
    there = path.read_text(encoding="utf-8") if path.exists() else f"{HEAD}\n# {markdown(name)}\n"
    if TITLE not in there:
        atomic_write(path, f"{there.rstrip()}\n\n{_how_to_load(model, name)}")


def _how_to_load(model: PreTrainedModel, name: str) -> str:
    auto, place = _auto_class(model), json.dumps(name)
    code = f"import altup  # lets transformers load it wide\nfrom transformers import {auto}\n\n"
    code += f"model = {auto}.from_pretrained({place})"
    if not auto:
        code = f"import altup\n\nmodel = altup.load_widened({place})"
    return f"""{TITLE}

It was widened with Alternating Updates. Its layers have coefficients that the plain class does not know: without
`import altup` that class leaves them out, and computes something else, or fails. `altup.load_widened`
loads it too.

{fenced(code, "python")}
{fenced(describe(model), "text")}"""


def _auto_class(model: PreTrainedModel) -> str:
    """The Auto class that chooses the model's class; empty where none does."""
    names = [name for name in modeling_auto.__all__ if name.startswith("Auto")]
    for name in sorted(names, key=lambda name: "PreTraining" in name):  # the same class, and says less
        mapping = getattr(modeling_auto, name)._model_mapping
        if mapping is not None and mapping.get(type(model.config), None) is type(model):
            return name
    return ""

"""A tiny T5 of ours with a tokenizer, as a model folder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from altup.data import tokenizer as vocabularies


def made_up_words(count: int = 200) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices("abdeiklmnorstu", k=draw.randint(2, 6))) for _ in range(count)]


def made_up_text() -> list[str]:
    draw, words = random.Random(1), made_up_words()
    return [" ".join(draw.choices(words, k=8)) + "." for _ in range(500)]


def save_tiny(
    folder: Path,
    text: Sequence[str] | None = None,
    vocab_size: int = 450,
    rows: int | None = None,
    method: str = "altup",
    **fields: Any,
) -> Path:
    """A fresh model with a vocabulary trained on `text`, and tables of `rows` rows (as many as it needs)."""
    from altup.models.t5.config import AltUpT5Config
    from altup.models.t5.model import AltUpT5ForConditionalGeneration

    vocabularies.save(vocabularies.train(text or made_up_text(), vocab_size), folder)
    vocabulary = vocabularies.vocabulary(folder)
    shape = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2}
    shape |= {"vocab_size": rows or vocabulary.padded_size, "dropout_rate": 0.0, **fields}
    torch.manual_seed(0)
    config = AltUpT5Config.from_preset("tiny", method, k=None if method == "dense" else 2, **shape)
    AltUpT5ForConditionalGeneration(config).save_pretrained(folder)
    return folder

"""Filling in: text with sentinels goes in, text with words in their place comes out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from altup.core.errors import UserError

SENTINEL = re.compile(r"<extra_id_(\d+)>")


def fill_spans(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int = 64, **options: Any
) -> list[list[tuple[str, bool]]]:
    """Each prompt as pieces (text, was it filled in?), after one `generate` over all of them.

    A sentinel stands for a gap: "I <extra_id_0> tea." A prompt without any gets one at its end, so that its
    text is continued. `options` go to `generate`. A gap for which the model wrote nothing stays empty.
    """
    prompts = [prompt if SENTINEL.search(prompt) else f"{prompt.rstrip()} <extra_id_0>" for prompt in prompts]
    ids = _sentinel_ids(tokenizer, prompts)
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True)
    inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
    with torch.inference_mode():
        outputs = model.generate(**inputs, max_new_tokens=max_new_tokens, **options)
    return [
        _join(prompt, _read_spans(tokenizer, ids, output.tolist()))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _sentinel_ids(tokenizer: Any, prompts: Sequence[str]) -> dict[int, int]:
    """Token id -> number of the sentinel."""
    used = {int(n) for prompt in prompts for n in SENTINEL.findall(prompt)}
    known = tokenizer.get_vocab()
    for number in sorted(used):
        if f"<extra_id_{number}>" not in known:
            raise UserError(
                f"prompt: <extra_id_{number}> is not in this model's vocabulary; use <extra_id_0> and up"
            )
    return {known[name]: n for n in range(1000) if (name := f"<extra_id_{n}>") in known}


def _read_spans(tokenizer: Any, ids: dict[int, int], output: list[int]) -> dict[int, str]:
    """The text after each sentinel of an output, by the sentinel's number; the first one counts."""
    spans: dict[int, list[int]] = {}
    current: list[int] = []
    for token in output:
        if token in ids:
            current = []
            spans.setdefault(ids[token], current)
        elif token == tokenizer.eos_token_id:
            break
        elif token != tokenizer.pad_token_id:
            current.append(token)
    return {number: tokenizer.decode(tokens).strip() for number, tokens in spans.items()}


def _join(prompt: str, spans: dict[int, str]) -> list[tuple[str, bool]]:
    parts = SENTINEL.split(prompt)
    pieces = [(part, False) if i % 2 == 0 else (spans.get(int(part), ""), True) for i, part in enumerate(parts)]
    return [(text, filled) for text, filled in pieces if text]

"""Text for a prompt: a T5 fills gaps, a BERT predicts one token for each, a decoder continues."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from altup.core.errors import MOST_SEED, MOST_TOKENS, UserError, check_range, check_whole, named
from altup.core.text import is_unicode, number_of, shorten
from altup.evaluation.answering.causal import pad_left, start_token
from altup.evaluation.loading import load_any

Pieces = list[tuple[str, bool]]  # texts, and whether the model wrote them
LEAST_TEMPERATURE = 1e-3
LEAST_PROBABILITY = 1e-6
MOST_BEAMS = 1_000
SENTINEL = re.compile(r"<extra_id_(\d+)>")


def answer_prompts(
    model: Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    beams: int = 1,
    seed: int = 0,
    say: Callable[[str], None] = lambda remark: None,
    stream: Callable[[str], None] | None = None,
) -> list[Pieces]:
    """Each prompt with its gaps filled, or continued, by the model of a run or folder, of any family.

    Temperature 0 takes the likeliest tokens; more samples, from the `top_k` likeliest or from the fewest that
    reach the probability `top_p`. `say` gets remarks on prompts without a gap, and on gaps and texts for which the
    model wrote nothing. `stream` gets what a decoder writes after a single prompt, piece by piece.
    """
    if temperature is None:
        temperature = 0.0 if top_k is None and top_p is None else 1.0
    check_whole("max_new_tokens", max_new_tokens, 1, MOST_TOKENS)
    check_whole("beams", beams, 1, MOST_BEAMS)
    check_range("temperature", temperature, 0, float("inf"))
    if 0 < temperature < LEAST_TEMPERATURE:
        raise UserError(
            f"{named('temperature', temperature)} is almost 0; give 0, which takes the likeliest token"
        )
    if top_k is not None:
        check_whole("top_k", top_k, 1, MOST_TOKENS)
    if top_p is not None:
        check_range("top_p", top_p, LEAST_PROBABILITY, 1)
    if not temperature and (top_k, top_p) != (None, None):
        raise UserError("top_k and top_p choose among samples, but temperature 0 samples nothing; give it 1")
    check_whole("seed", seed, 0, MOST_SEED)
    for prompt in prompts:
        if not is_unicode(prompt):
            raise UserError(f"prompt {prompt!r} is not UTF-8; save or type it as such")
    loaded = load_any(model)
    torch.manual_seed(seed)
    mask = loaded.tokenizer.mask_token if loaded.objective == "masked" else None
    for remark in remarks_on_prompts(loaded.objective, prompts, mask):
        say(remark)
    if loaded.objective == "masked":
        if temperature or beams > 1:
            raise UserError(
                "a BERT names the likeliest token of each gap; remove temperature, top_k, top_p, beams"
            )
        answers = fill_masks(loaded.model, loaded.tokenizer, prompts)
    else:
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "num_beams": beams, "do_sample": False}
        if temperature:
            chosen = {"top_k": top_k, "top_p": top_p}
            options |= {"do_sample": True, "temperature": temperature}
            options |= {name: value for name, value in chosen.items() if value is not None}
        if loaded.objective == "causal":
            write = stream if len(prompts) == 1 and beams == 1 else None
            answers = continue_text(loaded.model, loaded.tokenizer, prompts, stream=write, **options)
        else:
            answers = fill_spans(loaded.model, loaded.tokenizer, prompts, **options)
    for remark in remarks_on_answers(prompts, answers):
        say(remark)
    return answers


def remarks_on_prompts(objective: str, prompts: Sequence[str], mask: str | None) -> list[str]:
    """What a model of this objective makes of prompts that were meant for another, or of none."""
    gaps = [bool(SENTINEL.search(prompt)) or (mask is not None and mask in prompt) for prompt in prompts]
    if objective == "causal":
        remark = "has a gap, but this model is a decoder: it writes after the text and fills in nothing"
        return [f"{_quoted(prompt)} {remark}" for prompt, gap in zip(prompts, gaps, strict=True) if gap]
    remark = "has no gap, so the model writes at its end; mark a gap with <extra_id_0>"
    return [f"{_quoted(prompt)} {remark}" for prompt, gap in zip(prompts, gaps, strict=True) if not gap]


def remarks_on_answers(prompts: Sequence[str], answers: Sequence[Pieces]) -> list[str]:
    remarks = []
    for prompt, pieces in zip(prompts, answers, strict=True):
        written = [text for text, filled in pieces if filled]
        empty = sum(not text.strip() for text in written)
        if empty == 1 == len(written):
            remarks.append(f"{_quoted(prompt)}: the model wrote nothing")
        elif empty:
            remarks.append(
                f"{_quoted(prompt)}: the model wrote nothing for {empty} of {number_of(len(written), 'gap')}"
            )
    return remarks


def _quoted(prompt: str) -> str:
    return f"'{shorten(prompt, 60)}'"


def fill_spans(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int = 64, **options: Any
) -> list[Pieces]:
    """Each prompt as pieces (text, was it filled in?), after one `generate` over all of them.

    A sentinel stands for a gap: "I <extra_id_0> tea." A prompt without any gets one at its end, so that its
    text is continued. `options` go to `generate`. A gap for which the model wrote nothing is an empty piece.
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


def _join(prompt: str, spans: dict[int, str]) -> Pieces:
    parts = SENTINEL.split(prompt)
    pieces = [(part, False) if i % 2 == 0 else (spans.get(int(part), ""), True) for i, part in enumerate(parts)]
    return [(text, filled) for text, filled in pieces if text or filled]


def fill_masks(model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[Pieces]:
    """Each prompt as pieces (text, was it filled in?), with the likeliest token in every gap.

    A gap is the tokenizer's mask token or a sentinel: "I <extra_id_0> tea." One without gaps gets one at its end.
    """
    mask = tokenizer.mask_token or "<extra_id_0>"
    mask_id = tokenizer.get_vocab().get(mask)
    if mask_id is None:
        raise UserError("the tokenizer has neither a mask token nor <extra_id_0>; take one that has")
    prompts = [SENTINEL.sub(lambda _: mask, prompt) for prompt in prompts]
    prompts = [prompt if mask in prompt else f"{prompt.rstrip()} {mask}" for prompt in prompts]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="right")
    inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
    with torch.inference_mode():
        logits = model(**inputs).logits[..., : len(tokenizer)]  # tables may have more rows than there are tokens
        logits[..., sorted({mask_id, *tokenizer.all_special_ids})] = float("-inf")
        best = logits.argmax(dim=-1)
    found = []
    for prompt, ids, chosen in zip(prompts, inputs["input_ids"], best, strict=True):
        words = [tokenizer.decode([token]).strip() for token in chosen[ids == mask_id].tolist()]
        texts = prompt.split(mask)
        pieces: Pieces = [(texts[0], False)]
        for word, text in zip(words, texts[1:], strict=False):
            pieces += [(word, True), (text, False)]
        found.append([(text, filled) for text, filled in pieces if text or filled])
    return found


class Continuation(BaseStreamer):
    """What `generate` has written after a row of tokens, passed on as text; half a character is held back."""

    def __init__(self, tokenizer: Any, row: list[int], write: Callable[[str], None]) -> None:
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
        self._ids, self._shown, self._write = list(row), self._decode(row), write
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        if not self._begun:  # the prompt comes first
            self._begun = True
            return
        self._ids += value.flatten().tolist()
        text = self._decode(self._ids)
        if not text.endswith("\ufffd"):
            self._pass_on(text)

    def end(self) -> None:
        self._pass_on(self._decode(self._ids))

    def _pass_on(self, text: str) -> None:
        self._write(text[len(self._shown) :])
        self._shown = text


def continue_text(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    stream: Callable[[str], None] | None = None,
    **options: Any,
) -> list[Pieces]:
    """Each prompt as pieces (text, was it written?): itself and what the decoder writes after it.

    Texts begin with the model's start token, as in pretraining. `options` go to `generate`. `stream` gets what is
    written after a single prompt, piece by piece.
    """
    texts = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    start, pad = start_token(model.config, tokenizer), model.config.pad_token_id
    ids, mask = pad_left([[start, *row] for row in texts], tokenizer.eos_token_id if pad is None else pad)
    if stream is not None:
        options["streamer"] = Continuation(tokenizer, texts[0], stream)
    with torch.inference_mode():
        outputs = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            **options,
        )
    found = []
    for prompt, row, output in zip(prompts, texts, outputs[:, ids.shape[1] :].tolist(), strict=True):
        # Decoded together, because a piece shows its leading space only behind another one.
        whole = tokenizer.decode([*row, *output], skip_special_tokens=True)
        start = tokenizer.decode(row, skip_special_tokens=True)
        found.append([(prompt, False), (whole[len(start) :], True)])
    return found

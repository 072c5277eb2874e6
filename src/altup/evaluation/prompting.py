"""What a BERT and a decoder make of a prompt: words at its gaps, or the text that follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from altup.core.errors import UserError
from altup.evaluation.filling import SENTINEL

Pieces = list[tuple[str, bool]]


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
        found.append([piece for piece in pieces if piece[0]])
    return found


def continue_text(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int = 64, **options: Any
) -> list[Pieces]:
    """Each prompt as pieces (text, was it written?): itself and what the decoder writes after it.

    Texts begin with the model's start token, as in pretraining. `options` go to `generate`.
    """
    texts = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    rows = [[model.config.bos_token_id, *ids] for ids in texts]
    width = max(map(len, rows))
    ids = torch.tensor([[model.config.pad_token_id] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    with torch.inference_mode():
        outputs = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            **options,
        )
    found = []
    for prompt, row, output in zip(prompts, texts, outputs[:, width:].tolist(), strict=True):
        # Decoded together, because a piece shows its leading space only behind another one.
        whole = tokenizer.decode([*row, *output], skip_special_tokens=True)
        start = tokenizer.decode(row, skip_special_tokens=True)
        found.append([(prompt, False), (whole[len(start) :], True)])
    return found

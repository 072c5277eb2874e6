"""Greedy decoding of many texts: sorted by length, so that a batch pads little and ends together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from altup.data.tasks.examples import Tokens, pad, tokenise

BUCKET = 64  # inputs are padded to a multiple of this, so that there are few shapes


class Peers(Protocol):
    """The processes that share the work, such as `altup.training.parallel.ProcessGroup`."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, numbers: torch.Tensor) -> torch.Tensor: ...


def decode(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str] | Tokens,
    *,
    inputs_length: int,
    targets_length: int,
    batch_size: int = 128,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    peers: Peers | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """The likeliest continuation, token by token, of every text, in the order of `texts`.

    Inputs are cut at `inputs_length` tokens. Of several processes each decodes every n-th batch, and all get
    everything. `progress(n)` reports that n more texts are done.
    """
    tokens = texts if isinstance(texts, Tokens) else tokenise(tokenizer, texts, inputs_length)
    longest_first = np.argsort(-tokens.lengths, kind="stable")  # what does not fit in memory fails at once
    outputs = torch.zeros(len(texts), targets_length, dtype=torch.int64)
    rank, world = (peers.rank, peers.world_size) if peers else (0, 1)
    was_training = model.training
    model.eval()
    # A model compiled for training would be compiled again for every length of a growing answer.
    with torch.compiler.set_stance("force_eager"), torch.inference_mode(), autocast():
        for begin in range(rank * batch_size, len(texts), batch_size * world):
            rows = longest_first[begin : begin + batch_size]
            found = _decode_batch(model, tokenizer, [tokens[i] for i in rows], inputs_length, targets_length)
            outputs[torch.from_numpy(rows), : found.shape[1]] = found
            progress(len(rows))
    model.train(was_training)
    if peers:
        outputs = peers.all_reduce(outputs)
    return [read_answer(tokenizer, row) for row in outputs.tolist()]


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Linear maps in `dtype`, for a model that is not trained any more.

    Under autocast each of them rounds its weights in every call, that is in every step of an answer. Rounded
    once they are the same numbers for a quarter of the memory traffic.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))


def _decode_batch(
    model: Any, tokenizer: Any, rows: list[np.ndarray], inputs_length: int, targets_length: int
) -> torch.Tensor:
    """`[rows, ≤ targets_length]` tokens, without the start token."""
    longest = max(len(row) for row in rows)
    width = min(inputs_length, -(-longest // BUCKET) * BUCKET)
    inputs = torch.from_numpy(pad(rows, width, tokenizer.pad_token_id)).long().to(model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    mask = (torch.arange(width, device=model.device) < lengths[:, None]).long()
    found = model.generate(
        input_ids=inputs,
        attention_mask=mask,
        max_new_tokens=targets_length,
        do_sample=False,
        num_beams=1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return found[:, 1:].cpu()


def read_answer(tokenizer: Any, tokens: list[int]) -> str:
    """The text before the first eos."""
    if tokenizer.eos_token_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()

"""How people train Gemma 3n: LoRA on padded and on packed rows as TRL does it, and all weights in a bare loop.

    PYTHONPATH=src python3 benchmarks/gemma3n_recipes.py --out recipes.csv   # E2B's shape, below five minutes
    PYTHONPATH=src python3 benchmarks/gemma3n_recipes.py --quick             # toy sizes, on a CPU too

| method | is |
|---|---|
| `lora padded` | 4 rows, padded on the right to the longest, 2,048; most have a tenth to a third of that |
| `lora packed` | texts of such lengths end to end in one row of 8,192 tokens; `position_ids` begin again |
| `full fine-tuning` | 4 × 2,048 tokens with labels, all weights, recorded as CUDA graphs |

LoRA runs under autocast to bfloat16, through the model without its head; then one loss for all providers, in
chunks of the positions that have a label, as TRL's is. Batches alternate, so that no provider sees one set of
lengths alone. Peers are Hugging Face's layers compiled one by one, with SDPA and with FlexAttention; altup
is launched, as rows have lengths of their own. Weights are random.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from altup.bench.cases.gemma3n import Models, adapted, as_it_is, kernels, tolerances
from altup.bench.cases.step import held_bytes
from altup.bench.problem import Problem, Provider, Setup, Work, distance
from altup.bench.script import run_script
from altup.models.accelerate import accelerate
from altup.models.stack import compile_layers

Batch = dict[str, Tensor]
IGNORED = -100
CHUNK = 2048  # positions whose logits are held at a time
BATCHES = 4  # that take turns


def problems(setup: Setup) -> Iterator[Problem]:
    models = Models(setup, "tiny" if setup.quick else "E2B")
    rows, length = (3, 12) if setup.quick else (4, 2048)
    for layout, tokens in (("padded", rows * length), ("packed", rows * length)):
        recipe = Recipe(models, layout, rows, length)
        yield Problem(
            "gemma3n", {"size": models.size, "method": f"lora {layout}", "inputs": tokens}, recipe.providers(),
            tolerances=tolerances(setup),
        )  # fmt: skip
    whole = models.step(rows, length, "all")
    names = ("altup plain", "hf flex layers compiled", "altup recorded")
    whole.providers[:] = [provider for provider in whole.providers if provider.name in names]
    yield whole


class Recipe:
    """LoRA on one layout of rows."""

    def __init__(self, models: Models, layout: str, rows: int, length: int) -> None:
        self.models, self.layout, self.rows, self.length = models, layout, rows, length
        self.reference = cache(self._reference)

    def providers(self) -> list[Provider]:
        eager = Provider("hf eager", partial(self.work, as_it_is), "peer")
        return [
            *([eager] if self.models.setup.quick else []),  # at full size it takes twice as long as compiled
            Provider("hf layers compiled", partial(self.work, compile_layers), "peer", compiled=True),
            Provider("hf flex layers compiled", partial(self.work, flexible), "peer", compiled=True),
            Provider("altup plain", partial(self.work, partial(accelerate, implementation="plain")), "plain"),
            Provider("altup", partial(self.work, kernels), triton=True),
        ]

    def work(self, prepare: Callable[[Any], Any]) -> Work:
        model = adapted(self.models.whole(), "lora").train()
        prepare(model)
        batches = [self.batch(i, self.rows, self.length) for i in range(BATCHES)]

        def backward(loss: Tensor) -> None:
            loss.backward()
            model.zero_grad(set_to_none=True)

        return Work(
            lambda i: self.loss(model, batches[i % BATCHES]),
            backward,
            partial(self._errors, prepare),
            per_repetition=sum(int((batch["labels"] != IGNORED).sum()) for batch in batches) / BATCHES,
            unit="labels/s",
            held=held_bytes(model),
        )

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """As TRL's trainers compute it."""
        given = {name: value for name, value in batch.items() if name != "labels"}
        device = self.models.setup.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = model.model(**given, use_cache=False).last_hidden_state
            return chunked_loss(
                hidden, model.lm_head.weight, batch["labels"], model.config.final_logit_softcapping
            )

    def batch(self, number: int, rows: int, length: int) -> Batch:
        device, generator = self.models.setup.device, torch.Generator().manual_seed(number)
        lengths = [length, *self._lengths(generator, length)]
        vocabulary = self.models.fields.get("vocab_size", 262_144)
        ids = torch.randint(3, vocabulary, (rows, length), generator=generator).to(device)
        if self.layout == "padded":
            real = torch.arange(length) < torch.tensor(lengths[:rows])[:, None]
            mask = real.long().to(device)
            return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}
        places = torch.cat([torch.arange(n) for n in lengths])[: rows * length].unsqueeze(0).to(device)
        ids = ids.reshape(1, -1)
        return {"input_ids": ids, "position_ids": places, "labels": ids.masked_fill(places == 0, IGNORED)}

    def _lengths(self, generator: torch.Generator, length: int) -> list[int]:
        """Most texts are much shorter than the longest allowed."""
        drawn = torch.randn(100, generator=generator).exp() * 0.2 * length
        return [int(n) for n in drawn.clamp(min=max(2, 0.1 * length), max=length)]

    def _errors(self, prepare: Callable[[Any], Any]) -> dict[str, float]:
        """On a model of four layers, beside float64."""
        model = adapted(self.models.shallow(), "lora").train()
        prepare(model)
        loss = self.loss(model, self._example())
        loss.backward()
        want_loss, want = self.reference()
        got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        if missing := want.keys() - got.keys():
            return {f"gradient of {min(missing)}": float("inf")}
        gradient = distance([got[name] for name in want], list(want.values()))
        return {"loss": distance(loss, want_loss), "gradient": gradient}

    def _example(self) -> Batch:
        return self.batch(0, 2, self.length if self.models.setup.quick else 768)

    def _reference(self) -> tuple[Tensor, dict[str, Tensor]]:
        model = copy.deepcopy(adapted(self.models.shallow(), "lora")).double().train()
        with torch.autocast(self.models.setup.device.type, enabled=False):
            batch = self._example()
            given = {name: value for name, value in batch.items() if name != "labels"}
            hidden = model.model(**given, use_cache=False).last_hidden_state
            cap = model.config.final_logit_softcapping
            loss = chunked_loss(hidden, model.lm_head.weight, batch["labels"], cap)
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def flexible(model: Any) -> Any:
    """FlexAttention, which skips padding, other texts and what lies outside of a window."""
    model.set_attn_implementation("flex_attention")
    return compile_layers(model)


def chunked_loss(hidden: Tensor, weight: Tensor, labels: Tensor, cap: float) -> Tensor:
    """The mean over labels; logits of one chunk are held, and computed again in the backward pass."""
    kept = labels[:, 1:] != IGNORED
    hidden, labels = hidden[:, :-1][kept], labels[:, 1:][kept]
    parts = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
    total = sum(checkpoint(chunk_loss, h, weight, y, cap, use_reentrant=False) for h, y in parts)
    return total / len(labels)


def chunk_loss(hidden: Tensor, weight: Tensor, labels: Tensor, cap: float) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = cap * torch.tanh(logits.to(torch.promote_types(logits.dtype, torch.float32)) / cap)
    return F.cross_entropy(logits, labels, reduction="sum")


if __name__ == "__main__":
    run_script(__doc__, problems, clock="host", seconds=285.0)

"""Greedy decoding of a fixed number of tokens, ours and Hugging Face's `generate`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from altup.bench.cases import step
from altup.bench.problem import Fact, Problem, Provider, Setup, Timings, Work
from altup.models.accelerate import accelerate
from altup.models.accounting import TARGETS
from altup.models.t5.convert import to_hugging_face

Generate = Callable[[Any, Tensor, int], Tensor]
# A token may be less likely than the best by this many standard deviations of the logits: rounding decides ties.
REGRET = 0.2
PLAIN = "hf dense"
OURS = ("dense", "altup k2")


def generate(model: Any, input_ids: Tensor, new_tokens: int) -> Tensor:
    """[batch, 1 + new_tokens], start token included, through Hugging Face's loop."""
    return model.generate(input_ids=input_ids, max_new_tokens=new_tokens, do_sample=False, num_beams=1)


def generate_static(model: Any, input_ids: Tensor, new_tokens: int) -> Tensor:
    """The same with a cache of fixed size, for which Hugging Face compiles the decoder by itself on a GPU."""
    options = {"do_sample": False, "num_beams": 1, "cache_implementation": "static"}
    return model.generate(input_ids=input_ids, max_new_tokens=new_tokens, **options)


def problems(setup: Setup) -> Iterator[Problem]:
    size = "tiny" if setup.quick else "base"
    models = step.Models(setup, size)
    for rows in (1, 2) if setup.quick else (1, 64):
        torch._dynamo.reset()  # or decoders would be compiled for any batch, as they have seen another one
        ids = models.batch.input_ids[:rows]
        decoder = Decoder(models, ids, 5 if setup.quick else TARGETS)
        yield Problem(
            "generation",
            {"size": size, "batch": rows, "inputs": ids.shape[1], "targets": decoder.new_tokens},
            [
                *(Provider(name, partial(decoder.ours, name)) for name in OURS),
                Provider(PLAIN, partial(decoder.hugging_face, generate), "peer"),
                *(
                    Provider(f"{name} accelerated", partial(decoder.accelerated, name), compiled=True)
                    for name in OURS
                ),
                Provider("hf dense static", partial(decoder.hugging_face, generate_static), "peer", compiled=True),
            ],
            tolerances={"": REGRET},
            derive=compare_with_plain,
        )


def compare_with_plain(timings: Timings) -> Iterable[Fact]:
    """How much faster than `generate` as most people call it."""
    if PLAIN not in timings:
        return
    plain = timings[PLAIN]["generate"].p50
    for name, modes in timings.items():
        if name != PLAIN:
            ratio = plain / modes["generate"].p50
            yield Fact(
                name, "over plain", ratio, f"times as fast as {PLAIN}, as most people call it", mode="generate"
            )


@dataclass(frozen=True)
class Decoder:
    models: step.Models
    input_ids: Tensor
    new_tokens: int
    checked: list[tuple[str, Tensor, float]] = field(default_factory=list)

    def ours(self, name: str) -> Work:
        return self._work(step.share_weights(self.models.master(name)).eval(), generate, name)

    def accelerated(self, name: str) -> Work:
        """By `altup.accelerate`, which compiles and records what the second call of a shape decodes."""
        work = self._work(accelerate(step.share_weights(self.models.master(name)).eval()), generate, name)
        work.forward(0)
        return work

    def hugging_face(self, run: Generate) -> Work:
        with self.models.setup.device:
            model = to_hugging_face(self.models.master("dense")).eval()
        return self._work(model, run, "dense")

    def _work(self, model: Any, run: Generate, name: str) -> Work:
        model.generation_config = copy.deepcopy(model.generation_config)
        model.generation_config.eos_token_id = None  # random weights would end anywhere

        @torch.inference_mode()
        def forward(i: int = 0) -> Tensor:
            return run(model, self.input_ids, self.new_tokens)

        def errors() -> dict[str, float]:
            tokens = forward()
            known = (worst for other, same, worst in self.checked if other == name and torch.equal(same, tokens))
            worst = next(known, None)
            if worst is None:
                worst = self._regret(tokens, name)
                self.checked.append((name, tokens, worst))
            return {"least likely token": worst}

        count = len(self.input_ids) * self.new_tokens
        return Work(forward, errors=errors, mode="generate", per_repetition=count, unit="tokens/s", on_host=True)

    @torch.no_grad()
    def _regret(self, tokens: Tensor, name: str) -> float:
        """How far the logit of a chosen token lies below the highest, in standard deviations, by float64."""
        if tokens.shape != (len(self.input_ids), 1 + self.new_tokens):
            return float("inf")
        model = copy.deepcopy(self.models.master(name)).double().eval()
        worst = 0.0
        for ids, answer in zip(self.input_ids.split(4), tokens.split(4), strict=True):
            logits = model(input_ids=ids, decoder_input_ids=answer[:, :-1], use_cache=False).logits
            chosen = logits.gather(-1, answer[:, 1:, None]).squeeze(-1)
            worst = max(worst, float(((logits.amax(-1) - chosen) / logits.std(-1)).max()))
        return worst

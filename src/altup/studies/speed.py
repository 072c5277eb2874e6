"""How fast the models of a study are beside each other: training, reading and generating, in turns."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from altup.bench.problem import Work
from altup.bench.timing import PeakMemory, time_in_turns
from altup.studies.jobs import fresh_model, objective_of

if TYPE_CHECKING:
    from altup.training.parallel import ProcessGroup
    from altup.training.pretraining import PretrainConfig


def measure_speed(
    configs: Mapping[str, PretrainConfig], rounds: int, steps: int, generate_batch: int, generate_tokens: int
) -> dict[str, dict[str, float]]:
    """Measures of each model: training steps, forward passes and, where all models generate, generation of
    `generate_tokens` each. Ratios are to the first model."""
    from altup.training.engine import numerics
    from altup.training.parallel import join_process_group

    first = next(iter(configs.values()))
    with join_process_group() as group, numerics(first.deterministic, first.low_precision):
        models = {key: _Subject(config, group) for key, config in configs.items()}

        def time(works: dict[str, Work], burst: int) -> dict[str, list[float]]:
            return time_in_turns(works, group.device, rounds, burst)

        trained = time({key: model.train() for key, model in models.items()}, steps)
        read = time({key: model.forward() for key, model in models.items()}, steps)
        found: dict[str, dict[str, float]] = {key: {} for key in configs}
        base = next(iter(configs))
        for key, config in configs.items():
            found[key]["train_seq_per_s"] = 1000 * config.batch_size / statistics.median(trained[key])
            found[key]["relative_speed"] = ratio(trained[key], trained[base])
            _add(found[key], "forward", read[key], read[base])
        if all(model.can_generate for model in models.values()):
            written = time(
                {key: model.generate(generate_batch, generate_tokens) for key, model in models.items()}, 1
            )
            for key in configs:
                _add(found[key], "generate", written[key], written[base])
        for key, model in models.items():
            found[key] |= {"peak_memory": model.peak_memory / 2**30} if model.peak_memory is not None else {}
    return found


def _add(found: dict[str, float], what: str, times: Sequence[float], base: Sequence[float]) -> None:
    found |= {f"{what}_ms": statistics.median(times), f"relative_{what}": ratio(times, base)}


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """How much faster than `base`: the median over rounds, of turns of the same round."""
    return statistics.median(b / t for t, b in zip(times, base, strict=True))


class _Subject:
    """A model with its optimizer and one batch, that can be asked to train, to read and to write for a while.

    `peak_memory` is what its first step needs on the device, weights and optimizer included: later steps may
    replay it as a recording, whose activations no longer count as allocated.
    """

    def __init__(self, config: PretrainConfig, group: ProcessGroup) -> None:
        from altup.data.batches import ShardBatches
        from altup.data.shards import TokenStream
        from altup.training.engine import Engine
        from altup.training.prefetch import assemble

        text = TokenStream(config.data, "train")
        memory = PeakMemory(group.device)
        self._device = group.device
        self._engine = Engine(fresh_model(config, text.vocabulary), config, group)
        self._model: Any = self._engine.plain
        batches = ShardBatches(text, objective_of(config, text.vocabulary), config.batch_size, config.seed)
        self._batch = assemble(batches, config.micro_batch or config.batch_size, group, 0)
        self._engine.step(0, self._batch, self._batch.tokens)
        self.peak_memory = memory.read()

    @property
    def can_generate(self) -> bool:
        return bool(getattr(self._model, "can_generate", lambda: False)())

    def train(self) -> Work:
        """Whole training steps: forward, backward, optimizer."""
        self._model.train()
        return Work(lambda i: self._engine.step(i, self._batch, self._batch.tokens), mode="train", together=True)

    def forward(self) -> Work:
        """Forward passes over the batch without gradients; on a GPU recorded, as `altup.accelerate` does it."""
        from altup.models.recorded_calls import LAUNCHED, RecordedCalls

        self._model.eval()
        micro = [{name: t.to(self._device) for name, t in part.items()} for part in self._batch.micro]
        run = RecordedCalls(self._model) if self._device.type == "cuda" else self._model

        def read(i: int) -> None:
            for inputs in micro:
                run(**inputs, return_logits=False)

        def without_gradients() -> AbstractContextManager[None]:
            return self._within(torch.no_grad())

        if run is not self._model:
            with without_gradients():
                for i in range(LAUNCHED + 1):
                    read(i)
        return Work(read, together=True, around=without_gradients)

    def generate(self, batch: int, tokens: int) -> Work:
        """Greedy generation of `tokens` tokens for `batch` inputs, without stopping early."""
        self._model.eval()
        self._model.generation_config = copy.deepcopy(self._model.generation_config)
        # Not `min_new_tokens`, with which a GPU would not take the fast way of users' greedy decoding.
        self._model.generation_config.eos_token_id = None
        inputs = self._batch.micro[0]["input_ids"][:batch].long().to(self._device)

        def write(i: int) -> None:
            self._model.generate(input_ids=inputs, max_new_tokens=tokens, do_sample=False)

        def without_compiling() -> AbstractContextManager[None]:
            """Compiled code would be compiled again for every length of the growing answer."""
            return self._within(torch.compiler.set_stance("force_eager"), torch.inference_mode())

        return Work(write, mode="generate", together=True, around=without_compiling)

    @contextmanager
    def _within(self, *contexts: Any) -> Iterator[None]:
        """Autocast as in training, inside the contexts given."""
        with ExitStack() as stack:
            for context in (*contexts, self._engine.autocast()):
                stack.enter_context(context)
            yield

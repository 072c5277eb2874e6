"""How fast the models of a study are beside each other: training, reading and generating, in turns."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from altup.bench.problem import Work
from altup.bench.timing import PeakMemory, time_in_turns
from altup.studies.jobs import fresh_model, objective_of

if TYPE_CHECKING:
    from altup.training.parallel import ProcessGroup
    from altup.training.pretraining import PretrainConfig


@dataclass(frozen=True)
class Speed:
    """Sequences a second, and relative to the first model as median, lower and upper quartile."""

    seq_per_s: float
    relative: float
    low: float
    high: float


@dataclass(frozen=True)
class Measured:
    """Speeds of one model; `peak_memory` of a training step in bytes, where the device tells it."""

    train: Speed
    forward: Speed
    generate: Speed | None
    forward_ms: float
    generate_ms: float | None
    peak_memory: int | None


def compare_training(
    configs: Mapping[str, PretrainConfig], rounds: int, steps: int = 2, built: Callable[[], None] = lambda: None
) -> dict[str, Speed]:
    """Whole training steps (forward, backward, optimizer) of fresh models on the data of their configs. `built` is
    called before the first is timed."""
    with _subjects(configs) as subjects:
        built()
        return _speeds(subjects.time("train", rounds, steps), subjects.batch_sizes)


def measure_speed(
    configs: Mapping[str, PretrainConfig], rounds: int, steps: int, generate_batch: int, generate_tokens: int
) -> dict[str, Measured]:
    """Training steps, forward passes and, where the models generate, generation of `generate_tokens` each."""
    with _subjects(configs) as subjects:
        train = subjects.time("train", rounds, steps)
        forward = subjects.time("forward", rounds, steps)
        generate = None
        if subjects.can_generate:
            generate = subjects.time("generate", rounds, 1, generate_batch, generate_tokens)
        memory = {name: model.peak_memory for name, model in subjects.models.items()}
    trained, passed = _speeds(train, subjects.batch_sizes), _speeds(forward, subjects.batch_sizes)
    written = _speeds(generate, dict.fromkeys(configs, generate_batch)) if generate else {}
    return {
        name: Measured(
            trained[name], passed[name], written.get(name), statistics.median(forward[name]),
            statistics.median(generate[name]) if generate else None, memory[name],
        )
        for name in configs
    }  # fmt: skip


def _speeds(times: Mapping[str, Sequence[float]], batch_sizes: Mapping[str, int]) -> dict[str, Speed]:
    base = next(iter(times.values()))
    return {name: summarise(own, base, batch_sizes[name]) for name, own in times.items()}


def summarise(times: Sequence[float], base: Sequence[float], batch_size: int) -> Speed:
    """`times` are milliseconds a step in each round, `base` those of the model to compare with in the same
    rounds."""
    ratios = [b / t for t, b in zip(times, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Speed(1000 * batch_size / statistics.median(times), middle, low, high)


@dataclass(frozen=True)
class _Subjects:
    """Fresh models of some configs, all in this process."""

    models: dict[str, _Subject]
    batch_sizes: dict[str, int]
    device: torch.device

    def time(self, what: str, rounds: int, burst: int, *sizes: int) -> dict[str, list[float]]:
        """Milliseconds of one repetition of each model in every round."""
        works = {name: getattr(model, what)(*sizes) for name, model in self.models.items()}
        return time_in_turns(works, self.device, rounds, burst)

    @property
    def can_generate(self) -> bool:
        return all(model.can_generate for model in self.models.values())


@contextmanager
def _subjects(configs: Mapping[str, PretrainConfig]) -> Iterator[_Subjects]:
    from altup.training.engine import numerics
    from altup.training.parallel import join_process_group

    first = next(iter(configs.values()))
    with join_process_group() as group, numerics(first.deterministic, first.low_precision):
        models = {name: _Subject(config, group) for name, config in configs.items()}
        yield _Subjects(models, {name: config.batch_size for name, config in configs.items()}, group.device)


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
        """Whole training steps."""
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
        # Not `min_new_tokens`, with which a GPU would not take the fast way that users' greedy decoding goes.
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

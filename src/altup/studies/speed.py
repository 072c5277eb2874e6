"""How fast models are beside each other on a machine that also does other things.

The models take turns, a few steps each, and a ratio compares turns of the same round: what slows the machine down
for a while slows all of them down.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from altup.training.parallel import ProcessGroup
    from altup.training.pretraining import PretrainConfig

Turn = Callable[[int], float]  # does something so many times and gives the seconds it took


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


def compare_speed(configs: Mapping[str, PretrainConfig], rounds: int, steps: int = 2) -> dict[str, Speed]:
    """Whole training steps (forward, backward, optimizer) of fresh models on the data of their configs."""
    with _subjects(configs) as subjects:
        seconds = take_turns({name: subject.train for name, subject in subjects.items()}, rounds, steps)
        return _speeds(seconds, {name: config.batch_size for name, config in configs.items()})


def measure_speed(
    configs: Mapping[str, PretrainConfig], rounds: int, steps: int, generate_batch: int, generate_tokens: int
) -> dict[str, Measured]:
    """Training steps, forward passes and, where the model generates, generation of `generate_tokens` each."""
    with _subjects(configs) as subjects:
        sizes = {name: config.batch_size for name, config in configs.items()}
        train = take_turns({name: s.train for name, s in subjects.items()}, rounds, steps)
        forward = take_turns({name: s.forward for name, s in subjects.items()}, rounds, steps)
        generate = None
        if all(s.can_generate for s in subjects.values()):
            writers = {name: s.writer(generate_batch, generate_tokens) for name, s in subjects.items()}
            generate = take_turns(writers, rounds, 1)
    trained, passed = _speeds(train, sizes), _speeds(forward, sizes)
    written = _speeds(generate, dict.fromkeys(configs, generate_batch)) if generate else {}
    return {
        name: Measured(
            trained[name], passed[name], written.get(name),
            1000 * statistics.median(forward[name]),
            1000 * statistics.median(generate[name]) if generate else None,
            subjects[name].peak_memory,
        )
        for name in configs
    }  # fmt: skip


def take_turns(turns: Mapping[str, Turn], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of one step of each in every round, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for turn in turns.values():
        turn(1)
    names = list(turns)
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:  # nobody always comes first
            seconds[name].append(turns[name](steps) / steps)
    return seconds


def _speeds(seconds: Mapping[str, list[float]], batch_sizes: Mapping[str, int]) -> dict[str, Speed]:
    base = next(iter(seconds.values()))
    return {name: summarise(times, base, batch_sizes[name]) for name, times in seconds.items()}


def summarise(seconds: list[float], base: list[float], batch_size: int) -> Speed:
    """`seconds` a step in each round, `base` those of the model to compare with in the same rounds."""
    ratios = [b / s for s, b in zip(seconds, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Speed(batch_size / statistics.median(seconds), middle, low, high)


@contextmanager
def _subjects(configs: Mapping[str, PretrainConfig]) -> Iterator[dict[str, _Subject]]:
    """A fresh model of each config with its optimizer and one batch, all in this process."""
    from altup.training.engine import numerics
    from altup.training.parallel import join_process_group

    first = next(iter(configs.values()))
    with join_process_group() as process_group, numerics(first.deterministic, first.precision == "bf16"):
        yield {name: _Subject(config, process_group) for name, config in configs.items()}


class _Subject:
    """A model that can be asked to train, to read and to write for a while.

    `peak_memory` is what its first step needs on the device, weights and optimizer included: later steps may
    replay it as a recording, whose activations no longer count as allocated.
    """

    def __init__(self, config: PretrainConfig, process_group: ProcessGroup) -> None:
        import torch

        from altup.data.batches import ShardBatches
        from altup.data.shards import TokenStream
        from altup.studies.parts import fresh_model, objective_of
        from altup.training.engine import Engine
        from altup.training.prefetch import assemble

        text = TokenStream(config.data, "train")
        self._process_group = process_group
        others = self._start_counting()
        self._engine = Engine(fresh_model(config, text.vocabulary), config, process_group)
        assert config.micro_batch is not None
        batches = ShardBatches(text, objective_of(config, text.vocabulary), config.batch_size, config.seed)
        self._batch = assemble(batches, config.micro_batch, process_group, 0)
        self.train(1)
        self.peak_memory = (
            None if others is None else torch.cuda.max_memory_allocated(process_group.device) - others
        )

    def _start_counting(self) -> int | None:
        """Bytes that are allocated already, and no peak above them yet; None without a GPU."""
        import torch

        if self._process_group.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self._process_group.device)
        return torch.cuda.memory_allocated(self._process_group.device)

    def train(self, steps: int) -> float:
        begun = time.perf_counter()
        for step in range(steps):
            self._engine.step(step, self._batch, self._batch.tokens)
        self._engine.meter.read(self._process_group)  # waits for the device
        return time.perf_counter() - begun

    def forward(self, steps: int) -> float:
        """Forward passes over the batch without gradients, as in evaluation."""
        import torch

        model = self._engine.plain
        micro = [{n: t.to(self._process_group.device) for n, t in part.items()} for part in self._batch.micro]
        model.eval()
        self._wait()
        begun = time.perf_counter()
        with torch.no_grad(), self._engine.autocast():
            for _ in range(steps):
                for inputs in micro:
                    model(**inputs, return_logits=False)
        self._wait()
        seconds = time.perf_counter() - begun
        model.train()
        return seconds

    @property
    def can_generate(self) -> bool:
        return bool(getattr(self._engine.plain, "can_generate", lambda: False)())

    def writer(self, batch: int, tokens: int) -> Turn:
        """Greedy generation of `tokens` tokens for `batch` inputs, without stopping early."""
        import torch

        model: Any = self._engine.plain
        model.generation_config = copy.deepcopy(model.generation_config)
        # Not `min_new_tokens`, with which a GPU would not take the fast way that users' greedy decoding goes.
        model.generation_config.eos_token_id = None
        inputs = self._batch.micro[0]["input_ids"][:batch].long().to(self._process_group.device)

        def turn(steps: int) -> float:
            model.eval()
            self._wait()
            begun = time.perf_counter()
            # Compiled code would be compiled again for every length of the growing answer.
            with torch.compiler.set_stance("force_eager"), torch.inference_mode(), self._engine.autocast():
                for _ in range(steps):
                    model.generate(input_ids=inputs, max_new_tokens=tokens, do_sample=False)
            self._wait()
            seconds = time.perf_counter() - begun
            model.train()
            return seconds

        return turn

    def _wait(self) -> None:
        import torch

        if self._process_group.device.type == "cuda":
            torch.cuda.synchronize(self._process_group.device)

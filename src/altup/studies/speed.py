"""How fast models train beside each other on a machine that also does other things.

The models take turns, a few steps each, and a ratio compares steps of the same round: what slows the machine down
for a while slows all of them down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from altup.training.parallel import Processes
    from altup.training.pretraining import PretrainConfig


@dataclass(frozen=True)
class Speed:
    """Training speed: sequences a second, and relative to the first model as median, lower and upper quartile."""

    seq_per_s: float
    relative: float
    low: float
    high: float


def compare_speed(configs: Mapping[str, PretrainConfig], rounds: int, steps: int = 2) -> dict[str, Speed]:
    """Whole training steps (forward, backward, optimizer) of fresh models on the data of their configs."""
    from altup.training.determinism import numerics
    from altup.training.parallel import processes

    first = next(iter(configs.values()))
    with processes() as mine, numerics(first.deterministic, first.precision == "bf16"):
        turns = {name: _stepper(config, mine) for name, config in configs.items()}
        seconds: dict[str, list[float]] = {name: [] for name in configs}
        for turn in turns.values():
            turn(1)
        names = list(turns)
        for r in range(rounds):
            for name in names[r % len(names) :] + names[: r % len(names)]:  # nobody always comes first
                seconds[name].append(turns[name](steps) / steps)
    return {name: summarise(seconds[name], seconds[names[0]], configs[name].batch_size) for name in names}


def summarise(seconds: list[float], base: list[float], batch_size: int) -> Speed:
    """`seconds` a step in each round, `base` those of the model to compare with in the same rounds."""
    ratios = [b / s for s, b in zip(seconds, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Speed(batch_size / statistics.median(seconds), middle, low, high)


def _stepper(config: PretrainConfig, mine: Processes) -> Callable[[int], float]:
    """A function that trains for some steps and gives the seconds they took."""
    import torch

    from altup.data.batches import ShardBatches
    from altup.data.objectives import SpanCorruption
    from altup.data.shards import TokenStream
    from altup.training.engine import Engine
    from altup.training.prefetch import assemble
    from altup.training.pretraining import build_model

    text = TokenStream(Path(config.data), "train")
    words = text.vocabulary
    objective = SpanCorruption(
        words.sentinels, words.eos, config.inputs_length, config.noise_density, config.mean_span
    )
    torch.manual_seed(config.seed)
    engine = Engine(build_model(config.model_config(words), None), config, mine)
    assert config.micro_batch is not None
    batch = assemble(ShardBatches(text, objective, config.batch_size, config.seed), config.micro_batch, mine, 0)

    def turn(steps: int) -> float:
        begun = time.perf_counter()
        for step in range(steps):
            engine.step(step, batch, batch.tokens)
        engine.meter.read(mine)  # waits for the device
        return time.perf_counter() - begun

    return turn

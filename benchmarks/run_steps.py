"""Steps as `altup pretrain` makes them, in turns: bf16, fp8, with dropout; and a profile of what differs.

    python benchmarks/run_steps.py --data DATA            # T5 1.1 base, batch 64, Adafactor, on a GPU
    python benchmarks/run_steps.py --data DATA --only "bf16" "bf16 dropout" --out run_steps.json
    python benchmarks/run_steps.py --data DATA --quick    # a toy, on a CPU too

`altup bench step` times forward and backward pass alone. Here a step has its optimizer, under autocast and
recorded as a run records it. Each variant first makes 24 steps with the same batches, whose losses are told. Then
they take turns, and a profile of each is compared with that of `bf16`, kernel by kernel. With `--go FILE` see
turns.py.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from turns import Gate, in_words, ratio, say

from altup.bench.timing import Spread, synchronize, take_turns
from altup.data.batches import ShardBatches
from altup.data.shards import TokenStream
from altup.studies.jobs import fresh_model, objective_of
from altup.training.engine import Engine, numerics
from altup.training.metrics import means
from altup.training.parallel import ProcessGroup, join_process_group
from altup.training.prefetch import assemble
from altup.training.pretraining import PretrainConfig

ON_GPU = torch.cuda.is_available()
FIRST, BURST, LOSSES = 24, 6, 3  # steps before any is timed, of a turn, and from one loss that is told to the next
LOW = {"bf16": "bf16", "fp8": "fp8"} if ON_GPU else {"bf16": "fp32", "fp8": "fp32"}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": LOW["bf16"]},
    "bf16 dropout": {"precision": LOW["bf16"], "dropout": 0.1},
    "fp8": {"precision": LOW["fp8"]},
    "fp8 dropout": {"precision": LOW["fp8"], "dropout": 0.1},
    "AltUp": {"precision": LOW["bf16"], "method": "altup", "k": 2},
    "AltUp fp8": {"precision": LOW["fp8"], "method": "altup", "k": 2},
}
Kernels = dict[str, tuple[float, float]]  # name → milliseconds and launches a step


class Subject:
    """A run without its loop: an engine and the batches of its first steps."""

    def __init__(self, config: PretrainConfig, text: TokenStream, group: ProcessGroup) -> None:
        self.device = group.device
        self.engine = Engine(fresh_model(config, text.vocabulary), config, group)
        batches = ShardBatches(text, objective_of(config, text.vocabulary), config.batch_size, config.seed)
        self.batches = [assemble(batches, config.batch_size, group, number) for number in range(FIRST)]
        self.losses: list[float] = []
        for number, batch in enumerate(self.batches):
            self.engine.step(number, batch, batch.tokens)
            if number % LOSSES == LOSSES - 1:
                self.losses.append(means(self.engine.meter.read(group))["loss"])
                self.engine.meter.start_window()

    def burst(self, steps: int = BURST) -> float:
        """Milliseconds a step."""
        synchronize(self.device)
        begun = time.perf_counter()
        for number in range(steps):
            batch = self.batches[number % FIRST]
            self.engine.step(FIRST + number, batch, batch.tokens)
        synchronize(self.device)
        return 1000 * (time.perf_counter() - begun) / steps

    def profile(self, steps: int = 3) -> Kernels:
        activities = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activities.CUDA if ON_GPU else activities.CPU]) as seen:
            self.burst(steps)
        return {
            event.key: (
                (event.self_device_time_total if ON_GPU else event.self_cpu_time_total) / 1000 / steps,
                event.count / steps,
            )
            for event in seen.key_averages()
        }


def show_difference(name: str, kernels: Kernels, than: str, base: Kernels, most: int = 25) -> None:
    def added(key: str) -> float:
        return kernels.get(key, (0.0, 0.0))[0] - base.get(key, (0.0, 0.0))[0]

    print(f"{name} against {than}: {sum(map(added, {*kernels, *base})):+.2f} ms of kernels a step; the largest:")
    for key in sorted({*kernels, *base}, key=lambda key: -abs(added(key)))[:most]:
        (before, often), (after, now) = base.get(key, (0.0, 0.0)), kernels.get(key, (0.0, 0.0))
        print(f"  {added(key):+8.3f} ms  {before:8.3f} ({often:.0f}) → {after:8.3f} ({now:.0f})  {key[:100]}")


def build(
    config: Mapping[str, Any], text: TokenStream, group: ProcessGroup, names: list[str]
) -> dict[str, Subject]:
    subjects = {}
    for name in names:
        try:
            subjects[name] = Subject(PretrainConfig.from_dict({**config, **VARIANTS[name]}, name), text, group)
            told = " ".join(f"{loss:.4f}" for loss in subjects[name].losses)
            say(f"{name}: built; losses of {LOSSES} steps each: {told}")
        except Exception as error:
            say(f"FAILED {name}: {in_words(error)}")
    return subjects


def compare(subjects: dict[str, Subject], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for subject in subjects.values():
        subject.burst(2)
    for _, name in take_turns(subjects, rounds):
        times[name].append(subjects[name].burst())
    first = next(iter(times))
    for name, values in times.items():
        spread = Spread.of(values)
        slower, error = ratio(values, times[first])
        say(f"{name}: {spread.p50:.2f} ms a step ({min(values):.2f} to {max(values):.2f}), "
            f"{slower:.4f} ± {error:.4f} of {first}'s")  # fmt: skip
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a folder made by `altup prepare`")
    parser.add_argument("--only", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--size", default="base")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="at toy size")
    parser.add_argument("--out", type=Path, help="JSON of all times, losses and kernels")
    Gate.add_flags(parser, build_s=400, time_s=60)
    given = parser.parse_args()
    gate = Gate.of(given)
    size, rows, length = ("tiny", 2, 32) if given.quick else (given.size, given.rows, 512)
    config = {
        "data": given.data, "size": size, "steps": 200, "batch_size": rows, "inputs_length": length,
        "optimizer": "adafactor", "lr": 0.01, "seed": 0,
    }  # fmt: skip
    with join_process_group() as group, numerics(deterministic=False, low_precision=ON_GPU):
        subjects = build(config, TokenStream(given.data, "train"), group, given.only)
        gate.wait()
        times = compare(subjects, given.rounds)
        kernels = {name: subject.profile() for name, subject in subjects.items()}
    first = next(iter(kernels))
    for name in list(kernels)[1:]:
        show_difference(name, kernels[name], first, kernels[first])
    if given.out:
        losses = {name: subject.losses for name, subject in subjects.items()}
        given.out.write_text(json.dumps({"times": times, "losses": losses, "kernels": kernels}, indent=1))


if __name__ == "__main__":
    main()

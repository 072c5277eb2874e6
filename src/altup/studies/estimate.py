"""How long jobs will take: from measured speeds where there are any, else from FLOPs and the device's peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from altup.core.errors import UserError
from altup.studies.plan import Job

USE_OF_PEAK = 0.35  # what runs of small to large models reach of a GPU's bf16 peak, roughly
CPU_FLOPS = 15e9  # what small models reach on one core, roughly
GPU_START, CPU_START = 40.0, 1.0  # seconds to start, compile, evaluate and save
COMPARISON = 31.0  # seconds a model in a comparison of speed on a GPU: eleven small ones took 336 on an H200
DECODING = 30.0  # seconds to decode held-out examples on a GPU: 10,570 of SQuAD took 28 with base on an H200


@dataclass(frozen=True)
class Machine:
    """`flops` it reaches in training, and seconds that every run costs beside it."""

    name: str
    flops: float
    start: float


def this_machine() -> Machine:
    import torch

    from altup.studies.machine import hardware

    if torch.cuda.is_available():
        return machine(hardware())
    return Machine(hardware(), CPU_FLOPS * torch.get_num_threads(), CPU_START)


def machine(name: str) -> Machine:
    """A GPU by a part of its name."""
    from altup.training.hardware import PEAK_BF16

    peak = next((peak for part, peak in PEAK_BF16.items() if part.lower() in name.lower()), None)
    if peak is None:
        raise UserError(f"the peak of {name!r} is not known; known are {', '.join(PEAK_BF16)}")
    return Machine(name, USE_OF_PEAK * peak, GPU_START)


def make_estimate(on: Machine, vocabulary: Any, speed_of: Callable[[Any], float | None]) -> Callable[[Job], float]:
    """A function that gives a job's seconds. `speed_of(config)` is a measured speed, in sequences a second."""

    def estimate(job: Job) -> float:
        if job.kind == "speed":
            on_gpu = on.start == GPU_START
            return len(job.settings["configs"]) * (COMPARISON if on_gpu else 3.0)
        if job.kind == "finetune":
            return on.start + job.sequences / speeds.get(job.settings["of"], 1e3) + _decoding(on)
        speed = _speed(job, on, vocabulary, speed_of)
        speeds[job.key] = speed
        return on.start + job.sequences / speed

    speeds: dict[str, float] = {}
    return estimate


def _decoding(on: Machine) -> float:
    return DECODING if on.start == GPU_START else 2.0


def _speed(job: Job, on: Machine, vocabulary: Any, speed_of: Callable[[Any], float | None]) -> float:
    from altup.models.accounting import account
    from altup.studies.parts import objective_of
    from altup.training.pretraining import PretrainConfig

    config = PretrainConfig.from_dict(job.settings["config"], job.title)
    measured = speed_of(config)
    if measured:
        return measured
    targets = objective_of(config, vocabulary).targets
    return on.flops / account(config.model_config(vocabulary), config.inputs_length, targets).flops_train


def duration(seconds: float) -> str:
    """`38 s`, `12 min`, `5.2 h`, `3.1 days`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"

"""Forward passes without gradients of dense, AltUp and Recycled T5s: launched, and recorded by `altup.accelerate`.

    python benchmarks/inference.py --size small --out benchmarks/results/inference_h200.csv

512 input and 114 target tokens, teacher-forced, bf16 weights, compiled layers; by the host's clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import altup
from altup.bench.cases.step import Batch, Models, share_weights
from altup.bench.problem import Problem, Provider, Setup, Work
from altup.bench.script import run_script
from altup.bench.show import print_tables

METHODS = ("dense", "altup k2", "recycled k2")


def problems(setup: Setup) -> Iterator[Problem]:
    for size in ("tiny",) if setup.quick else setup.sizes:
        models = Models(setup, size)
        for rows in (2,) if setup.quick else (8, 64):
            lengths = models.batch.inputs, models.batch.targets
            batch = Batch.random(setup, rows, *lengths, models.configs["dense"].vocab_size)
            providers = [
                Provider(f"{name}{', recorded' * record}", partial(forward, models, name, batch, record))
                for name in METHODS
                for record in (False, True)
            ]
            sizes: dict[str, int | str] = {
                "size": size,
                "batch": rows,
                "inputs": lengths[0],
                "targets": lengths[1],
            }
            yield Problem("inference", sizes, providers, baseline="dense")


def forward(models: Models, name: str, batch: Batch, record: bool) -> Work:
    model = altup.accelerate(share_weights(models.master(name)).eval(), record=record)

    @torch.inference_mode()
    def run(i: int) -> torch.Tensor:
        return model(**batch.whole(), return_logits=False).loss

    return Work(run, per_repetition=batch.rows, records=record)


if __name__ == "__main__":
    print_tables(run_script(__doc__, problems, clock="host"))

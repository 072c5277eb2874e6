"""The update of all weights, and its share of a training step at base size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from altup.bench.cases import step
from altup.bench.problem import Fact, Problem, Provider, Setup, Timings, Work, distance
from altup.core.hardware import ensure_bf16
from altup.kernels.cuda_graph import record, warm_up
from altup.nn import Attention, GatedFeedForward
from altup.training.optimizers.build import blocks_of, build_optimizer
from altup.training.optimizers.config import OptimizerConfig

RATE = 1e-4
Build = Callable[[nn.Module], Any]
STEP = "forward and backward"


def adafactor(model: nn.Module) -> Any:
    return build_optimizer(OptimizerConfig(optimizer="adafactor", lr=RATE), model)


def adamw(model: nn.Module) -> Any:
    return build_optimizer(OptimizerConfig(optimizer="adamw", lr=RATE, weight_decay=0.1), model)


def adamw_rms(model: nn.Module) -> Any:
    return build_optimizer(OptimizerConfig(optimizer="adamw-rms", lr=RATE), model)


def muon(model: nn.Module, muon_by: str = "matrix") -> Any:
    equal = {"embeddings": 1.0}  # no part has another rate
    return build_optimizer(OptimizerConfig(optimizer="muon", lr=RATE, muon_by=muon_by, lr_factors=equal), model)


class RelativeReference:
    """`adamw-rms` by torch's AdamW: every parameter has a rate of its own, by its size."""

    def __init__(self, model: nn.Module) -> None:
        groups = [{"params": [p], "weight_decay": 0.0} for p in model.parameters()]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups)

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            (p,) = group["params"]
            group["lr"] = RATE * max(1e-3, float(p.detach().square().mean().sqrt()))
        self.optimizer.step()


class MuonReference(RelativeReference):
    """`muon` over matrices alone, by torch's Muon, which computes in bf16 everywhere.

    It has copies of the blocks for parameters; their rates go by the size of the whole matrix.
    """

    def __init__(self, model: nn.Module, muon_by: str = "matrix") -> None:
        ensure_bf16(next(model.parameters()).device.type)
        shapes = blocks_of(model, muon_by)
        self.matrices = {p: shapes.get(p, tuple(p.shape)) for p in model.parameters()}
        self.copies = {p: [nn.Parameter(part.clone()) for part in cut(p, b)] for p, b in self.matrices.items()}
        groups = [{"params": copies, "weight_decay": 0.0} for copies in self.copies.values()]
        self.optimizer = torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self) -> None:
        for (p, block), group in zip(self.matrices.items(), self.optimizer.param_groups, strict=True):
            assert p.grad is not None
            group["lr"] = RATE * max(1e-3, float(p.square().mean().sqrt()))
            for own, grad in zip(self.copies[p], cut(p.grad, block), strict=True):
                own.grad = grad
        self.optimizer.step()
        for p, block in self.matrices.items():
            for part, own in zip(cut(p.detach(), block), self.copies[p], strict=True):
                part.copy_(own)


def cut(matrix: Tensor, block: tuple[int, ...]) -> list[Tensor]:
    return [part for rows in matrix.split(block[0]) for part in rows.split(block[1], dim=1)]


def torch_adamw(model: nn.Module) -> Any:
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, fused=fused or None)


def hugging_face_adafactor(model: nn.Module) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(model.parameters(), lr=RATE, relative_step=False, scale_parameter=True)


def problems(setup: Setup) -> Iterator[Problem]:
    size = "tiny" if setup.quick else "base"
    models = step.Models(setup, size)
    yield Problem(
        "optimizer",
        {"size": size, "batch": models.batch.rows, "inputs": models.batch.inputs, "targets": models.batch.targets},
        [
            Provider("adafactor", partial(work, models, adafactor, hugging_face_adafactor)),
            Provider("adamw", partial(work, models, adamw, torch_adamw)),
            Provider("adamw-rms", partial(work, models, adamw_rms, RelativeReference)),
            *(
                Provider(
                    name, partial(work, models, partial(muon, muon_by=by), partial(MuonReference, muon_by=by))
                )
                for name, by in (("muon", "matrix"), ("muon by head", "head"), ("muon by block", "block"))
            ),
            Provider("hf adafactor", partial(work, models, hugging_face_adafactor), "peer"),
            Provider("torch adamw fused", partial(work, models, torch_adamw), "peer"),
            Provider(STEP, partial(models.ours, "dense", compiled=setup.compiles), "floor", setup.compiles),
        ],
        baseline="torch adamw fused",
        tolerances={"weights": 1e-3, "orthogonal weights": 5e-2, **step.tolerances(setup)},
        derive=share_of_step,
    )


def share_of_step(timings: Timings) -> Iterable[Fact]:
    if STEP not in timings:
        return
    for name, modes in timings.items():
        if name != STEP:
            share = modes["update"].p50 / timings[STEP]["both"].p50
            yield Fact(name, "fraction", share, f"of {STEP}", mode="update")


def work(models: step.Models, build: Build, reference: Build | None = None) -> Work:
    """float32 masters with random gradients; the learning rate is too small to lead them anywhere.

    Ours, which have a reference, are replayed as a CUDA graph where there is one, as training runs them.
    """
    model = copy.deepcopy(models.master("dense")).float()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = build(model)

    def compare() -> dict[str, float]:
        # Muon's matrices are orthogonalized in bf16, by torch too.
        name = "orthogonal weights" if getattr(reference, "func", None) is MuonReference else "weights"
        return {} if reference is None else {name: agreement(build, reference, models.setup)}

    update = optimizer.step if reference is None else replayed(optimizer, models.setup.device)
    return Work(lambda i: update(), errors=compare, mode="update")


def replayed(optimizer: Any, device: torch.device) -> Callable[[], Any]:
    if device.type != "cuda":
        return optimizer.step
    warm_up(optimizer.step, device)
    return record(optimizer.step)


def agreement(build: Build, reference: Build, setup: Setup) -> float:
    """How far `build` leads float32 weights in three steps from where `reference` leads float64 ones, relative to
    how far they went."""
    torch.manual_seed(0)
    layer = nn.Sequential(Attention(130, 2, 64), GatedFeedForward(130, 256)).to(setup.device, torch.float64)
    start = [p.detach().clone() for p in layer.parameters()]  # matrices: ours decays those alone
    bags = [copy.deepcopy(layer).float(), layer]
    optimizers = [make(bag) for make, bag in zip((build, reference), bags, strict=True)]
    for _ in range(3):
        gradients = [torch.randn_like(t) for t in start]
        for bag, optimizer in zip(bags, optimizers, strict=True):
            for parameter, gradient in zip(bag.parameters(), gradients, strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
    moved = [[p.detach() - t for p, t in zip(bag.parameters(), start, strict=True)] for bag in bags]
    return distance(moved[0], moved[1])

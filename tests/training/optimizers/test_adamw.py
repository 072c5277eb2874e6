"""AdamW against its definition, and which parameters decay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.training.tiny import optimizer_of
from torch import nn

from altup import AltUp
from altup.core.errors import UserError
from altup.training.optimizers.config import OPTIMIZER_DEFAULTS


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.rule = AltUp(num_blocks=3, num_layers=1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for p in self.parameters():
            p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (step % 3 - 1)


def reference(name: str, p: np.ndarray, gradients: list[np.ndarray], relative: bool) -> np.ndarray:
    decay = 0.1 if name.endswith("linear.weight") else 0.0
    m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        u = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        size = max(1e-3, np.sqrt(np.mean(p**2))) if relative else 1.0
        p = p - 0.02 * decay * p - 0.02 * size * u
    return p


@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02)])
@pytest.mark.parametrize("name", ["adamw", "adamw-rms"])
def test_twenty_steps_equal_the_definition(name, lr):
    model = Model()
    start = {n: p.detach().numpy().astype(np.float64) for n, p in model.named_parameters()}
    gradients: dict[str, list[np.ndarray]] = {n: [] for n in start}
    optimizer = optimizer_of(name, model, lr=lr, weight_decay=0.1)
    for step in range(20):
        model.set_gradients(step)
        for n, p in model.named_parameters():
            gradients[n].append(p.grad.numpy().astype(np.float64))
        optimizer.step()
    for n, p in model.named_parameters():
        expected = reference(n, start[n], gradients[n], relative=name == "adamw-rms")
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-5, atol=1e-6, err_msg=n)


@pytest.mark.parametrize("name", ["adamw", "adamw-rms"])
def test_vectors_and_coefficients_do_not_decay(name):
    model = Model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = optimizer_of(name, model, lr=0.5, weight_decay=0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[n] * (0.75 if n.endswith("linear.weight") else 1.0))


@pytest.mark.parametrize("name", OPTIMIZER_DEFAULTS)
def test_frozen_parameters_are_not_touched(name):
    model = Model()
    model.layers[0].requires_grad_(False)
    optimizer = optimizer_of(name, model, lr=0.5)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.layers[1].parameters()}


def test_requests_that_make_no_sense_are_named():
    model = Model()
    with pytest.raises(UserError, match="optimizer='sgd'"):
        optimizer_of("sgd", model, lr=0.1)
    with pytest.raises(UserError, match=r"weight_decay=0\.1.*adafactor"):
        optimizer_of("adafactor", model, lr=0.1, weight_decay=0.1)
    with pytest.raises(UserError, match="no parameter"):
        optimizer_of("adamw", model.requires_grad_(False), lr=0.1)

"""Adafactor against the definition, written here in plain NumPy from the paper's and T5's formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.training.tiny import optimizer_of
from torch import nn

from altup.training.optimizers import sharding
from altup.training.optimizers.state import state_tensors

SHAPES = {
    "wide": (130, 200),
    "wide_again": (130, 200),
    "edge": (128, 128),
    "just_too_small": (127, 300),
    "small": (4, 7),
    "small_again": (4, 7),
    "coefficients": (2, 2),
    "vector": (300,),
    "scalar": (),
    "pile": (3, 128, 130),
    "experts": (5, 130, 16),
    "zero_rows": (140, 150),
    "zero": (129, 129),
}


class Holder(nn.Module):
    """A bag of parameters with the scales a model has: some large, one of zeros."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for i, (name, shape) in enumerate(SHAPES.items()):
            value = torch.randn(shape, generator=generator, dtype=torch.float64) * (0.0, 1.0, 0.03)[i % 3]
            self.register_parameter(name, nn.Parameter(value.to(dtype)))

    def set_gradients(self, step: int) -> None:
        for i, (name, p) in enumerate(self.named_parameters()):
            noise = np.random.default_rng([step, i]).standard_normal(p.shape)
            grad = np.asarray(noise * 10.0 ** (step % 5 - 3))
            if name == "zero_rows":  # as in an embedding table: unseen words, and a row seen once
                grad[::3] = 0
                grad[1] *= step == 20
                grad[:, 5] = 0
            if name == "zero":
                grad[:] = 0
            p.grad = torch.from_numpy(grad).to(p.device, p.dtype)


def lr_of(step: int) -> float:
    return 0.3 / (1 + step)


def reference(p: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    p = p.astype(np.float64).copy()
    large = p.ndim >= 2 and p.shape[-1] >= 128 and p.shape[-2] >= 128
    v = r = c = 0.0
    for t, g in enumerate(gradients):
        beta2 = 1 - (t + 1) ** -0.8
        g2 = g.astype(np.float64) ** 2 + 1e-30
        if large:
            r = beta2 * r + (1 - beta2) * g2.mean(axis=-1, keepdims=True)
            c = beta2 * c + (1 - beta2) * g2.mean(axis=-2, keepdims=True)
            v = r * c / np.mean(r, axis=-2, keepdims=True)
        else:
            v = beta2 * v + (1 - beta2) * g2
        u = g / np.sqrt(v)
        u /= max(1.0, np.sqrt(np.mean(u**2)))
        p -= lr_of(t) * max(1e-3, np.sqrt(np.mean(p**2))) * u
    return p


def train(model: Holder, steps: int, lr_as_tensor: bool = False) -> torch.optim.Optimizer:
    optimizer = optimizer_of("adafactor", model, lr=0.0)
    for step in range(steps):
        model.set_gradients(step)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(lr_of(step)) if lr_as_tensor else lr_of(step)
        optimizer.step()
    return optimizer


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    model = Holder(torch.float64)
    gradients: dict[str, list[np.ndarray]] = {name: [] for name in SHAPES}
    for step in range(50):
        model.set_gradients(step)
        for name, p in model.named_parameters():
            gradients[name].append(p.grad.numpy().copy())
    return {name: reference(p.detach().numpy(), gradients[name]) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("dtype", "lr_as_tensor", "tolerance"),
    [(torch.float64, False, 1e-11), (torch.float32, False, 2e-5), (torch.float32, True, 2e-5)],
)
def test_fifty_steps_equal_the_definition(expected, dtype, lr_as_tensor, tolerance):
    model = Holder(dtype)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, 50, lr_as_tensor)
    for name, p in model.named_parameters():
        size = np.abs(expected[name]).max()
        np.testing.assert_allclose(p.detach().numpy(), expected[name], rtol=0, atol=tolerance * size, err_msg=name)
        assert torch.equal(p, start[name]) == (name == "zero"), name


def test_only_large_matrices_are_factored():
    model = Holder()
    state = state_tensors(optimizer_of("adafactor", model, lr=0.1), model)
    kept = {name: {key.split("/")[1] for key in state if key.split("/")[0] == name} for name in SHAPES}
    factored = {name for name, keys in kept.items() if keys == {"step", "row", "column"}}
    assert factored == {"wide", "wide_again", "edge", "pile", "zero_rows", "zero"}
    assert all(kept[name] == {"step", "square"} for name in set(SHAPES) - factored)
    assert state["pile/row"].shape == (3, 128)
    assert state["pile/column"].shape == (3, 130)


def test_how_parameters_are_stacked_does_not_matter(monkeypatch):
    together, apart = Holder(), Holder()
    train(together, 5)
    monkeypatch.setitem(sharding.STACK_ELEMENTS, "cpu", 1)
    train(apart, 5)
    for (name, a), b in zip(together.named_parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)


def test_two_runs_are_the_same_bits():
    first, second = Holder(), Holder()
    train(first, 10)
    train(second, 10)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_extreme_gradients_stay_finite():
    """A huge and a vanishing row side by side: r / mean(r) would underflow."""
    model = nn.Linear(128, 128, bias=False)
    optimizer = optimizer_of("adafactor", model, lr=0.01)
    for scale in (1e18, 1e-18, 0.0, 1e10):
        grad = torch.zeros(128, 128)
        grad[0] = scale
        grad[1, 3] = 1e-25
        model.weight.grad = grad
        optimizer.step()
        assert model.weight.isfinite().all()
        assert all(tensor.isfinite().all() for tensor in state_tensors(optimizer, model).values())


def test_a_parameter_without_gradient_is_left_alone():
    model = Holder()
    optimizer = optimizer_of("adafactor", model, lr=0.1)
    model.set_gradients(0)
    model.wide.grad = None
    before = model.wide.detach().clone()
    optimizer.step()
    assert torch.equal(model.wide, before)
    state = state_tensors(optimizer, model)
    assert state["wide/step"] == 0
    assert state["wide_again/step"] == 1


def test_bfloat16_weights_keep_float32_moments():
    model = Holder(torch.bfloat16)
    optimizer = train(model, 3)
    assert all(tensor.dtype == torch.float32 for tensor in state_tensors(optimizer, model).values())
    assert model.wide_again.dtype == torch.bfloat16
    assert model.wide_again.isfinite().all()


@pytest.mark.gpu
def test_on_the_gpu_nothing_waits_and_the_result_is_the_same(expected):
    model = Holder().cuda()
    optimizer = optimizer_of("adafactor", model, lr=0.0)
    skip = torch.tensor(False, device="cuda")
    for step in range(50):
        model.set_gradients(step)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(lr_of(step), device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step(skip=skip)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for name, p in model.named_parameters():
        size = np.abs(expected[name]).max()
        found = p.detach().cpu().numpy()
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=2e-5 * size, err_msg=name)

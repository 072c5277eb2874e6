"""Skipped steps, state through a file, and one process against two with FSDP2."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.processes import fork_two
from tests.training.tiny import optimizer_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from altup.core.errors import UserError
from altup.nn import Attention, GatedFeedForward
from altup.nn.altup import AltUpUpdate
from altup.training.checkpoints import save_tensors
from altup.training.optimizers.config import OPTIMIZER_DEFAULTS
from altup.training.optimizers.state import load_state_tensors, state_tensors
from altup.training.parallel import leave
from altup.training.tensor_files import TensorFiles


class Model(nn.Module):
    """No row count is a multiple of two; one vector has nothing for the second process."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "table": (151, 130),
            "again": (151, 130),
            "small": (5, 3),
            "vector": (7,),
            "one": (1,),
            "pile": (3, 130, 128),
            "rule_P": (2, 2),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def set_gradients(self, step: int) -> None:
        set_gradients(self, step)


def set_gradients(model: nn.Module, step: int) -> None:
    for i, p in enumerate(model.parameters()):
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        grad[::2] *= step % 3  # now and then rows without gradient
        if isinstance(p, DTensor):
            grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = grad


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step(skip=torch.tensor(step == 2))


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    weights = {f"weight/{name}": p for name, p in model.named_parameters()}
    whole = {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in weights.items()}
    return {n: w.detach().clone() for n, w in whole.items()} | state_tensors(optimizer, model)


@pytest.mark.parametrize("name", OPTIMIZER_DEFAULTS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_skipped_step_changes_no_bit(name, poison):
    model = Model()
    optimizer = optimizer_of(name, model, lr=0.1, weight_decay=0.1 * (name != "adafactor"))
    train(model, optimizer, range(2))
    before = snapshot(model, optimizer)
    model.set_gradients(5)
    model.table.grad[3, 4] = poison
    model.vector.grad[:] = poison
    optimizer.step(skip=torch.tensor(True))
    after = snapshot(model, optimizer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)

    model.set_gradients(5)
    optimizer.step(skip=torch.tensor(False))
    taken = snapshot(model, optimizer)
    untouched = Model()
    twin = optimizer_of(name, untouched, lr=0.1, weight_decay=0.1 * (name != "adafactor"))
    train(untouched, twin, range(2))
    untouched.set_gradients(5)
    twin.step()
    expected = snapshot(untouched, twin)
    assert all(torch.equal(taken[key], expected[key]) for key in expected)
    assert not torch.equal(taken["weight/table"], before["weight/table"])


@pytest.mark.parametrize("name", OPTIMIZER_DEFAULTS)
def test_training_goes_on_from_a_file_bit_for_bit(name, tmp_path):
    straight = Model()
    optimizer = optimizer_of(name, straight, lr=0.1)
    train(straight, optimizer, range(4))
    save_tensors(tmp_path / "state.safetensors", state_tensors(optimizer, straight))
    resumed = Model()
    resumed.load_state_dict(straight.state_dict())
    fresh = optimizer_of(name, resumed, lr=0.1)
    load_state_tensors(fresh, resumed, TensorFiles(tmp_path, "state"))
    train(straight, optimizer, range(4, 7))
    train(resumed, fresh, range(4, 7))
    one, other = snapshot(straight, optimizer), snapshot(resumed, fresh)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_torch_state_dict_round_trip():
    """What transformers.Trainer does."""
    model, twin = Model(), Model()
    optimizer, fresh = (optimizer_of("adafactor", m, lr=0.1) for m in (model, twin))
    train(model, optimizer, range(3))
    twin.load_state_dict(model.state_dict())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(3, 5))
    train(twin, fresh, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes():
    model = Model()
    optimizer = optimizer_of("adafactor", model, lr=0.1)
    train(model, optimizer, range(2))
    before = snapshot(model, optimizer)
    good = state_tensors(optimizer, model)
    missing = {key: tensor for key, tensor in good.items() if key != "vector/square"}
    wrong_shape = good | {"table/row": torch.zeros(150)}
    other = state_tensors(optimizer_of("adamw", model, lr=0.1), model)
    for tensors, message in [
        (missing, "vector/square is missing"),
        (wrong_shape, r"table/row has shape \(150,\).*instead of \(151,\)"),
        (good | {"ghost/row": torch.zeros(3)}, "ghost/row is not in this optimizer"),
        (good | {"one/step": torch.zeros((), dtype=torch.int64)}, r"one/step .*int64"),
        (other, "Adafactor"),
    ]:
        with pytest.raises(UserError, match=message):
            load_state_tensors(optimizer, model, tensors)
    after = snapshot(model, optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before)
    with pytest.raises(UserError, match="not in the model"):
        state_tensors(optimizer, Model())


def run_sharded(rank: int, folder: Path) -> None:
    """One of two processes: half of the run, state out and into a fresh optimizer, the other half."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name in OPTIMIZER_DEFAULTS:
        model = Model()
        # As where coefficients are kept out of FSDP: an ordinary tensor among the sharded ones.
        fully_shard(model, mesh=mesh, ignored_params={model.rule_P})
        optimizer = optimizer_of(name, model, lr=torch.tensor(0.1))
        train(model, optimizer, range(2))
        fresh = optimizer_of(name, model, lr=torch.tensor(0.1))
        load_state_tensors(fresh, model, state_tensors(optimizer, model))
        train(model, fresh, range(2, 4))
        result = snapshot(model, fresh)
        assert state_tensors(fresh, model, keep=False) == {}
        if rank == 0:
            save_tensors(folder / f"{name}.safetensors", result)
    model, optimizer = build_by_block(torch.tensor(0.1))
    train(model, optimizer, range(3))
    result = snapshot(model, optimizer)
    if rank == 0:
        save_tensors(folder / "blocks.safetensors", result)
    dist.barrier()
    leave()


def build_by_block(lr: torch.Tensor | float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Heads of 8 rows, half of which each of two processes has, and blocks of 36 hidden units."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(16, 4, 8), GatedFeedForward(16, 72), AltUpUpdate(3, active=0))
    if isinstance(lr, torch.Tensor):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, optimizer_of("muon", model, lr=lr, muon_by="block", coefficient_decay=4)


def test_two_processes_with_fsdp2_equal_one(tmp_path):
    fork_two(run_sharded, tmp_path)
    model, optimizer = build_by_block(0.1)
    assert len({group["block"] for group in optimizer.param_groups if group["orthogonal"]}) == 4
    train(model, optimizer, range(3))
    found = TensorFiles(tmp_path, "blocks")
    for key, tensor in snapshot(model, optimizer).items():
        torch.testing.assert_close(found[key][...], tensor, rtol=1e-4, atol=1e-4, msg=key)
    for name in OPTIMIZER_DEFAULTS:
        model = Model()
        optimizer = optimizer_of(name, model, lr=0.1)
        train(model, optimizer, range(4))
        expected, found = snapshot(model, optimizer), TensorFiles(tmp_path, name)
        assert expected.keys() == found.keys()
        for key, tensor in expected.items():
            # Muon's iterations magnify the rounding of small singular values.
            near = {"rtol": 1e-4, "atol": 1e-4} if name == "muon" else {"rtol": 2e-6, "atol": 1e-6}
            torch.testing.assert_close(found[key][...], tensor, **near, msg=f"{name} {key}")

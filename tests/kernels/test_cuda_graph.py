"""Recording and replaying on a CUDA GPU."""

from __future__ import annotations

import pytest
import torch

from altup.kernels.cuda_graph import record, warm_up

pytestmark = pytest.mark.gpu


def test_a_replay_does_the_work_again_in_the_same_places() -> None:
    x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")

    def add() -> torch.Tensor:
        return total.add_(x)

    warm_up(add, x.device)
    before = total.clone()
    replay = record(add)
    assert torch.equal(total, before)  # recorded, not run
    x.fill_(5)
    assert replay().data_ptr() == total.data_ptr()
    assert torch.equal(total, before + 5)


def test_many_warm_ups_leave_no_memory_behind() -> None:
    """Each stream that has multiplied matrices costs tens of megabytes, which are never given back."""
    device = torch.device("cuda", torch.cuda.current_device())
    a = torch.randn(256, 256, device=device, dtype=torch.bfloat16)

    def work() -> None:
        torch.mm(a, a)

    warm_up(work, device)
    before = torch.cuda.memory_allocated(device)
    for _ in range(8):
        warm_up(work, device)
    assert torch.cuda.memory_allocated(device) == before

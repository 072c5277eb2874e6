"""Recording and replaying on a CUDA GPU, and what is done where it fails, without one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from altup.kernels.cuda_graph import record, try_recording, warm_up
from tests.recordings import REFUSED, PretendedGraphs

CPU = torch.device("cpu")


def test_a_recording_that_fails_leaves_no_copies_of_weights_behind(monkeypatch, recwarn) -> None:
    """Autocast keeps copies for the next use, but in a recording they are not made."""
    x, weight = torch.randn(2, 3), torch.randn(4, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        want = F.linear(x, weight)
    with monkeypatch.context() as patch, torch.autocast("cpu", dtype=torch.bfloat16):
        pretended = PretendedGraphs(patch)
        pretended.fail[1] = RuntimeError(REFUSED)
        assert try_recording(lambda: record(lambda: F.linear(x, weight)), CPU, "it is slow") is None
        assert pretended.stream is pretended.main
        assert torch.equal(F.linear(x, weight), want)
    assert [str(warning.message) for warning in recwarn] == [f"it is slow: {REFUSED}"]


def test_an_error_that_the_caller_handles_is_not_the_reason(monkeypatch, recwarn) -> None:
    """A batch did not fit, and a smaller one cannot be recorded, which has nothing to do with memory."""
    pretended, owner = PretendedGraphs(monkeypatch), torch.nn.Identity()
    pretended.fail[1] = RuntimeError(REFUSED)
    try:
        raise torch.OutOfMemoryError("CUDA out of memory")
    except torch.OutOfMemoryError:
        for _ in range(2):
            made = try_recording(lambda: record(lambda: torch.ones(2) + 1 + 1), CPU, "it is slow", owner)
            assert made is None
    assert pretended.begun == 1  # nothing is tried again
    assert [str(warning.message) for warning in recwarn] == [f"it is slow: {REFUSED}"]


def test_what_is_no_error_of_recording_is_not_caught(monkeypatch) -> None:
    PretendedGraphs(monkeypatch)
    with pytest.raises(KeyError):
        try_recording(lambda: record(lambda: {}["x"]), CPU, "it is slow")


@pytest.mark.gpu
def test_a_recording_that_fails_leaves_a_gpu_ready(recwarn) -> None:
    """The work asks for a number, which no recording knows; then launched work and another recording are right."""
    x = torch.ones(3, device="cuda")
    before = torch.cuda.current_stream()
    assert try_recording(lambda: record(lambda: x.sum().item()), x.device, "it is slow") is None
    assert torch.cuda.current_stream() == before
    assert len(recwarn) == 1
    assert float((x + torch.rand_like(x)).sum()) > 3
    torch.cuda.empty_cache()
    replay = try_recording(lambda: record(lambda: x * 2), x.device, "it is slow")
    assert replay is not None
    assert torch.equal(replay(), x * 2)


@pytest.mark.gpu
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


@pytest.mark.gpu
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

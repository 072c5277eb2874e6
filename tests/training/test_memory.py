"""Memory that will not do is told before the first step, and advice comes instead of a traceback."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from altup.core.errors import UserError, is_out_of_memory
from altup.core.hardware import free_memory
from altup.training.memory import MemoryAdvice, activation_bytes
from tests.processes import PATIENCE, server
from tests.training.tiny import ALONE, build, tiny_loop

MEBIBYTE = 2**20


def starving(out: Path, said: Path) -> None:
    """A run whose step needs gigabytes and may take 768 MB, once its model is there."""
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    loop = tiny_loop(out, batch_size=32, model={"d_ff": 100_000})
    make = loop.build_model

    def make_and_limit(checkpoint: Path | None) -> torch.nn.Module:
        model = make(checkpoint)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + 768 * MEBIBYTE, resource.RLIM_INFINITY))
        return model

    loop.build_model = make_and_limit
    try:
        loop.run()
    except UserError as error:
        os.write(2, f"refused: {error}\n".encode())


def test_a_run_that_does_not_fit_is_warned_and_advised(tmp_path: Path) -> None:
    process = server.Process(target=starving, args=(tmp_path / "run", tmp_path / "said"))
    process.start()
    process.join(PATIENCE)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0, said
    warning, refusal = (
        next(line for line in said.splitlines() if word in line) for word in ("warning", "refused")
    )
    assert "a step needs at least 1.9 GiB (gradients 0.1 GiB, optimizer 0.1 GiB, activations 1.7 GiB;" in warning
    assert "`altup params` counts them), and 0." in warning
    assert " GiB are free on this machine" in warning
    assert "--micro-batch 16 (now 32; the update stays the same), --activation-checkpointing" in warning
    assert "out of memory on this machine: " in refusal
    assert "can't allocate memory" in refusal
    assert "A step was thought to need 1.9 GiB" in refusal
    assert "--micro-batch 16 (now 32" in refusal
    assert "Traceback" not in said


def lacking(error: BaseException | None) -> Any:
    """`build`, with a model whose second step asks for a petabyte, or raises `error`."""

    def make(checkpoint: Path | None) -> torch.nn.Module:
        model, passes = build(checkpoint), iter(range(100))

        def hook(*_: Any) -> None:
            if next(passes) == 1:
                if error:
                    raise error
                torch.empty(10**15)

        model.register_forward_pre_hook(hook)
        return model

    return make


@pytest.mark.parametrize(
    "error", [None, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), MemoryError()]
)
def test_advice_comes_instead_of_a_traceback(tmp_path: Path, error: BaseException | None) -> None:
    loop = tiny_loop(tmp_path, batch_size=12, micro_batch=6, activation_checkpointing=True)
    loop.build_model = lacking(error)
    with pytest.raises(
        UserError, match=r"out of memory on this machine: .*--resume.* with less: --micro-batch 3 "
    ):
        loop.run()


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    loop = tiny_loop(tmp_path)
    loop.build_model = lacking(RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        loop.run()


def test_remedies_go_with_the_run(tmp_path: Path) -> None:
    """One example a forward pass and recomputed layers: only another run helps."""
    config = tiny_loop(tmp_path, batch_size=8, micro_batch=1, activation_checkpointing=True).config
    assert MemoryAdvice(config, ALONE).remedies().startswith("a smaller model")


def test_enough_memory_is_not_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_loop(tmp_path, steps=1).run()
    assert "warning" not in capsys.readouterr().err


def test_recomputed_layers_need_less(tmp_path: Path) -> None:
    batch = {"input_ids": torch.empty(4, 64, device="meta"), "labels": torch.empty(4, 16, device="meta")}
    model: Any = build(num_layers=6)
    plain, recomputed = (
        activation_bytes(model.config, batch, tiny_loop(tmp_path, activation_checkpointing=on).config)
        for on in (False, True)
    )
    assert recomputed < plain / 2


def test_a_limit_of_the_shell_counts() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + 256 * MEBIBYTE, before[1]))
    try:
        free = free_memory()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert 0 < free <= 256 * MEBIBYTE
    assert free_memory() > free


def test_what_counts_as_a_lack_of_memory() -> None:
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"))
    assert not is_out_of_memory(OSError(28, "No space left on device"))

"""Devices by name, and bf16 on a CPU whose newest instructions crash or err: a real process does so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from altup.core import hardware
from altup.core.errors import UserError

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
DIES_WITHOUT = (
    f"import os, signal; os.environ.get('{hardware.ISA_VARIABLE}') or os.kill(os.getpid(), signal.SIGILL)"
)


@pytest.fixture(autouse=True)
def _untried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(hardware.ISA_VARIABLE, "")
    monkeypatch.delenv(hardware.ISA_VARIABLE)
    hardware.make_bf16_safe.cache_clear()
    yield
    hardware.make_bf16_safe.cache_clear()


def test_a_healthy_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "BF16_TRY", "pass")
    assert hardware.make_bf16_safe() is None
    assert hardware.ISA_VARIABLE not in os.environ


def test_a_crash_is_told_and_children_are_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "BF16_TRY", DIES_WITHOUT)
    assert "SIGILL" in str(hardware.make_bf16_safe())
    code = f"import os; print(os.environ['{hardware.ISA_VARIABLE}'])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == hardware.SAFE_ISA


def test_wrong_numbers_are_told_and_children_are_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = f"import os; raise SystemExit(0 if os.environ.get('{hardware.ISA_VARIABLE}') else 3)"
    monkeypatch.setattr(hardware, "BF16_TRY", wrong)
    assert "beside a matrix" in str(hardware.make_bf16_safe())
    assert os.environ[hardware.ISA_VARIABLE] == hardware.SAFE_ISA


def test_what_the_user_has_set_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hardware.ISA_VARIABLE, "AVX2")
    monkeypatch.setattr(hardware, "BF16_TRY", DIES)
    assert hardware.make_bf16_safe() is None


def test_no_way_out_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "BF16_TRY", DIES)
    with pytest.raises(UserError, match="--precision fp32"):
        hardware.make_bf16_safe()


def test_the_product_itself_is_tried() -> None:
    """On this machine, with what make_bf16_safe sets where it has to."""
    hardware.make_bf16_safe()
    assert hardware.bf16_fault() is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA L40S", 362e12),
        ("h200", 989e12),
        ("Abacus 3000", None),
    ],
)
def test_peaks_by_a_part_of_the_name(name: str, peak: float | None) -> None:
    assert hardware.peak_flops(name) == peak


def test_what_runs_here_has_a_name_and_versions() -> None:
    assert hardware.processor()
    assert hardware.device_name()
    assert hardware.usable_cores() >= 1
    assert list(hardware.versions())[:4] == ["altup", "Python", "torch", "transformers"]
    assert hardware.installed("no-such-package") is None
    assert hardware.installed("torch") == hardware.versions()["torch"]

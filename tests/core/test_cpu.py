"""bf16 on a CPU whose newest instructions crash: here the try itself raises the signal, in a real process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from altup.core import cpu
from altup.core.errors import UserError

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
DIES_WITHOUT = f"import os, signal; os.environ.get('{cpu.VARIABLE}') or os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture(autouse=True)
def _untried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(cpu.VARIABLE, "")
    monkeypatch.delenv(cpu.VARIABLE)
    cpu.make_bf16_safe.cache_clear()
    yield
    cpu.make_bf16_safe.cache_clear()


def test_a_healthy_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "TRY", "pass")
    assert cpu.make_bf16_safe() is None
    assert cpu.VARIABLE not in os.environ


def test_a_crash_is_told_and_children_are_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "TRY", DIES_WITHOUT)
    assert "SIGILL" in str(cpu.make_bf16_safe())
    code = f"import os; print(os.environ['{cpu.VARIABLE}'])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == cpu.SAFE


def test_what_the_user_has_set_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.VARIABLE, "AVX2")
    monkeypatch.setattr(cpu, "TRY", DIES)
    assert cpu.make_bf16_safe() is None


def test_no_way_out_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "TRY", DIES)
    with pytest.raises(UserError, match="--precision fp32"):
        cpu.make_bf16_safe()


def test_the_product_itself_is_tried() -> None:
    """On this machine, with what make_bf16_safe sets where it has to."""
    cpu.make_bf16_safe()
    assert cpu.bf16_crash() is None

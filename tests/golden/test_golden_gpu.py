"""The recording on a GPU: that its comparison notices differences, and that a GPU repeats itself.

Before and after a change of compiled, fused, fp8 or recorded code: `python -m tests.golden.record_gpu --help`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.golden.record_gpu import METHODS, STEPS, compare, record, ways


def test_every_way_is_recorded_and_differences_are_noticed() -> None:
    """Without a GPU narrow models stand in, so that the script is not broken when it gets to one."""
    if torch.cuda.is_available():
        pytest.skip("on a GPU the test below does this")
    recorded = record(("decoder",))
    assert list(recorded["cases"]) == [f"decoder {method} {way}" for method in METHODS for way in ways()]
    for case in recorded["cases"].values():
        assert "error" not in case, case
        assert len(case["train"]) == len(case["grad_norm"]) == STEPS
        assert len(set(case["train"])) == STEPS  # the weights move
    assert compare(recorded, recorded) == []
    for name, kind, step, factor in [
        ("altup bf16", "train", 0, 1.001),
        ("dense accelerate", "grad_norm", 3, 0.8),
    ]:
        changed: dict[str, Any] = copy.deepcopy(recorded)
        changed["cases"][f"decoder {name}"][kind][step] *= factor
        (line,) = compare(recorded, changed)
        assert line.startswith(f"decoder {name}: {kind} of step {step + 1}:")


@pytest.mark.gpu
def test_a_gpu_repeats_itself_within_tolerances() -> None:
    assert compare(*(record(("t5",)) for _ in range(2))) == []

"""Schedules against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from altup.core.errors import UserError
from altup.training.optimizers.config import build_schedule


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        # T5: constant 0.01 for 10,000 steps, then 1/√step.
        (
            "rsqrt",
            {"lr": 1.0, "warmup_steps": 10_000, "steps": 500_000},
            {0: 0.01, 1: 0.01, 9_999: 0.01, 10_000: 0.01, 40_000: 0.005, 250_000: 0.002},
        ),
        (
            "constant",
            {"lr": 0.01, "warmup_steps": 0, "steps": 2500, "decay_fraction": 0.3},
            {0: 0.01, 1750: 0.01, 1825: 0.009, 2125: 0.005, 2499: 0.01 / 750, 2500: 0.0, 9999: 0.0},
        ),
        ("constant", {"lr": 3.0, "warmup_steps": 3, "steps": 9}, {0: 1.0, 1: 2.0, 2: 3.0, 3: 3.0, 9: 3.0}),
        (
            "linear",
            {"lr": 1.0, "warmup_steps": 2, "steps": 10},
            {0: 0.5, 1: 1.0, 2: 1.0, 4: 0.75, 9: 0.125, 10: 0.0, 11: 0.0},
        ),
        (
            "cosine",
            {"lr": 2.0, "warmup_steps": 0, "steps": 12},
            {0: 2.0, 4: 1.5, 6: 1.0, 8: 0.5, 12: 0.0},
        ),
        # Half of rsqrt's value half way down the final slope.
        (
            "rsqrt",
            {"lr": 1.0, "warmup_steps": 4, "steps": 200, "decay_fraction": 1.0},
            {0: 0.5, 100: 0.05, 200: 0.0},
        ),
    ],
)
def test_values(name, settings, expected):
    schedule = build_schedule(name, **settings)
    for step, lr in expected.items():
        assert schedule(step) == pytest.approx(lr, rel=1e-12, abs=1e-15), step


@pytest.mark.parametrize("name", ["rsqrt", "constant", "linear", "cosine"])
def test_a_step_does_not_depend_on_what_was_asked_before(name):
    settings = {"lr": 0.7, "warmup_steps": 5, "steps": 50, "decay_fraction": 0.2}
    forward = [build_schedule(name, **settings)(step) for step in range(50)]
    schedule = build_schedule(name, **settings)
    assert [schedule(step) for step in reversed(range(50))] == forward[::-1]
    assert all(lr > 0 and math.isfinite(lr) for lr in forward)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "exponential"}, "schedule='exponential'"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"name": "rsqrt", "warmup_steps": 0}, "warmup_steps=0"),
        ({"steps": 0}, "steps=0"),
        ({"warmup_steps": 100}, "warmup_steps=100"),
        ({"decay_fraction": 1.5}, "decay_fraction=1.5"),
    ],
)
def test_settings_that_make_no_sense_are_named(change, field):
    settings = {"name": "linear", "lr": 1.0, "warmup_steps": 2, "steps": 10} | change
    with pytest.raises(UserError, match=field):
        build_schedule(settings.pop("name"), **settings)

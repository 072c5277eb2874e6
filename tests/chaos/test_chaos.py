"""Runs that are killed, inside writes above all, end as those that are not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.chaos.chaos import chaos

KILLS = int(os.environ.get("ALTUP_KILLS", "300"))


@pytest.mark.slow
def test_kills_change_no_bit(tmp_path: Path) -> None:
    """Over pretrain, finetune, prepare and study run, with one process and two ranks."""
    began = time.monotonic()
    made = chaos(tmp_path, KILLS)
    print(f"{made.report()}; {time.monotonic() - began:.0f} s")
    assert made.problems == []
    assert sum(made.kills.values()) >= KILLS
    assert all(made.kills.values())

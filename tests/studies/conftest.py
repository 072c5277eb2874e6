"""What the tests of studies share: prepared text, and a scale of four steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from altup.studies.scale import Scale, find_scale, with_settings
from tests.processes import prepare_text


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def scale() -> Scale:
    quick = replace(
        find_scale("smoke"), speed={"rounds": 1, "steps": 1, "generate_batch": 1, "generate_tokens": 2}
    )
    return with_settings(quick, {"steps": 4, "eval_every": 2, "deterministic": True})

"""Bad input gets a clear sentence: 750 cases that are certain to be bad, and more that may be harmless."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from altup.cli.main import VERBS
from tests.chaos import fuzz
from tests.chaos.cases import COMMANDS
from tests.chaos.material import make_material


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_material(tmp_path_factory.mktemp("material"))


def test_every_verb_is_tried() -> None:
    assert {words[0] for words in COMMANDS.values()} == set(VERBS)


@pytest.mark.slow
def test_the_commands_work_before_they_are_spoilt(material: Path, tmp_path: Path) -> None:
    assert [str(one) for one in fuzz.run_good(tmp_path, material) if one.problems] == []


@pytest.mark.slow
def test_bad_input_gets_a_sentence(material: Path, tmp_path: Path) -> None:
    """No traceback, no hang, no success, nothing written but to `--out`. One of them again:
    `python -m tests.chaos.fuzz NUMBER`."""
    began = time.monotonic()
    found = list(fuzz.fuzz(range(fuzz.BAD + fuzz.ODD), tmp_path, material))
    slowest = max(found, key=lambda one: one.seconds)
    print(f"{len(found)} cases in {time.monotonic() - began:.0f} s; the slowest took {slowest.seconds:.1f} s")
    assert [str(one) for one in found if one.problems] == []


@pytest.mark.slow
def test_a_case_is_the_same_wherever_it_is_made(material: Path, tmp_path: Path) -> None:
    for number in range(0, fuzz.BAD + fuzz.ODD, 25):
        one, other = (fuzz.make_case(number, tmp_path / f"{number}{which}", material) for which in "ab")
        assert one == other

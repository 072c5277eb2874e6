"""Fifty steps of every family and method have the losses that they had when `losses.json` was recorded.

On the kind of machine where it was recorded (CPU, instruction sets, versions) every bit counts. On another, sums
are made in another order, and losses may differ by `RELATIVE`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from altup.models.families import FAMILIES
from altup.models.methods import list_presets
from tests.golden.record import NOT_FOR, Case, cases, differences, digest_of_data, fingerprint, prepare, run

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "losses.json").read_text())
# Of each family its widest rule, and every optimizer, sequence method and kind of expert once.
QUICK = (
    "t5 altup --k 4",
    "t5 recycled",
    "t5 sequence-altup --stride 2",
    "t5 average-pooling --stride 2",
    "t5 altup --dropout 0.1 --micro-batch 4 --activation-checkpointing",
    "bert altup --optimizer adamw --lr 0.01 --clip-norm 1",
    "bert stride-and-skip --stride 2",
    "decoder altup+moe --experts 4 --set expert_hidden=4",
    "decoder altup --optimizer adamw-rms --warmup-steps 5",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("golden"))


def test_the_same_text_gives_the_same_tokens(data: Path) -> None:
    assert digest_of_data(data) == RECORDED["data"]


def test_every_family_and_method_has_a_case() -> None:
    assert {case.family for case in cases()} == set(FAMILIES)
    for family in FAMILIES:
        methods = {case.method for case in cases() if case.family == family}
        assert methods == set(list_presets()) - set(NOT_FOR.get(family, ()))


def test_every_case_is_recorded() -> None:
    assert [case.name for case in cases()] == list(RECORDED["cases"])
    assert set(QUICK) <= RECORDED["cases"].keys()


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c.name in QUICK else pytest.mark.slow) for c in cases()]
)
def test_losses_are_the_recorded_ones(case: Case, data: Path, tmp_path: Path) -> None:
    same = fingerprint() == RECORDED["fingerprint"]
    assert not differences(RECORDED["cases"][case.name], run(case, data, tmp_path / "run"), same)

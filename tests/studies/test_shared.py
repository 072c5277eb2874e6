"""A model stands in the tables of all studies that have it, and a table says what its scores leave out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from altup.studies.claims import claims_table
from altup.studies.evidence import Evidence, choose_evidence
from altup.studies.partial import partial_note
from altup.studies.plan import deciding_fields, resolve
from altup.studies.results import Result
from altup.studies.scale import find_scale
from altup.studies.shared import with_shared
from altup.studies.study import shipped
from tests.studies.test_evidence import record, result

STUDIES = list(shipped().values())
GLUE = ["glue/cola", "glue/sst2"]


@pytest.fixture
def kept() -> dict[str, dict[str, Any]]:
    """Records of two dense runs, of AltUp, of AltUp with other coefficients, and of dense tuned on GLUE and
    SQuAD."""
    study, scale = shipped()["initialisation"], find_scale("mini")
    found = {}
    models = {"d0": ("Dense", 0), "d1": ("Dense", 1), "a0": ("AltUp K=2", 0), "p0": ("P averages", 0)}
    for key, (label, seed) in models.items():
        config = resolve(study, study.row(label), "small", scale, seed, "text")
        assert config is not None
        found[key] = record(key, config=deciding_fields(config), start=study.row(label).start)
    of_squad = {"column": "squad", "tasks": {"squad": {}}, "missing": ["squad: validation 9 of 10,570"]}
    found["g0"] = record("g0", kind="finetune", column="glue", tasks={task: {} for task in GLUE}, missing=[])
    found["s0"] = record("s0", kind="finetune", **of_squad)
    return found


RESULTS = [
    result("Dense", 40.0, "0", run="d0"), result("Dense", 41.0, "1", run="d1"),
    result("AltUp K=2", 42.0, run="a0"), result("Dense", 0.7, "", "relative_forward", run="v"),
    result("P averages", 43.0, study="initialisation", run="p0"),
    result("Dense", 70.0, metric="glue", run="g0"), result("Dense", 50.0, metric="squad_f1", run="s0"),
]  # fmt: skip


def mean(evidence: Evidence, study: str, label: str, metric: str = "accuracy") -> float | None:
    found = evidence.get(study, label, "small", metric)
    return found.mean if found else None


def test_what_one_study_ran_the_others_show(kept: dict[str, dict[str, Any]]) -> None:
    plain = choose_evidence(RESULTS)
    evidence = with_shared(plain, STUDIES, kept.get)
    assert mean(plain, "sequence", "Dense") is None
    for study in ("parameters-and-speed", "sequence", "experts", "recycled"):
        assert mean(evidence, study, "Dense") == 40.5
        assert mean(evidence, study, "Dense", "glue") == 70
    assert mean(evidence, "recycled", "Dense", "relative_forward") == 0.7
    assert mean(evidence, "initialisation", "AltUp K=2") == 42  # and not that of other coefficients
    assert mean(evidence, "initialisation", "P averages") == 43
    assert mean(evidence, "sequence", "Sequence-AltUp") is None
    # As long as AltUp takes for the scale's steps: its run is the one of other studies, those of others are not.
    assert mean(evidence, "equal-time", "AltUp K=2") == 42
    assert mean(evidence, "equal-time", "Dense") is None
    assert with_shared(evidence, STUDIES, kept.get).results == evidence.results


def test_other_settings_are_another_model(kept: dict[str, dict[str, Any]]) -> None:
    other = [replace(r, scale="mini:steps=9") for r in RESULTS]
    assert with_shared(choose_evidence(other), STUDIES, kept.get).results == other
    kept["d0"]["config"]["steps"] = 9
    assert mean(with_shared(choose_evidence(RESULTS), STUDIES, kept.get), "sequence", "Dense") == 41


def test_a_part_of_a_suite_is_told(kept: dict[str, dict[str, Any]]) -> None:
    def told(results: list[Result]) -> str:
        return partial_note(shipped()["varying-k"], choose_evidence(results), kept.get)

    assert "GLUE is the mean of cola, sst2 alone" in told(RESULTS)
    assert "SQuAD counts a part of the examples (squad: validation 9 of 10,570)" in told(RESULTS)
    assert told(RESULTS[:4]) == ""


def test_a_claim_that_was_not_run_shows_the_paper_at_every_size(kept: dict[str, dict[str, Any]]) -> None:
    """Also where one of its two models is there, run for another study."""
    evidence = with_shared(choose_evidence(RESULTS), STUDIES, kept.get)
    text = claims_table([shipped()["experts"]], evidence)
    assert "small, base, large" in text
    assert "not run" in text

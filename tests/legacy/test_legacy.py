"""What older code wrote is read by this one: prepared data, runs stopped and finished, models, results.

`make.py` says how the artefacts were made. On the kind of machine where they were made, a run that goes on must
end with the weights of the old code's run that was never stopped, bit for bit; on another, near them.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.golden.record import altup, digest_of_weights, fingerprint
from tests.legacy.make import HERE, PRETRAIN, STEPS, logits

EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())
RUNS = [*PRETRAIN, "finetuned"]
NUMBER, ERROR = re.compile(r"\d[\d.,e]*"), re.compile(r" ± [\d.,e]+")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the artefacts, where the user stands."""
    copy = tmp_path / "legacy"
    shutil.copytree(HERE, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.chdir(copy)
    return copy


def losses(run: Path) -> list[tuple[int, str, float]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["split"], record["loss"]) for record in records if "loss" in record]


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_goes_on_to_the_same_end(here: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The config, the optimizer's state, the place in the data and the sums of the log's window are taken up."""
    before, now = here / f"{name}-finished", here / f"{name}-stopped"
    altup("finetune" if name == "finetuned" else "pretrain", "--out", now, "--resume")
    expected, found = load_file(before / "final/model.safetensors"), load_file(now / "final/model.safetensors")
    assert expected.keys() == found.keys()
    if fingerprint() == EXPECTED["fingerprint"]:
        assert digest_of_weights(now / "final") == EXPECTED["weights"][name]
        assert losses(now) == losses(before)
    for tensor in expected:
        torch.testing.assert_close(found[tensor], expected[tensor], rtol=1e-3, atol=1e-3)
    assert [loss[:2] for loss in losses(now)] == [loss[:2] for loss in losses(before)]
    assert losses(now)[-1][0] == STEPS
    assert caplog.text.count("step-6 is of an earlier version") == 1


def test_a_finished_run_is_one(here: Path) -> None:
    weights = here / "t5-finished/final/model.safetensors"
    before = weights.stat().st_mtime_ns
    assert f"finished {STEPS} steps" in altup("pretrain", "--out", "t5-finished", "--resume")
    assert weights.stat().st_mtime_ns == before


@pytest.mark.parametrize("name", [f"{name}-{state}" for name in RUNS for state in ("stopped", "finished")])
def test_models_answer(here: Path, name: str) -> None:
    said = altup("generate", name, "--prompt", "ab <extra_id_0> mor.", "--max-new-tokens", "4")
    assert len(said.splitlines()) == 1


def test_data_is_whole_and_is_not_made_again(here: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (here / "data").rglob("*.bin")}
    assert len(before) == 2
    altup("pretrain", "--config", "t5-finished/config.yaml", "--steps", "1", "--out", "run", "--track", "none")
    assert before == {path: path.stat().st_mtime_ns for path in (here / "data").rglob("*.bin")}


def test_a_saved_config_trains_the_same_model(here: Path) -> None:
    altup("pretrain", "--config", "t5-finished/config.yaml", "--out", "again")
    if fingerprint() == EXPECTED["fingerprint"]:
        assert digest_of_weights(here / "again/final") == EXPECTED["weights"]["t5"]
    again, before = losses(here / "again"), losses(here / "t5-finished")
    assert [loss for *_, loss in again] == pytest.approx([loss for *_, loss in before], rel=1e-3)


def test_scores_that_are_there_are_kept(here: Path) -> None:
    """The fine-tuned run is scored again as its training scored it."""
    altup("evaluate", "finetuned-finished", "--task", "task", "--out", "scores")
    now = json.loads((here / "scores/scores.json").read_text())["tasks"][0]
    before = json.loads((here / f"finetuned-finished/evaluation/step-{STEPS}/scores.json").read_text())["tasks"][0]
    assert now["examples"] == before["examples"]
    assert now["metrics"].keys() == before["metrics"].keys()
    if fingerprint() == EXPECTED["fingerprint"]:
        assert now["metrics"] == before["metrics"]


@pytest.mark.parametrize("name", list(EXPECTED["logits"]))
def test_upcycled_and_widened_models_compute_what_they_did(name: str) -> None:
    from altup import AltUpT5ForConditionalGeneration, load_widened

    load: Any = AltUpT5ForConditionalGeneration.from_pretrained if name == "upcycled" else load_widened
    found = logits(load(HERE / name))
    assert found == pytest.approx(EXPECTED["logits"][name], rel=1e-4, abs=1e-6)
    if fingerprint() == EXPECTED["fingerprint"]:
        assert found == EXPECTED["logits"][name]


def test_an_upcycled_model_is_trained_on(here: Path) -> None:
    """`params` reads its config as well."""
    counted = json.loads(altup("params", "--config", "upcycled", "--json"))
    assert counted


def numbers(text: str) -> list[list[str]]:
    """Of each line, so that words may change; without the seeds, which the old code did not tell, and without the
    standard errors, which it took from all models instead of the two compared."""
    found: list[list[str]] = []
    tells_seeds = False
    for row in csv.reader(text.splitlines()):
        if row and row[0] == "model":
            tells_seeds = "seeds" in row
        cells = [cell for place, cell in enumerate(row) if not (tells_seeds and place == 1)]
        found.append([number for cell in cells for number in NUMBER.findall(ERROR.sub("", cell))])
    return found


def test_tables_of_stored_results() -> None:
    """Every number is the one that the old code printed, of the studies that it had."""
    from altup.studies.study import shipped

    names = [name for name in shipped() if name not in ("continuing", "decoder")]
    said = altup("study", "table", *names, "--results", HERE / "results", "--format", "csv")
    before = numbers((HERE / "tables.csv").read_text())
    assert numbers(said) == before
    assert sum(map(len, before)) > 500


def test_a_report_of_stored_results(tmp_path: Path) -> None:
    altup("study", "report", "--results", HERE / "results", "--out", tmp_path / "report.html", "--no-plots")
    assert (tmp_path / "report.html").stat().st_size > 50_000

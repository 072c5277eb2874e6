"""Results of a study become the tables of an experiment, from which a page's table is made."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
from experiments.collect import add

from experiments import tables

COLUMNS = ["study", "label", "size", "seed", "metric", "value", "run"]
LOSSES = {"Dense": (3.5, 3.52, 3.51), "AltUp K=2": (3.4, 3.41, 3.45)}


def write_record(folder: Path, key: str, kind: str = "pretrain", **config: object) -> None:
    record = {
        "key": key, "kind": kind, "title": f"tiny {key}", "step": 40, "hardware": "CPU", "date": "2026-11-19",
        "config": {"batch_size": 4, "inputs_length": 8, "lr": 0.06, "lr_factors": {"vectors": 0.1}, **config},
        "measures": {"loss": 3.9}, "data": "text",
        "curves": {"held_out": [[20, 3.9, 20.5], [40, 3.5, 22.0]], "train": [[i, 4.0] for i in range(100)]},
    }  # fmt: skip
    (folder / "runs").mkdir(exist_ok=True)
    (folder / "runs" / f"{key}.json").write_text(json.dumps(record))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two models with three seeds and a speed, a fine-tuning run, and a run of a sweep."""
    folder = tmp_path / "results"
    folder.mkdir()
    lines = [["question", "AltUp K=2", "tiny", "", "relative_speed", "0.9", "speed"]]
    for label, losses in LOSSES.items():
        for seed, loss in enumerate(losses, start=1):
            key = f"{label.split()[0]}{seed}"
            write_record(folder, key, method=label.split()[0].lower(), seed=seed)
            lines += [
                ["question", label, "tiny", str(seed), m, str(v), key] for m, v in (("loss", loss), ("steps", 40))
            ]
    write_record(folder, "tuned", kind="finetune")
    lines.append(["question", "Dense", "tiny", "1", "squad_f1", "50", "tuned"])
    write_record(folder, "sweep", lr=0.12)
    write_record(folder, "lost", method="dense", seed=4)
    lines.append(["question", "Dense", "tiny", "4", "diverged", "40", "lost"])
    with (folder / "question.csv").open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *lines])
    return folder


def test_a_line_a_run(results: Path, tmp_path: Path) -> None:
    assert add(results, tmp_path / "question") == 8
    rows = {row["run"]: row for row in csv.DictReader((tmp_path / "question/runs.csv").open())}
    assert len(rows) == 8
    assert rows["Dense1"]["loss"] == "3.5"
    assert rows["Dense1"]["squad_f1"] == "50"
    assert rows["AltUp2"]["speed"] == "0.9"
    assert (rows["AltUp2"]["norms"], rows["AltUp2"]["tokens"]) == ("0.1", "1280")
    assert [row["use"] for row in rows.values()] == ["report"] * 7 + ["tuning"]
    assert (rows["sweep"]["lr"], rows["sweep"]["loss"]) == ("0.12", "3.9")


def test_curves_are_thinned_and_keep_their_end(results: Path, tmp_path: Path) -> None:
    add(results, tmp_path / "question")
    lines = gzip.decompress((tmp_path / "question/curves.csv.gz").read_bytes()).decode().splitlines()
    train = [line.split(",")[2] for line in lines if line.startswith("Dense1,train")]
    assert train[-1] == "99"
    assert len(train) < 40
    assert "Dense1,held_out,40,3.5000,22.00" in lines


def test_a_run_collected_again_replaces_itself(results: Path, tmp_path: Path) -> None:
    add(results, tmp_path / "question")
    before = [(tmp_path / "question" / name).read_bytes() for name in ("runs.csv", "curves.csv.gz")]
    add(results, tmp_path / "question")
    assert [(tmp_path / "question" / name).read_bytes() for name in ("runs.csv", "curves.csv.gz")] == before


def test_a_page_shows_the_difference(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(results, tmp_path / "question")
    monkeypatch.setattr(tables, "HERE", tmp_path)
    page = tables.fill("<!-- table: question | question | tiny | Dense -->\n")
    assert "| AltUp K=2 | 3 | 0.900 | 40 | 3.420 | −0.090 (−0.147 to −0.033) |" in page
    paired = tables.fill("<!-- table: question | question | tiny | Dense | paired -->\n")
    assert "| Dense | 3, 1 diverged |" in page
    assert "−0.0900 (−0.1557 to −0.0243)" in paired


def test_a_result_without_its_record_is_refused(results: Path, tmp_path: Path) -> None:
    (results / "runs/Dense1.json").unlink()
    with pytest.raises(SystemExit, match=r"question\.csv names the run Dense1"):
        add(results, tmp_path / "question")

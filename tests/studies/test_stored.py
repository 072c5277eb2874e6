"""Records, sweeps and scales of strangers: what reports cannot read is named, and never a traceback."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from altup.cli.main import app
from altup.core.errors import UserError
from altup.studies.report import StudyReport
from altup.studies.results import read_results, write_record, write_results, write_scale, write_sweep
from altup.studies.scale import find_scale
from altup.studies.stored import record_misfit, sweep_misfit
from tests.studies.samples import SEEDS, record

BLOCKS = [
    {"stack": "encoder", "layer": layer, "P": [[1.0, 0.0], [0.0, 1.0]], "g": [1.0, 0.5], "active": layer % 2}
    for layer in range(2)
]
RECORD = record(
    "a", title="a title", config={"size": "small"}, start={}, tuned=["lr"], tuned_by="sweep", step=2000,
    measures={"accuracy": 40.0, "loss": 2.5},
    curves={"held_out": [[1000, 3.0, 30.0], [2000, 2.5, 40.0]], "train": [[500, 3.5], [2000, 2.6]]},
    coefficients={"blocks": BLOCKS, "sequence": [{"stack": "encoder", "layer": 1, "a": [1.0, 0.0], "b": [1.0]}]},
)  # fmt: skip
SWEEP: dict[str, Any] = {
    "key": "sweep", "model": "small", "scale": "long", "steps": 100, "seed": 9, "grid": {"lr": [0.1, 0.2]},
    "chosen": {"lr": 0.1}, "curves": {"lr": [[0.1, 2.0], [0.2, None]]},
    "runs": [[{"lr": 0.1}, 2.0, "one"], [{"lr": 0.2}, None, "two"]],
    "settled": {"steps": 200, "curves": {"lr": [[0.1, 1.9]]}, "runs": [[{"lr": 0.1}, 1.9, "three"]]},
}  # fmt: skip


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    copy = json.loads(json.dumps(value))
    place = copy
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = new
    return copy


def test_what_we_write_fits() -> None:
    assert record_misfit(RECORD) is None
    assert sweep_misfit(SWEEP) is None


@pytest.mark.parametrize(
    ("path", "new", "told"),
    [
        (("step",), None, "step must be a whole number"),
        (("measures",), [], "measures must be a mapping to a number"),
        (("measures", "accuracy"), "40", "measures must be"),
        (("curves",), {}, "curves.held_out is no list of 3 numbers each"),
        (("curves", "held_out"), [[1, 2.0]], "curves.held_out is no list of 3 numbers each"),
        (("curves", "train", 0, 1), math.inf, "not finite"),
        (("coefficients", "blocks"), {"a": 1}, "coefficients must be"),
        (("coefficients", "blocks", 0, "g"), [1.0], "P, g and active do not belong together"),
        (("coefficients", "blocks", 1, "active"), 2, "P, g and active do not belong together"),
        (("coefficients", "sequence", 0, "b"), [], "a has two numbers and b one"),
        (("start",), {"g": 1}, "start must be a mapping to text"),
        (("hardware",), {}, "hardware must be text"),
    ],
)
def test_a_record_that_does_not_fit(path: tuple[Any, ...], new: Any, told: str) -> None:
    assert told in str(record_misfit(changed(RECORD, path, new)))


def test_fine_tuning_that_diverged_says_on_what() -> None:
    """Its column names the measure under which it is counted."""
    lost = {**record("a", kind="finetune"), "of": "b", "diverged": "by step 3"}
    assert record_misfit({**lost, "column": "glue"}) is None
    for wrong in (lost, {**lost, "column": "chess"}):
        assert "column must be one of glue, superglue, squad, triviaqa" in str(record_misfit(wrong))


@pytest.mark.parametrize(
    ("path", "new", "told"),
    [
        (("grid",), [], "grid must be"),
        (("grid", "lr", 0), [1], "grid.lr holds more than numbers and text"),
        (("grid", "lr", 0), "high", "grid.lr mixes numbers and text"),
        (("chosen",), "lr", "chosen must be"),
        (("curves", "lr", 0, 0), 0.3, "curves.lr does not go with the grid"),
        (("curves", "lr", 0, 1), math.nan, "curves.lr does not go with the grid"),
        (("runs", 0), [], "runs is no list of settings, loss and key"),
        (("runs", 0, 0), 0.1, "runs is no list of settings, loss and key"),
        (("chosen", "lr"), [0.1], "chosen holds more than numbers and text"),
        (("chosen", "lr"), 10**400, "chosen holds more than numbers and text"),
        (("settled",), [], "settled must be"),
        (("settled", "steps"), "many", "settled: steps must be a whole number"),
        (("settled", "curves", "size"), [], "curves.size does not go with the grid"),
        (("settled", "runs", 0, 0), ["lr"], "runs is no list of settings, loss and key"),
    ],
)
def test_a_sweep_that_does_not_fit(path: tuple[Any, ...], new: Any, told: str) -> None:
    assert told in str(sweep_misfit(changed(SWEEP, path, new)))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    write_results(folder, [replace(result, scale="long") for result in SEEDS])
    for result in read_results(folder):
        write_record(folder, {**RECORD, "key": result.run})
    write_sweep(folder, SWEEP)
    write_scale(folder, find_scale("long"))
    return folder


@pytest.mark.parametrize(
    ("file", "path", "new"),
    [
        ("runs/*.json", ("curves",), None),
        ("runs/*.json", ("key",), ["a"]),
        ("sweeps/*.json", ("runs",), {}),
        ("scales/*.json", ("seeds",), "0"),
        ("scales/*.json", ("columns",), []),
        ("scales/*.json", ("tune", "grid"), 3),
        ("scales/*.json", ("pretrain", "batch_size"), "many"),
    ],
)
def test_a_report_names_the_file(
    results: Path, tmp_path: Path, file: str, path: tuple[Any, ...], new: Any
) -> None:
    found = sorted(results.glob(file))[0]
    whole = found.read_text()
    found.write_text(json.dumps(changed(json.loads(whole), path, new)))
    try:
        told = CliRunner().invoke(app, ["study", "table", "varying-k", "--results", str(results)])
    finally:
        found.write_text(whole)
    assert isinstance(told.exception, UserError), told.output
    assert path[-1] in str(told.exception)


def test_a_report_of_what_fits_is_written(results: Path, tmp_path: Path) -> None:
    StudyReport([results], None, ("varying-k",)).write(tmp_path / "report.html", plots=False)
    assert (tmp_path / "report.html").stat().st_size > 10_000

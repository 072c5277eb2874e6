"""`altup bench` as its users start it: real processes, real files."""

from __future__ import annotations

import csv
import json
import re
import signal

import pytest
import typer
from typer.testing import CliRunner

from altup.bench.rows import read_rows
from altup.cli.bench import command
from altup.core.errors import UserError
from tests.processes import run as altup
from tests.processes import start

app = typer.Typer()
app.command()(command)

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def bench(*arguments, code=0):
    run = altup("bench", *arguments, **NO_GPU)
    assert run.returncode == code, run.stdout + run.stderr
    return run


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One small run, printed as JSON, stored as CSV, drawn."""
    folder = tmp_path_factory.mktemp("bench")
    out, plot = folder / "rows.csv", folder / "bars.png"
    run = bench("head", "--quick", "--repeat", "2", "--json", "--out", str(out), "--plot", str(plot))
    return run, out, plot


def test_rows_as_json_and_in_the_file(measured):
    run, out, _ = measured
    printed = [json.loads(line) for line in run.stdout.splitlines()]
    with out.open() as file:
        stored = list(csv.DictReader(file))
    assert [(r["provider"], r["mode"], r["metric"], str(r["p50"])) for r in printed] == [
        (r["provider"], r["mode"], r["metric"], r["p50"] or "None") for r in stored
    ]
    both = next(r for r in printed if (r["provider"], r["mode"], r["metric"]) == ("plain eager", "both", "ms"))
    assert both["p20"] <= both["p50"] <= both["p80"]
    assert (both["case"], both["vocabulary"], both["status"]) == ("head", 300, "ok")
    assert both["command"].startswith("altup bench head --quick --repeat 2")
    assert {r["status"] for r in printed if r["provider"] == "triton"} == {"skipped"}


def test_plot_and_table_from_a_file(measured, tmp_path):
    _, out, plot = measured
    assert plot.read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "bars.svg"
    shown = bench("--show", str(out), "--plot", str(again)).stdout
    assert "plain eager" in shown
    assert "both ms" in shown
    assert "<svg" in again.read_text()
    for drawn in (plot, again, tmp_path / "bars.pdf", tmp_path / "bars.pdf"):  # one of ours is drawn again
        CliRunner().invoke(app, ["--show", str(out), "--plot", str(drawn)], catch_exceptions=False)


def test_a_run_on_a_cpu_tells_what_it_measured():
    only = [word for name in ("altup k2*", "dense", "dense eager", "copy", "triton") for word in ("--only", name)]
    run = bench("rule", "step", "--quick", "--repeat", "1", *only)
    assert "skipped" not in run.stdout + run.stderr
    assert "altup k2 eager" in run.stdout
    assert "overhead: over our dense." in run.stdout
    assert "floor" not in run.stdout  # at these sizes, floors mean nothing
    told = " ".join(run.stdout.split())
    assert "Not measured (need a GPU): dense, altup k2." in told
    assert "Toy sizes" in told
    assert "3 providers, were not measured" in told


def test_stored_rows_are_printed_again_as_they_were(measured):
    run, out, _ = measured
    assert bench("--show", str(out), "--json").stdout == run.stdout
    assert bench("head", "--show", str(out), "--csv").stdout == out.read_text()
    assert "no rows of data" in bench("data", "--show", str(out), code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed", "--quick"], "cases='speed' is not known"),
        (["head", "--quick", "--repeat", "0"], "repeat=0 makes no sense"),
        (["head"], "add --quick"),
        (["head", "--quick", "--only", "nobody"], "no provider of head has such a name"),
        (["head", "--quick", "--where", "d=5"], "--where d=5: nothing of head has these sizes"),
        (["head", "--quick", "--where", "5"], "write name=value, such as batch=4"),
        (["head", "--quick", "--out", "rows.txt"], "ends in .csv"),
        (["step", "--quick", "--size", "huge"], "sizes='huge' is not known"),
        (["--quick", "--time-limit", "-1"], "above 0"),
        (["--quick", "--json", "--csv"], "choose one"),
        (["--show", "nothing.csv"], "cannot be read"),
        (["--show", "rows.csv", "--out", "more.csv"], "--show measures nothing"),
        (["head", "--quick", "--plot", "bars.txt"], "ends in .png"),
    ],
)
def test_mistakes_are_explained(arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=re.escape(message)):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--plot", "mine.png", "mine.png is not a PNG and would be written over; choose another --plot"),
        ("--plot", "mine.svg", "mine.svg is not an SVG"),
        ("--plot", "mine.pdf", "mine.pdf is not a PDF"),
        ("--out", "mine.csv", "mine.csv holds no rows"),
        ("--out", "mine.jsonl", "mine.jsonl holds no rows"),
    ],
)
def test_a_file_of_one_s_own_is_left_alone(option, name, message, tmp_path):
    """Before anything is measured."""
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=re.escape(message)):
        CliRunner().invoke(app, ["head", "--quick", option, str(tmp_path / name)], catch_exceptions=False)
    assert (tmp_path / name).read_text() == "mine"


def test_a_mistake_is_one_line_and_exit_code_2():
    run = bench("speed", code=2)
    assert run.stderr.startswith("altup: 'speed' is not known; choose one of 'step', 'rule'")
    assert len(run.stderr.splitlines()) == 1


def test_a_killed_run_keeps_its_rows(tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = ["bench", "head", "step", "--quick", "--repeat", "3", "--out", out]
    running = start(tmp_path / "log", *arguments, environment=NO_GPU)
    running.wait_until(lambda: out.exists() and '"ms"' in out.read_text(), "a time")
    running.signal(signal.SIGKILL)
    running.wait()
    rows = read_rows(out)
    assert any(row.metric == "ms" for row, _ in rows)


def test_help_has_examples():
    shown = bench("--help").stdout
    assert "altup bench --quick" in shown
    assert "--time-limit" in shown

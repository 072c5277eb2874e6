from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from altup.bench.rows import BenchRow, Machine, Sheet, read_rows
from altup.bench.show import build_table, by_problem, print_tables
from altup.bench.timing import Spread
from altup.core.errors import UserError

MACHINE = Machine.here(torch.device("cpu"), torch.float32)
ROWS = [
    BenchRow("step", "altup k2", "ours", "both", "ms", 1.25, 1.5, 2.0, 20, size="base", batch=64, k=2, d=768),
    BenchRow(
        "rule", 'a "quoted", name', "peer", "", "", status="failed", note="Error: a, b\nc", error=float("inf")
    ),
    BenchRow("data", "tokenising", "ours", "produce", "MB/s", 0.1 + 0.2, 1 / 3, 1e-12, 3, error=0.0),
]


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "deeper/rows.json"])
def test_rows_come_back_as_they_were(tmp_path, name):
    path = tmp_path / name
    for part in (ROWS[:1], ROWS[1:]):  # two runs into one file
        sheet = Sheet(path, MACHINE)
        for row in part:
            sheet.add(row)
    if name != "rows.csv":
        assert read_rows(path) == [(row, MACHINE) for row in ROWS]
        return
    back = read_rows(path)
    assert [machine for _, machine in back] == [MACHINE] * 3
    assert [row for row, _ in back][::2] == ROWS[::2]
    assert path.read_text().count("case,provider") == 1


def test_a_stream_gets_the_same(tmp_path):
    for as_json in (False, True):
        stream = io.StringIO()
        sheet = Sheet(stream, MACHINE, as_json)
        sheet.add(ROWS[0])
        lines = stream.getvalue().splitlines()
        record = json.loads(lines[0]) if as_json else next(csv.DictReader(lines))
        assert float(record["p50"]) == 1.5
        assert record["torch"] == torch.__version__
        assert {"device", "triton", "transformers", "altup", "commit", "command", "date"} <= record.keys()


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
STORED = [path for path in sorted(RESULTS.glob("*.csv")) if path.read_text().startswith("case,provider")]


def test_stored_rows_can_still_be_shown():
    """The files of earlier versions that the documentation shows."""
    assert len(STORED) >= 8
    for path in STORED:
        for rows in by_problem(row for row, _ in read_rows(path)).values():
            table = build_table(rows)
            for provider in {row.provider for row in rows}:
                assert any(line[0] == provider for line in table.rows) or provider in " ".join(table.notes)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_rows_fit_a_terminal(path, monkeypatch, capsys):
    """80 columns, every number whole; and every ratio says what it is a ratio to."""
    monkeypatch.setenv("COLUMNS", "80")
    rows = [row for row, _ in read_rows(path)]
    print_tables(rows)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    told = " ".join(shown.split())
    for row in rows:
        if row.metric == "speedup":
            assert f"×: {row.note}" in told


def test_foreign_files_are_refused_and_left_alone(tmp_path):
    foreign = tmp_path / "accounts.csv"
    foreign.write_text("name,amount\nAda,3\n")
    with pytest.raises(UserError, match=r"accounts\.csv holds no rows"):
        Sheet(foreign, MACHINE)
    assert foreign.read_text() == "name,amount\nAda,3\n"
    with pytest.raises(UserError, match=r"ends in \.csv"):
        Sheet(tmp_path / "rows.txt", MACHINE)
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(tmp_path / "nothing.csv")


@pytest.mark.parametrize("changes", [{"kind": "friend"}, {"p50": "fast"}])
def test_damaged_rows_are_refused(tmp_path, changes):
    path = tmp_path / "rows.jsonl"
    Sheet(path, MACHINE).add(ROWS[0])
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}) + "\n")
    with pytest.raises(UserError, match="holds no rows"):
        read_rows(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is no text"):
        read_rows(path)


def test_percentiles_are_the_usual_ones():
    for count in (1, 2, 3, 50):
        values = list(np.random.default_rng(count).random(count))
        spread = Spread.of(values)
        np.testing.assert_allclose([spread.p20, spread.p50, spread.p80], np.percentile(values, [20, 50, 80]))
        assert spread.samples == count


def test_tables_show_the_beginning_of_a_note(tmp_path):
    """A file keeps the whole."""
    long = "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.\n" + "GPU 0 has 139 GiB. " * 20
    rows = [ROWS[0], BenchRow("step", "t5", "peer", "", "", status="failed", note=long, size="base", batch=64)]
    path = tmp_path / "rows.jsonl"
    sheet = Sheet(path, MACHINE)
    for row in rows:
        sheet.add(row)
    assert read_rows(path)[1][0].note == long
    assert build_table(rows).notes[-1] == "Not measured (failed, OutOfMemoryError: CUDA out of memory): t5."

"""Results folders: what adds up, what is damaged, and what merges."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from altup.core.errors import UserError
from altup.core.files import locked
from altup.studies.results import (
    ResultFolders,
    merge,
    note_failure,
    read_record,
    read_results,
    write_record,
    write_results,
)
from tests.studies.samples import SEEDS, record, result


def test_results_add_up(tmp_path: Path) -> None:
    """What is there stays; of one run and measure the newer counts, whichever was written first."""
    write_results(tmp_path, SEEDS[:3])
    newer = replace(SEEDS[0], value=39.0, date="2025-03-01")
    write_results(tmp_path, [newer, *SEEDS[3:], result("A", 1.0, study="other")])
    write_results(tmp_path, SEEDS[:1])
    assert {path.name for path in tmp_path.glob("*.csv")} == {"varying-k.csv", "other.csv"}
    found = {r.identity: r.value for r in read_results(tmp_path)}
    assert found == {r.identity: r.value for r in [newer, *SEEDS[1:], result("A", 1.0, study="other")]}


def test_the_order_of_merges_does_not_matter(tmp_path: Path) -> None:
    """Three machines with results, records and a failure; one record is newer on the second."""
    for i, part in enumerate((SEEDS[:2], SEEDS[2:4], SEEDS[4:])):
        write_results(tmp_path / f"m{i}", part)
        write_record(
            tmp_path / f"m{i}", record("shared", date=f"2025-01-0{(i * 2) % 3 + 1}", measures={"loss": i})
        )
        write_record(tmp_path / f"m{i}", record(f"own-{i}"))
    note_failure(tmp_path / "m0", "own-1", "failed here", "disk full")
    note_failure(tmp_path / "m0", "nowhere", "failed", "disk full")
    seen = set()
    for n, order in enumerate(itertools.permutations(range(3))):
        target = tmp_path / f"target-{n}"
        for i in order:
            assert merge(tmp_path / f"m{i}", target) == (len(read_results(tmp_path / f"m{i}")), 2)
        files = {
            str(path.relative_to(target)): path.read_text()
            for path in sorted(target.rglob("*.*"))
            if path.suffix in (".csv", ".json")
        }
        seen.add(json.dumps(files, sort_keys=True))
        folders = ResultFolders([target])
        assert folders.record("shared")["measures"] == {"loss": 1}
        assert [failure["title"] for failure in folders.failures()] == ["failed"]  # own-1 was run elsewhere
    assert len(seen) == 1


def test_merges_at_once_lose_nothing(tmp_path: Path) -> None:
    for i, one in enumerate(SEEDS):
        write_results(tmp_path / str(i), [one])
    threads = [
        threading.Thread(target=merge, args=(tmp_path / str(i), tmp_path / "all")) for i in range(len(SEEDS))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_results(tmp_path / "all")) == len(SEEDS)


def test_who_writes_waits_for_another(tmp_path: Path) -> None:
    write_results(tmp_path, SEEDS[:1])
    writer = threading.Thread(target=write_results, args=(tmp_path, SEEDS[1:]))
    with locked(tmp_path, None):
        writer.start()
        writer.join(0.3)
        assert writer.is_alive()
    writer.join()
    assert len(read_results(tmp_path)) == len(SEEDS)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text.replace("accuracy,40", "accuracy,forty"), "line 2: 'forty' is not a number"),
        (lambda text: text.replace("accuracy,40", "accuracy,nan"), "is not a number"),
        (lambda text: text.replace("accuracy,40", "beauty,40"), "measure 'beauty' is not known"),
        (lambda text: text[: len(text) // 2], "not a whole result"),
        (lambda text: text.replace("label", "name", 1).replace("metric", "label"), "written by another version"),
        (lambda text: text.replace("\nvarying-k", "\n../up"), "study"),
        (lambda text: text.replace("dense-0-accuracy", "/etc/passwd"), "run"),
    ],
)
def test_damaged_results_are_named_and_never_overwritten(tmp_path: Path, damage: Any, words: str) -> None:
    write_results(tmp_path, SEEDS[:1])
    path = tmp_path / "varying-k.csv"
    damaged = damage(path.read_text()).replace("metric", "metric")
    if "another version" in words:
        damaged = path.read_text().replace("hardware", "machine", 1)
    path.write_text(damaged)
    with pytest.raises(UserError, match=words):
        write_results(tmp_path, SEEDS[1:])
    assert path.read_text() == damaged


def test_other_tables_are_left_alone(tmp_path: Path) -> None:
    for name, text in (("mine.csv", "a,b\n1,2\n"), ("varying-k.csv", "a,b\n1,2\n")):
        (tmp_path / name).write_text(text)
    assert read_results(tmp_path) == []
    with pytest.raises(UserError, match="would be overwritten"):
        write_results(tmp_path, SEEDS)
    assert (tmp_path / "mine.csv").read_text() == "a,b\n1,2\n"


BLOCK = {"stack": "encoder", "layer": 0, "P": [[1.0, 0.0], [0.0, 1.0]], "g": [1.0, 1.0], "active": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"key": "other"},
        {"kind": "painting"},
        {"measures": {"loss": "low"}},
        {"date": 3},
        {"curves": {"held_out": [[1, 2.0]]}},
        {"curves": {"held_out": [[1, 1e300, 2.0]]}},
        {"curves": 3},
        {"coefficients": {"blocks": [{**BLOCK, "active": 2}]}},
        {"coefficients": {"blocks": [{**BLOCK, "P": [[1.0, 0.0]]}]}},
        {"coefficients": {"blocks": [{**BLOCK, "g": ["x", "y"]}]}},
        {"kind": "finetune", "column": "chess", "tasks": {}, "missing": []},
        {"kind": "finetune", "column": "glue", "tasks": 3, "missing": []},
        {"diverged": 5},
    ],
    ids=str,
)
def test_a_damaged_record_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "runs" / "k.json"
    write_record(tmp_path, record("k", coefficients={"blocks": [BLOCK]}))
    assert read_record(path)["key"] == "k"
    path.write_text(json.dumps({**record("k"), **change}))
    with pytest.raises(UserError, match=r"k\.json is not a whole record"):
        read_record(path)
    path.write_text("{")
    with pytest.raises(UserError, match=r"k\.json is not a whole record"):
        read_record(path)


def test_a_damaged_record_in_the_target_is_replaced(tmp_path: Path) -> None:
    write_record(tmp_path / "a", record("k"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "runs" / "k.json").write_text("{")
    merge(tmp_path / "a", tmp_path / "b")
    assert read_record(tmp_path / "b" / "runs" / "k.json")
    with pytest.raises(UserError, match="holds no results"):
        merge(tmp_path / "nothing", tmp_path / "b")


def test_a_failure_is_known_until_the_job_has_run(tmp_path: Path) -> None:
    note_failure(tmp_path, "k", "a job", "out of memory")
    assert [one["reason"] for one in ResultFolders([tmp_path]).failures()] == ["out of memory"]
    write_record(tmp_path, record("k"))
    assert ResultFolders([tmp_path]).failures() == []

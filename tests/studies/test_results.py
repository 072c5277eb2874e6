"""Results add up, are named where they are damaged, and stand in the tables of all studies that share a model."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from altup.core.errors import UserError
from altup.core.files import locked
from altup.studies.configs import resolve
from altup.studies.jobs import deciding_fields
from altup.studies.report import StudyReport
from altup.studies.results import (
    Record,
    Result,
    _untuned_key,
    merge,
    read_record,
    read_results,
    read_scale,
    share_results,
    write_record,
    write_results,
    write_scale,
)
from altup.studies.scale import Scale, find_scale, with_settings
from altup.studies.statistics import choose_results
from altup.studies.study import find_study, shipped
from tests.processes import PATIENCE
from tests.studies.samples import SEEDS, record, result

STUDIES = list(shipped().values())


def test_results_add_up(tmp_path: Path) -> None:
    one, two, both = (tmp_path / name for name in ("one", "two", "both"))
    write_results(one, SEEDS[:3])
    write_record(one, record("a"))
    write_results(two, SEEDS[2:])
    write_record(two, record("b"))
    assert merge(one, both) == (3, 1)
    assert merge(two, both) == (3, 1)
    assert merge(one, both) == (3, 1)
    assert sorted(r.identity for r in read_results(both)) == sorted(r.identity for r in SEEDS)
    assert {r.identity: r for r in read_results(both)} == {r.identity: r for r in SEEDS}
    assert read_record(both, "a") == record("a")
    with pytest.raises(UserError, match="no results"):
        merge(tmp_path / "empty", both)
    path = both / "varying-k.csv"
    path.write_text(path.read_text().replace("40,%", "forty,%", 1))
    with pytest.raises(UserError, match="line"):
        read_results(both)


def test_the_order_of_merges_does_not_matter(tmp_path: Path) -> None:
    """Of a result, a record and a scale that two folders have, the newer is kept."""
    scales = [replace(find_scale("smoke"), name="own", about=about) for about in ("older", "newer")]
    for i, name in enumerate(("old", "new")):
        date = f"2025-01-0{i + 1}"
        write_results(tmp_path / name, [result("Dense", 40.0 + i, date=date, scale="own", run="a")])
        write_record(tmp_path / name, record("a", date=date, step=i))
        write_scale(tmp_path / name, scales[i])
    for first, second in (("old", "new"), ("new", "old")):
        both = tmp_path / f"{first} and {second}"
        merge(tmp_path / first, both)
        merge(tmp_path / second, both)
        assert [r.value for r in read_results(both)] == [41.0]
        assert (read_record(both, "a") or {})["step"] == 1
        assert read_scale([both], "own") == scales[1]


def test_merges_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each reads the tables and writes them again."""
    sources = [tmp_path / str(number) for number in range(8)]
    for number, source in enumerate(sources):
        write_results(source, [result("Dense", 40.0, str(seed)) for seed in range(8 * number, 8 * number + 8)])
    with ThreadPoolExecutor(8) as threads:
        for found in [threads.submit(merge, source, tmp_path / "all") for source in sources]:
            found.result()
    assert {int(r.seed) for r in read_results(tmp_path / "all")} == set(range(64))


def test_a_merge_waits_for_who_writes(tmp_path: Path) -> None:
    write_results(tmp_path / "one", SEEDS)
    (tmp_path / "all").mkdir()
    with ThreadPoolExecutor() as threads:
        with locked(tmp_path / "all", "held by another test"):
            waits = threads.submit(merge, tmp_path / "one", tmp_path / "all")
            time.sleep(0.4)
            assert not waits.done()
            assert not list((tmp_path / "all").iterdir())
        assert waits.result(PATIENCE) == (5, 0)
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["varying-k.csv"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: text.rindex("H200")], "line 6: not a whole result"),
        (lambda text: text.replace("40,%", "nan,%", 1), "'nan' is not a number"),
        (lambda text: text.replace("accuracy", "taste", 1), "'taste' is not known to this version"),
        (lambda text: text.replace("hardware,", "gpu,", 1), "another version of altup"),
        (lambda text: "\x00\udcff" + text, "damaged"),
    ],
)  # fmt: skip
def test_damaged_results_are_named_and_never_written_over(tmp_path: Path, damage: Any, words: str) -> None:
    write_results(tmp_path, SEEDS)
    path = tmp_path / "varying-k.csv"
    path.write_bytes(damage(path.read_text()).encode(errors="surrogateescape"))
    before = path.read_bytes()
    with pytest.raises(UserError, match=words):
        read_results(tmp_path)
    with pytest.raises(UserError, match="varying-k"):
        write_results(tmp_path, SEEDS[:1])
    assert path.read_bytes() == before


def test_other_tables_lie_beside_and_are_left_alone(tmp_path: Path) -> None:
    write_results(tmp_path, SEEDS)
    (tmp_path / "steps.csv").write_text("case,ms\nstep,1\n")
    assert len(read_results(tmp_path)) == len(SEEDS)
    with pytest.raises(UserError, match="would be written over"):
        write_results(tmp_path, [result("Dense", 1.0, study="steps")])


@pytest.mark.parametrize(
    "text", ["", '{"key": "a", "ki', "[1]", '{"key": "a"}', '{"key": "a", "kind": "pretrain"}']
)
def test_damaged_records_are_named(tmp_path: Path, text: str) -> None:
    write_results(tmp_path / "one", SEEDS)
    write_record(tmp_path / "one", record("a"))
    (tmp_path / "one" / "runs" / "a.json").write_text(text)
    with pytest.raises(UserError, match=r"a\.json is not a whole record"):
        read_record(tmp_path / "one", "a")
    with pytest.raises(UserError, match=r"a\.json is not a whole record"):
        merge(tmp_path / "one", tmp_path / "two")
    assert not (tmp_path / "two").exists()


@pytest.fixture
def kept() -> dict[str, Record]:
    return records_at(find_scale("mini-adamw"))


def records_at(scale: Scale) -> dict[str, Record]:
    """Of two dense runs, of AltUp, and of AltUp with other coefficients."""
    study, found = shipped()["initialisation"], {}
    models = {"d0": ("Dense", 0), "d1": ("Dense", 1), "a0": ("AltUp K=2", 0), "p0": ("P averages", 0)}
    for key, (label, seed) in models.items():
        config = resolve(study, study.row(label), "small", scale, seed, "text")
        assert config is not None
        found[key] = record(key, config=deciding_fields(config), start=study.row(label).start)
    return found


RESULTS = [
    result("Dense", 40.0, "0", run="d0"), result("Dense", 41.0, "1", run="d1"),
    result("AltUp K=2", 42.0, run="a0"), result("Dense", 0.7, "", "relative_forward", run="v"),
    result("P averages", 43.0, study="initialisation", run="p0"), result("Dense", 70.0, metric="glue", run="g0"),
]  # fmt: skip


def mean(results: list[Result], study: str, label: str, metric: str = "accuracy") -> float | None:
    found = choose_results(results).mean(study, label, "small", metric)
    return found.mean if found else None


def test_what_one_study_ran_the_others_show(kept: dict[str, Record]) -> None:
    shared = share_results(RESULTS, STUDIES, find_scale("mini-adamw"), kept.get)
    assert mean(RESULTS, "sequence", "Dense") is None
    for study in ("parameters-and-speed", "sequence", "experts", "recycled"):
        assert mean(shared, study, "Dense") == 40.5
        assert mean(shared, study, "Dense", "glue") == 70
    assert mean(shared, "recycled", "Dense", "relative_forward") == 0.7
    assert mean(shared, "initialisation", "AltUp K=2") == 42  # and not that of other coefficients
    assert mean(shared, "initialisation", "P averages") == 43
    assert mean(shared, "sequence", "Sequence-AltUp") is None
    # As long as AltUp takes for the scale's steps: its run is the one of other studies, those of others are not.
    assert mean(shared, "equal-time", "AltUp K=2") == 42
    assert mean(shared, "equal-time", "Dense") is None
    assert share_results(shared, STUDIES, find_scale("mini-adamw"), kept.get) == shared


def test_a_run_that_collapsed_hides_in_no_study_the_one_that_repeats_it(
    kept: dict[str, Record], tmp_path: Path
) -> None:
    """One folder has the run that collapsed, the other the repeated one, in another study and with an older
    date."""
    kept["r1"] = {**kept["d1"], "config": {**kept["d1"]["config"], "on_spike": "skip"}}
    one = [*RESULTS, result("Dense", 3.5, "1", "collapse", run="d1")]
    two = [result("Dense", 42.0, "1", run="r1", study="recycled", date="2024-01-01")]
    for name, found in (("one", one), ("two", two)):
        write_results(tmp_path / name, found)
        merge(tmp_path / name, tmp_path / "both")
    merged = read_results(tmp_path / "both")
    for results, expected in ((one, 40.0), (merged, 41.0)):
        shared = share_results(results, STUDIES, find_scale("mini-adamw"), kept.get)
        for study in ("varying-k", "recycled", "sequence"):
            assert mean(shared, study, "Dense") == expected
            assert choose_results(shared).collapsed(study, "Dense", "small") == 1
        assert share_results(shared, STUDIES, find_scale("mini-adamw"), kept.get) == shared
    both = [*one, result("Dense", 2.5, "1", "collapse", run="r1")]
    told = choose_results(share_results(both, STUDIES, find_scale("mini-adamw"), kept.get)).describe_collapses
    for study in ("varying-k", "sequence"):
        assert told(study, "Dense", "small") == "1 collapsed, again when repeated"


def test_other_settings_are_another_model(kept: dict[str, Record]) -> None:
    kept["d0"]["config"]["steps"] = 9
    shared = share_results(RESULTS, STUDIES, find_scale("mini-adamw"), kept.get)
    assert mean(shared, "sequence", "Dense") == 41


def test_a_scale_of_ones_own_is_known_to_those_who_read_its_results(tmp_path: Path) -> None:
    path = tmp_path / "longer.yaml"
    path.write_text("like: mini-adamw\npretrain: {steps: 9000}\n")
    changes = {
        "batch_size": 64,
        "finetune.steps": 3,
        "finetune.note": "x" * 300,
    }  # a name of 300 letters
    own = with_settings(find_scale(str(path)), changes, minutes=2)
    write_scale(tmp_path / "one", own)
    write_results(tmp_path / "one", [replace(r, scale=own.name) for r in RESULTS])
    merge(tmp_path / "one", tmp_path / "two")
    assert read_scale([tmp_path, tmp_path / "two"], own.name) == own
    assert read_scale([tmp_path], own.name) is None
    assert read_scale([tmp_path], "mini") == find_scale("mini-adamw")  # which was its name before scales were kept
    assert read_scale([tmp_path], "long") == find_scale("long")
    shared = share_results(RESULTS, STUDIES, own, records_at(own).get)
    assert mean(shared, "sequence", "Dense") == 40.5
    assert mean(shared, "equal-time", "AltUp K=2") is None  # it trains for the minutes
    assert (
        mean(share_results(RESULTS, STUDIES, own, records_at(find_scale("mini-adamw")).get), "sequence", "Dense")
        is None
    )
    next((tmp_path / "two" / "scales").glob("*.json")).write_text("{}")
    with pytest.raises(UserError, match="not a whole scale"):
        read_scale([tmp_path / "two"], own.name)


NAMES = ["../../x", "/tmp/x", "a/b", ".hidden", "..", "", "a\x00b"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("column", ["study", "run"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, column: str, name: str) -> None:
    """By everything that reads results: a merge would write there, a report would read there."""
    source = tmp_path / "a" / "source"
    write_results(source, SEEDS)
    path = source / "varying-k.csv"
    kept = {"study": "varying-k", "run": "dense-0-accuracy"}[column]
    path.write_text(path.read_text().replace(kept, name))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"cannot be a file's name|damaged"):
        merge(source, tmp_path / "a" / "target")
    with pytest.raises(UserError, match=r"cannot be a file's name|damaged"):
        StudyReport([source]).write(tmp_path / "report.html")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_study_of_one_s_own_has_such_a_name_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'two words' cannot be a file's name"):
        find_study(str(tmp_path / "two words.yaml"))
    with pytest.raises(UserError, match="cannot be a file's name"):
        write_results(tmp_path, [result("Dense", 1.0, study="../x")])
    assert not list(tmp_path.iterdir())


def test_a_factor_that_was_given_tells_models_apart_and_one_that_was_tuned_does_not() -> None:
    tuned = ["lr_factors.embeddings", "lr"]

    def key(lr: float, **factors: float) -> str:
        return _untuned_key({"method": "dense", "lr": lr, "lr_factors": factors}, {}, tuned)

    assert key(0.06, embeddings=4) == key(0.09, embeddings=2)
    assert key(0.06, embeddings=4, vectors=0.1) == key(0.06, embeddings=2, vectors=0.1)
    assert key(0.06, embeddings=4, vectors=0.1) != key(0.06, embeddings=4)
    assert _untuned_key({"method": "dense"}, {}, tuned) == key(0.06, embeddings=4)  # as older records have it

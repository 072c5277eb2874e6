"""Every model at its own best settings: the walk, what it costs, and what is reported of it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from altup.cli.main import app
from altup.core.errors import UserError
from altup.studies.configs import resolve
from altup.studies.forecast import forecast
from altup.studies.jobs import deciding_fields, key_of
from altup.studies.report import StudyReport
from altup.studies.results import (
    Result,
    drop_other_settings,
    merge,
    read_record,
    read_results,
    read_sweep,
    read_sweeps,
)
from altup.studies.run import StudyOutcome, StudyRun, this_device
from altup.studies.scale import Scale, Tuning, find_scale, with_settings
from altup.studies.statistics import choose_results
from altup.studies.study import read_study, shipped
from altup.studies.sweep_figures import add_given, sweep_lines, sweep_plots, sweeps_of, text_sweeps
from altup.studies.tuning import edges_of, most_runs, walk_grid
from altup.training.pretraining import PretrainConfig
from tests.studies.samples import TEXT, TWO, plan, study_run
from tests.studies.samples import result as made_up

Place = tuple[Any, ...]


def walked(
    grid: dict[str, list[Any]], start: dict[str, Any], loss: Callable[[dict[str, Any]], float]
) -> tuple[dict[str, Any], list[Place]]:
    """The end of a walk whose points are run when it asks for them, and these points."""
    known: dict[Place, float] = {}
    while (found := walk_grid(grid, start, lambda point: known.get(tuple(point.values())))).missing:
        for point in found.missing:
            assert tuple(point.values()) not in known
            known[tuple(point.values())] = loss(point)
    return found.best, list(known)


def test_a_walk_by_hand() -> None:
    """Along `a` from 4: its neighbours 2 and 8; 8 is better, so 16, which is worse. Along `b` from 1: 2."""
    losses = {2: 4.0, 4: 3.0, 8: 2.0, 16: 2.5}
    best, asked = walked(
        {"a": [1, 2, 4, 8, 16], "b": [1, 2]}, {"a": 4, "b": 1}, lambda p: losses[p["a"]] - 0.1 * p["b"]
    )
    assert best == {"a": 8, "b": 2}
    assert asked == [(2, 1), (4, 1), (8, 1), (16, 1), (8, 2)]


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_a_walk_ends_where_no_step_of_the_last_setting_helps(shape: list[list[int]], random: Any) -> None:
    """It costs no more than it says, and finds the best where settings do not depend on each other and losses have
    one valley."""
    grid = {str(i): list(range(len(values))) for i, values in enumerate(shape)}
    start = {name: random.choice(values) for name, values in grid.items()}
    table = dict(zip(grid, shape, strict=True))
    best, asked = walked(grid, start, lambda point: sum(table[name][i] for name, i in point.items()))
    assert len(asked) <= most_runs(grid)
    last = list(grid)[-1]
    for beside in (best[last] - 1, best[last] + 1):
        if 0 <= beside < len(grid[last]):
            assert table[last][beside] >= table[last][best[last]]
    valleys = {name: [abs(i - values[0] % len(values)) for i in grid[name]] for name, values in table.items()}
    lowest, _ = walked(grid, start, lambda point: sum(valleys[name][i] for name, i in point.items()))
    assert all(valleys[name][i] == 0 for name, i in lowest.items())


def test_what_diverges_is_walked_away_from_and_never_chosen() -> None:
    for start in (1, 2, 3, 4):
        found, _ = walked({"lr": [1, 2, 3, 4]}, {"lr": start}, lambda p: math.inf if p["lr"] > 2 else -p["lr"])
        assert found == {"lr": 2}
    assert walked({"lr": [1, 2, 3]}, {"lr": 2}, lambda p: math.inf)[0] == {"lr": 2}


@pytest.fixture(scope="module")
def tuned(scale: Scale) -> Scale:
    grid = {"lr_factors.embeddings": [1, 4], "lr": [0.01, 0.06], "lr_factors.coefficients": [0.3, 1, 3]}
    muon = {"optimizer": "muon", "lr": None, "schedule": None}
    return replace(
        scale, name="tuned", seeds=[1], pretrain={**scale.pretrain, **muon},
        tune=Tuning(grid, steps=3, start={"lr": 0.01, "lr_factors.embeddings": 4}),
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tuned: Scale, data: Path) -> tuple[StudyRun, StudyOutcome]:
    run = study_run(tmp_path_factory.mktemp("tuned") / "out", tuned, data, seeds=[1])
    return run, run.run(lambda text: None)


def test_each_model_is_tuned_and_then_run_with_what_was_chosen(done: tuple[StudyRun, StudyOutcome]) -> None:
    run, outcome = done
    assert (outcome.failed, outcome.left) == ([], [])
    reported = {r.label: r for r in read_results(run.results) if r.metric == "loss"}
    assert {r.seed for r in reported.values()} == {"1"}
    for label, result in reported.items():
        record = read_record(run.results, result.run)
        assert record is not None
        sweep = read_sweep([run.results], record["tuned_by"])
        assert sweep is not None
        chosen = sweep["chosen"]
        assert record["config"]["eval_part"] == "reporting"
        assert record["config"]["steps"] == 4
        assert record["config"]["lr"] == chosen["lr"]
        assert record["config"]["lr_factors"]["embeddings"] == chosen["lr_factors.embeddings"]
        assert ("lr_factors.coefficients" in chosen) == (label == "AltUp K=2")
        losses = {}
        for point, loss, key in sweep["runs"]:
            made = read_record(run.results, key)
            assert made is not None
            assert made["measures"]["loss"] == loss
            assert (made["config"]["eval_part"], made["config"]["steps"]) == ("tuning", 3)
            assert "seed" not in made["config"]  # 0
            losses[tuple(point.values())] = loss
        assert len(losses) == len(sweep["runs"])
        assert losses[tuple(chosen.values())] == min(losses.values())
        assert len(losses) <= most_runs(sweep["grid"])
    sweeps = list((run.results / "sweeps").glob("*.json"))
    assert len(sweeps) == 2
    assert outcome.finished == 2 + sum(len(json.loads(path.read_text())["runs"]) for path in sweeps)


def test_the_runs_of_a_sweep_keep_no_weights(done: tuple[StudyRun, StudyOutcome]) -> None:
    folders = list((done[0].out / "runs").glob("*"))
    kept = [folder for folder in folders if list(folder.glob("final/*.safetensors"))]
    assert len(kept) == 2
    assert len(folders) > 6
    assert not [folder for folder in folders if folder not in kept and list(folder.glob("checkpoints/*"))]


def test_nothing_is_tuned_twice(
    done: tuple[StudyRun, StudyOutcome], tuned: Scale, data: Path, tmp_path: Path
) -> None:
    """Neither by the same command, nor for another study or seed, nor where only the results are known."""
    run = done[0]
    assert study_run(run.out, tuned, data, seeds=[1]).run(lambda text: None).finished == 0
    merge(run.results, tmp_path / "results")
    other = read_study("other", TEXT.replace("Dense", "Plain") + "baseline: Plain\n", "other")
    elsewhere = study_run(tmp_path / "out", tuned, data, other, results=tmp_path / "results", seeds=[1, 2])
    assert elsewhere.plan().tuning() == []
    assert elsewhere.run(lambda text: None).finished == 2  # those of seed 2
    (tmp_path / "other.yaml").write_text(TEXT.replace("AltUp K=2", "Wide"))
    stats = StudyReport([run.results], names=[str(tmp_path / "other.yaml")]).stats
    assert stats.mean("other", "Wide", "tiny", "loss") == stats.mean("two", "AltUp K=2", "tiny", "loss")
    # Without the results the runs' folders say what they found, though their weights are gone.
    again = study_run(run.out, tuned, data, seeds=[1], results=tmp_path / "fresh")
    assert again.run(lambda text: None).finished == 0
    here, there = (
        {r.identity for r in read_results(place) if r.metric != "train_seconds"}
        for place in (run.results, tmp_path / "fresh")
    )
    assert here == there


def go_on(made: StudyRun, scale: Scale, data: Path, folder: Path, **tuning: Any) -> StudyRun:
    """The study in another folder, which knows the results made, with some of the tuning changed."""
    merge(made.results, folder / "results")
    assert scale.tune is not None
    changed = replace(scale, tune=replace(scale.tune, **tuning))
    return study_run(folder / "out", changed, data, results=folder / "results", seeds=[1])


def test_runs_belong_to_the_sweep_that_chose_them_last(
    done: tuple[StudyRun, StudyOutcome], tuned: Scale, data: Path, tmp_path: Path
) -> None:
    """A setting that is added to the grid later and stays as it was takes nothing from the runs made before."""
    assert tuned.tune is not None
    run = go_on(done[0], tuned, data, tmp_path, grid={**tuned.tune.grid, "weight_decay": [0.0]})
    results = run.results
    assert run.run(lambda text: None).finished == 0
    for result in read_results(results):
        if result.metric == "loss":
            record = read_record(results, result.run)
            assert record is not None
            assert record["tuned"][-1] == "weight_decay"
            sweep = read_sweep([results], record["tuned_by"])
            assert sweep is not None
            assert sweep["chosen"]["weight_decay"] == 0
            assert "weight_decay" not in edges_of(sweep)
    (tmp_path / "other.yaml").write_text(TEXT.replace("AltUp K=2", "Wide"))
    stats = StudyReport([results], names=[str(tmp_path / "other.yaml")]).stats
    assert stats.mean("other", "Wide", "tiny", "loss") == stats.mean("two", "AltUp K=2", "tiny", "loss")


def test_settings_are_settled_in_longer_runs(
    done: tuple[StudyRun, StudyOutcome], tuned: Scale, data: Path, tmp_path: Path
) -> None:
    """The short runs are those made before; the best of the long ones is chosen, and reported."""
    run = go_on(done[0], tuned, data, tmp_path, settle=["lr"], settle_steps=4)
    results = run.results
    told = [line.title for line in forecast(run, run.plan(), this_device())]
    assert sum(title.startswith("settling") for title in told) == 2
    assert not any(title.startswith("tuning") for title in told)
    assert run.run(lambda text: None).failed == []
    sweeps = [sweep for sweep in read_sweeps(results) if "settled" in sweep]
    assert len(sweeps) == 2
    for sweep in sweeps:
        losses = {point["lr"]: loss for point, loss, _ in sweep["settled"]["runs"]}
        assert losses.keys() == {0.01, 0.06}
        assert sweep["chosen"]["lr"] == min(losses, key=lambda lr: losses[lr])
        for _, loss, key in sweep["settled"]["runs"]:
            made = read_record(results, key)
            assert made is not None
            assert made["config"]["steps"] == 4
            assert made["measures"]["loss"] == loss
    (tmp_path / "two.yaml").write_text(TEXT)
    report = StudyReport([results], names=[str(tmp_path / "two.yaml")])
    for result in report.as_run.results:
        if result.metric == "loss":
            record = read_record(results, result.run)
            assert record is not None
            sweep = read_sweep([results], record["tuned_by"])
            assert sweep is not None
            assert record["config"]["lr"] == sweep["chosen"]["lr"]
    assert "settled in runs of 4 steps" in text_sweeps(report.sweeps(report.studies[0]))
    merge(done[0].results, results)  # an older copy takes nothing back
    report = StudyReport([results], names=[str(tmp_path / "two.yaml")])
    assert "settled in runs of 4 steps" in text_sweeps(report.sweeps(report.studies[0]))
    report.write(tmp_path / "report.html")
    assert list((tmp_path / "report-plots").glob("*settled-tuning-lr.svg"))


def test_runs_that_were_made_before_the_choice_are_told(
    done: tuple[StudyRun, StudyOutcome], tmp_path: Path
) -> None:
    """A sweep goes on and chooses another value, whose runs are not made yet: the table names both values."""
    shutil.copytree(done[0].results, tmp_path / "results")
    path = next(
        p
        for p in (tmp_path / "results" / "sweeps").glob("*.json")
        if "dense" in json.loads(p.read_text())["model"]
    )
    sweep = json.loads(path.read_text())
    other = {**sweep["chosen"], "lr": 0.03}
    sweep |= {"key": "later", "chosen": other, "runs": [*sweep["runs"], [other, 1.0, "k"]]}
    path.with_stem("later").write_text(json.dumps(sweep))
    (tmp_path / "two.yaml").write_text(TEXT)
    report = StudyReport([tmp_path / "results"], names=[str(tmp_path / "two.yaml")])
    text = text_sweeps(report.sweeps(report.studies[0]))
    assert "0.03 (the runs: 0.0" in text
    assert text.count("the runs: 0.0") == 1  # AltUp's are those that its sweep chose
    assert "still to be made" in text


def test_what_was_far_behind_in_short_runs_is_not_settled(tuned: Scale, data: Path) -> None:
    """Along one setting 0.1, 0.3, 1, 3 had 2.0, 1.0, 1.04, 1.2: settled with 0.05 are 0.3 and 1 alone."""
    assert tuned.tune is not None
    short = {0.1: 2.0, 0.3: 1.0, 1.0: 1.04, 3.0: 1.2}
    asked: list[float] = []

    def found(within: float | None) -> list[float]:
        tune = Tuning({"lr_factors.coefficients": list(short)}, steps=3, settle=["lr_factors.coefficients"],
                      settle_steps=4, settle_within=within)  # fmt: skip
        scale, known = replace(tuned, tune=tune), dict[str, float]()
        asked.clear()
        while todo := plan([TWO], scale, data, seeds=[1], only=["AltUp K=2"], losses=known.get).tuning():
            for job in todo:
                factor = job.settings["config"]["lr_factors"]["coefficients"]
                known[job.key] = short[factor] if job.steps == 3 else factor
                asked.extend([factor] if job.steps == 4 else [])
        return sorted(asked)

    assert found(None) == [0.1, 0.3, 1.0]
    assert found(0.05) == [0.3, 1.0]


RELATIVES = """
title: Relatives
question: Which?
rows:
  Dense: {method: dense}
  AltUp K=2: {method: altup, k: 2, tune_from: Dense}
  SameUp: {method: sameup, k: 2, tune_from: AltUp K=2, tune: []}
  Wide: {method: dense-wide, k: 2, tune_from: AltUp K=2, tune: [lr]}
"""


def test_a_sweep_begins_where_that_of_a_relative_ended(tuned: Scale, data: Path, tmp_path: Path) -> None:
    """Dense is tuned in everything; then AltUp in what the scale names; SameUp is as it; Wide looks at the rate
    alone, and has no coefficients. Asking for the last ones asks for the sweeps before."""
    assert tuned.tune is not None
    tune = replace(tuned.tune, near=["lr_factors.embeddings"])
    study = read_study("relatives", RELATIVES, "relatives")
    run = study_run(tmp_path, replace(tuned, tune=tune), data, study, seeds=[1], only=["SameUp", "Wide"])
    told = [line.title for line in forecast(run, run.plan(), this_device())]
    assert [t.split(":")[0] for t in told if "tuning" in t] == [
        f"tuning tiny {model}" for model in ("dense", "altup K=2", "dense-wide K=2")
    ]
    assert all("dense" in job.title for job in run.plan().tuning())  # the others wait
    outcome = run.run(lambda text: None)
    assert (outcome.failed, outcome.left) == ([], [])
    sweeps = {sweep["model"]: sweep for sweep in read_sweeps(run.results)}
    dense, altup, sameup, wide = (
        sweeps[f"tiny {model}"] for model in ("dense", "altup K=2", "sameup K=2", "dense-wide K=2")
    )
    assert [list(sweep["curves"]) for sweep in (altup, sameup, wide)] == [["lr_factors.embeddings"], [], ["lr"]]
    assert altup["chosen"]["lr"] == dense["chosen"]["lr"]
    assert sameup["chosen"] == altup["chosen"]
    assert wide["chosen"]["lr_factors.embeddings"] == altup["chosen"]["lr_factors.embeddings"]
    assert [sweep["from"] for sweep in (altup, sameup, wide)] == ["tiny dense", "tiny altup K=2", "tiny altup K=2"]
    for result in (r for r in read_results(run.results) if r.metric == "loss"):
        record = read_record(run.results, result.run)
        assert record is not None
        chosen = (sameup if result.label == "SameUp" else wide)["chosen"]
        assert set(record["tuned"]) == set(chosen)
        assert record["config"]["lr"] == chosen["lr"]
        assert record["config"]["lr_factors"]["embeddings"] == chosen["lr_factors.embeddings"]
    (tmp_path / "relatives.yaml").write_text(RELATIVES)
    report = StudyReport([run.results], names=[str(tmp_path / "relatives.yaml")])
    text = text_sweeps(report.sweeps(report.studies[0]))
    assert "as tiny altup K=2" in text
    assert ", from tiny altup K=2" in text
    again = study_run(tmp_path, run.scale, data, study, seeds=[1], only=["Wide"])
    assert again.run(lambda text: None).finished == 0


def test_a_relative_settles_only_where_its_short_runs_end_elsewhere(tuned: Scale, data: Path) -> None:
    """Dense's short runs choose 8 and its long ones 4. AltUp's short runs choose 8 too: it takes 4. If they choose
    2 instead, long runs compare 2 and 4 alone."""
    tune = Tuning({"lr_factors.embeddings": [1.0, 2.0, 4.0, 8.0]}, steps=3, settle=["lr_factors.embeddings"],
                  settle_steps=4)  # fmt: skip
    study = read_study("relatives", RELATIVES, "relatives")
    short = {"dense": 8.0, "altup": 8.0}

    def found(best: dict[str, float]) -> tuple[float, list[float]]:
        known: dict[str, float] = {}
        asked: list[float] = []
        while todo := plan([study], replace(tuned, tune=tune), data, seeds=[1], only=["AltUp K=2"],
                           losses=known.get).tuning():  # fmt: skip
            for job in todo:
                config = job.settings["config"]
                factor = config["lr_factors"]["embeddings"]
                wanted = best[config["method"]] if job.steps == 3 else 4.0
                known[job.key] = abs(math.log(factor / wanted))
                asked.extend([factor] if (job.steps, config["method"]) == (4, "altup") else [])
        (trial,) = plan([study], replace(tuned, tune=tune), data, seeds=[1], only=["AltUp K=2"],
                        losses=known.get).trials  # fmt: skip
        assert trial.pretrain is not None
        return trial.pretrain.settings["config"]["lr_factors"]["embeddings"], sorted(asked)

    assert found(short) == (4.0, [])
    assert found({**short, "altup": 2.0}) == (4.0, [2.0, 4.0])


def test_a_sweep_is_no_longer_than_the_run(tuned: Scale, data: Path) -> None:
    """A study with shorter runs than the scale's has shorter sweeps, and then nothing to settle. The longest of
    its lengths counts, be it shorter than the scale's runs or longer."""
    assert tuned.tune is not None
    long = replace(tuned, given={}, tune=replace(tuned.tune, settle=["lr"], settle_steps=10))
    for study, lengths in (
        (replace(TWO, settings={"smoke": {"steps": 10}}), {3, 10}),
        (replace(TWO, settings={"smoke": {"steps": 2}}), {2}),
        (replace(TWO, settings={"smoke": {"steps": 10}}, lengths={"smoke": [1, 2]}), {2}),
        (replace(TWO, settings={"smoke": {"steps": 2}}, lengths={"smoke": [2, 10]}), {3, 10}),
    ):
        known: dict[str, float] = {}
        asked: set[int] = set()
        while todo := plan([study], long, data, seeds=[1], losses=known.get).tuning():
            known |= {job.key: 1.0 for job in todo}
            asked |= {job.steps for job in todo}
        assert asked == lengths


def test_runs_with_settings_that_were_given_up_do_not_count() -> None:
    """Whichever study they are told by; a run that was tuned for nothing stays."""

    def result(seed: int, run: str, date: str, study: str = "s") -> Result:
        return Result(
            study, "Dense", "tiny", str(seed), "long", "d", "loss", 1.0, "nats", "5", run, "GPU", "v", date, "c"
        )

    made = [result(1, "old1", "2026-01-01"), result(2, "old2", "2026-01-01"), result(1, "new1", "2026-01-02"),
            result(3, "free", "2026-01-01")]  # fmt: skip
    records: dict[str, dict[str, Any]] = {
        "old1": {"tuned": ["lr"], "config": {"lr": 8, "decay": 0}},
        "old2": {"tuned": ["lr"], "config": {"lr": 8, "decay": 0}},
        "new1": {"tuned": ["lr", "decay"], "config": {"lr": 4, "decay": 0}},
        "free": {"config": {"lr": 1}},
    }
    assert [r.run for r in drop_other_settings(made, records.get)] == ["new1", "free"]
    # Another study shows the same model, as it has one of its runs, and was not run again since.
    both = [*made, result(1, "old1", "2026-01-01", "t"), result(4, "old4", "2026-01-01", "t")]
    records["old4"] = records["old1"]
    assert [r.run for r in drop_other_settings(both, records.get)] == ["new1", "free"]
    # A study of another model, which has none of them, keeps its own settings.
    other = [*made, result(4, "old4", "2026-01-01", "t")]
    assert [r.run for r in drop_other_settings(other, records.get)] == ["new1", "free", "old4"]
    records["new1"]["config"]["lr"] = 8  # the same choice, of a sweep with one more setting
    assert len(drop_other_settings(made, records.get)) == 4


def test_runs_of_an_older_recipe_do_not_count() -> None:
    """Coefficients' steps grew at first. A run that was repeated since has not collapsed twice."""
    runs = {
        "old": {"tuned": ["lr"], "config": {"lr": 8}},
        "new": {"tuned": ["lr"], "config": {"lr": 8, "coefficient_growth": 1.0}},
    }
    assert dropped(runs, {"old": ("s", "AltUp"), "new": ("s", "AltUp")}) == {"old"}
    assert dropped(runs, {"old": ("s", "AltUp, as before"), "new": ("s", "AltUp")}) == set()


def dropped(runs: dict[str, dict[str, Any]], places: dict[str, tuple[str, str]]) -> set[str]:
    """The runs that tables leave out, each newer than the one before; `places` are their studies and labels."""
    made = [
        Result(*places[run], "tiny", str(i), "long", "d", "loss", 1.0, "nats", "5", run, "GPU", "v",
               runs[run].get("date", f"2026-01-0{i}"), "c")
        for i, run in enumerate(places, start=1)
    ]  # fmt: skip
    return {r.run for r in made} - {r.run for r in drop_other_settings(made, runs.get)}


def test_a_label_that_changes_its_model_drops_no_run_of_the_model_it_was() -> None:
    """`Wide` was K=2, which another study has too, and is K=4 now, with another rate of its own."""
    runs = {
        "two": {"tuned": ["lr"], "config": {"k": 2, "lr": 8}},
        "again": {"tuned": ["lr"], "config": {"k": 2, "lr": 8, "seed": 2}},
        "four": {"tuned": ["lr"], "config": {"k": 4, "lr": 1}},
    }
    places = {"two": ("s", "Wide"), "again": ("s", "Wide"), "four": ("s", "Wide")}
    assert dropped(runs, places) == set()
    runs["four"]["config"]["k"] = 2
    assert dropped(runs, places) == {"two", "again"}


def test_models_that_go_on_are_also_told_by_what_was_chosen_for_their_parents() -> None:
    """What a row that goes on takes from the dense model is not what its own sweep walked through."""
    runs = {
        "dense1": {"tuned": ["lr", "lr_factors.embeddings"], "config": {"lr": 1, "lr_factors": {"embeddings": 8}}},
        "dense2": {"tuned": ["lr", "lr_factors.embeddings"], "config": {"lr": 1, "lr_factors": {"embeddings": 4}}},
        "on1": {"tuned": ["lr"], "config": {"lr": 0.1, "lr_factors": {"embeddings": 8}}},
        "on2": {"tuned": ["lr"], "config": {"lr": 0.1, "lr_factors": {"embeddings": 4}}},
    }
    runs["on1"]["continues"], runs["on2"]["continues"] = {"run": "dense1"}, {"run": "dense2"}
    places = {"on1": ("s", "On"), "on2": ("s", "On")}
    assert dropped(runs, places) == {"on1"}
    runs["dense2"]["config"] = {"lr": 2, "lr_factors": {"embeddings": 8}}  # only the parent's rate is another
    runs["on2"]["config"] = runs["on1"]["config"]
    assert dropped(runs, places) == {"on1"}
    runs["dense2"]["config"] = {"seed": 2, **runs["dense1"]["config"]}
    assert dropped(runs, places) == set()


def test_a_model_is_as_old_as_its_pretraining() -> None:
    """The one with the settings given up was fine-tuned last, on another machine."""
    runs: dict[str, dict[str, Any]] = {
        "old": {"tuned": ["lr"], "config": {"lr": 8}},
        "new": {"tuned": ["lr"], "config": {"lr": 4}},
        "tuned old": {"of": "old"},
    }
    assert dropped(runs, dict.fromkeys(runs, ("s", "Dense"))) == {"old", "tuned old"}


def test_rows_that_name_what_is_tuned_share_their_runs(tuned: Scale, data: Path, tmp_path: Path) -> None:
    """And rows that take a part of their settings from a relative that does not have the others."""
    assert tuned.tune is not None
    near = replace(tuned, tune=replace(tuned.tune, near=["lr"]))
    text = TEXT.replace("{method: dense}", "{method: dense, tune: [lr]}")
    text = text.replace("k: 2}", "k: 2, tune_from: Dense}")
    for name in ("one", "other"):
        (tmp_path / f"{name}.yaml").write_text(text)
    run = study_run(tmp_path / "out", near, data, read_study("one", text, "one"), seeds=[1])
    assert run.run(lambda text: None).failed == []
    stats = StudyReport([run.results], names=[str(tmp_path / "other.yaml")]).stats
    for label in ("Dense", "AltUp K=2"):
        assert stats.values("other", label, "tiny", "loss") == stats.values("one", label, "tiny", "loss") != []


def test_the_sweep_is_shown(done: tuple[StudyRun, StudyOutcome], tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(TEXT)
    report = StudyReport([done[0].results], names=[str(tmp_path / "two.yaml")])
    sweeps = report.sweeps(TWO)
    text = text_sweeps(sweeps)
    assert "(edge)" in text
    assert "better one may lie beyond" in text
    plots = {plot.name: plot for plot in sweep_plots(TWO, sweeps)}
    assert list(plots) == [
        f"two-tuning-{name}" for name in ("lr-factors-embeddings", "lr", "lr-factors-coefficients")
    ]
    drawn = plots["two-tuning-lr"]
    assert [s.name for s in drawn.series] == ["Dense", "AltUp K=2"]
    assert drawn.x_names == ["0.01", "0.06"]
    for s, sweep in zip(drawn.series, sweeps.values(), strict=True):
        assert [y for _, y in s.points] == [loss for _, loss in sweep["curves"]["lr"]]
        assert s.mark == [0.01, 0.06].index(sweep["chosen"]["lr"])
    assert [s.name for s in plots["two-tuning-lr-factors-coefficients"].series] == ["AltUp K=2"]
    report.write(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("edge of the grid") >= 2
    assert (tmp_path / "report-plots" / "two-tuning-lr.png").exists()


def test_sweeps_are_shown_and_merged_before_there_are_results(
    done: tuple[StudyRun, StudyOutcome], tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    shutil.copytree(done[0].results, begun)
    for path in begun.glob("*.csv"):
        path.unlink()
    path = min((begun / "sweeps").glob("*.json"))
    sweep = json.loads(path.read_text())
    path.write_text(json.dumps({**sweep, "chosen": None}))
    best = min(loss for _, loss, _ in sweep["runs"])
    merged = CliRunner().invoke(app, ["study", "merge", str(begun), "--into", str(tmp_path / "merged")])
    assert merged.stdout.startswith("0 results, ")
    assert "and 2 sweeps are now in" in merged.stdout
    assert CliRunner().invoke(app, ["study", "table", "--results", str(begun), "--scale", "other"]).exit_code
    assert CliRunner().invoke(app, ["study", "table", "nonsense", "--results", str(begun)]).exit_code
    for folder in (begun, tmp_path / "merged"):
        shown = CliRunner().invoke(app, ["study", "table", "--results", str(folder)])
        assert (shown.exit_code, f"{best:.3f}" in shown.stdout, "so far" in shown.stdout) == (0, True, True)
        assert "without results yet" in shown.stderr
        path = tmp_path / f"{folder.name}.html"
        told = CliRunner().invoke(app, ["study", "report", "--results", str(folder), "--out", str(path)])
        assert told.exit_code == 0, told.output
        page = path.read_text()
        assert "no results yet, only sweeps" in page
        assert f"{best:.3f}" in page
        assert (path.with_name(f"{folder.name}-plots") / "sweeps-tuning-lr.svg").exists()


def test_sweeps_that_others_have_replaced_are_not_shown_as_begun(
    done: tuple[StudyRun, StudyOutcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same models were swept with another grid before; a sweep that goes on is shown."""
    monkeypatch.setattr("altup.studies.report.shipped", lambda: {"two": TWO})
    shutil.copytree(done[0].results, tmp_path / "results")
    path = min((tmp_path / "results" / "sweeps").glob("*.json"))
    sweep = {**json.loads(path.read_text()), "key": "earlier"}
    for chosen, shown in ((sweep["chosen"], []), (None, [sweep["model"]])):
        path.with_stem("earlier").write_text(json.dumps({**sweep, "chosen": chosen}))
        begun = StudyReport([tmp_path / "results"]).begun
        assert [model for model, _ in begun] == shown


def sweep_of(steps: int, settled: int | None = None) -> dict[str, Any]:
    curves, runs = {"lr": [(1, 2.0), (2, 1.0)]}, [[{"lr": 1}, 2.0, "a"], [{"lr": 2}, 1.0, "b"]]
    found = {
        "key": f"of {steps} steps",
        "steps": steps,
        "seed": 0,
        "grid": {"lr": [1, 2]},
        "chosen": {"lr": 2},
        "curves": curves,
        "runs": runs,
    }
    return {**found, **({"settled": {"steps": settled, "curves": curves, "runs": runs}} if settled else {})}


def test_sweeps_of_three_lengths_have_plots_of_their_own() -> None:
    """Each is saved under its name."""
    found = {("Dense", "tiny"): sweep_of(10, 30), ("AltUp K=2", "tiny"): sweep_of(20)}
    assert [plot.name for plot in sweep_plots(TWO, found)] == [
        "two-tuning-lr", "two-settled-tuning-lr", "two-30-steps-tuning-lr",
    ]  # fmt: skip


def test_a_rate_that_a_row_names_is_shown_instead_of_the_sweeps() -> None:
    """It takes the other settings from the sweep, which is drawn once."""
    rows = "rows:\n  Dense: {method: dense}\n  Faster: {method: dense, tune_from: Dense, tune: [], lr: 4}\n"
    study = read_study("named", f"title: T\nquestion: Q\n{rows}", "named")
    runs = [made_up(label, 40.0, study="named", run=label.lower()) for label in ("Dense", "Faster")]
    swept = {**sweep_of(10), "chosen": {"lr": 2, "lr_factors.embeddings": 8}}
    sweeps = sweeps_of(study, choose_results(runs), lambda key: {"tuned_by": "s"}, lambda key: swept)
    found = {place: add_given(study.row(place[0]), sweep) for place, sweep in sweeps.items()}
    _, dense, faster = sweep_lines(found)
    assert dense[1:3] == ["2 (edge)", "8"]
    assert faster[1:3] == ["4 (given)", "8"]
    assert (dense[-2], faster[-2]) == ("1.000", "–")  # the sweep has no run at that rate
    assert "(given): the study names that value" in text_sweeps(found)
    (plot,) = sweep_plots(study, found)
    assert [series.name for series in plot.series] == ["Dense"]


def test_models_that_took_all_from_another_have_no_length_of_runs() -> None:
    taken = {**sweep_of(10), "runs": [], "curves": {}, "from": "tiny dense"}
    assert "Each model was tuned, by the loss on" in text_sweeps({("Wide", "tiny"): taken})


def test_models_of_one_title_keep_their_own_sweeps(scale: Scale, data: Path, tmp_path: Path) -> None:
    """Titles do not name the dropout. The table of one model must not tell what was chosen for the other."""
    text = "title: Two\nquestion: Which?\nbaseline: A\nrows:\n"
    text += "  A: {method: dense}\n  B: {method: dense, dropout: 0.1, tune: [lr]}\n"
    (tmp_path / "drop.yaml").write_text(text)
    study = read_study("drop", text, "drop")
    tune = Tuning({"lr": [0.01, 0.03], "lr_factors.embeddings": [1, 2]}, steps=2, seed=7)
    run = study_run(tmp_path / "out", replace(scale, tune=tune), data, study)
    assert run.run(lambda text: None).failed == []
    report = StudyReport([run.results], names=[str(tmp_path / "drop.yaml")])
    for (label, _), sweep in report.sweeps(report.studies[0]).items():
        assert list(sweep["chosen"]) == (["lr", "lr_factors.embeddings"] if label == "A" else ["lr"])
        assert "ran" not in sweep


def test_a_run_that_diverges_counts_as_infinitely_bad(scale: Scale, data: Path, tmp_path: Path) -> None:
    wild = Tuning({"lr": [0.01, 1e30]}, steps=3)
    changed = replace(scale, tune=wild, given={**scale.given, "max_skipped": 1, "log_every": 1})
    run = study_run(tmp_path, changed, data, seeds=[1], only=["Dense"])
    outcome = run.run(lambda text: None)
    assert (outcome.failed, outcome.left, outcome.finished) == ([], [], 3)
    (sweep,) = [json.loads(path.read_text()) for path in (tmp_path / "results" / "sweeps").glob("*.json")]
    assert sweep["chosen"] == {"lr": 0.01}
    assert sorted(loss is None for _, loss, _ in sweep["runs"]) == [False, True]
    (tmp_path / "two.yaml").write_text(TEXT)
    report = StudyReport([tmp_path / "results"], names=[str(tmp_path / "two.yaml")])
    assert "2, 1 diverged" in text_sweeps(report.sweeps(report.studies[0]))


def test_a_run_of_a_sweep_that_collapses_stops_and_counts_as_infinitely_bad(
    scale: Scale, data: Path, tmp_path: Path
) -> None:
    """Its loss need not jump from one record to the next."""
    given = {**scale.given, "steps": 12, "eval_every": 2, "log_every": 12}
    changed = replace(scale, tune=Tuning({"lr": [0.01, 1.0]}, steps=12), given=given)
    run = study_run(tmp_path, changed, data, seeds=[1], only=["Dense"])
    assert run.run(lambda text: None).failed == []
    (sweep,) = [json.loads(path.read_text()) for path in (tmp_path / "results" / "sweeps").glob("*.json")]
    assert sweep["chosen"] == {"lr": 0.01}
    (lost,) = [key for _, loss, key in sweep["runs"] if loss is None]
    assert 0 < (read_record(run.results, lost) or {})["step"] < 12


def test_a_sweep_that_fails_leaves_the_other_models_alone(tuned: Scale, data: Path, tmp_path: Path) -> None:
    run = study_run(tmp_path / "out", tuned, data, seeds=[1])
    job = next(job for job in run.plan().tuning() if "dense" in job.title)
    folder = tmp_path / "out" / "runs" / job.folder_name
    folder.mkdir(parents=True)
    (folder / "someone-elses-file").touch()
    outcome = run.run(lambda text: None)
    assert outcome.failed == [job.key]
    assert {r.label for r in read_results(run.results)} == {"AltUp K=2"}


def test_a_run_of_a_sweep_that_was_never_measured_is_told(
    done: tuple[StudyRun, StudyOutcome], tuned: Scale, data: Path, tmp_path: Path
) -> None:
    """Its sweep cannot go on, and neither can the model's own runs."""
    shutil.copytree(done[0].out, tmp_path / "out")
    record = next(
        p for p in (tmp_path / "out/results/runs").glob("*.json") if json.loads(p.read_text()).get("tunes")
    )
    (folder,) = (tmp_path / "out/runs").glob(f"*-{record.stem}")
    record.unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if '"validation"' not in line))
    said: list[str] = []
    outcome = study_run(tmp_path / "out", tuned, data, seeds=[1]).run(said.append)
    assert outcome.failed == [record.stem]
    assert any(f"no evaluation worked; remove {folder} to repeat it" in line for line in said)


def test_a_sweep_begins_with_what_the_model_has(tuned: Scale, data: Path) -> None:
    """A study's own rate for a scale is where its sweep begins; the nearest value counts."""
    assert tuned.tune is not None
    scale = replace(tuned, tune=replace(tuned.tune, start={}))
    for settings, wanted in (({}, 0.06), ({"lr": 0.011}, 0.01)):
        (dense, _) = plan([replace(TWO, settings={"smoke": settings})], scale, data, seeds=[1]).sweeps()
        config = dense.first.settings["config"]
        assert (config["lr"], config["lr_factors"]["embeddings"]) == (wanted, 4)


def test_a_loss_that_jumps_ends_a_run_of_a_sweep(tuned: Scale, data: Path) -> None:
    """What was run before sweeps did that is still known, and a user who says otherwise is heard."""
    sweep = plan([TWO], tuned, data).sweeps()[0]
    assert {job.settings["config"]["on_spike"] for job in sweep.todo} == {"stop"}
    config = PretrainConfig.from_dict({**sweep.first.settings["config"], "on_spike": "ignore"}, "")
    assert sweep.first.key == key_of("pretrain", deciding_fields(config), {}, sweep.first.settings["data"])
    told = plan([TWO], with_settings(tuned, {"on_spike": "skip"}), data).sweeps()[0]
    assert {job.settings["config"]["on_spike"] for job in told.todo} == {"skip"}


def test_lengths_of_a_study_share_a_sweep(tuned: Scale, data: Path) -> None:
    study = shipped()["equal-time"]
    found = plan([study], replace(tuned, given={}), data, seeds=[1], only=["Dense", "AltUp K=2"])
    assert len({trial.size for trial in found.trials}) == 3
    assert [sweep.title for sweep in found.sweeps()] == ["tiny dense", "tiny altup K=2"]
    assert all(trial.waits for trial in found.trials)


def test_what_a_row_or_the_user_sets_is_not_swept(tuned: Scale, data: Path) -> None:
    text = TEXT.replace("k: 2}", "k: 2, lr: 0.05}", 1)
    dense, altup = plan([read_study("own", text, "own")], tuned, data, seeds=[1]).sweeps()
    assert list(dense.grid) == ["lr_factors.embeddings", "lr"]
    assert list(altup.grid) == ["lr_factors.embeddings", "lr_factors.coefficients"]
    text = TEXT.replace("k: 2}", "k: 2, lr_factors: {coefficients: 0.5}}", 1)
    _, altup = plan([read_study("own", text, "own")], tuned, data, seeds=[1]).sweeps()
    assert list(altup.grid) == ["lr_factors.embeddings", "lr"]
    own = {"embeddings": 4, "positions": 4, "vectors": 0.1, "coefficients": 0.5}
    assert altup.first.settings["config"]["lr_factors"] == own
    given = with_settings(tuned, {"lr": 0.02})
    assert all("lr" not in sweep.grid for sweep in plan([TWO], given, data, seeds=[1]).sweeps())


def test_models_with_coefficients_are_those_that_have_them() -> None:
    from altup.models import AltUpT5Config, AltUpT5ForConditionalGeneration
    from altup.models.methods import list_presets
    from altup.nn import coefficient_names

    fixed, dynamic = {"coefficients": "fixed"}, {"coefficients": "dynamic"}
    cases: list[tuple[str, dict[str, Any], int | None]] = [
        *((method, {}, None) for method in list_presets()),
        *((method, fixed, None) for method in ("altup", "sameup+moe", "altup+sequence-altup")),
        *((method, dynamic, None) for method in ("recycled", "altup+sequence-altup")),
        ("dense", {"widening": "altup", "num_blocks": 2}, None),
        ("altup", {"num_blocks": 1}, None),
        ("sequence-altup", {}, 1),
    ]
    for method, overrides, stride in cases:
        shape: dict[str, Any] = {"d_model": 8, "d_ff": 8, "num_layers": 3, "vocab_size": 32, **overrides}
        model = AltUpT5ForConditionalGeneration(AltUpT5Config.from_preset("tiny", method, stride=stride, **shape))
        names = coefficient_names(model)
        told = PretrainConfig(data="text", size="tiny", method=method, stride=stride, model_overrides=shape)
        assert told.has_coefficients == bool(names), (method, overrides)
        scalars = [name for name in names if name.split(".")[-1] in ("P", "g", "a", "b")]
        assert told.has_scalars == bool(scalars), (method, overrides)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tune: {steps: 3, grid: {lr: [0.1]}}", "seed 0 is that of the sweeps"),
        ("seeds: [1]\ntune: {grid: {lr: [0.1]}}", "no steps"),
        ("seeds: [1]\ntune: {steps: 3, grid: {}}", "no grid"),
        ("seeds: [1]\ntune: {steps: 3, grid: {rate: [1]}}", "'rate' is not known"),
        ("seeds: [1]\ntune: {steps: 3, grid: {lr: []}}", "different values"),
        ("seeds: [1]\ntune: {steps: 3, grid: {lr: [1]}, start: {lr: 2}}", "start lr=2"),
        ("seeds: [1]\ntune: {steps: 3, grid: {lr.embeddings: [1]}}", "it has no entries"),
        ("seeds: [1]\ntune: {steps: 3, grid: {lr_factors: [1]}}", "name one of its entries"),
        ("seeds: [1]\ntune: {steps: 3, grid: {lr_factors.heads: [1]}}", "'heads' is not known"),
        ("seeds: [1]\ntune: {steps: 3, grid: {lr: [1]}, rounds: 2}", "rounds"),
        ("seeds: [1]\ntune: {steps: 3, grid: {lr: [1]}, near: [dropout]}", "near='dropout'"),
    ],
)  # fmt: skip
def test_mistakes_in_a_grid_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"like: smoke\n{text}\n")
    with pytest.raises(UserError, match=words):
        find_scale(str(path))


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "like: smoke\nseeds: [1]\ntune: {steps: 3, grid: {lr: [1e-3, 3e-3], lr_factors.head: [1, 1e1]}}\n"
    )
    tune = find_scale(str(path)).tune
    assert tune is not None
    assert tune.grid == {"lr": [0.001, 0.003], "lr_factors.head": [1.0, 10.0]}


def test_a_dry_run_counts_the_sweeps(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 or, at most, 4 + 3 − 1 runs for a model with both settings, and each of two seeds once for two studies."""
    (tmp_path / "own.yaml").write_text(
        "like: smoke\nseeds: [1, 2]\n"
        "tune: {steps: 3, grid: {lr: [0.01, 0.02, 0.03, 0.04], lr_factors.coefficients: [0.1, 1, 3]}}\n"
    )
    (tmp_path / "two.yaml").write_text(TEXT)
    arguments = ["two.yaml", "varying-k", "--scale", "own.yaml", "--data", str(data), "--only", "Dense", "--only"]
    arguments = ["study", "run", *arguments, "AltUp K=2", "--no-finetune", "--no-speed", "--dry-run"]
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    assert "tuning tiny dense: 3 to 4 runs │ new │ 4 × 3" in told
    assert "tuning tiny altup K=2: 5 to 6 runs │ new │ 6 × 3" in told
    assert f"{4 + 6 + 4} jobs at most" in told
    assert "if every sweep ends where it begins" in told
    assert not (tmp_path / "studies" / "runs").exists()


def test_seeds_of_sweeps_are_not_reported(tuned: Scale, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must come from others"):
        study_run(tmp_path, tuned, data, seeds=[0, 1]).plan()


def test_the_long_scale_is_what_was_measured() -> None:
    """T5 of width 256, 4 + 4 layers, Muon; the sweeps begin near what was best at the probe's length."""
    scale, study = find_scale("long"), shipped()["recycled"]
    config = resolve(study, study.row("Dense"), "tiny", scale, 1, "data")
    assert config is not None
    assert (config.optimizer, config.lr, config.schedule, config.warmup_steps, config.decay_fraction) == (
        "muon", 0.06, "constant", 50, 0.8,
    )  # fmt: skip
    assert scale.tune is not None
    for name, value in (("lr", 0.06), ("lr_factors.embeddings", 2), ("lr_factors.coefficients", 1)):
        assert value in scale.tune.grid[name][1:-1]
    assert scale.tune.steps >= config.steps / 2  # a shorter sweep chooses what ends the plateau first
    assert len(scale.seeds) >= 3
    assert 0.16 * config.steps >= 800  # where the plateau ends
    assert config.model_overrides == {"d_model": 256, "d_ff": 512, "d_kv": 32, "num_heads": 8, "num_layers": 4}

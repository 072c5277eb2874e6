"""Models that go on from others: what they inherit, in which order they are tuned, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from altup.core.errors import UserError
from altup.studies.configs import OTHER_ORDER
from altup.studies.report import StudyReport
from altup.studies.results import read_record, read_results
from altup.studies.scale import Scale, Tuning, find_scale
from altup.studies.study import find_study, read_study, shipped
from tests.studies import samples
from tests.studies.samples import plan, study_run

TEXT = (
    "title: Further\nquestion: Which?\nrows:\n  Before: {method: dense}\n"
    "  Dense: {continues: Before, method: dense}\n  AltUp K=2: {continues: Before, method: altup, k: 2}\n"
    "lengths: {smoke: [3]}\nexpect: [{better: AltUp K=2, than: Dense, metric: loss}]\n"
)


@pytest.fixture(scope="module")
def tuned() -> Scale:
    scale = find_scale("smoke")
    del scale.pretrain["lr"]
    grid: dict[str, list[Any]] = {"lr": [0.01, 0.03], "lr_factors.embeddings": [1.0, 2.0]}
    tune = Tuning(grid, steps=2, continuing={"lr": [0.001, 0.003], "lr_factors.coefficients": [1.0, 3.0]})
    return replace(scale, tune=tune, pretrain={**scale.pretrain, "steps": 4, "eval_every": 2})


def configs(found: Any) -> dict[str, dict[str, Any]]:
    return {trial.label: trial.pretrain.settings["config"] for trial in found.trials if trial.pretrain}


def test_who_goes_on_sees_other_batches_at_a_tenth_of_the_rate(data: Path) -> None:
    """The study's length is that of the rows that go on; what they continue has the scale's steps."""
    scale = find_scale("long")
    study = shipped()["continuing"]
    found = plan([study], replace(scale, tune=None), data, seeds=[7])
    by_label = configs(found)
    assert by_label["Before"]["steps"] == scale.pretrain["steps"]
    assert by_label["AltUp K=2"]["steps"] == study.lengths["long"][0]
    assert (by_label["Before"]["seed"], by_label["Dense"]["seed"]) == (7, 7 + OTHER_ORDER)
    assert (by_label["Before"]["lr"], by_label["Dense"]["lr"]) == (0.06, pytest.approx(0.006))
    assert {trial.seed for trial in found.trials} == {7}
    assert [trial.label for trial in found.trials if trial.waits] == [
        "Dense, Recycled's time",
        "Dense, AltUp's time",
    ]
    before = next(trial.pretrain for trial in found.trials if trial.label == "Before")
    assert {trial.parent.job.key for trial in found.trials if trial.parent} == {before.key}
    dense = plan([shipped()["recycled"]], replace(scale, tune=None), data, seeds=[7], only=["Dense"])
    assert dense.trials[0].pretrain.key == before.key


def test_nobody_goes_on_from_a_model_that_collapsed(data: Path) -> None:
    """But from the run that repeats it, which is also the one that is reported; without one from nothing."""
    study, scale = read_study("on", TEXT, "on"), find_scale("smoke")
    lost = next(trial.pretrain for trial in plan([study], scale, data).trials if trial.label == "Before")
    collapsed = {lost.key: True}
    left = plan([study], scale, data, collapsed=collapsed.get)
    assert [trial.is_lost for trial in left.trials] == [False, True, True]
    assert [job.key for job in left.training()] == [lost.key]
    assert left.parents_ahead() == []
    found = plan([study], scale, data, collapsed=collapsed.get, repeat_collapsed=True)
    before, *others = found.trials
    assert (before.collapsed.key, before.pretrain.settings["config"]["on_spike"]) == (lost.key, "skip")
    assert before.pretrain.title == f"{lost.title}, again without spikes"
    assert [trial.pretrain.needs for trial in others] == [(before.pretrain.key,)] * 2
    assert lost.key not in {job.key for job in found.training()}
    collapsed[before.pretrain.key] = False  # it was repeated before, and need not be asked for
    alone = plan([study], scale, data, collapsed=collapsed.get, only=["AltUp K=2"])
    assert [job.key for job in alone.training()] == [before.pretrain.key, others[1].pretrain.key]
    collapsed[before.pretrain.key] = True
    twice = plan([study], scale, data, collapsed=collapsed.get, repeat_collapsed=True)
    assert [trial.is_lost for trial in twice.trials] == [False, True, True]


def test_a_sweep_whose_parent_collapsed_is_left_out(tuned: Scale, data: Path) -> None:
    """It goes on from a dense model of the sweeps' seed; rows that take what it would choose wait in vain too."""
    text = TEXT.replace("k: 2}", "k: 2, tune_from: Dense}")
    study, losses = read_study("on", text, "on"), dict[str, float]()
    while sweeps := plan([study], tuned, data, seeds=[7], losses=losses.get, only=["Before"]).tuning():
        losses |= {job.key: 1.0 for job in sweeps}
    before = plan([study], tuned, data, seeds=[7], losses=losses.get)
    parents = {sweep.parent.job.key for sweep in before.sweeps() if sweep.parent}
    assert len(parents) == 1
    found = plan([study], tuned, data, seeds=[7], losses=losses.get, collapsed=dict.fromkeys(parents, True).get)
    assert [trial.is_lost for trial in found.trials] == [False, True, True]
    assert (found.tuning(), found.parents_ahead(), len(found.training())) == ([], [], 1)


def test_a_model_is_tuned_after_the_one_that_it_continues(tuned: Scale, data: Path) -> None:
    """First the sweep of the dense model, then its training with the sweeps' seed, then the sweeps of those that
    go on, which keep its factor of the embeddings."""
    study, losses = read_study("on", TEXT, "on"), {}

    def look() -> Any:
        return plan([study], tuned, data, seeds=[1], losses=losses.get)

    found = look()
    assert all(trial.waits for trial in found.trials)
    assert {job.settings["config"]["method"] for job in found.tuning()} == {"dense"}
    assert all(not job.needs for job in found.tuning())
    assert plan([study], tuned, data, seeds=[1], only=["AltUp K=2"]).tuning() == found.tuning()
    while not found.sweeps()[0].chosen:
        losses |= {
            job.key: 1 / job.settings["config"]["lr_factors"].get("embeddings", 1) for job in found.tuning()
        }
        found = look()
    parent, *children = found.tuning()
    assert (parent.settings["config"]["seed"], parent.steps, parent.needs) == (0, 4, ())
    assert {job.needs for job in children} == {(parent.key,)}
    assert {job.settings["config"]["method"] for job in children} == {"dense", "altup"}
    for job in (parent, *children):
        assert job.settings["config"]["lr_factors"]["embeddings"] == 2
    while children:
        losses |= {job.key: job.settings["config"]["lr"] for job in children}
        found = look()
        _, *children = found.tuning() or [None]
    by_label = configs(found)
    assert {label: config["lr"] for label, config in by_label.items()} == {
        "Before": pytest.approx(0.03, rel=1), "Dense": 0.001, "AltUp K=2": 0.001,
    }  # fmt: skip
    assert [job.needs for job in found.training()].count((found.trials[0].pretrain.key,)) == 2


def test_tuned_models_go_on(tuned: Scale, data: Path, tmp_path: Path) -> None:
    """Everything is run once, in an order in which it can be; the same command then has nothing left to do."""
    path = tmp_path / "on.yaml"
    alone = TEXT.replace("  Dense: {continues: Before, method: dense}\n", "").replace(
        "than: Dense", "than: Before"
    )
    path.write_text(alone + "baseline: Before\n")
    study, quick = find_study(str(path)), Tuning({"lr": [0.03]}, steps=1, continuing={"lr": [0.003]})
    scale = replace(tuned, tune=quick, pretrain={**tuned.pretrain, "steps": 3, "eval_every": 3})
    run = study_run(tmp_path / "out", scale, data, study, seeds=[1])
    outcome = run.run(lambda text: None)
    # A sweep of one run each, the model that AltUp's goes on from, and the two that are reported.
    assert (outcome.finished, outcome.failed, outcome.left) == (1 + 1 + 1 + 2, [], [])
    rows = {r.label: r for r in read_results(run.results) if r.metric == "loss"}
    assert {r.size for r in rows.values()} == {"tiny, 3 steps"}
    record = read_record(run.results, rows["AltUp K=2"].run)
    assert record is not None
    assert record["continues"] == {"run": rows["Before"].run, "steps": 3}
    assert record["tuned"] == ["lr"]
    again = study_run(tmp_path / "out", scale, data, study, seeds=[1])
    assert again.run(lambda text: None).finished == 0
    elsewhere = {"results": run.results, "seeds": [1, 2], "only": ["AltUp K=2"]}
    more = study_run(tmp_path / "other", scale, data, study, **elsewhere)
    assert [job.settings["config"]["method"] for job in more.todo(more.plan())] == ["dense", "altup"]
    fresh = tmp_path / "two.yaml"  # has the dense model too, and an AltUp that does not go on from it
    fresh.write_text(samples.TEXT)
    report = StudyReport([run.results], names=[str(path), str(fresh)])
    report.write(tmp_path / "report.html", plots=False)
    before = report.stats.mean("on", "Before", "tiny, 3 steps", "loss")
    assert before is not None
    assert report.stats.mean("two", "Dense", "tiny", "loss") == before
    assert report.stats.mean("two", "AltUp K=2", "tiny", "loss") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("Before, method: dense}", "Later, method: dense}"), "'Later' is not known"),
        (("Before: {method: dense}", "Before: {method: altup, k: 2}"), "continue a dense one"),
        (("method: altup, k: 2", "method: sum, k: 2"), "method"),
        (("k: 2}", "k: 2, extra_layers: 1}"), "must agree"),
        (("{continues: Before, method: altup", "{continues: Dense, method: altup"), "continues another"),
        (("{method: dense}", "{method: dense, at: {smoke: null}}"), "which has no size tiny"),
        (("k: 2}", "k: 2, time_of: AltUp K=2}"), "which has another's"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_refused(change: tuple[str, str], words: str, data: Path) -> None:
    with pytest.raises(UserError, match=words):
        plan([read_study("on", TEXT.replace(*change), "on")], find_scale("smoke"), data)

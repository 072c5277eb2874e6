"""Running studies for real, at the smallest scale: nothing twice, nothing lost, results that add up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from altup.core.errors import UserError
from altup.studies import work
from altup.studies.jobs import Job
from altup.studies.results import read_results, write_record
from altup.studies.run import Device, StudyRun
from altup.studies.scale import Scale, Tuning, find_scale, prepare_smoke_tasks, with_settings
from altup.studies.study import RELATIVE, shipped
from altup.training.pretraining import PretrainConfig, pretrain
from tests.processes import start, wait_until
from tests.studies.samples import TEXT, TWO, first_jobs, read_study, record, silent, statistics, study_run
from tests.training.compare import records, weights


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, scale: Scale, data: Path) -> tuple[StudyRun, Any]:
    out = tmp_path_factory.mktemp("study") / "out"
    run = study_run(out, scale, data, speed=True, command="first")
    return run, run.run(silent)


def test_what_is_recorded_is_what_the_runs_say(done: tuple[StudyRun, Any]) -> None:
    run, outcome = done
    assert (outcome.finished, outcome.failed, outcome.remaining, outcome.stopped) == (3, [], [], False)
    rows = {(r.label, r.metric): r for r in read_results(run.results)}
    assert len(rows) == outcome.results
    for label, method in (("Dense", "dense"), ("AltUp K=2", "altup")):
        row = rows[label, "accuracy"]
        folder = next((run.out / "runs").glob(f"*-{row.run}"))
        assert method in folder.name
        last = [r for r in records(folder) if r["split"] == "validation"][-1]
        assert row.value == pytest.approx(100 * last["accuracy"], rel=1e-6)
        assert rows[label, "loss"].value == pytest.approx(last["loss"], rel=1e-6)
        tensors = weights(folder)
        tables = sum(t.numel() for n, t in tensors.items() if "embed_tokens" in n or "lm_head" in n)
        assert rows[label, "embedding_params"].value == tables
        assert rows[label, "non_embedding_params"].value == sum(t.numel() for t in tensors.values()) - tables
        record = run.known.record(row.run)
        assert record is not None
        assert [point[0] for point in record["curves"]["held_out"]] == [1, 2, 3, 4]
        assert len(json.dumps(record)) < 100_000
    blocks = record["coefficients"]["blocks"]
    assert [(b["stack"], b["layer"], b["active"]) for b in blocks] == [
        (stack, layer, layer % 2) for stack in ("encoder", "decoder") for layer in range(3)
    ]
    for b in blocks:
        learned = tensors[f"{b['stack']}.rule.updates.{b['layer']}.P"].flatten().tolist()
        assert [value for line in b["P"] for value in line] == pytest.approx(learned, abs=5.1e-5)
    assert rows["Dense", "relative_speed"].value == 1
    assert rows["Dense", "relative_speed"].setup == rows["AltUp K=2", "relative_speed"].setup != ""
    assert rows["AltUp K=2", "relative_speed"].value > 0
    assert rows["AltUp K=2", "generate_ms"].value > 0


def test_nothing_is_done_twice_and_more_seeds_are_added(
    done: tuple[StudyRun, Any], scale: Scale, data: Path, tmp_path: Path
) -> None:
    """Also in another folder that has the results alone, as on another machine: but not the models."""
    results = shutil.copytree(done[0].results, tmp_path / "results")
    again = study_run(tmp_path / "out", scale, data, results=results, speed=True)
    assert again.run(silent).finished == 0
    more = study_run(tmp_path / "out", scale, data, results=results, seeds=[0, 1], command="second")
    assert more.run(silent).finished == 2
    dense = statistics(read_results(results), "two").mean("two", "Dense", "tiny", "accuracy")
    assert dense is not None
    assert dense.seeds == 2


def test_a_run_that_diverges_is_counted_and_has_no_measure(
    scale: Scale, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AltUp by an error of the loop, dense because its loss ends two nats above its lowest."""
    from altup.core.errors import DivergedError

    def lost(config: PretrainConfig, out: Path, **options: Any) -> Any:
        if config.method == "altup":
            raise DivergedError("too many steps were not finite")
        return pretrain(config, out, **options)

    def two_nats_higher(*arguments: Any) -> Any:
        found = describe(*arguments)
        found["curves"]["held_out"][-1][1] = min(p[1] for p in found["curves"]["held_out"]) + 2
        return found

    describe = work.describe_run
    monkeypatch.setattr("altup.training.pretraining.pretrain", lost)
    monkeypatch.setattr(work, "describe_run", two_nats_higher)
    said: list[str] = []
    run = study_run(tmp_path, scale, data)
    outcome = run.run(said.append)
    assert (outcome.finished, outcome.failed) == (2, [])
    assert any("diverged: tiny altup" in line and "not finite" in line for line in said)
    assert {(r.label, r.metric) for r in read_results(run.results)} == {
        ("Dense", "diverged"),
        ("AltUp K=2", "diverged"),
    }
    assert study_run(tmp_path, scale, data).run(silent).finished == 0  # and it is not tried again


FINE = TEXT + "finetune: [glue, squad]\nfinetune_at: [smoke]\nmeasures: [accuracy, glue, squad_em, squad_f1]\n"


def test_models_are_tuned_trained_and_fine_tuned(scale: Scale, data: Path, tmp_path: Path) -> None:
    """From a plan to results in one go: sweeps keep no weights, and nothing of them is reported."""
    tuned = replace(scale, seeds=[1], tune=Tuning({"lr": [0.01, 0.03]}, steps=2))
    options = {"seeds": [1], "tasks": str(prepare_smoke_tasks(tmp_path)), "only": ["AltUp K=2"]}
    run = study_run(tmp_path / "out", tuned, data, read_study(FINE), **options)
    outcome = run.run(silent)
    assert (outcome.finished, outcome.failed) == (2 + 1 + 2, [])
    rows = {r.metric: r for r in read_results(run.results)}
    assert {"accuracy", "glue", "squad_em", "squad_f1"} <= rows.keys()
    sweeps = [record for record in run.known.records() if "sweep" in record]
    losses = {record["sweep"]["point"]["lr"]: record["measures"]["loss"] for record in sweeps}
    reported = run.known.record(rows["accuracy"].run) or {}
    assert reported["chosen"] == {"lr": min(losses, key=losses.__getitem__)}
    assert reported["config"]["eval_part"] == "reporting"
    assert reported["config"]["lr"] == reported["chosen"]["lr"]
    for swept in sweeps:
        folder = next((run.out / "runs").glob(f"*-{swept['key']}"))
        assert not list(folder.rglob("*.safetensors"))
    scores = run.known.record(rows["glue"].run) or {}
    assert rows["glue"].value == pytest.approx(sum(sum(t.values()) / len(t) for t in scores["tasks"].values()) / 2)


def test_a_model_whose_record_alone_is_here_is_trained_again_for_fine_tuning(
    done: tuple[StudyRun, Any], scale: Scale, data: Path, tmp_path: Path
) -> None:
    results = shutil.copytree(done[0].results, tmp_path / "results")
    study = replace(read_study(FINE), name="two")
    options = {"results": results, "tasks": str(prepare_smoke_tasks(tmp_path)), "only": ["Dense"]}
    outcome = study_run(tmp_path / "out", scale, data, study, **options).run(silent)
    assert (outcome.finished, outcome.failed) == (3, [])


def test_what_fine_tuning_needs_is_asked_for_before_anything_is_trained(
    scale: Scale, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import builtins

    usual = builtins.__import__

    def without_sklearn(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "sklearn":
            raise ImportError(name)
        return usual(name, *arguments, **options)

    monkeypatch.setattr("altup.core.packages.importlib.import_module", without_sklearn)
    tasks = prepare_smoke_tasks(tmp_path)
    run = study_run(tmp_path / "out", scale, data, read_study(FINE), tasks=str(tasks))
    with pytest.raises(UserError, match="pip install scikit-learn"):
        run.run(silent)
    assert not (tmp_path / "out" / "runs").exists()


def test_equal_time_measures_the_speeds_that_it_waits_for(scale: Scale, data: Path, tmp_path: Path) -> None:
    study = read_study(TEXT + "equal_time: AltUp K=2\n")
    run = study_run(tmp_path, scale, data, study)
    outcome = run.run(silent)
    assert (outcome.finished, outcome.failed) == (3, [])
    rows = {(r.label, r.metric): r for r in read_results(run.results)}
    planned = [rows[label, "planned_seconds"].value for label in ("Dense", "AltUp K=2")]
    a_step = planned[0] / rows["Dense", "steps"].value
    assert planned[0] == pytest.approx(planned[1], abs=0.51 * a_step)  # steps are whole numbers
    assert rows["Dense", "steps"].budget == rows["AltUp K=2", "steps"].budget != ""


def test_one_failure_does_not_stop_the_others_and_is_kept(scale: Scale, data: Path, tmp_path: Path) -> None:
    """Until the job has run: the folder of the run is in the way."""
    (first, second) = first_jobs(tmp_path, scale, data)
    first.folder(tmp_path).mkdir(parents=True)
    (first.folder(tmp_path) / "notes.txt").write_text("mine")
    run = study_run(tmp_path, scale, data)
    outcome = run.run(silent)
    assert (outcome.finished, outcome.failed) == (1, [first.title])
    assert [failure["title"] for failure in run.known.failures()] == [first.title]
    assert "notes.txt" in run.known.failures()[0]["reason"]
    (first.folder(tmp_path) / "notes.txt").unlink()
    again = study_run(tmp_path, scale, data)
    assert again.run(silent).finished == 1
    assert again.known.failures() == []
    assert second.title != first.title


def test_a_run_whose_last_evaluation_is_lost_has_no_result(scale: Scale, data: Path, tmp_path: Path) -> None:
    """An earlier evaluation must not be taken for it."""
    job = first_jobs(tmp_path, scale, data)[0]
    config = PretrainConfig.from_dict(job.settings["config"], "a job")
    pretrain(config, job.folder(tmp_path))
    metrics = job.folder(tmp_path) / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if not ('"step": 4' in line and "validation" in line)))
    with pytest.raises(UserError, match="no evaluation of the last step, 4"):
        work.describe_run(config, job.folder(tmp_path), alone=True)


def test_after_the_time_limit_nothing_is_begun(scale: Scale, data: Path, tmp_path: Path) -> None:
    outcome = study_run(tmp_path, scale, data).run(silent, time_limit=1e-6)
    assert (outcome.finished, len(outcome.remaining), outcome.stopped) == (0, 2, False)


def test_what_a_signal_stops_is_remaining(scale: Scale, data: Path, tmp_path: Path) -> None:
    long = with_settings(scale, {"steps": 50_000, "eval_every": 50_000})
    job = first_jobs(tmp_path, long, data)[0]
    metrics = job.folder(tmp_path) / "metrics.jsonl"

    def stop() -> None:
        wait_until(lambda: metrics.exists() and metrics.stat().st_size)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    outcome = study_run(tmp_path, long, data).run(silent)
    assert (outcome.stopped, outcome.finished, len(outcome.remaining)) == (True, 0, 2)


CONTINUED = """
title: More
question: Which?
rows:
  Dense: {method: dense}
  Further: {continues: Dense, method: dense}
  Wide: {continues: Dense, method: altup, k: 2}
  Fresh: {method: altup, k: 2}
  Further by FLOPs: {continues: Dense, method: dense, flops_of: Fresh}
"""


def test_what_a_run_continues_belongs_to_its_length(
    scale: Scale, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rows that continue alike are compared, also where a budget is shared."""

    def pretend(job: Job, out: Path, results: Path, alone: bool) -> bool:
        (job.folder(out) / "final").mkdir(parents=True)
        write_record(results, record(job.key, measures={"loss": 1.0}))
        return True

    monkeypatch.setattr("altup.studies.queue.do_job", pretend)
    study = read_study(CONTINUED)
    run = study_run(tmp_path, scale, data, study)
    assert run.run(silent).finished == 5
    stats = statistics(read_results(run.results), "own")

    def reason(one: str, other: str) -> str:
        return stats.reason_against(study, "tiny", "loss", one, other)

    assert reason("Further", "Dense") == "4 steps of 4 after 4 of 4 against 4 steps of 4"
    assert reason("Wide", "Further") == ""
    assert reason("Wide", "Fresh")
    assert reason("Further by FLOPs", "Fresh")


def test_who_waits_for_a_job_that_failed_is_named(
    scale: Scale, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: Job, *places: Any, **options: Any) -> bool:
        raise UserError("disk full")

    monkeypatch.setattr("altup.studies.queue.do_job", fail)
    said: list[str] = []
    outcome = study_run(tmp_path, scale, data, read_study(CONTINUED), only=["Dense", "Wide"]).run(said.append)
    assert len(outcome.failed) == 1
    assert said[-1] == f"skipped: own: Wide, tiny, seed 0: it waits for {outcome.failed[0]}, which failed"


def test_labels_text_and_tasks_are_checked(scale: Scale, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs text"):
        StudyRun([TWO], find_scale("mini"), tmp_path, tmp_path / "results", [1]).run(silent)
    with pytest.raises(UserError, match="no such folder"):
        study_run(tmp_path, scale, data, tasks="absent").run(silent)


def test_estimates_come_from_flops_or_from_measured_speed(
    done: tuple[StudyRun, Any], scale: Scale, data: Path, tmp_path: Path
) -> None:
    job = first_jobs(tmp_path, scale, data)[0]
    gpu = Device.find("H200")
    by_flops = study_run(tmp_path, scale, data).estimate(gpu)(job) - gpu.start
    twice = replace(job, sequences=2 * job.sequences)
    assert study_run(tmp_path, scale, data).estimate(gpu)(twice) - gpu.start == pytest.approx(2 * by_flops)
    speed = {(r.label, r.metric): r.value for r in read_results(done[0].results)}["Dense", "train_seq_per_s"]
    here = done[0].device
    known = study_run(tmp_path, scale, data, results=done[0].results).estimate(here)(job) - here.start
    assert known == pytest.approx(job.sequences / speed, rel=1e-3)
    with pytest.raises(UserError, match="H200"):
        Device.find("H20")


def test_the_forecast_counts_what_is_not_known_yet(scale: Scale, data: Path, tmp_path: Path) -> None:
    """Sweeps of three runs, runs whose settings they choose, fine-tuning of these, and the comparison of speed."""
    tuned = replace(scale, seeds=[1], tune=Tuning({"lr": [0.01, 0.03], "z_loss": [0.0, 0.1]}, steps=2))
    run = study_run(
        tmp_path, tuned, data, read_study(FINE + "equal_time: AltUp K=2\n"), seeds=[1], dry=True, speed=True,
        tasks=str(prepare_smoke_tasks(tmp_path)),
    )  # fmt: skip
    lines = run.forecast(Device.find("H200"))
    assert [line.runs for line in lines if line.title.startswith("sweep of")] == [3, 3]
    assert len([line for line in lines if " on glue" in line.title]) == 2
    assert len(lines) == 2 * (1 + 1 + 2) + 1
    assert all(line.state == "new" and line.seconds > 0 for line in lines)
    assert sum(line.runs for line in lines) == 6 + 2 + 4 + 1


def test_several_processes_killed_and_resumed(scale: Scale, data: Path, tmp_path: Path) -> None:
    """A study that is killed ends with the weights of one that never was, in processes of their own."""
    (tmp_path / "two.yaml").write_text(TEXT)
    arguments = [
        "study",
        "run",
        tmp_path / "two.yaml",
        "--scale",
        "smoke",
        "--data",
        data,
        "--no-speed",
        "--jobs",
        "2",
    ]
    for setting in ("steps=12", "save_every=1", "eval_every=6", "deterministic=True"):
        arguments += ["--set", setting]
    out = tmp_path / "out"
    running = start(tmp_path / "log", *arguments, "--out", out)
    running.wait_until(lambda: list(out.glob("runs/*/checkpoints/step-2")), "a checkpoint")
    running.signal(signal.SIGKILL)
    running.wait()
    assert start(tmp_path / "again", *arguments, "--out", out).wait() == 0
    whole = study_run(tmp_path / "whole", with_settings(find_scale("smoke"), {
        "steps": 12, "save_every": 1, "eval_every": 6, "deterministic": True}), data)  # fmt: skip
    whole.run(silent)
    found = {r.identity: r.value for r in read_results(out / "results") if r.metric == "loss"}
    assert len(found) == 2
    assert found == {r.identity: r.value for r in read_results(whole.results) if r.metric == "loss"}


@pytest.mark.slow
def test_a_library_study_at_the_smoke_scale(tmp_path: Path) -> None:
    """Which continues dense models in other models' time, with the text and tasks that the scale brings."""
    scale = find_scale("smoke")
    run = StudyRun([shipped()["continuing"]], scale, tmp_path, tmp_path / "results", [0])
    outcome = run.run(silent)
    assert outcome.failed == []
    stats = statistics(read_results(run.results), "continuing")
    verdicts = {v.word for v in stats.verdicts(shipped()["continuing"])}
    assert verdicts == {"one seed, no verdict"}
    assert {r.metric for r in read_results(run.results)} >= {"loss", *RELATIVE}

"""Running studies for real, at the smallest scale: nothing twice, nothing lost, results that add up."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from altup.core.errors import UserError
from altup.studies.forecast import forecast
from altup.studies.jobs import deciding_fields, key_of, speed_key
from altup.studies.report import StudyReport
from altup.studies.results import Result, read_record, read_results, write_results
from altup.studies.run import StudyRun, find_device
from altup.studies.scale import Scale, find_scale, prepare_smoke_tasks, with_settings
from altup.studies.statistics import choose_results
from altup.studies.study import RELATIVE, read_study, shipped
from altup.training.pretraining import PretrainConfig, pretrain
from tests.processes import altup, start, wait_until
from tests.studies.samples import TEXT, TWO, study_run
from tests.training.compare import records, weights


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, scale: Scale, data: Path) -> tuple[StudyRun, Any]:
    out = tmp_path_factory.mktemp("study") / "out"
    run = study_run(out, scale, data, speed=True, command="first")
    return run, run.run(lambda text: None)


def test_what_is_recorded_is_what_the_runs_say(done: tuple[StudyRun, Any]) -> None:
    run, outcome = done
    assert (outcome.finished, outcome.failed, outcome.left, outcome.stopped) == (3, [], [], False)
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
        record = read_record(run.results, row.run)
        assert record is not None
        assert [point[0] for point in record["curves"]["held_out"]] == [2, 4]
        assert len(json.dumps(record)) < 100_000
    blocks = record["coefficients"]["blocks"]
    assert [(b["stack"], b["layer"], b["active"]) for b in blocks] == [
        (stack, layer, layer % 2) for stack in ("encoder", "decoder") for layer in range(3)
    ]
    for b in blocks:
        learned = tensors[f"{b['stack']}.rule.updates.{b['layer']}.P"].flatten().tolist()
        assert [value for line in b["P"] for value in line] == pytest.approx(learned, abs=5.1e-5)
    assert rows["Dense", "relative_speed"].value == 1
    assert rows["AltUp K=2", "relative_speed"].value > 0
    assert rows["AltUp K=2", "generate_ms"].value > 0


def test_a_row_whose_model_was_timed_for_another_has_its_speed(
    done: tuple[StudyRun, Any], scale: Scale, data: Path, tmp_path: Path
) -> None:
    """In another folder with the same results, as on another day. Nothing is timed again, and what the first rows
    have stays."""
    again = TEXT.replace("expect:", "  AltUp again: {method: altup, k: 2, lr: 0.01}\nexpect:")
    study, results = read_study("two", again, "two"), tmp_path / "results"
    shutil.copytree(done[0].results, results)
    before = {(r.label, r.metric): r for r in read_results(results) if r.metric in RELATIVE}
    assert before
    run = study_run(tmp_path / "out", scale, data, study=study, results=results, speed=True)
    assert run.plan().speed == []
    run.run(lambda text: None)
    rows = {(r.label, r.metric): r for r in read_results(results) if r.metric in RELATIVE}
    assert {place: row for place, row in rows.items() if place[0] != "AltUp again"} == before
    first, second = ({m: rows[label, m].value for m in RELATIVE} for label in ("AltUp K=2", "AltUp again"))
    assert first == second


def test_a_run_that_collapsed_is_counted_and_repeated_only_if_asked(
    done: tuple[StudyRun, Any], scale: Scale, data: Path, tmp_path: Path
) -> None:
    """A run that ends three nats above its best, and was not recorded when an earlier command was killed: it is
    told beside the seeds. If the user asks, its seed is run once more, and both stay."""
    run, _ = done
    shutil.copytree(run.out, tmp_path / "out", symlinks=True)
    lost = {(r.label, r.metric): r.run for r in read_results(run.results)}["Dense", "accuracy"]
    record = read_record(run.results, lost)
    assert record is not None
    shutil.rmtree(tmp_path / "out" / "results")
    metrics = next((tmp_path / "out" / "runs").glob(f"*-{lost}")) / "metrics.jsonl"
    *lines, last = map(json.loads, metrics.read_text().splitlines())
    last["loss"] = min(line["loss"] for line in lines if line["split"] == "validation") + 3
    metrics.write_text("".join(json.dumps(line) + "\n" for line in (*lines, last)))
    once = study_run(tmp_path / "out", scale, data)
    assert once.run(lambda text: None).finished == 0
    stats = choose_results(read_results(once.results))
    assert stats.mean("two", "Dense", "tiny", "accuracy") is None
    assert stats.describe_collapses("two", "Dense", "tiny") == "1 collapsed"
    again = study_run(tmp_path / "out", scale, data, repeat_collapsed=True)
    assert again.run(lambda text: None).finished == 1
    rows = [r for r in read_results(again.results) if r.label == "Dense" and r.seed]
    assert [(r.run, r.value) for r in rows if r.metric == "collapse"] == [(lost, pytest.approx(3, abs=1e-4))]
    repeated = {r.run for r in rows} - {lost}
    assert len(repeated) == 1
    config = (read_record(again.results, repeated.pop()) or {})["config"]
    assert config == {**record["config"], "on_spike": "skip"}
    mean = choose_results(read_results(again.results)).mean("two", "Dense", "tiny", "accuracy")
    assert mean is not None
    assert mean.seeds == 1
    for later in (again, once):  # once it was repeated, that counts whatever is asked
        assert later.run(lambda text: None).finished == 0
        assert later.plan().trials[0].collapsed is not None


def test_a_run_that_diverges_is_counted_as_collapsed(scale: Scale, data: Path, tmp_path: Path) -> None:
    """Its gradients are not finite, so that it ends before its last step and has no measure; without a trace of it
    the other seeds would flatter its model."""
    wild = with_settings(scale, {**scale.given, "lr": 1e30, "max_skipped": 2, "log_every": 1})
    run, said = study_run(tmp_path / "out", wild, data, seeds=[0, 1], only=["Dense"]), list[str]()
    outcome = run.run(said.append)
    assert (outcome.finished, outcome.failed, outcome.left) == (2, [], [])
    assert sum("collapsed: " in line and "not finite (max_skipped=2)" in line for line in said) == 2
    found = read_results(run.results)
    assert {(r.seed, r.metric) for r in found} == {("0", "collapse"), ("1", "collapse")}
    for r in found:
        record = read_record(run.results, r.run)
        assert record is not None
        assert "max_skipped=2" in record["diverged"]
        assert 0 < record["step"] < 4
    assert run.run(said.append).finished == 0  # it is known, and not tried again
    (tmp_path / "two.yaml").write_text(TEXT)
    report = StudyReport([run.results], names=[str(tmp_path / "two.yaml")])
    assert report.stats.describe_collapses("two", "Dense", "tiny") == "2 collapsed"
    report.write(tmp_path / "report.html")
    assert "2 collapsed" in (tmp_path / "report.html").read_text()


def test_a_run_that_collapses_stops_and_is_counted_as_if_it_had_gone_on(
    scale: Scale, data: Path, tmp_path: Path
) -> None:
    """Half of its steps are saved. Its key is that of the run that an earlier version trained to its end: that one
    is read, told and repeated in the same way."""
    destroying = {"steps": 12, "eval_every": 2, "log_every": 2, "save_every": 4, "optimizer": "adamw", "lr": 3.0}
    wild, said = with_settings(scale, {**scale.given, **destroying}), list[str]()
    run = study_run(tmp_path / "out", wild, data, only=["Dense"])
    (job,) = run.plan().training()
    config = PretrainConfig.from_dict(job.settings["config"], "")
    assert job.key == key_of("pretrain", deciding_fields(config), {}, job.settings["data"])
    outcome = run.run(said.append)
    assert (outcome.finished, outcome.failed, outcome.left) == (1, [], [])
    assert sum("collapsed: " in line and "twice in a row" in line for line in said) == 1
    record = read_record(run.results, job.key)
    assert record is not None
    assert (record["step"], record["measures"]) == (6, {})
    before = study_run(tmp_path / "before", wild, data, only=["Dense"])
    pretrain(config, job.folder(before.out))
    assert before.run(said.append).finished == 0
    to_its_end = read_record(before.results, job.key)
    assert to_its_end is not None
    assert to_its_end["step"] == 12
    assert to_its_end["curves"]["held_out"][:3] == record["curves"]["held_out"]
    for either in (run, before):
        found = read_results(either.results)
        assert [r.value > 1 for r in found if r.metric == "collapse"] == [True]
        stats = choose_results(found)
        assert stats.describe_collapses("two", "Dense", "tiny") == "1 collapsed"
        assert stats.mean("two", "Dense", "tiny", "loss") is None
        assert either.run(said.append).finished == 0
        again = study_run(either.out, wild, data, only=["Dense"], repeat_collapsed=True)
        (repeated,) = again.todo(again.plan())
        assert repeated.settings["config"] == {**job.settings["config"], "on_spike": "skip"}
    again = study_run(run.out, wild, data, only=["Dense"], repeat_collapsed=True)
    assert again.run(said.append).finished == 1
    told = choose_results(read_results(run.results)).describe_collapses("two", "Dense", "tiny")
    assert told == "1 collapsed, again when repeated"
    assert again.run(said.append).finished == 0


def test_an_equal_time_run_that_collapsed_is_known_when_speeds_have_changed(
    scale: Scale, data: Path, tmp_path: Path
) -> None:
    """Like one that was trained to its end, whose steps other seeds take as well."""
    wild = with_settings(scale, {**scale.given, "steps": 12, "optimizer": "adamw", "lr": 3.0, "log_every": 2})
    run = study_run(tmp_path, wild, data, shipped()["equal-time"], only=["Dense"])
    assert run.run(lambda text: None).failed == []
    (lost,) = [r.run for r in read_results(run.results) if r.metric == "collapse"]
    for path in (tmp_path / "speed").glob("*.json"):  # another machine of the same name
        speed = json.loads(path.read_text())
        speed["train"]["relative"] *= 1.5 if speed["train"]["relative"] != 1 else 1
        path.write_text(json.dumps(speed))
    both = study_run(tmp_path, wild, data, shipped()["equal-time"], only=["Dense"], seeds=[0, 1])
    first, second = [trial.pretrain for trial in both.plan().trials]
    assert first is not None
    assert second is not None
    assert (first.key, first.steps) == (lost, second.steps)


def test_fine_tuning_that_diverges_is_counted_as_collapsed(scale: Scale, data: Path, tmp_path: Path) -> None:
    """Beside the seeds of its model, whose pretraining counts; its other columns are tuned all the same. It is not
    tried again, unless the user asks."""
    settings = {"finetune.max_skipped": 1, "finetune.log_every": 1}
    wild = with_settings(scale, {**scale.given, **settings})
    glue = wild.columns["glue"]
    wild = replace(wild, columns={**wild.columns, "glue": replace(glue, settings={**glue.settings, "lr": 1e30})})
    text = TEXT + "finetune: [glue, squad]\nfinetune_at: [smoke]\nmeasures: [accuracy, glue, squad_f1]\n"
    (tmp_path / "two.yaml").write_text(text)
    tasks, said = prepare_smoke_tasks(tmp_path), list[str]()
    fields = {"tasks": str(tasks), "seeds": [0, 1], "only": ["Dense"]}
    run = study_run(tmp_path / "out", wild, data, read_study("two", text, "two"), **fields)
    jobs = run.plan().training()
    outcome = run.run(said.append)
    assert (outcome.finished, outcome.failed, outcome.left) == (6, [], [])
    assert sum("collapsed: tiny dense" in line and "on glue" in line for line in said) == 2
    found = read_results(run.results)
    assert {(r.seed, r.metric) for r in found if "collapse" in r.metric} == {
        ("0", "collapse_glue"),
        ("1", "collapse_glue"),
    }
    lost = [job for job in jobs if job.settings.get("column") == "glue"]
    for job in lost:
        record = read_record(run.results, job.key)
        assert record is not None
        assert "max_skipped=1" in record["diverged"]
        assert (record["measures"], record["of"]) == ({}, job.settings["of"])
    stats = choose_results(found)
    assert stats.mean("two", "Dense", "tiny", "glue") is None
    for metric in ("accuracy", "squad_f1"):
        mean = stats.mean("two", "Dense", "tiny", metric)
        assert mean is not None
        assert mean.seeds == 2
    told = "fine-tuning on GLUE: 2 collapsed"
    assert stats.describe_collapses("two", "Dense", "tiny") == told
    assert run.run(said.append).finished == 0
    again = study_run(tmp_path / "out", wild, data, run.studies[0], **fields, repeat_collapsed=True)
    repeated = again.todo(again.plan())
    assert [job.settings["config"] for job in repeated] == [
        {**job.settings["config"], "on_spike": "skip"} for job in lost
    ]
    assert again.run(said.append).finished == 2
    assert sum("although spikes were skipped" in line for line in said) == 2
    told += ", 2 of them again when repeated"
    for results in (again, run):  # once it was repeated, that counts whatever is asked
        assert results.run(said.append).finished == 0
        assert choose_results(read_results(run.results)).describe_collapses("two", "Dense", "tiny") == told
    report = StudyReport([run.results], names=[str(tmp_path / "two.yaml")])
    assert report.stats.describe_collapses("two", "Dense", "tiny") == told
    report.write(tmp_path / "report.html", plots=False)
    assert f"2 seeds, {told}" in (tmp_path / "report.html").read_text()


def test_nothing_goes_on_from_a_run_that_diverged(scale: Scale, data: Path, tmp_path: Path) -> None:
    """Neither a model that continues it, nor fine-tuning: they are left out, and that is said."""
    text = "title: Further\nquestion: Which?\nbaseline: Before\nrows:\n  Before: {method: dense, lr: 1e30}\n"
    text += "  AltUp: {method: altup, k: 2, continues: Before}\nfinetune: [glue]\nfinetune_at: [smoke]\n"
    wild = with_settings(scale, {**scale.given, "max_skipped": 1, "log_every": 1})
    run, said = study_run(tmp_path, wild, data, read_study("on", text, "on"), tasks=str(tmp_path)), list[str]()
    plan = run.plan()
    assert [job.kind for job in plan.training()] == ["pretrain", "finetune"] * 2
    outcome = run.run(said.append)
    assert (outcome.finished, outcome.failed, outcome.left) == (1, [], [])
    assert "left out: AltUp, tiny, seed 0, as what it goes on from collapsed" in said
    assert forecast(run, run.plan(), run.device)[-1].title.startswith("tiny dense")


def test_a_run_whose_last_evaluation_is_lost_is_not_recorded(
    done: tuple[StudyRun, Any], scale: Scale, data: Path, tmp_path: Path
) -> None:
    """An earlier one must not stand for it."""
    run, _ = done
    shutil.copytree(run.out / "runs", tmp_path / "runs")
    metrics = next((tmp_path / "runs").glob("*altup*")) / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    again = study_run(tmp_path, scale, data)
    with pytest.raises(
        UserError, match=r"metrics.jsonl has no evaluation of the last step, 4: .* the file was cut"
    ):
        again.run(lambda text: None)


def test_nothing_is_done_twice_and_more_seeds_are_added(
    done: tuple[StudyRun, Any], scale: Scale, data: Path
) -> None:
    run, _ = done
    before = {path: path.stat().st_mtime_ns for path in run.out.glob("runs/*/final/model.safetensors")}
    speeds = {path: path.read_text() for path in run.out.glob("speed/*")}
    again = study_run(run.out, scale, data, speed=True, seeds=[0, 1]).run(lambda text: None)
    assert again.finished == 2
    after = {path: path.stat().st_mtime_ns for path in run.out.glob("runs/*/final/model.safetensors")}
    assert len(after) == 4
    assert before.items() <= after.items()
    assert {path: path.read_text() for path in run.out.glob("speed/*")} == speeds
    found = [r for r in read_results(run.results) if r.metric == "accuracy"]
    assert sorted((r.label, r.seed) for r in found) == [
        ("AltUp K=2", "0"), ("AltUp K=2", "1"), ("Dense", "0"), ("Dense", "1"),
    ]  # fmt: skip


def test_results_of_another_machine_count_as_done(
    done: tuple[StudyRun, Any], scale: Scale, data: Path, tmp_path: Path
) -> None:
    """A folder of results without any run is enough, unless a model is needed for fine-tuning."""
    elsewhere = study_run(tmp_path / "out", scale, data, results=done[0].results, speed=True)
    assert elsewhere.run(lambda text: None).finished == 0
    assert not (tmp_path / "out" / "runs").exists()
    again = replace(TWO, name="again")
    later = study_run(tmp_path / "out", scale, data, again, results=done[0].results, command="later")
    assert later.run(lambda text: None).finished == 0
    (tmp_path / "again.yaml").write_text(TEXT)
    stats = StudyReport([done[0].results], names=[str(tmp_path / "again.yaml")]).stats
    for label in ("Dense", "AltUp K=2"):  # the speeds are shared where results are read
        for metric in {r.metric for r in stats.results}:
            assert stats.mean("again", label, "tiny", metric) == stats.mean("two", label, "tiny", metric)
    commands = {(r.study, r.label): r.command for r in read_results(done[0].results) if r.seed == "0"}
    for label in ("Dense", "AltUp K=2"):  # the one that measured it, not the last that found it done
        assert commands["again", label] == commands["two", label] == f"first --only {shlex.quote(label)}"
    tuned = replace(TWO, name="two", finetune=("glue",), finetune_at=("smoke",))
    pending = study_run(
        tmp_path / "out", scale, data, tuned, results=done[0].results, tasks=str(tmp_path), only=("Dense",)
    )
    assert [job.kind for job in pending.todo(pending.plan())] == ["pretrain", "finetune"]


def test_equal_time_measures_what_it_waits_for(scale: Scale, data: Path, tmp_path: Path) -> None:
    """One row alone is trained too, though its time is that of a row that is not; a row compared in another
    process than the one whose time counts does not wait until the next command."""
    study = shipped()["equal-time"]
    outcome = study_run(tmp_path / "one", scale, data, study, only=["Dense"]).run(lambda text: None)
    assert (outcome.finished, outcome.left) == (2, [])
    assert {r.label for r in read_results(tmp_path / "one" / "results") if r.metric == "steps"} == {"Dense"}
    apart = replace(scale, speed={**scale.speed, "together": 1})
    run = study_run(tmp_path / "apart", apart, data, study, only=["AltUp K=2", "Recycled K=2"])
    assert (run.run(lambda text: None).finished, run.todo(run.plan())) == (4, [])
    timed = study_run(tmp_path / "timed", with_settings(scale, {}, 0.001), data, study, only=["Recycled K=2"])
    assert [len(job.settings["configs"]) for job in timed.plan().speed] == [2]
    assert timed.run(lambda text: None).finished == 2


def test_after_the_time_limit_nothing_is_begun(scale: Scale, data: Path, tmp_path: Path) -> None:
    run = study_run(tmp_path / "out", scale, data)
    outcome = run.run(lambda text: None, time_limit=1e-9)
    assert (outcome.finished, len(outcome.left)) == (0, 2)
    assert not (tmp_path / "out" / "runs").exists()


def test_what_a_signal_stops_is_told_as_left(scale: Scale, data: Path, tmp_path: Path) -> None:
    """In this process too: the run it stopped, those behind it, and the speeds."""
    run = study_run(tmp_path / "out", with_settings(scale, {"steps": 50_000}), data, speed=True)
    plan = run.plan()

    def interrupt() -> None:
        wait_until(lambda: list((tmp_path / "out").glob("runs/*/metrics.jsonl")))
        os.kill(os.getpid(), signal.SIGINT)

    outcome = run.run(lambda text: threading.Thread(target=interrupt).start())  # said of the first run alone
    assert (outcome.finished, outcome.stopped) == (0, True)
    assert outcome.left == [job.key for job in (*plan.training(), *plan.speed)]


def test_damaged_speeds_are_named(scale: Scale, data: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "speed").mkdir(parents=True)
    for text in ("{", "[]", "{}"):
        (tmp_path / "out" / "speed" / "abc.json").write_text(text)
        with pytest.raises(UserError, match=r"abc\.json is not a whole measurement"):
            study_run(tmp_path / "out", scale, data).plan()


def test_one_failure_does_not_stop_the_others(scale: Scale, data: Path, tmp_path: Path) -> None:
    run = study_run(tmp_path / "out", scale, data)
    folder = tmp_path / "out" / "runs"
    dense = next(job for job in run.plan().training() if "dense" in job.title)
    (folder / dense.folder_name).mkdir(parents=True)
    (folder / dense.folder_name / "someone-elses-file").touch()
    said: list[str] = []
    outcome = run.run(said.append)
    assert (outcome.finished, outcome.failed) == (1, [dense.key])
    assert any("someone-elses-file" in line for line in said)


def test_a_model_that_diverged_is_told_without_its_loss(scale: Scale, data: Path, tmp_path: Path) -> None:
    wild = with_settings(scale, {"lr": 1e30})
    run = study_run(tmp_path / "out", wild, data)
    outcome = run.run(lambda text: None)
    assert (outcome.finished, outcome.failed) == (2, [])
    told = {r.metric for r in read_results(run.results)}
    assert {"accuracy", "collapse"} <= told
    assert "loss" not in told
    for label in ("Dense", "AltUp K=2"):  # its loss would be left out of a mean, and its accuracy would not
        assert choose_results(read_results(run.results)).mean("two", label, "tiny", "accuracy") is None
    own = tmp_path / "two.yaml"
    own.write_text(TEXT)
    StudyReport([run.results], names=[str(own)]).write(tmp_path / "report.html")


def test_labels_and_data_are_checked(scale: Scale, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="AltUp K=2"):
        study_run(tmp_path, scale, data, only=("Dens",)).plan()
    with pytest.raises(UserError, match="altup prepare"):
        StudyRun([TWO], find_scale("mini-adamw"), tmp_path, tmp_path / "results", [0]).plan()


def test_estimates_come_from_flops_or_from_measured_speed(scale: Scale, data: Path, tmp_path: Path) -> None:
    run = study_run(tmp_path, find_scale("mini-adamw"), data)
    dense = run.plan().training()[0]
    seconds = run.estimate(find_device("H200"))(dense)
    assert 60 < seconds < 600  # 256,000 sequences of a small model on an H200 take minutes
    slower = run.estimate(find_device("A100"))(dense)
    key = speed_key(
        PretrainConfig.from_dict(dense.settings["config"], "here"),
        run.study_data.vocabulary.padded_size,
        "NVIDIA H200",
    )
    place = {
        "study": "two",
        "label": "Dense",
        "size": "small",
        "seed": "",
        "scale": "mini",
        "data": "",
        "step": "",
    }
    place |= {"unit": "", "versions": "", "date": "", "command": "", "run": key, "hardware": "NVIDIA H200"}
    speeds = {"train_seq_per_s": 1000.0, "relative_speed": 1.0}
    write_results(run.results, [Result(**place, metric=name, value=value) for name, value in speeds.items()])
    measured = study_run(tmp_path, find_scale("mini-adamw"), data).estimate(find_device("H200"))(dense)
    assert measured == pytest.approx(256 + find_device("H200").start)
    assert slower > 2 * seconds - 60
    with pytest.raises(UserError, match="H200"):
        find_device("Abacus")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_several_processes_stopped_or_killed_and_gone_on(data: Path, tmp_path: Path, number: int) -> None:
    """Two runs at a time in processes of their own: both save, even if what started them is killed. The same
    command waits for them and goes on where they stood."""
    out, mine = tmp_path / "out", tmp_path / "two.yaml"
    mine.write_text(TEXT)
    command = ["study", "run", mine, "--scale", "smoke", "--data", data, "--out", out, "--set", "steps=600"]
    command += ["--set", "eval_every=600", "--set", "save_every=600", "--no-speed", "--jobs", "2"]
    running = start(tmp_path / "first.txt", *command)
    running.wait_until(
        lambda: sum("step 20/" in path.read_text() for path in out.glob("logs/*.log")) == 2, "both trained"
    )
    running.signal(number)
    stopped = running.wait()
    if number == signal.SIGTERM:
        assert stopped == 75, running.text
        assert "run the same command again" in running.text
    code, text = altup(tmp_path / "second.txt", *command)
    assert code == 0, text
    assert "2 jobs finished now" in text
    logs = "".join(path.read_text() for path in out.glob("logs/*.log"))
    assert logs.count("resuming from") == 2

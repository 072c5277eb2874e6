"""Running studies for real, at the smallest scale: nothing twice, nothing lost, results that add up."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from altup.core.errors import UserError
from altup.finetuning.config import FinetuneConfig
from altup.studies.estimate import machine
from altup.studies.inputs import identify
from altup.studies.plan import Job, SpeedFacts, deciding_fields, make_plan, resolve, speed_key
from altup.studies.queue import Queue
from altup.studies.results import Result, read_results, read_run_record, write_results
from altup.studies.run import StudyRun
from altup.studies.scale import Scale, find_scale, with_settings
from altup.studies.study import Study, read_study, shipped
from altup.studies.study_report import StudyReport
from altup.training.pretraining import PretrainConfig
from tests.training.compare import records, weights
from tests.training.verbs import altup, prepare_text, start

TEXT = (
    "title: Two\nquestion: Which?\nrows:\n  Dense: {method: dense}\n  AltUp K=2: {method: altup, k: 2}\n"
    "expect: [{better: AltUp K=2, than: Dense}]\n"
)
TWO = read_study("two", TEXT, "two")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def scale() -> Scale:
    return with_settings(find_scale("smoke"), {"steps": 4, "eval_every": 2, "deterministic": True})


def study_run(out: Path, scale: Scale, data: Path, study: Study = TWO, **changes: Any) -> StudyRun:
    fields = {"results": out / "results", "seeds": [0], "data": str(data), "speed": False, **changes}
    return StudyRun([study], scale, out, **fields)


def plan(studies: list[Study], scale: Scale, data: Path, **changes: Any) -> Any:
    fields = {"seeds": [0], "speeds": {}, "chosen_steps": lambda *place: None, "machine": "here", **changes}
    return make_plan(studies, scale, identify(str(data), None), **fields)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, scale: Scale, data: Path) -> tuple[StudyRun, Any]:
    out = tmp_path_factory.mktemp("study") / "out"
    run = study_run(out, scale, data, speed=True, command="first")
    return run, run.run(lambda text: None)


def test_what_is_recorded_is_what_the_runs_say(done: tuple[StudyRun, Any]) -> None:
    run, outcome = done
    assert (outcome.finished, outcome.failed, outcome.left, outcome.stopped) == (3, [], [], False)
    rows = {(r.label, r.metric): r for r in read_results(run.results)}
    assert len(rows) == outcome.rows
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
        record = read_run_record(run.results, row.run)
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
    rows = {(r.study, r.label, r.metric): r.value for r in read_results(done[0].results) if r.seed in ("", "0")}
    copied = {(label, metric) for study, label, metric in rows if study == "again"}
    assert copied == {(label, metric) for study, label, metric in rows if study == "two"}
    assert all(rows["again", label, metric] == rows["two", label, metric] for label, metric in copied)
    commands = {(r.study, r.label): r.command for r in read_results(done[0].results) if r.seed in ("", "0")}
    for label in ("Dense", "AltUp K=2"):  # the one that measured it, not the last that found it done
        assert commands["again", label] == commands["two", label] == f"first --only {shlex.quote(label)}"
    tuned = replace(TWO, name="two", finetune=("glue",), finetune_at=("smoke",))
    pending = study_run(
        tmp_path / "out", scale, data, tuned, results=done[0].results, tasks=str(tmp_path), only=("Dense",)
    )
    assert [job.kind for job in pending.todo(pending.plan())] == ["pretrain", "finetune"]


def test_a_run_is_keyed_by_what_it_computes(scale: Scale, data: Path, tmp_path: Path) -> None:
    def key(study: Study = TWO, scale: Scale = scale, seed: int = 0) -> str:
        cells = plan([study], scale, data, seeds=[seed]).cells
        return next(cell.pretrain.key for cell in cells if cell.label == "AltUp K=2")

    assert key(shipped()["varying-k"]) == key(shipped()["recycled"]) == key()
    assert key(seed=1) != key()
    assert key(scale=with_settings(find_scale("smoke"), {"steps": 5, "eval_every": 2})) != key()
    watched = replace(scale, given={**scale.given, "log_every": 1, "save_every": 2, "deterministic": False})
    assert key(scale=watched) == key()
    other = prepare_text(tmp_path, sentences=3000)
    here, there = identify(str(data), None), identify(str(other), None)
    assert here.identity != there.identity
    moved = tmp_path / "moved"
    other.rename(moved)
    assert identify(str(moved), None).identity == there.identity


def write_tasks(folder: Path, label: int = 1) -> Path:
    """SST-2, large enough that a change in the middle of its file is far from both ends, and CoLA."""
    lines = [f'{{"sentence": "{"so so " * 20}{i}", "label": {i % 2}}}\n' for i in range(2000)]
    lines[1001] = lines[1001].replace('"label": 1', f'"label": {label}')
    for name in ("sst2", "cola"):
        (folder / "glue" / name).mkdir(parents=True)
        for split in ("train", "validation"):
            (folder / "glue" / name / f"{split}.jsonl").write_text("".join(lines if name == "sst2" else lines[:9]))
    return folder


def test_fine_tuning_is_keyed_by_what_the_task_files_hold(scale: Scale, data: Path, tmp_path: Path) -> None:
    tuned = replace(TWO, finetune=("glue", "squad"), finetune_at=("smoke",))

    def keys(tasks: Path | None) -> dict[str, str]:
        inputs = identify(str(data), str(tasks) if tasks else None)
        found = make_plan(
            [tuned], scale, inputs, seeds=[0], only=("Dense",), speeds={}, chosen_steps=lambda *_: None, machine=""
        )
        return {column: job.key for column, job in found.cells[0].finetune.items()}

    here = write_tasks(tmp_path / "here")
    first = keys(here)
    assert keys(write_tasks(tmp_path / "copy")) == first
    assert keys(here.rename(tmp_path / "moved")) == first
    (tmp_path / "moved" / "glue" / "sst2" / "test.jsonl").write_text("nothing that is trained on or scored\n")
    assert keys(tmp_path / "moved") == first
    other = keys(write_tasks(tmp_path / "other", label=0))  # as many bytes, the same beginning and end
    assert other["glue"] != first["glue"]
    assert other["squad"] == first["squad"]
    (tmp_path / "moved" / "glue" / "cola" / "validation.jsonl").write_text("")
    assert keys(tmp_path / "moved")["glue"] not in (first["glue"], other["glue"])


def test_tasks_on_the_hub_keep_the_keys_of_finished_runs(scale: Scale, data: Path) -> None:
    """What is on the hub is known by its name, which the key always held."""
    tuned = replace(TWO, finetune=("glue",), finetune_at=("smoke",))
    cell = plan([tuned], scale, data, only=("Dense",)).cells[0]
    config = FinetuneConfig.from_dict(cell.finetune["glue"].settings["config"], "glue")
    parts = ["finetune", deciding_fields(config), config.eval_limit, cell.pretrain.key]
    before = json.dumps(parts, sort_keys=True)
    assert cell.finetune["glue"].key == hashlib.sha256(before.encode()).hexdigest()[:12]


def test_every_shared_run_is_planned_once(scale: Scale, data: Path) -> None:
    studies = [shipped()[name] for name in ("varying-k", "recycled", "block-selection", "experts")]
    found = plan(studies, scale, data, finetune=False)
    jobs = found.training()
    assert len({job.key for job in jobs}) == len(jobs) == 8
    assert len(found.cells) == 14
    assert [len(job.settings["configs"]) for job in found.speed] == [5, 4]


@pytest.mark.parametrize("name", ["mini", "paper"])
def test_runs_of_a_gpu_are_known_where_there_is_none(
    name: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The precision's default depends on the machine; a finished run must not."""

    def keys() -> set[str]:
        cells = plan([shipped()["recycled"]], find_scale(name), data).cells
        return {
            job.key for cell in cells for job in (cell.pretrain, *cell.finetune.values(), *cell.optional.values())
        }

    found = []
    for gpu in (True, False):
        monkeypatch.setattr("altup.training.config._has_gpu", lambda gpu=gpu: gpu)
        found.append(keys())
    assert found[0] == found[1]
    assert len(found[0]) > 6


def test_speeds_are_compared_with_a_dense_model_trained_alike(scale: Scale, data: Path) -> None:
    """Steps of another batch or length take another time, which says nothing of the model."""
    text = TEXT.replace("k: 2}", "k: 2}\n  Larger batch: {method: altup, k: 2, batch_size: 8}")
    jobs = plan([read_study("three", text, "three")], scale, data).speed
    found = [[(c["method"], c["batch_size"]) for c in job.settings["configs"].values()] for job in jobs]
    assert found == [[("dense", 4), ("altup", 4)], [("dense", 8), ("altup", 8)]]


def test_equal_time_gives_steps_by_speed(scale: Scale, data: Path) -> None:
    """Dense 100 sequences a second, AltUp at 0.8 of it, Recycled at 0.9, batches of 4. AltUp's own 4 steps take
    0.2 seconds, in which dense does 5 and Recycled 4.5; in 0.005 minutes they do 7.5, 6 and 6.75."""
    study, config = shipped()["equal-time"], None
    speeds = {}
    vocabulary = 768
    for row, relative in zip(study.rows, (1.0, 0.8, 0.9), strict=True):
        config = resolve(study, row, "tiny", scale, 0, str(data))
        assert config is not None
        from altup.data.shards import TokenStream

        vocabulary = TokenStream(data, "train").vocabulary.padded_size
        # The absolute speed of the others was taken at another time: only their ratio counts.
        speeds[speed_key(config, vocabulary, "here")] = SpeedFacts(100.0 if relative == 1 else 1e6, relative)
    assert [cell.waits for cell in plan([study], scale, data).cells] == [True, False, True]
    known = plan([study], scale, data, speeds=speeds)
    assert [cell.pretrain.steps for cell in known.cells] == [5, 4, 4]
    assert [cell.seconds for cell in known.cells] == pytest.approx([0.2, 0.2, 4 * 4 / 90])
    given = with_settings(scale, {}, minutes=0.005)
    assert all(cell.waits for cell in plan([study], given, data).cells)
    known = plan([study], given, data, speeds=speeds)
    assert [cell.pretrain.steps for cell in known.cells] == [8, 6, 7]
    assert known.cells[1].seconds == pytest.approx(0.3)
    chosen = plan([study], scale, data, chosen_steps=lambda study, label, size: 11)
    assert [cell.pretrain.steps for cell in chosen.cells] == [11, 11, 11]


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


def test_other_starts_change_the_coefficients_and_nothing_else(scale: Scale, data: Path, tmp_path: Path) -> None:
    import torch

    from altup.studies.plan import run_folder
    from altup.studies.work import work
    from altup.training.metrics import read_records

    study = shipped()["initialisation"]
    cells = {cell.label: cell for cell in plan([study], scale, data).cells}
    usual, other = cells["AltUp K=2"].pretrain, cells["g = 1 if active"].pretrain
    assert usual.key != other.key
    from altup.studies.starts import begin_with
    from altup.training.pretraining import PretrainConfig

    for name, job in (("usual", usual), ("other", other)):
        config = PretrainConfig.from_dict(job.settings["config"], name)
        begin_with(config, job.settings["start"] or {}, tmp_path / name)
    start = [weights_at(tmp_path / name / "checkpoints/step-0") for name in ("usual", "other")]
    differ = {name for name in start[0] if not torch.equal(start[0][name], start[1][name])}
    assert differ == {name for name in start[0] if name.endswith(".g")}
    assert start[1]["encoder.rule.updates.1.g"].tolist() == [0.0, 1.0]
    assert start[0]["encoder.rule.updates.1.g"].tolist() == [1.0, 1.0]
    assert work(other, tmp_path)
    folder = run_folder(tmp_path, other)
    assert [r["step"] for r in read_records(folder / "metrics.jsonl") if r["split"] == "validation"] == [2, 4]
    learned = weights(folder)["encoder.rule.updates.1.g"]
    assert not torch.equal(learned, start[1]["encoder.rule.updates.1.g"])
    assert (learned - start[1]["encoder.rule.updates.1.g"]).abs().max() < 0.5


def weights_at(checkpoint: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")


@pytest.mark.parametrize("start", [{"q": "active"}, {"g": "large"}])
def test_unknown_starts_are_refused(start: dict[str, str]) -> None:
    from altup.studies.starts import check_start

    with pytest.raises(UserError, match="not known"):
        check_start(start)


def test_after_the_time_limit_nothing_is_begun(scale: Scale, data: Path, tmp_path: Path) -> None:
    run = study_run(tmp_path / "out", scale, data)
    outcome = run.run(lambda text: None, time_limit=1e-9)
    assert (outcome.finished, len(outcome.left)) == (0, 2)
    assert not (tmp_path / "out" / "runs").exists()


def test_what_the_time_limit_stops_and_all_behind_it_is_left(scale: Scale, data: Path, tmp_path: Path) -> None:
    jobs = plan([TWO], with_settings(scale, {"steps": 50_000}), data, seeds=[0, 1]).training()
    queue = Queue(
        tmp_path, lambda text: None, lambda job: None, width=2, isolated=True, until=time.monotonic() + 1
    )
    queue.run(jobs)
    assert (len(jobs), sorted(queue.left)) == (4, sorted(job.key for job in jobs))


def test_jobs_of_one_device_take_turns_and_ctrl_c_loses_nothing(scale: Scale, data: Path, tmp_path: Path) -> None:
    """A terminal's Ctrl-C goes to every process of its group."""
    settings = {"steps": 50_000, "save_every": 50_000, "eval_every": 50_000, "log_every": 1}
    jobs = plan([TWO], with_settings(scale, settings), data).training()
    script = (
        "import json, os, sys\nfrom pathlib import Path\nfrom altup.studies.plan import Job\n"
        "from altup.studies.queue import Queue\nos.setpgrp()\n"
        "jobs = [Job(**fields) for fields in json.loads(sys.argv[1])]\n"
        "queue = Queue(Path(sys.argv[2]), print, print, width=2, devices=['0'], isolated=True)\nqueue.run(jobs)\n"
        "assert sorted(queue.left) == sorted(job.key for job in jobs)\n"
    )
    arguments = [json.dumps([asdict(job) for job in jobs]), str(tmp_path)]
    running = subprocess.Popen([sys.executable, "-c", script, *arguments])

    def said(words: str) -> int:
        return sum(words in path.read_text() for path in tmp_path.glob("logs/*.log"))

    end = time.monotonic() + 120
    while not (said("step 20/") and said("waiting for its turn")):
        assert time.monotonic() < end
        assert running.poll() is None
        time.sleep(0.1)
    assert said("step 2/") == 1
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(60) == 0
    saved = sorted(int(path.name.partition("-")[2]) for path in tmp_path.glob("runs/*/checkpoints/step-*"))
    assert (len(saved), saved[0]) == (2, 1)
    assert saved[1] >= 20


def test_what_waits_on_one_device_is_counted_by_the_time_limit(scale: Scale, data: Path, tmp_path: Path) -> None:
    """Each is thought to take 100 s of the 250 there are, so the third begins when others have ended sooner."""
    jobs = plan([TWO], scale, data, seeds=[0, 1]).training()[:3]
    events: list[str] = []
    queue = Queue(
        tmp_path, lambda text: events.append("begins"), lambda job: events.append("ends"), lambda job: 100,
        width=3, devices=["0"], isolated=True, until=time.monotonic() + 250,
    )  # fmt: skip
    queue.run(jobs)
    assert events[:3] == ["begins", "begins", "ends"]
    assert (events.count("begins"), events.count("ends"), queue.left) == (3, 3, [])


def test_what_a_signal_stops_is_told_as_left(scale: Scale, data: Path, tmp_path: Path) -> None:
    """In this process too: the run it stopped, those behind it, and the speeds."""
    run = study_run(tmp_path / "out", with_settings(scale, {"steps": 50_000}), data, speed=True)
    plan = run.plan()
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    outcome = run.run(lambda text: timer.start())  # said of the first run alone
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
    assert "accuracy" in told
    assert "loss" not in told
    own = tmp_path / "two.yaml"
    own.write_text(TEXT)
    StudyReport([run.results], names=[str(own)]).write(tmp_path / "report.html")


def test_what_needs_a_failed_model_is_left_out(tmp_path: Path) -> None:
    queue = Queue(tmp_path, lambda text: None, lambda job: None)
    queue.failed.append("a")
    queue.run([Job("finetune", "b", "b", {}, needs=("a",))])
    assert queue.failed == ["a", "b"]


def test_labels_and_data_are_checked(scale: Scale, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="AltUp K=2"):
        study_run(tmp_path, scale, data, only=("Dens",)).plan()
    with pytest.raises(UserError, match="altup prepare"):
        StudyRun([TWO], find_scale("mini"), tmp_path, tmp_path / "results", [0]).plan()


def test_estimates_come_from_flops_or_from_measured_speed(scale: Scale, data: Path, tmp_path: Path) -> None:
    run = study_run(tmp_path, find_scale("mini"), data)
    dense = run.plan().training()[0]
    seconds = run.estimate(machine("H200"))(dense)
    assert 60 < seconds < 600  # 256,000 sequences of a small model on an H200 take minutes
    slower = run.estimate(machine("A100"))(dense)
    key = speed_key(
        PretrainConfig.from_dict(dense.settings["config"], "here"),
        run.inputs.vocabulary.padded_size,
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
    measured = study_run(tmp_path, find_scale("mini"), data).estimate(machine("H200"))(dense)
    assert measured == pytest.approx(256 + machine("H200").start)
    assert slower > 2 * seconds - 60
    with pytest.raises(UserError, match="H200"):
        machine("Abacus")


@pytest.mark.slow
def test_several_processes_stopped_and_gone_on(data: Path, tmp_path: Path) -> None:
    """Two runs at a time in processes of their own: a signal makes both save, and the same command goes on."""
    out, mine = tmp_path / "out", tmp_path / "two.yaml"
    mine.write_text(TEXT)
    command = ["study", "run", mine, "--scale", "smoke", "--data", data, "--out", out, "--set", "steps=600"]
    command += ["--set", "eval_every=600", "--set", "save_every=600", "--no-speed", "--jobs", "2"]
    running = start(tmp_path / "first.txt", *command)
    end = time.monotonic() + 120
    while sum("step 20/" in path.read_text() for path in out.glob("logs/*.log")) < 2:
        assert time.monotonic() < end, running.text
        time.sleep(0.1)
    running.signal(signal.SIGTERM)
    assert running.wait() == 75, running.text
    assert "run the same command again" in running.text
    code, text = altup(tmp_path / "second.txt", *command)
    assert code == 0, text
    assert "2 jobs finished now" in text
    logs = "".join(path.read_text() for path in out.glob("logs/*.log"))
    assert logs.count("resuming from") == 2

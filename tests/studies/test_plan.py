"""Plans: what makes runs the same, nothing planned twice, and steps for equal time."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from altup.finetuning.config import FinetuneConfig
from altup.studies.configs import resolve
from altup.studies.jobs import StudyData, deciding_fields, speed_key
from altup.studies.plan import KnownSpeed
from altup.studies.scale import Scale, Tuning, find_scale, with_settings
from altup.studies.study import Study, read_study, shipped
from tests.processes import prepare_text
from tests.studies.samples import TEXT, TWO, plan


def test_a_run_is_keyed_by_what_it_computes(scale: Scale, data: Path, tmp_path: Path) -> None:
    def key(study: Study = TWO, scale: Scale = scale, seed: int = 0) -> str:
        trials = plan([study], scale, data, seeds=[seed]).trials
        return next(trial.pretrain.key for trial in trials if trial.label == "AltUp K=2")

    assert key(shipped()["varying-k"]) == key(shipped()["recycled"]) == key()
    assert key(seed=1) != key()
    assert key(scale=with_settings(find_scale("smoke"), {"steps": 5, "eval_every": 2})) != key()
    watched = replace(scale, given={**scale.given, "log_every": 1, "save_every": 2, "deterministic": False})
    assert key(scale=watched) == key()
    other = prepare_text(tmp_path, sentences=3000)
    here, there = StudyData.prepared(str(data), None), StudyData.prepared(str(other), None)
    assert here.identity != there.identity
    moved = tmp_path / "moved"
    other.rename(moved)
    assert StudyData.prepared(str(moved), None).identity == there.identity


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
        trial = plan([tuned], scale, data, tasks, only=("Dense",)).trials[0]
        return {column: job.key for column, job in trial.finetune.items()}

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
    trial = plan([tuned], scale, data, only=("Dense",)).trials[0]
    config = FinetuneConfig.from_dict(trial.finetune["glue"].settings["config"], "glue")
    parts = ["finetune", deciding_fields(config), config.eval_limit, trial.pretrain.key]
    before = json.dumps(parts, sort_keys=True)
    assert trial.finetune["glue"].key == hashlib.sha256(before.encode()).hexdigest()[:12]


def test_every_shared_run_is_planned_once(scale: Scale, data: Path) -> None:
    studies = [shipped()[name] for name in ("varying-k", "recycled", "block-selection", "experts")]
    found = plan(studies, scale, data, finetune=False)
    jobs = found.training()
    assert len({job.key for job in jobs}) == len(jobs) == 8
    assert len(found.trials) == 14
    assert [len(job.settings["configs"]) for job in found.speed] == [5, 4]


@pytest.mark.parametrize("name", ["mini-adamw", "paper"])
def test_runs_of_a_gpu_are_known_where_there_is_none(
    name: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The precision's default depends on the machine; a finished run must not."""

    def keys() -> set[str]:
        return {job.key for job in plan([shipped()["recycled"]], find_scale(name), data).training()}

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
    """Dense 100 sequences a second, AltUp at 0.8 of it, Recycled at 0.9, Sequence-AltUp at 1.6, batches of
    4. AltUp's own 4 steps take 0.2 seconds, in which dense does 5, Recycled 4.5 and Sequence-AltUp 8; in 0.005
    minutes they do 7.5, 6, 6.75 and 12."""
    study, config = shipped()["equal-time"], None
    speeds = {}
    vocabulary = 768
    for row, relative in zip(study.rows, (1.0, 0.8, 0.9, 1.6), strict=True):
        config = resolve(study, row, "tiny", scale, 0, str(data))
        assert config is not None
        from altup.data.shards import TokenStream

        vocabulary = TokenStream(data, "train").vocabulary.padded_size
        # The absolute speed of the others was taken at another time: only their ratio counts.
        speeds[speed_key(config, vocabulary, "here")] = KnownSpeed(100.0 if relative == 1 else 1e6, relative)
    assert [trial.waits for trial in plan([study], scale, data).trials] == [True, False, True, True]
    known = plan([study], scale, data, speeds=speeds)
    assert [trial.pretrain.steps for trial in known.trials] == [5, 4, 4, 8]
    assert [trial.seconds for trial in known.trials] == pytest.approx([0.2, 0.2, 4 * 4 / 90, 0.2])
    given = with_settings(scale, {}, minutes=0.005)
    assert all(trial.waits for trial in plan([study], given, data).trials)
    known = plan([study], given, data, speeds=speeds)
    assert [trial.pretrain.steps for trial in known.trials] == [8, 6, 7, 12]
    assert known.trials[1].seconds == pytest.approx(0.3)
    chosen = plan([study], scale, data, chosen_steps=lambda study, label, size: 11)
    assert [trial.pretrain.steps for trial in chosen.trials] == [11, 11, 11, 11]


def test_equal_time_at_several_lengths(data: Path) -> None:
    """Each length is compared for itself: AltUp has its steps, and the others as many as fit into its time."""
    study, scale = shipped()["equal-time"], find_scale("smoke")
    assert [variant.steps for variant in scale.variants_of(study)] == [4, 12, 32]
    speeds = {}
    for row, relative in zip(study.rows, (1.0, 0.5, 0.9, 2.0), strict=True):
        config = resolve(study, row, "tiny", scale, 0, str(data))
        assert config is not None
        key = speed_key(config, StudyData.prepared(str(data), None).vocabulary.padded_size, "here")
        speeds[key] = KnownSpeed(100.0, relative)
    found = plan([study], scale, data, speeds=speeds)
    steps = {(trial.label, trial.size): trial.pretrain.steps for trial in found.trials if trial.pretrain}
    assert [steps["AltUp K=2", f"tiny, {n} steps"] for n in (4, 12, 32)] == [4, 12, 32]
    assert [steps["Dense", f"tiny, {n} steps"] for n in (4, 12, 32)] == [8, 24, 64]
    assert [steps["Sequence-AltUp", f"tiny, {n} steps"] for n in (4, 12, 32)] == [16, 48, 128]
    assert len(found.trials) == len(steps) == 12
    seconds = {(trial.label, trial.size): trial.seconds for trial in found.trials}
    assert seconds["Dense", "tiny, 32 steps"] == pytest.approx(32 * 4 / 50)
    assert [variant.name for variant in with_settings(scale, {"steps": 5}).variants_of(study)] == ["tiny"]


def test_equal_time_by_speeds_that_a_study_gives(data: Path) -> None:
    """They need not be measured, and count whatever was measured or run since."""
    text = TEXT + "equal_time: AltUp K=2\nspeeds: {Dense: 1, AltUp K=2: 0.8}\nlengths: {smoke: [4, 9]}\n"
    study, scale = read_study("given", text, "given"), find_scale("smoke")
    found = plan([study], scale, data, chosen_steps=lambda *place: 77)
    assert not any(trial.waits for trial in found.trials)
    steps = [(trial.label, trial.size, trial.pretrain.steps) for trial in found.trials if trial.pretrain]
    assert steps == [
        ("Dense", "tiny, 4 steps", 5), ("AltUp K=2", "tiny, 4 steps", 4),
        ("Dense", "tiny, 9 steps", 11), ("AltUp K=2", "tiny, 9 steps", 9),
    ]  # fmt: skip
    assert all(trial.waits for trial in plan([study], with_settings(scale, {}, minutes=0.1), data).trials)
    swept = plan([study], replace(scale, tune=Tuning({"lr": [0.01, 0.02, 0.03]}, steps=3)), data)
    assert all(trial.waits for trial in swept.trials)  # for their sweeps
    assert not swept.speed_first()


def test_jobs_are_in_order_of_seeds(scale: Scale, data: Path) -> None:
    """Every row of a seed before the next seed, so that models can be compared when the time ends early; a model
    that others continue just before the first of them."""
    found = plan([TWO], scale, data, seeds=[3, 1])
    assert [(trial.label, trial.seed) for trial in found.trials] == [
        ("Dense", 3), ("AltUp K=2", 3), ("Dense", 1), ("AltUp K=2", 1),
    ]  # fmt: skip
    assert [job.key for job in found.training()] == [job.key for trial in found.trials for job in trial.jobs]
    going_on = plan([shipped()["continuing"]], scale, data, seeds=[3, 1], only=["Dense", "AltUp K=2"]).training()
    of_seed = [job.settings["config"]["seed"] % 1000 for job in going_on]
    assert of_seed == [3] * 3 + [1] * 3
    assert [len(job.needs) for job in going_on] == [0, 1, 1] * 2

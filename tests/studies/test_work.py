"""Runs that do not begin with fresh weights: other coefficients, or the model of another run, widened."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from altup.core.errors import UserError
from altup.data.shards import TokenStream
from altup.models.upcycling import load_pretrained
from altup.studies.jobs import fresh_model, read_job
from altup.studies.results import ResultFolders, note_failure, read_record, write_json
from altup.studies.scale import Scale, with_settings
from altup.studies.study import STARTS, shipped
from altup.studies.work import STARTERS, begin, do_job
from altup.training.metrics import read_records
from altup.training.pretraining import PretrainConfig
from tests.studies.samples import TEXT, first_jobs, read_study, record, study_run
from tests.training.compare import weights


def test_every_start_that_a_study_may_name_is_there() -> None:
    assert {(name, value) for name, values in STARTS.items() for value in values} == set(STARTERS)


def test_a_comparison_of_speed_that_runs_has_failed_no_more(
    scale: Scale, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records have the keys of its models."""
    *_, job = first_jobs(tmp_path, scale, data, speed=True)
    assert job.kind == "speed"
    note_failure(tmp_path, job.key, job.title, "out of memory")
    monkeypatch.setattr(
        "altup.studies.speed.measure_speed", lambda configs, **timing: {key: {} for key in configs}
    )
    assert do_job(job, tmp_path, tmp_path, alone=True)
    assert ResultFolders([tmp_path]).failures() == []


def test_other_starts_change_the_coefficients_and_nothing_else(scale: Scale, data: Path, tmp_path: Path) -> None:
    labels = ["AltUp K=2", "g = 1 if active"]
    usual, other = first_jobs(tmp_path, scale, data, shipped()["initialisation"], only=labels)
    assert usual.key != other.key
    config = PretrainConfig.from_dict(usual.settings["config"], "usual")
    begin(usual, config, tmp_path)
    assert not usual.folder(tmp_path).exists()
    begin(other, PretrainConfig.from_dict(other.settings["config"], "other"), tmp_path)
    fresh = fresh_model(config, TokenStream(data, "train").vocabulary).state_dict()
    start = [fresh, weights_at(other.folder(tmp_path) / "checkpoints/step-0")]
    assert start[1].keys() <= start[0].keys()
    differ = {name for name in start[1] if not torch.equal(start[0][name], start[1][name])}
    assert differ == {name for name in start[1] if name.endswith(".g")}
    assert start[1]["encoder.rule.updates.1.g"].tolist() == [0.0, 1.0]
    assert start[0]["encoder.rule.updates.1.g"].tolist() == [1.0, 1.0]
    assert do_job(other, tmp_path, tmp_path / "results", alone=True)
    folder = other.folder(tmp_path)
    assert [r["step"] for r in read_records(folder / "metrics.jsonl") if r["split"] == "validation"] == [
        1,
        2,
        3,
        4,
    ]
    learned = weights(folder)["encoder.rule.updates.1.g"]
    assert not torch.equal(learned, start[1]["encoder.rule.updates.1.g"])
    assert (learned - start[1]["encoder.rule.updates.1.g"]).abs().max() < 0.5


def test_a_widened_model_begins_as_the_model_it_continues(scale: Scale, data: Path, tmp_path: Path) -> None:
    """It computes the same at step 0; a run that was killed resumes to the same bits, also without its parent."""
    often = with_settings(scale, {**scale.given, "save_every": 2, "keep_last": 3})
    results = tmp_path / "results"
    run = study_run(tmp_path, often, data, shipped()["continuing"], seeds=[3], only=["AltUp K=2"])
    (parent,) = run.plan.todo()
    run.known._records[parent.key] = record(parent.key, measures={"loss": 1.0})
    job = run.plan.trials[0].jobs()[""]
    assert job.needs == (parent.key,)
    with pytest.raises(UserError, match="pretrained model is not in"):
        do_job(job, tmp_path, results, alone=True)
    assert do_job(parent, tmp_path, results, alone=True)
    assert do_job(job, tmp_path, results, alone=True)
    kept = read_record(results / "runs" / f"{job.key}.json")
    assert (kept["continues"], kept["measures"]["steps"]) == (parent.key, 4)
    folder = job.folder(tmp_path)
    dense, wide, trained = (
        load_pretrained(str(place)).eval()
        for place in (parent.folder(tmp_path) / "final", folder / "checkpoints/step-0", folder / "final")
    )
    assert (dense.config.num_blocks, wide.config.num_blocks, trained.config.num_blocks) == (1, 2, 2)
    ids = torch.arange(3, 27).reshape(2, 12)
    before, start, after = (model(input_ids=ids, decoder_input_ids=ids).logits for model in (dense, wide, trained))
    assert torch.allclose(before, start, atol=1e-5)
    assert not torch.allclose(before, after, atol=1e-3)
    assert [r["step"] for r in read_records(folder / "metrics.jsonl") if r["split"] == "validation"] == [
        1,
        2,
        3,
        4,
    ]

    whole = weights(folder)
    for place in (folder / "final", folder / "checkpoints/step-4", parent.folder(tmp_path)):
        shutil.rmtree(place)
    assert do_job(job, tmp_path, results, alone=True)
    assert all(torch.equal(tensor, weights(folder)[name]) for name, tensor in whole.items())


def weights_at(checkpoint: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")


@pytest.mark.parametrize("start", ["{q: active}", "{g: large}"])
def test_unknown_starts_are_refused(start: str) -> None:
    with pytest.raises(UserError, match="not known"):
        read_study(TEXT.replace("k: 2}", f"k: 2, start: {start}}}"))


def test_a_job_is_read_as_it_was_written(scale: Scale, data: Path, tmp_path: Path) -> None:
    for number, job in enumerate(first_jobs(tmp_path, scale, data, speed=True)):
        path = tmp_path / f"{number}.json"
        write_json(path, asdict(job))
        assert read_job(path) == job
        for text in (
            "{",
            "[]",
            '{"kind": "x"}',
            path.read_text().replace(f'"kind":"{job.kind}"', '"kind":"dance"'),
        ):
            path.write_text(text)
            with pytest.raises(UserError, match="does not describe a job"):
                read_job(path)

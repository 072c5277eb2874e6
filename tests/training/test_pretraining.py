"""`pretrain`: what joins data, model and loop, and how a run tells that one of them has changed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from altup.cli.main import app
from altup.core.errors import UserError
from altup.core.files import sha256_of
from altup.data.prepare import Recipe, prepare
from altup.data.shards import hashes
from altup.data.text_files import LocalFiles
from altup.data.tokenizer import vocabulary
from altup.training.checkpoints import read_state
from altup.training.pretraining import PretrainConfig, pretrain
from tests.data.conftest import edit_manifest
from tests.processes import prepare_text

SMALL: dict[str, Any] = {
    "size": "tiny", "model_overrides": {"d_model": 16, "d_ff": 32, "num_layers": 1}, "inputs_length": 32,
    "batch_size": 4, "steps": 4, "log_every": 2, "eval_every": 4, "eval_sequences": 6, "save_every": 2,
    "precision": "fp32",
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert pretrain(PretrainConfig(data=str(data), **SMALL), out).finished
    return out


@pytest.fixture
def stopped(trained: Path, tmp_path: Path) -> Path:
    """The run as it was after two of its four steps."""
    out = tmp_path / "stopped"
    shutil.copytree(trained, out)
    shutil.rmtree(out / "final")
    shutil.rmtree(out / "checkpoints/step-4")
    return out


def test_a_checkpoint_is_sealed_with_its_model_and_data(trained: Path, stopped: Path, data: Path) -> None:
    """A run of another width, or on other text, does not go on from it, whatever became of config.yaml."""
    (stopped / "config.yaml").unlink()
    for name, other in (
        ("size", {"size": "small"}),
        ("model_overrides.d_model", {"model_overrides": {"d_model": 32, "d_ff": 32, "num_layers": 1}}),
        ("batches.data", {"data": str(prepare_text(stopped.parent, sentences=3000))}),
    ):
        config = PretrainConfig(**{"data": str(data), **SMALL, **other})
        with pytest.raises(UserError, match=rf"(?s)other settings or data than those of now:.*\n  {name}: "):
            pretrain(config, stopped, resume=True)
    sealed = read_state(trained / "checkpoints/step-4").config
    assert sealed is not None
    assert sealed["batches"]["data"]
    moved = data.with_name("moved")
    shutil.copytree(data, moved)
    assert pretrain(PretrainConfig(data=str(moved), **SMALL), stopped, resume=True).finished


def test_a_lost_config_is_read_from_the_checkpoint(stopped: Path, trained: Path, tmp_path: Path) -> None:
    """`--resume` needs no other option; damage of the newest does not matter."""
    (stopped / "config.yaml").unlink()
    (stopped / "checkpoints/step-3").mkdir()
    (stopped / "checkpoints/step-3/training_state.json").write_text("{")
    result = CliRunner().invoke(app, ["pretrain", "--out", str(stopped), "--resume"])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load((stopped / "config.yaml").read_text()) == yaml.safe_load(
        (trained / "config.yaml").read_text()
    )


@pytest.fixture
def copied(data: Path, tmp_path: Path) -> Path:
    """Data that may be damaged."""
    return Path(shutil.copytree(data, tmp_path / "data"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def test_other_bytes_between_two_lives_are_noticed(stopped: Path, copied: Path) -> None:
    config = PretrainConfig(data=str(copied), **SMALL)
    for name, told in (
        ("train-00000.bin", "has other content than was written; run the same `altup prepare`"),
        ("validation-00000.bin", "has other content than was written"),
        ("tokenizer/tokenizer.json", "is missing or not the one the shards were made with"),
    ):
        whole = (copied / name).read_bytes()
        flip(copied / name)
        with pytest.raises(UserError, match=rf"{name} {told}"):
            pretrain(config, stopped, resume=True)
        (copied / name).write_bytes(whole)
    assert pretrain(config, stopped, resume=True).finished


def test_all_bytes_are_read_if_so_asked(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of text in a dozen shards, of which the sample is one."""
    monkeypatch.setattr("altup.data.shards.SAMPLE", 1)
    recipe = Recipe(
        [LocalFiles(data.parent / "text.txt", "text")],
        validation_fraction=0.05,
        vocab_size=600,
        shard_tokens=3_000,
    )
    prepare(tmp_path / "data", recipe, workers=1)
    config = PretrainConfig(data=str(tmp_path / "data"), **{**SMALL, "steps": 1})
    assert pretrain(config, tmp_path / "run").finished
    flip(tmp_path / "data/train-00005.bin")
    for _ in range(8):
        with pytest.raises(UserError, match=r"train-00005.bin has other content than was written"):
            pretrain(replace(config, verify_data=True), tmp_path / "run", resume=True)


def test_an_id_beyond_the_vocabulary_is_a_sentence(copied: Path, tmp_path: Path) -> None:
    """In data whose hashes agree, as another program may have made it."""
    shard = copied / "train-00000.bin"
    content = np.fromfile(shard, "<u2")
    content[:] = 65_535
    content.tofile(shard)
    edit_manifest(
        copied, lambda content: content["segments"][0]["shards"]["train"].update(sha256=sha256_of(shard))
    )
    with pytest.raises(UserError, match=r"train-00000.bin has the id 65,535, but the vocabulary only"):
        pretrain(PretrainConfig(data=str(copied), **SMALL), tmp_path / "run")


def test_roles_of_tokens_changed_between_two_lives_are_noticed(copied: Path, tmp_path: Path) -> None:
    """Not one byte of the shards differs, and every hash fits: the weights alone would."""
    config = PretrainConfig(data=str(copied), **{**SMALL, "steps": 2})
    assert pretrain(config, tmp_path / "run").finished
    settings = copied / "tokenizer/tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"eos_token": "</s>"', '"eos_token": "<unk>"'))
    roles, sums = vocabulary(copied / "tokenizer").to_json(), hashes(copied / "tokenizer")
    edit_manifest(copied, lambda content: content.update(vocabulary=roles, tokenizer=sums))
    with pytest.raises(UserError, match=r"batches\.vocabulary"):
        pretrain(replace(config, verify_data=True, steps=3), tmp_path / "run", resume=True)

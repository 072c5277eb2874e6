"""The same settings train the same model, whether they come by the command line, by Python or from a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import altup
from altup.cli.main import app
from tests.evaluation.tiny_models import save_llama
from tests.processes import prepare_text
from tests.training.compare import assert_same_bits, weights

SHAPE = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2}
SETTINGS: dict[str, Any] = {
    "size": "tiny", "method": "altup", "k": 2, "steps": 4, "batch_size": 4, "inputs_length": 32, "eval_every": 1,
    "eval_sequences": 4, "save_every": 4, "log_every": 2, "deterministic": True, "precision": "fp32",
    "trackers": ["none"], "compile": False, "keep_last": 1, "keep_best": False,
}  # fmt: skip
FLAGS = {"trackers": "--track"}


def options(settings: dict[str, Any]) -> list[str]:
    """The settings as `--steps 4`."""
    found = []
    for name, value in settings.items():
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        if isinstance(value, bool):
            found.append(flag if value else flag.replace("--", "--no-"))
        else:
            found += [flag, *(value if isinstance(value, list) else [str(value)])]
    return found


def run(*arguments: object) -> None:
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output


def config_of(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "config.yaml").read_text())


def assert_same_training(one: Path, other: Path) -> None:
    assert config_of(one) == config_of(other)
    assert_same_bits(weights(one), weights(other))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("data"))


def test_pretraining(data: Path, tmp_path: Path) -> None:
    """Nobody names an optimizer, a rate, or the factors that a T5 begins with."""
    shape = [word for name, value in SHAPE.items() for word in ("--set", f"{name}={value}")]
    run("pretrain", "--data", data, "--out", tmp_path / "flags", *options(SETTINGS), *shape)
    assert config_of(tmp_path / "flags")["lr_factors"] == {"embeddings": 4.0, "positions": 4.0, "vectors": 0.1}

    settings = {**SETTINGS, "model_overrides": SHAPE}
    altup.pretrain(altup.PretrainConfig(data=str(data), **settings), tmp_path / "python")
    assert_same_training(tmp_path / "python", tmp_path / "flags")

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    run("pretrain", "--data", data, "--out", tmp_path / "file", "--config", tmp_path / "run.yaml")
    assert_same_training(tmp_path / "file", tmp_path / "flags")

    rows = {"AltUp": {"method": "altup", "k": 2}}
    study = {"title": "One", "question": "Which?", "baseline": "AltUp", "rows": rows}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(study))
    pretrain = {name: value for name, value in SETTINGS.items() if name not in ("size", "method", "k")}
    pretrain |= dict.fromkeys(("optimizer", "lr", "schedule"))  # nothing, where the scale says something
    scale = {"like": "smoke", "shapes": {"tiny": {"expert_hidden": None, **SHAPE}}, "pretrain": pretrain}
    (tmp_path / "four.yaml").write_text(yaml.safe_dump(scale))
    run(
        *("study", "run", tmp_path / "one.yaml", "--scale", tmp_path / "four.yaml", "--data", data),
        *("--out", tmp_path / "study", "--no-speed", "--no-finetune"),
    )
    (of_study,) = (tmp_path / "study" / "runs").iterdir()
    assert_same_training(of_study, tmp_path / "flags")


def test_fine_tuning_a_causal_model(tmp_path: Path) -> None:
    """Nobody names AdamW or its rate, which a T5 would not have."""
    model, task = save_llama(tmp_path / "model"), tmp_path / "own.jsonl"
    task.write_text('{"input": "a", "target": "b"}\n{"input": "b", "target": "a"}\n')
    settings = {
        **{name: SETTINGS[name] for name in ("deterministic", "precision", "trackers")},
        **{"steps": 2, "batch_size": 2, "inputs_length": 32, "targets_length": 8},
    }
    run("finetune", model, "--task", task, "--out", tmp_path / "flags", *options(settings))
    assert (config_of(tmp_path / "flags")["optimizer"], config_of(tmp_path / "flags")["lr"]) == ("adamw", 1e-4)
    config = altup.FinetuneConfig(model=str(model), tasks=[str(task)], **settings)
    altup.finetune(config, tmp_path / "python")
    assert_same_training(tmp_path / "python", tmp_path / "flags")
    altup.finetune(config, tmp_path / "python", resume=True)  # completed again, from the checkpoint
    assert_same_training(tmp_path / "python", tmp_path / "flags")

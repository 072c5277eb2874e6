"""How a run learns by default: T5s by the paper's recipe, other models by one of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from altup.cli.main import app
from altup.core.errors import UserError
from altup.finetuning.config import FinetuneConfig
from altup.models.widening.folders import widen_folder
from tests.evaluation.tiny import save_tiny
from tests.evaluation.tiny_models import save_bart, save_bert, save_llama, save_t5


def recipe(config: FinetuneConfig) -> tuple[Any, ...]:
    return config.optimizer, config.lr, config.schedule, config.weight_decay


@pytest.mark.parametrize(
    ("save", "flags", "expected"),
    [
        (save_tiny, {}, ("adafactor", 1e-3, "constant", 0)),
        (save_tiny, {"optimizer": "adamw"}, ("adamw", 1e-3, "constant", 0.01)),
        (save_tiny, {"lr": 2e-3}, ("adafactor", 2e-3, "constant", 0)),
        (save_t5, {}, ("adafactor", 1e-3, "constant", 0)),
        (save_bart, {}, ("adamw", 1e-4, "constant", 0.01)),
        (save_llama, {}, ("adamw", 1e-4, "constant", 0.01)),
        (save_llama, {"lr": 2e-3, "beta2": 0.98}, ("adamw", 2e-3, "constant", 0.01)),
        (save_bert, {}, ("adamw", 1e-4, "constant", 0.01)),
        (save_bert, {"optimizer": "adamw"}, ("adamw", 1e-4, "constant", 0.01)),
        (save_bert, {"optimizer": None, "lr": None}, ("adamw", 1e-4, "constant", 0.01)),
        (save_bert, {"optimizer": "adafactor"}, ("adafactor", 1e-3, "constant", 0)),
    ],
)
def test_the_recipe_is_by_kind_of_model_and_flags_win(
    save: Any, flags: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path
) -> None:
    save(tmp_path)
    values = {"model": str(tmp_path), "tasks": ["sst2"], **flags}
    for config in (FinetuneConfig(**values), FinetuneConfig.resolve({}, None, values)):
        found = config.for_model(str(tmp_path))
        assert recipe(found) == expected
        assert found.for_model(str(tmp_path)) == replace(found) == found


def test_coefficients_of_a_widened_model_have_the_rate_of_parameter_groups(tmp_path: Path) -> None:
    place = save_llama(tmp_path / "model")
    widen_folder(str(place), tmp_path / "wide", "recycled", 2, seed=0)

    def factors(model: str, **flags: Any) -> dict[str, float]:
        return FinetuneConfig(**{"model": model, "tasks": ["sst2"], **flags}).for_model(model).lr_factors

    wide = str(tmp_path / "wide")
    assert factors(str(place)) == {}
    assert factors(wide) == {"coefficients": 10}
    assert factors(wide, lr=2e-3) == {"coefficients": pytest.approx(5)}
    assert factors(wide, lr_factors={"head": 2.0}) == {"head": 2, "coefficients": 10}
    assert factors(wide, lr_factors={"coefficients": 1.0}) == {"coefficients": 1}


def test_t5s_are_refused_what_adafactor_has_not(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with pytest.raises(UserError, match=r"beta1=0\.9 is for 'adamw'"):
        FinetuneConfig(model=str(tmp_path), tasks=["sst2"], beta1=0.9).for_model(str(tmp_path))


def test_a_run_says_and_saves_its_recipe(tmp_path: Path) -> None:
    model, own, out = save_llama(tmp_path / "model"), tmp_path / "own.jsonl", tmp_path / "run"
    own.write_text('{"input": "a", "target": "b"}\n')
    arguments = ["finetune", str(model), "--task", str(own), "--out", str(out), "--batch-size", "1"]
    lengths = ["--inputs-length", "32", "--targets-length", "8", "--track", "none"]
    done = CliRunner().invoke(app, [*arguments, *lengths, "--steps", "1"])
    assert done.exit_code == 0, done.output
    assert "adamw at 0.0001, " in done.output
    assert yaml.safe_load((out / "config.yaml").read_text())["lr"] == 1e-4

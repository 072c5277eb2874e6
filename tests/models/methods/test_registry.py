"""A method is one file: what this one registers is there everywhere, as from `altup/models/methods/`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import altup
from altup.cli.main import app
from altup.core.errors import UserError, check_range
from altup.models.methods import Preset, Widening, list_presets, register, unregister
from altup.nn.coefficients import CoefficientModule, coefficient
from altup.nn.rule import Reading, Rule
from altup.training.optimizers.build import build_optimizer
from altup.training.optimizers.config import OptimizerConfig
from tests.processes import prepare_text
from tests.training.compare import assert_same_run, weights


class Scale(CoefficientModule):
    """One learned number a layer."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.s = coefficient(1)
        self.start = start
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.s, self.start)


class HalfRule(Rule):
    """x ← s · layer(x)."""

    def __init__(self, num_layers: int, start: float) -> None:
        super().__init__()
        self.updates = nn.ModuleList(Scale(start) for _ in range(num_layers))

    def lift(self, embeddings: Tensor) -> Tensor:
        return embeddings.unsqueeze(0)

    def read(self, state: Any, site: int) -> Reading:
        return Reading(state[0])

    def write(self, state: Any, site: int, residual: Tensor | None, update: Tensor, kept: Any = None) -> Any:
        new = update if residual is None else residual + update
        return ((new * self.updates[site].s).to(new.dtype),)  # type: ignore[operator]

    def lower(self, state: Any) -> Tensor:
        return state[0]


class Half(Widening):
    name = "half"
    presets: ClassVar = {"halved": Preset("a toy that scales every layer", {"widening": "half"})}
    settings: ClassVar = {"half_start": 0.5}
    has_blocks = False

    def check(self, config: Any) -> None:
        super().check(config)
        check_range("half_start", config.half_start, 0, 2)

    def build_rule(self, config: Any, num_layers: int, lowering: str | None) -> Rule:
        return HalfRule(num_layers, config.half_start)

    def has_coefficients(self, config: Any) -> bool:
        return True

    def parameters(self, config: Any, layer: Any) -> int:
        return 1

    def flops(self, config: Any, layer: Any) -> int:
        return 2 * layer.state_tokens * config.d_model


@pytest.fixture(autouse=True)
def _half() -> Iterator[None]:
    register(Half)
    yield
    unregister(Half)


SHAPE = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2, "vocab_size": 64}


def test_it_is_named_and_described() -> None:
    assert "halved" in list_presets()
    shown = CliRunner(env={"COLUMNS": "300", "TERM": "dumb"}).invoke(app, ["pretrain", "--help"]).output
    assert "halved (a toy that scales every layer)" in shown
    shown = CliRunner().invoke(app, ["params", "--size", "tiny", "--method", "halved", "--json"]).output
    assert '"coefficients": 8' in shown
    with pytest.raises(UserError, match="there is no such field"):
        altup.AltUpT5Config.from_preset("tiny", "halved", half_stat=0.1)
    with pytest.raises(UserError, match="half_start=7 makes no sense"):
        altup.AltUpT5Config.from_preset("tiny", "halved", half_start=7)
    with pytest.raises(UserError, match=r"k=3 does not fit method='halved', which widens nothing"):
        altup.AltUpT5Config.from_preset("tiny", "halved", k=3)


def test_it_is_counted_as_it_is_built() -> None:
    dense = altup.AltUpDecoderConfig.from_preset("tiny", "dense", **SHAPE)
    config = altup.AltUpDecoderConfig.from_preset("tiny", "halved", **SHAPE, half_start=0.25)
    model = altup.AltUpDecoderForCausalLM(config)
    assert altup.account(config).total == sum(p.numel() for p in model.parameters())
    assert altup.account(config).flops_forward - altup.account(dense).flops_forward == 2 * 2 * 512 * 16
    assert {update.s.item() for update in model.model.rule.updates} == {0.25}


def test_its_numbers_have_a_group_of_their_own() -> None:
    model = altup.AltUpDecoderForCausalLM(altup.AltUpDecoderConfig.from_preset("tiny", "halved", **SHAPE))
    config = OptimizerConfig(
        optimizer="muon", weight_decay=0.1, coefficient_decay=4.0, lr_factors={"coefficients": 3}
    )
    (own,) = [group for group in build_optimizer(config, model).param_groups if group["pull"]]
    assert {id(p) for p in own["params"]} == {id(update.s) for update in model.model.rule.updates}
    assert (own["weight_decay"], own["lr_factor"], own["growth"]) == (0, 3, 1)


def test_it_trains_is_saved_and_resumes(tmp_path: Path) -> None:
    data = prepare_text(tmp_path)
    shape = {name: value for name, value in SHAPE.items() if name != "vocab_size"}
    config = altup.PretrainConfig(
        data=str(data), model="decoder", size="tiny", method="halved",
        model_overrides={**shape, "half_start": 0.7},
        steps=4, batch_size=4, inputs_length=32, eval_sequences=4, eval_every=2, save_every=2, log_every=1,
        deterministic=True, precision="fp32", trackers=["none"],
    )  # fmt: skip
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    altup.pretrain(config, whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("altup.training.loop.Engine.step", _failing_at(2))
        with pytest.raises(RuntimeError, match="pulled the plug"):
            altup.pretrain(config, stopped)
    altup.pretrain(config, stopped, resume=True)
    assert_same_run(whole, stopped, 4)
    learned = weights(whole)["model.rule.updates.0.s"]
    assert learned != torch.tensor([0.7])
    again = altup.AltUpDecoderForCausalLM.from_pretrained(whole / "final")
    assert again.config.half_start == 0.7
    assert torch.equal(again.model.rule.updates[0].s.detach(), learned)


def _failing_at(failing: int) -> Any:
    from altup.training.engine import Engine

    step = Engine.step

    def run(self: Any, number: int, *rest: Any) -> None:
        if number == failing:
            raise RuntimeError("pulled the plug")
        step(self, number, *rest)

    return run

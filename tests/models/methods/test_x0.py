"""x0: every layer reads λ·x + μ·x₀; with λ = 1 and μ = 0, as it starts, the model is the dense one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import altup
from altup.core.errors import UserError
from altup.models.families import FAMILIES
from altup.studies.study import Row
from tests.models.helpers import SHAPE, batch, tiny, tiny_t5
from tests.processes import prepare_text
from tests.training.compare import assert_same_run, weights


def build(family: str, method: str) -> Any:
    return tiny_t5(method) if family == "t5" else tiny(family, method)


def stacks(model: Any) -> list[Any]:
    return [model.encoder, model.decoder] if hasattr(model, "encoder") else [model.base_model]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_starts_as_the_dense_model_and_every_number_learns(family: str) -> None:
    dense, model = build(family, "dense"), build(family, "x0")
    model.load_state_dict(dense.state_dict(), strict=False)
    mixtures = [mixture for stack in stacks(model) for mixture in stack.rule.mixtures]
    for mixture in mixtures:
        mixture.reset_parameters()
    got = model(**batch(family))
    torch.testing.assert_close(got.logits, dense(**batch(family)).logits)
    got.loss.backward()
    assert all((mixture.weights.grad != 0).all() for mixture in mixtures)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_read_the_mixture(family: str) -> None:
    model = build(family, "x0").double()
    for stack in stacks(model):
        first: list[Any] = []
        before: list[Any] = []  # each layer's output
        for index, layer in enumerate(stack.layers):
            if not index:
                layer.register_forward_pre_hook(lambda _, given, kept=first: kept.append(given[0]))

            def check(_: Any, given: Any, output: Any, index: int = index, stack: Any = stack,
                      first: list[Any] = first, before: list[Any] = before) -> None:  # fmt: skip
                of_x, of_first = stack.rule.mixtures[index].weights.double()
                x0 = first[0] / sum(stack.rule.mixtures[0].weights.double())
                want = of_x * (before[-1] if before else x0) + of_first * x0
                torch.testing.assert_close(given[0], want, rtol=1e-6, atol=1e-6)
                before.append(sum(part for part in output if part is not None))

            layer.register_forward_hook(check)
        stack.seen = before
    model(**batch(family))
    assert all(len(stack.seen) == len(stack.layers) for stack in stacks(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_counted_as_it_is_built(family: str) -> None:
    model = build(family, "x0")
    assert altup.account(model.config).total == sum(p.numel() for p in set(model.parameters()))


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    shape = {name: value for name, value in SHAPE.items() if name not in ("vocab_size", "num_heads")}
    config = altup.PretrainConfig(
        data=str(prepare_text(tmp_path)), model="decoder", size="tiny", method="x0",
        model_overrides={**shape, "num_heads": 2, "num_kv_heads": 1},
        steps=4, batch_size=4, inputs_length=32, eval_sequences=4, eval_every=2, save_every=2, log_every=1,
        deterministic=True, precision="fp32", trackers=["none"],
    )  # fmt: skip
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    altup.pretrain(config, whole)
    with pytest.MonkeyPatch.context() as patch:
        from altup.training.engine import Engine

        step = Engine.step
        patch.setattr(
            Engine, "step", lambda self, number, *rest: step(self, number, *rest) if number < 3 else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            altup.pretrain(config, stopped)
    altup.pretrain(config, stopped, resume=True)
    assert_same_run(whole, stopped, 4)
    assert (weights(whole)["model.rule.mixtures.0.weights"] != torch.tensor([1.0, 0.0])).all()


def test_where_it_does_not_fit_it_says_so() -> None:
    with pytest.raises(UserError, match="method='x0'"):
        altup.upcycle(tiny("decoder"), "x0")
    with pytest.raises(UserError, match="k=2 does not fit method='x0'"):
        altup.AltUpDecoderConfig.from_preset("tiny", "x0", k=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_one_is_not_taken_for_dense(family: str) -> None:
    """Neither widened further nor handed to Hugging Face's class, which has no place for λ and μ."""
    model = build(family, "x0")
    for change in (lambda: altup.upcycle(model, "altup"), lambda: altup.upcycle(model, "dense")):
        with pytest.raises(UserError, match="widening='x0'"):
            change()
    with pytest.raises(UserError, match="widening='x0'"):
        import_module(f"altup.models.{family}.convert").to_hugging_face(model)


def test_it_can_be_a_row_of_a_study() -> None:
    assert Row("x0", {"method": "x0"}).identity["method"] == "x0"

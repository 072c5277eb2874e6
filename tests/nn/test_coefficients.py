"""Which parameters are coefficients of an update rule, and which stay float32: nn answers, and others agree."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from altup.models import AltUpT5Config, AltUpT5ForConditionalGeneration
from altup.nn import AltUp, CoefficientModule, DynamicAltUp, PartialExperts, SequenceAltUp, coefficient_names


def test_coefficients_are_the_parameters_of_the_rules():
    model = nn.ModuleDict(
        {
            "static": AltUp(2, 2),
            "dynamic": DynamicAltUp(2, 1, width=4),
            "sequence": SequenceAltUp(nn.Linear(4, 4), 2),
            "experts": PartialExperts(4, 3),
        }
    )
    assert coefficient_names(model) == {
        *(f"static.updates.{layer}.{name}" for layer in range(2) for name in "Pg"),
        *(f"dynamic.updates.0.{name}" for name in ("norm", "R", "A", "C")),
        "sequence.update.a",
        "sequence.update.b",
    }


@pytest.mark.parametrize("k", [1, 3])
def test_a_rule_by_itself(k):
    assert len(coefficient_names(AltUp(k, 5))) == (10 if k > 1 else 0)


def test_a_half_precision_model_keeps_them_wide_and_hugging_face_knows_them_by_name():
    config = AltUpT5Config.from_preset("tiny", "altup+sequence-altup+moe", k=2, experts=3)
    with torch.device("meta"):
        model = AltUpT5ForConditionalGeneration(config).to(torch.bfloat16)
    wide = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, CoefficientModule)]
    assert wide == {f"{name}.{own}" for name, module in modules for own, _ in module.named_parameters()}
    kept = set(model._keep_in_fp32_modules_strict)
    assert wide == {name for name, _ in model.named_parameters() if kept & set(name.split("."))}
    assert {name for name in wide if ".router." not in name} == coefficient_names(model)

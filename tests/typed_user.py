"""A user's file, for the type checker alone: mypy reads it beside the package, and nothing runs it.

An `ignore` here marks what a user's mypy must find. It finds nothing wrong with a name that is `Any`, and then
complains of the `ignore` that is not needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import torch
from torch import nn

import altup
from altup.evaluation.evaluate import Evaluation
from altup.models.accounting import Accounting
from altup.training.loop import TrainOutcome

altup.wyden  # type: ignore[attr-defined]  # noqa: B018

# Modules for a transformer of one's own.
rule = altup.AltUp(num_blocks=2, num_layers=6)
assert_type(rule, altup.AltUp)
state = rule.lift(torch.zeros(1, 2, 8))
assert_type(state, torch.Tensor)
assert_type(rule(state, nn.Linear(4, 4), 0), torch.Tensor)
blocks = (state[0], state[1])
assert_type(altup.DynamicAltUp(2, 6, 8)(blocks, nn.Linear(4, 4), 0), tuple[torch.Tensor, ...])
assert_type(altup.FixedAltUp(2, 6)(blocks, nn.Linear(4, 4), 0), tuple[torch.Tensor, ...])
rule(state, nn.Linear(4, 4), index="0")  # type: ignore[arg-type]
assert_type(altup.SequenceAltUp(nn.Linear(4, 4), 2)(state[0]), torch.Tensor)
assert_type(altup.StrideAndSkip(nn.Linear(4, 4), 2)(state[0]), torch.Tensor)
assert_type(altup.AveragePooling(2)(state[0], mask=None), torch.Tensor)
assert_type(altup.PartialExperts(4, 2)(state[0]), torch.Tensor)
altup.AltUp(blocks=2)  # type: ignore[call-arg]
no_module: str = altup.DynamicAltUp(2, 6, 8)  # type: ignore[assignment]
for module in (
    altup.SequenceAltUp,
    altup.StrideAndSkip,
    altup.AveragePooling,
    altup.PartialExperts,
):
    kind: type[nn.Module] = module
    no_kind: type[str] = module  # type: ignore[assignment]

# Models.
config = altup.AltUpT5Config.from_preset("tiny", "altup", k=2)
assert_type(config, altup.AltUpT5Config)
assert_type(altup.AltUpBertConfig.from_preset("tiny"), altup.AltUpBertConfig)
assert_type(altup.AltUpDecoderConfig.from_preset("tiny"), altup.AltUpDecoderConfig)
altup.AltUpT5Config.from_preset("tiny", k="two")  # type: ignore[arg-type]
no_model: str = altup.AltUpT5ForConditionalGeneration(config)  # type: ignore[assignment]
for model_class in (
    altup.AltUpBertForMaskedLM,
    altup.AltUpBertForSequenceClassification,
    altup.AltUpBertModel,
    altup.AltUpDecoderForCausalLM,
    altup.AltUpDecoderModel,
    altup.AltUpT5EncoderModel,
):
    no_model_kind: type[str] = model_class  # type: ignore[assignment]

# Models that others wrote.
model: nn.Module = nn.Linear(2, 2)
altup.widen(model, "recycled", num_blocks="two")  # type: ignore[arg-type]
altup.narrow(3)  # type: ignore[arg-type]
altup.load_widened(3)  # type: ignore[arg-type]
altup.upcycle("google/t5-v1_1-small", num_block=2)  # type: ignore[call-arg]
altup.register_handler("GPT2LMHeadModel", 3)  # type: ignore[arg-type]
altup.Structure(3, 4)  # type: ignore[arg-type]
assert_type(altup.describe(model), str)
torch.optim.AdamW(altup.parameter_groups(model, lr=5e-5, weight_decay=0.01))
altup.parameter_groups(model, rate=5e-5)  # type: ignore[call-arg]
assert_type(altup.WideTrainerMixin.coefficient_factor, float | None)
assert_type(altup.accelerate(nn.Linear(2, 2), head=False), nn.Linear)
assert_type(altup.skip_modules("google/gemma-3n-E2B"), list[str])
assert_type(altup.explain(nn.Linear(2, 2)).as_dict(), dict[str, list[dict[str, Any]]])
assert_type(altup.decelerate(nn.Linear(2, 2)), nn.Linear)
altup.accelerate(model, heads=True)  # type: ignore[call-arg]

# The verbs as functions.
run = altup.PretrainConfig(data="data", steps=100, method="altup", k=2)
altup.PretrainConfig(step=100)  # type: ignore[call-arg]
assert_type(altup.pretrain(run, Path("runs/altup")), TrainOutcome)
altup.Loop(steps=3)  # type: ignore[call-arg]
tuning = altup.FinetuneConfig(model="runs/altup", tasks=["squad"])
assert_type(altup.finetune(tuning, "runs/squad", resume=True), TrainOutcome)
assert_type(altup.evaluate("runs/squad", ["squad"], config=altup.EvaluateConfig(limit=100)), Evaluation)
altup.EvaluateConfig(limits=100)  # type: ignore[call-arg]
assert_type(altup.account(config), Accounting)
assert_type(altup.__version__, str)
refused: type[ValueError] = altup.UserError

"""Weights that are made parameter by parameter are, bit for bit, those of a model that is built in one go."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from altup.models.bert.config import AltUpBertConfig
from altup.models.bert.model import AltUpBertForMaskedLM
from altup.models.decoder.config import AltUpDecoderConfig
from altup.models.decoder.model import AltUpDecoderForCausalLM
from altup.models.methods import PRESETS
from altup.models.t5.config import AltUpT5Config
from altup.models.t5.model import AltUpT5ForConditionalGeneration
from altup.training.deferred import NotDeferredError, defer_weights

FAMILIES: dict[str, tuple[Any, Any]] = {
    "t5": (AltUpT5Config, AltUpT5ForConditionalGeneration),
    "bert": (AltUpBertConfig, AltUpBertForMaskedLM),
    "decoder": (AltUpDecoderConfig, AltUpDecoderForCausalLM),
}
SHAPE = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 3, "vocab_size": 1200}


def small(family: str, method: str, **fields: Any) -> Callable[[], nn.Module]:
    config_class, model_class = FAMILIES[family]
    experts = {"experts": 4} if "moe" in method else {}
    known = {name: value for name, value in SHAPE.items() if hasattr(config_class(), name)}
    return lambda: model_class(config_class.from_preset("tiny", method, **{**known, **experts, **fields}))


def fill_with_rubbish(model: nn.Module) -> None:
    model._apply(lambda t: torch.full_like(t, math.nan, device="cpu") if t.is_meta else t)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # as FSDP does, which replaces a parameter wherever it stands


def assert_same(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    plain = build()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    model, deferred = defer_weights(build)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), after)
    fill_with_rubbish(model)
    deferred.fill(model)
    assert torch.equal(torch.get_rng_state(), after)
    expected, found = plain.state_dict(), model.state_dict()
    assert expected.keys() == found.keys()
    assert not [name for name in expected if not torch.equal(expected[name], found[name])]
    buffers = dict(plain.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("method", ["dense", "recycled", "altup+moe"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_same_bits(family: str, method: str) -> None:
    assert_same(small(family, method))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_or_not(tied: bool) -> None:
    assert_same(small("decoder", "altup", tie_word_embeddings=tied))


@pytest.mark.parametrize("coefficients", ["dynamic", "fixed"])
def test_other_coefficients(coefficients: str) -> None:
    assert_same(small("decoder", "altup", coefficients=coefficients))


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_method(family: str) -> None:
    for method in [*PRESETS, "altup+sequence-altup+moe"]:
        if family == "t5" or not {"sequence-altup", "stride-and-skip", "average-pooling"} & set(method.split("+")):
            assert_same(small(family, method))


class Odd(nn.Module):
    """Everything at once: views, a padding row, a value that it is registered with."""

    def __init__(self, extra: Callable[[nn.Module], Any] = lambda module: None) -> None:
        super().__init__()
        self.table = nn.Embedding(700, 100, padding_idx=3)
        self.norm = nn.LayerNorm(100)
        self.free = nn.Parameter(torch.linspace(0, 1, 40))
        self.cut = nn.Parameter(torch.empty(300, 300))
        nn.init.xavier_normal_(self.cut)
        with torch.no_grad():
            self.cut[:7].normal_(1.0)
            self.cut.data[8, 1:5].fill_(4.0)
            self.cut.mul_(2.0)
        self.eye = nn.Parameter(torch.empty(300, 300))
        nn.init.eye_(self.eye)
        self.register_buffer("noise", torch.randn(5))
        extra(self)


class Blank(nn.Module):
    """A small parameter without a value; `trunc_normal_` does nothing on the meta device."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(30, 30))
        parent.add_module("blank", self)


def test_writes_of_any_kind() -> None:
    assert_same(Odd)


@pytest.mark.parametrize(
    "extra",
    [
        lambda module: setattr(module, "large", nn.Parameter(torch.randn(300, 300))),
        lambda module: setattr(module, "large", nn.Parameter(nn.init.trunc_normal_(torch.empty(300, 300)))),
        lambda module: nn.init.trunc_normal_(Blank(module).weight),
        lambda module: module.cut.data.copy_(module.eye),
        lambda module: float(module.cut.detach().sum()),
        lambda module: module.cut.data.normal_(generator=torch.Generator()),
    ],
    ids=["value", "its value", "no value", "another", "read", "generator"],
)
def test_what_cannot_be_repeated_is_refused(extra: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(NotDeferredError):
        defer_weights(lambda: Odd(extra))


def test_little_memory_is_touched() -> None:
    """A model far larger than the memory of any machine, as long as no weights are wanted."""
    model, _ = defer_weights(
        lambda: nn.Sequential(*(nn.Linear(1 << 15, 1 << 15) for _ in range(200))), wanted=False
    )
    assert sum(parameter.numel() for parameter in model.parameters()) > 2e11

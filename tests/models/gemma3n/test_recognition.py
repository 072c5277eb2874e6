"""Which classes of transformers are replaced: those that compute what their fused classes compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma3n import modeling_gemma3n as hf

from altup.core import errors
from altup.kernels.gemma3n import reference
from altup.models.gemma3n import classes, recognition
from altup.models.gemma3n.parts import Fused
from tests.models.gemma3n.tiny import accelerated, assert_same, batch, tiny_gemma


@pytest.fixture
def change(monkeypatch):
    """Gives another method to a class of transformers, as another version would, made from the one before."""

    def to(cls, name, made_from):
        monkeypatch.setattr(cls, name, made_from(getattr(cls, name)))
        classes.differences.cache_clear()

    yield to
    classes.differences.cache_clear()


def names() -> set[str]:
    return {base.__name__ for base in classes.differences()}


def test_every_part_of_this_transformers_is_known():
    assert names() == set()


@pytest.mark.parametrize(
    ("cls", "method", "other", "refused"),
    [
        (hf.Gemma3nRMSNorm, "forward", lambda f: lambda self, x: f(self, x + 1e-3), "Gemma3nRMSNorm"),
        (hf.Gemma3nTextMLP, "_gaussian_topk", lambda f: lambda self, x: x, "Gemma3nTextMLP"),
        (hf.Gemma3nTextAltUp, "correct", lambda f: lambda self, p, y: f(self, p, 1.01 * y), "Gemma3nTextAltUp"),
        (hf.Gemma3nTextLaurelBlock, "forward", lambda f: lambda self, x: 2 * f(self, x), "Gemma3nTextDecoderLayer"),  # noqa: E501
        (hf, "apply_rotary_pos_emb", lambda f: lambda x, c, s, **k: f(x, s, c, **k), "Gemma3nTextAttention"),
        (hf.Gemma3nRotaryEmbedding, "forward", lambda f: lambda self, *a: [2 * x for x in f(self, *a)], None),
    ],
)  # fmt: skip
def test_another_formula_is_refused_and_what_only_feeds_a_part_may_change(change, cls, method, other, refused):
    change(cls, method, other)
    assert (refused in names()) if refused else not names()


def test_another_formula_for_tokens_of_small_size_is_refused(monkeypatch, change):
    """The projections before the first layer have a floor under a token's magnitude."""
    monkeypatch.setattr(reference, "SMALLEST", 1e-4)
    classes.differences.cache_clear()
    assert "Gemma3nTextModel" in names()


def test_the_same_formula_in_other_words_is_known(change):
    def other_words(_):
        def forward(self, x):
            size = (x.float() ** 2).mean(-1, keepdim=True) + self.eps
            return (x.float() / size.sqrt() * (self.weight.float() if self.with_scale else 1.0)).type_as(x)

        return forward

    change(hf.Gemma3nRMSNorm, "forward", other_words)
    assert names() == set()


def test_a_member_of_another_name_is_refused(change):
    def renamed(before):
        def init(self, *given):
            before(self, *given)
            self.coefficients = self.prediction_coefs
            del self.prediction_coefs

        return init

    predict = hf.Gemma3nTextAltUp.predict

    def with_old_name(_):
        def other(self, x):
            self.__dict__["prediction_coefs"] = self.coefficients
            try:
                return predict(self, x)
            finally:
                del self.__dict__["prediction_coefs"]

        return other

    change(hf.Gemma3nTextAltUp, "__init__", renamed)
    change(hf.Gemma3nTextAltUp, "predict", with_old_name)
    change(hf.Gemma3nPreTrainedModel, "_init_weights", lambda _: lambda self, module: None)
    assert "AttributeError" in classes.differences()[hf.Gemma3nTextAltUp]


def test_a_part_that_is_refused_keeps_its_code_and_the_warning_names_what_is_lost(change):
    change(hf.Gemma3nTextLaurelBlock, "forward", lambda f: lambda self, x: 2 * f(self, x))
    errors.WARNED.clear()
    model = tiny_gemma(layers=2)
    with pytest.warns(
        UserWarning, match="Gemma3nTextDecoderLayer.*Lost: additions.*transformers 5.15 to"
    ) as caught:
        ours = accelerated(model)
    assert recognition.TESTED in str(caught[0].message)
    assert type(ours.model.layers[0]) is type(model.model.layers[0])
    assert isinstance(ours.model.layers[0].altup, Fused)
    assert_same(model, ours, batch())


def test_a_trial_changes_neither_random_numbers_nor_settings():
    classes.differences.cache_clear()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            assert names() == set()
            assert nn.Linear(1, 1).weight.is_meta
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)

"""`accelerate` on models of this library and on widened ones: their layers compiled, in place and reversibly."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import altup
from altup.core.errors import WARNED, UserError
from altup.models import accelerate as module
from tests.models.helpers import VOCABULARY, batch, tiny, tiny_t5


def widened():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return altup.widen(LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY)), "recycled", num_blocks=2)


def compiled_parts(model):
    return [name for name, part in model.named_modules() if part._compiled_call_impl is not None]


@pytest.mark.parametrize("build", [widened, lambda: tiny_t5("altup"), lambda: tiny("decoder", "altup")])
def test_on_a_cpu_nothing_changes_and_it_says_so_once(build):
    model = build()
    WARNED.clear()
    with pytest.warns(UserWarning, match="not on cpu, so the plain code runs"):
        assert altup.accelerate(model) is model
    assert not compiled_parts(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        altup.accelerate(altup.decelerate(model))


@pytest.mark.parametrize(
    ("build", "layers"),
    [
        (widened, {"model.layers.0", "model.layers.1"}),
        (lambda: tiny("decoder", "altup"), {"model.layers.0", "model.layers.1"}),
    ],
)
def test_asked_for_layers_are_compiled_and_copies_are_their_own(build, layers):
    """Nothing is run compiled here: that takes long, and `test_stack.py` asks whether it is right."""
    model = build()
    altup.accelerate(model, compile=True)
    assert layers <= set(compiled_parts(model))
    first = {name: part._compiled_call_impl for name, part in model.named_modules()}
    altup.accelerate(model, compile=True)
    assert all(part._compiled_call_impl is first[name] for name, part in model.named_modules())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not compiled_parts(other)  # compiled code is bound to the layers that it was made for
        assert layers <= set(compiled_parts(altup.accelerate(other, compile=True)))
    altup.decelerate(model)
    assert not compiled_parts(model)
    assert not hasattr(model, module.COMPILED)


def test_a_call_that_the_user_compiled_comes_back():
    model = tiny("decoder", "altup")
    model.compile()
    compiled = model._compiled_call_impl
    altup.accelerate(model, record=True)
    altup.accelerate(model, record=True, head=False)
    assert model._compiled_call_impl is not compiled
    altup.decelerate(model)
    assert model._compiled_call_impl is compiled


def test_another_model_is_refused():
    with pytest.raises(UserError, match="neither a model of altup, nor widened by it, nor a Gemma 3n"):
        altup.accelerate(torch.nn.Linear(2, 2))
    assert isinstance(altup.decelerate(torch.nn.Linear(2, 2)), torch.nn.Linear)


@pytest.mark.gpu
@pytest.mark.parametrize("build", [widened, lambda: tiny("decoder", "altup")])
def test_on_a_gpu_compiled_layers_compute_the_same(build):
    model = build().cuda()
    data = {name: value.cuda() for name, value in batch("decoder").items()}
    want = model(**data).loss
    altup.accelerate(model)
    assert compiled_parts(model)
    torch.testing.assert_close(model(**data).loss, want, rtol=1e-4, atol=1e-4)
    altup.decelerate(model)
    assert torch.equal(model(**data).loss, want)

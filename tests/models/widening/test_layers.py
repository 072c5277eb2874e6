"""Models of which some layers are wide: `widen(model, layers=…)`."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BertForSequenceClassification

from altup import describe, load_widened, narrow, widen
from altup.core.errors import UserError
from tests.models.widening.families import build, inputs
from tests.models.widening.test_load_and_narrow import assert_same_weights, logits
from tests.models.widening.test_training import train

STACKS = {"llama": "model.layers", "bert": "bert.encoder.layer", "gpt2": "transformer.h", "t5": "decoder.block"}


def wide_layers(model, family):
    return [i for i, layer in enumerate(model.get_submodule(STACKS[family])) if hasattr(layer, "altup")]


@pytest.mark.parametrize(
    ("family", "layers", "expected"),
    [
        ("llama", slice(2, None), [2, 3]),
        ("bert", [1, 2], [1, 2]),
        ("gpt2", slice(-1, None), [3]),
        ("t5", range(2), [0, 1]),
    ],
)
def test_a_whole_life(family, layers, expected, tmp_path):
    """Same function, gradients and blocks that part, disk, more blocks, the way back."""
    model = build(family)
    original, batch = copy.deepcopy(model), inputs(model)
    assert widen(model, layers=layers) is model
    assert wide_layers(model, family) == expected
    torch.testing.assert_close(logits(model), logits(original), rtol=0, atol=1e-5)
    assert_same_weights(narrow(copy.deepcopy(model)), original)
    model(**batch).loss.backward()
    coefficients = {name: p for name, p in model.named_parameters() if ".altup." in name}
    assert len(coefficients) == 2 * len(expected) * len(model.config.altup["stacks"])
    assert all((p.grad != 0).all() for p in coefficients.values())
    losses = train(model, 10)
    assert losses[-1] < losses[0]
    with pytest.raises(UserError, match="has moved"):
        narrow(model)
    model.save_pretrained(tmp_path)
    loaded = load_widened(tmp_path)
    assert wide_layers(loaded, family) == expected
    assert_same_weights(loaded, model)
    assert torch.equal(logits(loaded), logits(model))
    before = logits(model)
    widen(model, num_blocks=4)
    assert wide_layers(model, family) == expected
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


def test_it_is_the_plain_layers_around_a_wide_part():
    """With coefficients of any size: the state is repeated before the part and averaged after it."""
    model = build("llama").double()
    layers, states = list(model.model.layers), {}
    widen(model, layers=[1, 2])
    for layer in layers[1:3]:
        torch.nn.init.normal_(layer.altup.P)
        torch.nn.init.normal_(layer.altup.g)
    layers[1].register_forward_pre_hook(lambda module, args: states.update(entering=args[:2]))
    layers[2].register_forward_hook(lambda module, args, output: states.update(leaving=output[:2]))
    layers[3].register_forward_pre_hook(lambda module, args: states.update(after=args[0]))
    logits(model)
    assert torch.equal(states["entering"][0], states["entering"][1])
    assert not torch.allclose(states["leaving"][0], states["leaving"][1])
    torch.testing.assert_close(states["after"], sum(states["leaving"]) / 2)


@torch.no_grad()
def test_what_hangs_on_a_layer_is_called_without_gradients_too():
    """Where nothing hangs on a layer, it is not called as a module is, which takes the host longer."""
    model = widen(build("llama")).eval()
    layer = model.model.layers[1]
    torch.nn.init.normal_(layer.altup.P)
    before, called = logits(model), []
    handles = [
        part.register_forward_hook(lambda *_: called.append("after"))
        for part in (layer, layer.altup, model.model.layers[2].mlp)
    ]
    handles += [
        part.register_forward_pre_hook(lambda *_: called.append("before")) for part in (layer, layer.altup)
    ]
    assert torch.equal(logits(model), before)
    assert sorted(called) == ["after"] * 3 + ["before"] * 2
    for handle in handles:
        handle.remove()
    called.clear()
    for part in (layer, layer.altup):  # as accelerate does
        forward = part.forward
        part.forward = lambda *args, forward=forward, **kwargs: (
            called.append("forward") or forward(*args, **kwargs)
        )
        assert torch.equal(logits(model), before)
        del part.forward
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module)):
        assert torch.equal(logits(model), before)
    assert called[:2] == ["forward"] * 2
    assert layer in called
    assert layer.altup in called
    with torch.enable_grad():
        torch.testing.assert_close(logits(model), before, rtol=0, atol=0)


def test_each_stack_may_have_its_own(tmp_path):
    model = build("t5")
    before = logits(model)
    widen(model, num_blocks=3, layers={"encoder.block": slice(1), "decoder.block": [-1]})
    wide = [name for name, _ in model.named_modules() if name.endswith(".altup")]
    assert wide == ["encoder.block.0.altup", "decoder.block.2.altup"]
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)
    assert "encoder.block: layers 0 to 0 of 3, which work on blocks 0" in describe(model)
    assert "decoder.block: layers 2 to 2 of 3" in describe(model)


def test_another_head_keeps_the_wide_layers(tmp_path):
    body = widen(build("bert"), layers=slice(2))
    train(body, 2)
    body.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="start at random"):
        model = load_widened(tmp_path, BertForSequenceClassification)
    assert wide_layers(model, "bert") == [0, 1]
    assert torch.equal(model.bert.encoder.layer[1].altup.P, body.bert.encoder.layer[1].altup.P)


def test_weights_of_the_original_load_back():
    model = build("llama")
    state = copy.deepcopy(model.state_dict())
    expected = logits(model)
    widen(model, layers=slice(1, 3))
    train(model, 2)
    model.load_state_dict(state)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [0, 2]}, r"layers=\[0, 2\] of model.layers, which has 4 layers, must be one run"),
        ({"layers": slice(None, None, 2)}, "one run of layers without a gap"),
        ({"layers": []}, "holds none of the 4 layers of model.layers"),
        ({"layers": slice(4, None)}, "layers='4:' holds none of the 4 layers"),
        ({"layers": [3, 4]}, r"layers=\[3, 4\] are no layers of model.layers, which has 4"),
        ({"layers": "2:4"}, "are no layers of"),
        (
            {"layers": {"model.blocks": [0]}},
            "'model.blocks', which is no stack that is widened; name 'model.layers'",
        ),
        ({"layers": [0, 1], "method": "altup"}, "tables and head are wide.*take method='recycled'"),
        ({"layers": [0, 1], "selection": [0, 1, 0, 1]}, "each of the 2 layers"),
    ],
)
def test_bad_choices_change_nothing(options, message):
    model = build("llama")
    before = copy.deepcopy(model)
    with pytest.raises(UserError, match=message):
        widen(model, **options)
    assert_same_weights(model, before)
    with pytest.raises(UserError, match="and no more"):
        widen(widen(model), num_blocks=4, layers=[0])

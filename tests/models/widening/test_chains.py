"""Text from widened models whose blocks differ: updates in a chain against updates one by one.

Without a GPU a function stands in for the kernel, which is given addresses as the kernel is.
"""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch
from transformers import DynamicCache

from altup import widen
from altup.kernels import altup_update_reference
from altup.models.widening import layer as widened_layer
from tests.models.widening.families import VOCABULARY, build

pytest.importorskip("triton")

from altup.kernels.altup_update import relaunch

UPDATE = sys.modules["altup.kernels.altup_update"]
KINDS = [("recycled", 2), ("recycled", 4), ("altup", 2), ("altup", 3), ("sameup", 2)]


def numbers_at(address, n):
    return torch.frombuffer((ctypes.c_float * n).from_address(address), dtype=torch.float32)


def stand_in(outs, xs, y, residual, P, g, active, n, K, block):
    """What the kernel does."""
    state = torch.stack([numbers_at(x, n) for x in xs])
    P, g = numbers_at(P, K * K).view(K, K), numbers_at(g, K)
    for at, new in zip(outs, altup_update_reference(state, numbers_at(y, n), P, g, active), strict=True):
        numbers_at(at, n).copy_(new)


def begin_on_cpu(xs, y, update, active):
    if not UPDATE.CHAINS or torch.is_grad_enabled():
        return None
    relaunch.COMPILED[relaunch.kind_of(xs, y, None, "cpu")] = stand_in, 128
    return relaunch.begin_chain(xs, y, update, active, "cpu")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Room for two layers only, so that more has to be made."""
    monkeypatch.setattr(UPDATE, "CHAINS", False)
    monkeypatch.setattr(relaunch, "ROOM_LAYERS", 2)
    if request.param == "cpu":
        monkeypatch.setattr(relaunch, "stream_of", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
        monkeypatch.setattr(widened_layer, "begin_chain", begin_on_cpu)
    yield request.param
    for kind in [kind for kind in relaunch.COMPILED if "cpu" in kind]:
        del relaunch.COMPILED[kind]


@pytest.fixture
def followed(monkeypatch):
    """Whether each update that a chain was asked for was done by it."""
    done, follow = [], relaunch.Chain.follow

    def noting(*given):
        new = follow(*given)
        done.append(new is not None)
        return new

    monkeypatch.setattr(relaunch.Chain, "follow", noting)
    return done


def trained(method, K, device):
    """A model whose blocks differ, as after training: coefficients, tables, norm and head have moved."""
    torch.manual_seed(0)
    model = widen(build("llama"), method, K).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".altup." in name or parameter.shape[-1] == 32 * K:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)


@torch.no_grad()
def logits_of(model, ids, new, states=False):
    """Of a prompt, and of each token after it."""
    cache, found = DynamicCache(config=model.config), []
    for given in (ids, *new.unbind(1)):
        given = given if given.dim() == 2 else given[:, None]
        outputs = model(input_ids=given, past_key_values=cache, output_hidden_states=states)
        found += [outputs.logits, *(outputs.hidden_states or ())]
    return found


def on_and_off(monkeypatch, run):
    """What `run` gives without chains, then with them."""
    off = [run(), run()][1]  # chains take kinds of arrays that were updated before
    monkeypatch.setattr(UPDATE, "CHAINS", True)
    on = [run(), run()][1]
    monkeypatch.setattr(UPDATE, "CHAINS", False)
    return on, off


def assert_same(found, wanted, device):
    for a, b in zip(found, wanted, strict=True):
        if device == "cpu":
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(a, b)


def tokens(*shape, device):
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("method", "K"), KINDS)
def test_logits_token_by_token(method, K, batch, device, followed, monkeypatch):
    model = trained(method, K, device)
    ids, new = tokens(batch, 5, device=device), tokens(batch, 4, device=device)
    on, off = on_and_off(monkeypatch, lambda: logits_of(model, ids, new))
    assert followed == [True] * 2 * 5 * 4  # runs, passes, layers
    assert_same(on, off, device)
    assert not torch.equal(on[1], on[2])


@pytest.mark.parametrize(("method", "K"), KINDS)
def test_generated_text(method, K, device, followed, monkeypatch):
    """Two texts, one of them padded."""
    model = trained(method, K, device)
    ids = tokens(2, 5, device=device)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0

    def write():
        return model.generate(
            ids * mask, attention_mask=mask, max_new_tokens=12, do_sample=False, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip

    on, off = on_and_off(monkeypatch, write)
    assert len(followed) >= 2 * 11 * 4
    assert all(followed)
    assert torch.equal(on.sequences, off.sequences)
    assert_same(on.logits, off.logits, device)
    assert len(on.sequences[:, 5:].unique()) > 1


@pytest.mark.parametrize("method", ["recycled", "altup"])
def test_states_between_the_layers_and_hooks_on_one_of_them(method, device, followed, monkeypatch):
    """States are asked for by hooks on all layers, and a chain that meets one ends."""
    model, seen = trained(method, 2, device), []
    ids, new = tokens(2, 3, device=device), tokens(2, 2, device=device)
    handle = model.model.layers[2].register_forward_hook(lambda module, args, output: seen.append(args[:2]))
    on, off = on_and_off(monkeypatch, lambda: logits_of(model, ids, new))
    assert followed == [True] * 2 * 3 * 2
    assert_same(on, off, device)
    assert_same([t for pair in seen[6:] for t in pair], [t for pair in seen[:6] for t in pair], device)
    assert not torch.equal(*seen[-1])
    handle.remove()
    with_states, without = on_and_off(monkeypatch, lambda: logits_of(model, ids, new, states=True))
    assert_same(with_states, without, device)


def test_what_a_chain_cannot_take_ends_it(device, followed, monkeypatch):
    """Coefficients in another dtype, and gradients that begin within a layer."""
    model = trained("recycled", 2, device)
    ids, new = tokens(2, 3, device=device), tokens(2, 2, device=device)
    model.model.layers[1].altup.double()
    on, off = on_and_off(monkeypatch, lambda: logits_of(model, ids, new))
    assert followed == [True, False] * 2 * 3
    assert_same(on, off, device)

    followed.clear()
    model.model.layers[1].altup.float()
    model.model.layers[1].mlp.register_forward_hook(lambda *_: torch._C._set_grad_enabled(True))
    on, off = on_and_off(monkeypatch, lambda: logits_of(model, ids, new[:, :0]))
    assert followed == [True, False] * 2
    assert_same(on, off, device)
    assert on[0].requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["recycled", "altup"])
def test_a_recorded_token_and_another_stream(method, device, followed, monkeypatch):
    if device == "cpu":
        pytest.skip("needs a GPU")
    model, ids, other = trained(method, 2, device), tokens(2, 1, device=device), tokens(2, 1, device=device) // 2

    @torch.no_grad()
    def run():
        return model(input_ids=ids, use_cache=False).logits

    on, off = on_and_off(monkeypatch, run)
    assert torch.equal(on, off)
    monkeypatch.setattr(UPDATE, "CHAINS", True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(run(), off)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    followed.clear()
    with torch.cuda.graph(graph):
        recorded = run()
    assert followed == [True] * 4
    graph.replay()
    assert torch.equal(recorded, off)
    ids.copy_(other)
    graph.replay()
    monkeypatch.setattr(UPDATE, "CHAINS", False)
    assert torch.equal(recorded, run())
    assert not torch.equal(recorded, off)

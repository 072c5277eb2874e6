"""Models whose layers multiply in fp8: every family and method, what is left alone, and gradients."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from altup import (
    AltUpBertConfig,
    AltUpBertForMaskedLM,
    AltUpDecoderConfig,
    AltUpDecoderForCausalLM,
    AltUpT5Config,
    AltUpT5ForConditionalGeneration,
)
from altup.core.errors import UserError
from altup.models import stack
from altup.models.stack import compile_layers
from altup.nn import GatedFeedForward, RMSNorm, linear
from altup.nn.linear import KINDS, Fp8Maps, apply_linears, enable_fp8, use_fp8

FAMILIES = {
    "t5": (AltUpT5Config, AltUpT5ForConditionalGeneration),
    "bert": (AltUpBertConfig, AltUpBertForMaskedLM),
    "decoder": (AltUpDecoderConfig, AltUpDecoderForCausalLM),
}
SHAPE = {"num_layers": 3, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "vocab_size": 96}


def build(family="t5", method="dense", **fields):
    torch.manual_seed(0)
    config, model = FAMILIES[family]
    return model(config.from_preset("tiny", method, **{**SHAPE, "dropout_rate": 0.0, **fields})).train()


def passes(model, family="t5", tokens=32, device="cpu"):
    """Loss and gradients, under autocast as a run has them."""
    torch.manual_seed(1)
    ids = torch.randint(3, 96, (4, tokens), device=device)
    labels = ids[:, : 8 if family == "t5" else tokens]
    model.zero_grad(set_to_none=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=labels, return_logits=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def flat(gradients):
    return torch.cat([gradients[name].flatten().double() for name in sorted(gradients)])


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("t5", "dense"), ("t5", "altup"), ("t5", "recycled"), ("t5", "sequence-altup"), ("t5", "altup+moe"),
        ("bert", "altup"), ("decoder", "altup"), ("decoder", "dense"),
    ],
)  # fmt: skip
def test_every_family_and_method_trains_in_fp8(family, method):
    model = build(family, method)
    loss, want = passes(model, family)
    assert use_fp8(model) == sum(isinstance(part, Fp8Maps) for part in model.modules()) > 0
    low_loss, got = passes(model, family)
    assert got.keys() == want.keys()
    assert all(g.dtype == torch.float32 for g in got.values())
    assert 0 < abs(low_loss - loss) < 0.02 * loss
    a, b = flat(got), flat(want)
    assert 0 < (a - b).norm() / b.norm() < 0.35
    assert abs(a @ b / (b @ b) - 1) < 0.1


def test_each_kind_of_map_changes_the_numbers_when_it_is_chosen():
    model = build()
    losses = [passes(model)[0]]
    for kind in KINDS:
        use_fp8(model, [kind])
        losses.append(passes(model)[0])
    assert len({float(loss) for loss in losses}) == len(losses)
    use_fp8(model, ())
    assert torch.equal(passes(model)[0], losses[0])


@torch.no_grad()
def test_evaluation_stays_in_16_bits():
    model = build().eval()
    ids = torch.randint(3, 96, (4, 32))
    want = model(input_ids=ids, labels=ids[:, :8]).loss
    use_fp8(model)
    assert torch.equal(model(input_ids=ids, labels=ids[:, :8]).loss, want)


def test_checkpointing_and_a_second_pass_give_the_same_gradients():
    """Layers are computed again in the backward pass, with the same rounding."""
    model = build("decoder")
    use_fp8(model)
    want = flat(passes(model, "decoder")[1])
    assert torch.equal(flat(passes(model, "decoder")[1]), want)
    model.gradient_checkpointing_enable()
    assert torch.equal(flat(passes(model, "decoder")[1]), want)


@pytest.mark.parametrize(("family", "method"), [("t5", "altup"), ("decoder", "dense")])
def test_weights_rounded_together_change_nothing(family, method, monkeypatch):
    """They are rounded before the first layer, compiled or not, and forgotten behind the last."""
    model = build(family, method)
    use_fp8(model)
    with monkeypatch.context() as apart:
        apart.setattr(stack, "weights_rounded_together", lambda *given: nullcontext())
        want_loss, want = passes(model, family)
    seen = []
    real = linear.round_many_weights
    monkeypatch.setattr(linear, "round_many_weights", lambda *given: seen.append(len(given[0])) or real(*given))
    for compiled in (False, True):
        if compiled:
            torch._dynamo.reset()
            compile_layers(model, ends=False, backend="eager", fullgraph=True)
        for _ in range(2):
            loss, got = passes(model, family)
            assert torch.equal(loss, want_loss)
            assert torch.equal(flat(got), flat(want))
    assert sum(seen) == 4 * sum(
        len(maps)
        for part in model.modules()
        if isinstance(part, Fp8Maps)
        for maps in part.maps_of_one_input().values()
    )
    assert all(part.rounded is None for part in model.modules() if isinstance(part, Fp8Maps))


class Adapted(nn.Module):
    """A map with an adapter, as PEFT wraps one: it has the map's weight, and does more."""

    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, nn.Linear(base.in_features, base.out_features, bias=False)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.more(x)


@pytest.mark.parametrize("name", ["wi_0", "wo"])
def test_an_adapter_that_comes_later_counts(name):
    part = GatedFeedForward(32, 64).train()
    use_fp8(part)
    setattr(part, name, Adapted(getattr(part, name)))
    part(torch.randn(16, 32)).square().mean().backward()
    assert getattr(part, name).more.weight.grad.norm() > 0


def test_dropout_in_the_feed_forward_is_kept():
    part = GatedFeedForward(32, 64, dropout=0.5).train()
    use_fp8(part)
    x = torch.randn(16, 32)
    assert not torch.equal(part(x), part(x))
    part.dropout = 0.0
    assert torch.equal(part(x), part(x))


def test_sizes_that_do_not_fit_stay_in_16_bits():
    """4 × 5 tokens are no multiple of 16: exactly bf16, in both directions."""
    model = build("decoder")
    want = {tokens: flat(passes(model, "decoder", tokens=tokens)[1]) for tokens in (5, 32)}
    use_fp8(model)
    assert torch.equal(flat(passes(model, "decoder", tokens=5)[1]), want[5])
    assert not torch.equal(flat(passes(model, "decoder", tokens=32)[1]), want[32])


def test_wrapped_and_watched_maps_are_left_alone():
    model = build()
    layer = model.encoder.layers[0]
    layer.attention.q.register_forward_hook(lambda *given: None)
    layer.feed_forward.wo = nn.Sequential(layer.feed_forward.wo)
    use_fp8(model)
    assert not layer.attention.fp8
    assert model.encoder.layers[1].attention.fp8
    passes(model)


def test_no_output_of_a_norm_exceeds_its_bound():
    norm = RMSNorm(64)
    nn.init.normal_(norm.weight)
    x = 1e-3 * torch.randn(1000, 64)
    x[:, 7] = 100 * torch.randn(1000)
    one_hot = torch.eye(64) * 1e4
    for given in (x, one_hot):
        assert norm(given).abs().amax() <= norm.bound()
    assert norm(one_hot).abs().amax() > 0.99 * norm.bound()


def test_biases_are_added():
    linear = nn.Linear(32, 48)
    x = torch.randn(16, 32)
    (got,) = apply_linears(x, [linear], fp8=True)
    off = (got - linear(x)).norm() / linear(x).norm()
    assert 0.005 < off < 0.06


def test_other_models_are_refused():
    with pytest.raises(UserError, match=r"precision='fp8'.*Linear has none; take 'bf16'"):
        enable_fp8(nn.Linear(2, 2), torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "method"), [("t5", "altup"), ("decoder", "dense")])
def test_compiled_layers_on_a_gpu_compute_what_eager_ones_do(family, method, monkeypatch):
    """Whose own noise is that of rounding in another place; both are as far from bf16 as on a CPU."""
    sizes = {"d_model": 1024, "d_ff": 1024, "d_kv": 512}  # wide enough to pay
    eager = build(family, method, **sizes).cuda()
    compiled = copy.deepcopy(eager)
    bf16 = flat(passes(eager, family, tokens=64, device="cuda")[1])
    for model in (eager, compiled):
        use_fp8(model)
    torch._dynamo.reset()
    compile_layers(compiled, fullgraph=True)
    (a_loss, a), (b_loss, b) = (passes(model, family, tokens=64, device="cuda") for model in (eager, compiled))
    monkeypatch.setattr(stack, "weights_rounded_together", lambda *given: nullcontext())
    apart = passes(eager, family, tokens=64, device="cuda")[1]
    assert torch.equal(flat(apart), flat(a))
    a, b = flat(a), flat(b)
    assert abs(a_loss - b_loss) < 0.01 * a_loss
    assert (a - b).norm() / a.norm() < 0.3
    assert (b - bf16).norm() / bf16.norm() < 0.35

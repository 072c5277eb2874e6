"""Layers compiled in place, and whole models without a graph break, forward and backward."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from altup.core.errors import UserError
from altup.kernels.add_norm import add_norm_reference
from altup.kernels.fp8.reference import VALUE, power_of_two, quantize_reference
from altup.models.families import FAMILIES
from altup.models.stack import compile_layers, left_uncompiled
from altup.nn.linear import join_maps, use_fp8
from tests.models.helpers import ALL_METHODS, STACKS, batch, tiny, tiny_t5

# Methods combine without code of their own: these hold every part. Dense and AltUp alone are among BY_LAYER.
QUICK = [("t5", f"altup+{other}") for other in ("sequence-altup+moe", "average-pooling")]
QUICK += [("t5", method) for method in ("recycled+stride-and-skip", "sum")]
QUICK += [("bert", "altup+sequence-altup+moe"), ("bert", "recycled"), ("decoder", "altup")]
BY_LAYER = [("t5", "dense"), ("t5", "altup"), ("t5", "sequence-altup"), ("bert", "altup"), ("decoder", "altup")]
BY_LAYER += [pytest.param("t5", "altup+moe", marks=pytest.mark.slow)]
WHOLE = [
    stack if stack in QUICK else pytest.param(*stack, marks=pytest.mark.slow)
    for stack in [*(("t5", method) for method in ALL_METHODS), *STACKS]
]


def build(family, method, layers, **fields):
    if family == "t5":
        return tiny_t5(method, num_layers=layers, expert_jitter=0.0, **fields).train()
    return tiny(family, method, num_layers=layers, expert_jitter=0.0, **fields).train()


def gradients(family, method, backend):
    torch._dynamo.reset()
    layers = 3 if "seq" in method or "stride" in method else 2  # of 3 one is strided
    model = build(family, method, layers, **({"num_decoder_layers": 2} if family == "t5" else {}))
    run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    run(**batch(family), return_logits=family == "t5" or backend is None).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("family", "method"), WHOLE)
def test_compiles_without_graph_breaks_forward_and_backward(family, method):
    want = gradients(family, method, None)
    for name, got in gradients(family, method, "aot_eager").items():
        torch.testing.assert_close(got, want[name], rtol=1e-4, atol=1e-5)


class Scaled(torch.nn.Module):
    """A part behind an adapter, which shows the part's weight as PEFT's do."""

    def __init__(self, part):
        super().__init__()
        self.part, self.scale = part, torch.nn.Parameter(torch.ones(()))

    weight = property(lambda self: self.part.weight)
    bias = property(lambda self: self.part.bias)
    eps = property(lambda self: self.part.eps)

    def forward(self, x):
        return self.scale * self.part(x)


def count_calls(monkeypatch, name):
    """Grows by one with each call of a function."""
    module, _, function = name.rpartition(".")
    original, calls = getattr(importlib.import_module(module), function), []

    def counted(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(name, counted)
    return calls


def passes(model, data):
    loss = model(**data).loss
    return loss, torch.autograd.grad(loss, list(model.parameters()))


FUSED = [("t5", "dense"), ("t5", "sum"), ("t5", "altup+sequence-altup"), ("decoder", "dense"), ("bert", "dense")]


@pytest.mark.parametrize(("family", "method"), FUSED)
def test_joined_products_and_additions_change_nothing(family, method, fusing, monkeypatch):
    """In float64 they are the same function with the same gradients."""
    model, data = build(family, method, 4).double(), batch(family)
    loss, gradients = passes(model, data)
    products, additions = count_calls(monkeypatch, "altup.nn.attention.joined_linear"), []
    if family != "bert":
        additions = count_calls(monkeypatch, "altup.models.layers.add_norm")
    fusing()
    got_loss, got = passes(model, data)
    torch.testing.assert_close(got_loss, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(got, gradients, rtol=1e-9, atol=1e-12)
    stacks = [model.encoder, model.decoder] if family == "t5" else [model.base_model]
    layers = sum(len(stack.layers) for stack in stacks)
    assert len(products) >= layers
    # Within each layer, and, where one block moves, between two.
    inner = {"t5": len(stacks[0].layers) + 2 * len(stacks[-1].layers), "decoder": layers, "bert": 0}[family]
    between = layers - len(stacks) if method in ("dense", "sum") and family != "bert" else 0
    assert len(additions) == inner + between


@pytest.mark.parametrize("shared", [False, True])
def test_joined_additions_drop_the_same(shared, fusing):
    """The same numbers at every addition, also at the last one of a layer."""
    fields = {"dropout_rate": 0.3, "sequence_dropout": shared}
    model, data, runs = build("t5", "dense", 3, **fields).double(), batch("t5"), []
    for join in (False, True):
        if join:
            fusing()
        torch.manual_seed(7)
        runs.append(passes(model, data))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["t5", "decoder"])
@pytest.mark.parametrize("method", ["altup", "recycled"])
def test_an_update_that_computes_the_next_norm_changes_nothing(family, method, fusing, monkeypatch):
    model, data = build(family, method, 4).double(), batch(family)
    stacks = [model.encoder, model.decoder] if family == "t5" else [model.base_model]
    for update in (update for stack in stacks for update in stack.rule.updates):
        update.P.data.add_(0.1 * torch.randn_like(update.P))
    loss, gradients = passes(model, data)
    fusing()
    monkeypatch.setattr("altup.nn.altup.takes_norm", lambda state: True)
    updates = count_calls(monkeypatch, "altup.nn.altup.altup_update_norm")
    heard = []  # who watches a norm still hears it
    stacks[0].layers[1].attention_norm.register_forward_hook(lambda *given: heard.append(given))
    got_loss, got = passes(model, data)
    assert len(heard) == 1
    assert len(updates) == sum(len(stack.layers) - 1 for stack in stacks) - 1
    torch.testing.assert_close(got_loss, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(got, gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["dense", "altup"])
def test_who_watches_a_layer_sees_its_whole_input_and_output(method, fusing):
    model, data = build("decoder", method, 3).double(), batch("decoder")
    model.zero_grad()
    want = model(**data, output_hidden_states=True)
    fusing()
    seen = []
    model.model.layers[1].register_forward_hook(lambda _layer, given, output: seen.append((given[0], *output)))
    assert model(**data).loss.item() == pytest.approx(want.loss.item(), rel=1e-12)
    ((x, residual, update),) = seen
    if method == "dense":
        torch.testing.assert_close(x, want.hidden_states[1], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(residual + update, want.hidden_states[2], rtol=1e-9, atol=1e-12)


def test_recomputed_layers_are_given_one_tensor(fusing):
    """A layer's saved input is then one tensor, and not the terms of a sum."""
    model, data = build("decoder", "dense", 3).double(), batch("decoder")
    fusing()
    want = passes(model, data)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    given = []

    def run_and_count(run, *args):
        tensors = [value for value in (*args, *run.keywords.values()) if isinstance(value, torch.Tensor)]
        given.append(sum(tensor.requires_grad for tensor in tensors))
        return run(*args)

    for layer in model.model.layers:
        layer._gradient_checkpointing_func = run_and_count
    torch.testing.assert_close(passes(model, data), want, rtol=1e-9, atol=1e-12)
    assert given == [1, 1, 1]


def blocks_by_hand(stack, state, inputs, post_norm):
    """AltUp around each sublayer, from its definition: the state after the last layer."""
    sublayers = [sublayer for layer in stack.layers for sublayer in layer.sublayers()]
    for number, (norm, run, _) in enumerate(sublayers):
        update, active = stack.rule.updates[number], number % len(state)
        x = state[active]
        y = norm(x + run(x, *inputs)) if post_norm else x + run(norm(x), None, *inputs)
        predicted = [sum(update.P[i, j] * block for j, block in enumerate(state)) for i in range(len(state))]
        state = [hat + g * (y - predicted[active]) for hat, g in zip(predicted, update.g, strict=True)]
    return state


@pytest.mark.parametrize("method", ["altup", "recycled"])
@pytest.mark.parametrize("family", ["bert", "decoder"])
def test_sites_around_sublayers(family, method, fusing, monkeypatch):
    """Against the definition, plain and with what a GPU joins, and with recomputed layers."""
    model, data = build(family, method, 3, k=2, sites="sublayer").double(), batch(family)
    stack, kept = model.base_model, {}
    run = stack._run_layers

    def keep(state, inputs, *rest):
        kept.update(start=list(state), inputs=inputs[0])
        return run(state, inputs, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(stack, "_run_layers", keep)
        patch.setattr(stack, "lower", lambda state: kept.update(end=state) or type(stack).lower(stack, state))
        want = passes(model, data)
    inputs = [*kept["inputs"].args, *([None] if family == "decoder" else [])]  # and no cache
    end = blocks_by_hand(stack, kept["start"], inputs, post_norm=family == "bert")
    torch.testing.assert_close(list(kept["end"]), end)
    fusing()
    monkeypatch.setattr("altup.nn.altup.takes_norm", lambda state: True)
    torch.testing.assert_close(passes(model, data), want, rtol=1e-9, atol=1e-12)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(passes(model, data), want, rtol=1e-9, atol=1e-12)


def test_sites_around_a_t5s_sublayers():
    """Three in a layer of the decoder; with fresh coefficients and equal blocks it is the dense model."""
    dense, model = build("t5", "dense", 2), build("t5", "recycled", 2, sites="sublayer")
    assert (len(model.encoder.rule.updates), len(model.decoder.rule.updates)) == (4, 3 * len(model.decoder.layers))
    model.load_state_dict(dense.state_dict(), strict=False)
    for rule in (model.encoder.rule, model.decoder.rule):
        rule.reset_parameters()
    data = batch()
    torch.testing.assert_close(model(**data).loss, dense(**data).loss)
    ids = data["input_ids"]
    model.eval(), dense.eval()
    torch.testing.assert_close(model.generate(ids, max_new_tokens=5), dense.generate(ids, max_new_tokens=5))
    with pytest.raises(UserError, match=r"sites='sublayer' does not fit sequence='skip'"):
        build("t5", "altup+stride-and-skip", 3, sites="sublayer")
    with pytest.raises(UserError, match="one block a layer"):
        build("t5", "altup", 2, sites="sublayer", selection=[0, 1])


def test_wrapped_and_watched_maps_are_not_joined(fusing):
    model, x = build("t5", "dense", 2), torch.randn(2, 3, 24)
    fusing()
    layer = model.encoder.layers[0]
    layer.attention.k.register_forward_hook(lambda *given: None)
    layer.feed_forward.wi_0 = torch.nn.Sequential(layer.feed_forward.wi_0)
    assert not layer.attention.joins("projections", x)
    assert not layer.feed_forward.joins("feed_forward", x)
    assert model.encoder.layers[1].attention.joins("projections", x)
    join_maps(model, False)
    assert not model.encoder.layers[1].attention.joins("projections", x)
    model(**batch("t5")).loss.backward()


def test_what_takes_a_parts_place_later_is_heard(fusing):
    """Adapters are put around maps and norms of a model that is accelerated already, and train."""
    model, data = build("t5", "dense", 2), batch("t5")
    fusing()
    layers = [*model.encoder.layers, *model.decoder.layers]
    for layer in layers:
        layer.compile(fullgraph=True, backend="eager")
    model(**data)
    scales = []
    for place, name in [
        (layers[0].attention, "q"), (layers[0].feed_forward, "wi_1"), (layers[1], "feed_forward_norm"),
        (layers[-1].cross_attention, "q"), (layers[-1].cross_attention, "v"),
    ]:  # fmt: skip
        scales.append(Scaled(getattr(place, name)))
        setattr(place, name, scales[-1])
    gradients = torch.autograd.grad(model(**data).loss, [part.scale for part in scales])
    assert all(gradient != 0 for gradient in gradients)


@pytest.mark.parametrize(("family", "method"), BY_LAYER)
def test_layers_are_compiled_once_whatever_the_depth(family, method):
    graphs = []
    for depth in (3, 5):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model, data = build(family, method, depth), batch(family)
        want = model(**data).loss
        compile_layers(model, backend=counter, fullgraph=True)
        got = model(**data).loss
        got.backward()
        torch.testing.assert_close(got, want)
        graphs.append(counter.frame_count)
    # Of T5 an encoder layer, a decoder layer and the final norm.
    assert graphs[0] == graphs[1] >= (3 if family == "t5" else 1)


def packed(rows, inputs, targets):
    """Three examples to a row, as fine-tuning packs them."""
    torch.manual_seed(rows)

    def segments(length):
        return (torch.arange(length) * 3 // length + 1).expand(rows, length)

    ids, labels = (torch.randint(3, 40, (rows, length)) for length in (inputs, targets))
    return {
        "input_ids": ids, "segments": segments(inputs), "labels": labels, "decoder_segments": segments(targets)
    }  # fmt: skip


def test_batches_of_many_shapes_need_few_compilations():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = tiny_t5("altup", num_layers=2, num_decoder_layers=2, dropout_rate=0.0).train()
    shapes = [(6, 32, 8), (7, 32, 8), (5, 32, 16), (7, 32, 24), (9, 32, 16), (4, 32, 8)]
    wants = [model(**packed(*shape)).loss for shape in shapes]
    compile_layers(model, backend=counter, fullgraph=True, dynamic=None)
    counts = []
    for shape, want in zip(shapes, wants, strict=True):
        got = model(**packed(*shape)).loss
        got.backward()
        torch.testing.assert_close(got, want)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[3]  # once each size was seen to vary
    assert counts[-1] <= 3 * counts[0]


def test_packed_batches_compile_behind_others():
    """Sizes that varied already may meet segments that never did."""
    torch._dynamo.reset()
    first, second = (tiny_t5("altup", num_layers=2, num_decoder_layers=2).train() for _ in range(2))
    compile_layers(first, backend="eager", fullgraph=True)
    ids, labels = (torch.randint(3, 40, (4, length)) for length in (32, 12))
    first(input_ids=ids, labels=labels).loss.backward()
    shapes = [(6, 32, 8), (7, 32, 16), (5, 64, 8)]
    wants = [second(**packed(*shape)).loss for shape in shapes]
    compile_layers(second, backend="eager", fullgraph=True, dynamic=None)  # what may fail is the tracing
    for shape, want in zip(shapes, wants, strict=True):
        torch.testing.assert_close(second(**packed(*shape)).loss, want)


@pytest.mark.parametrize("breaks", [False, True])
def test_what_does_not_compile_is_told(breaks):
    torch._dynamo.reset()
    model = tiny_t5("altup", num_layers=2, num_decoder_layers=2).train()
    if breaks:
        model.encoder.layers[0].feed_forward.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    before = left_uncompiled()
    compile_layers(model, backend="aot_eager")
    model(**batch()).loss.backward()
    new = [reason for reason in left_uncompiled() if reason not in before]
    assert ["graph_break" in reason for reason in new] == [True] * breaks


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "altup", "altup+sequence-altup+moe"])
def test_compiled_code_agrees(method):
    want = gradients("t5", method, None)
    for name, got in gradients("t5", method, "inductor").items():
        torch.testing.assert_close(got, want[name], rtol=1e-3, atol=1e-5)


def test_the_state_of_sum_is_rounded_as_autocast_rounds():
    """CUDA's autocast, which needs no GPU to be asked, computes sums in float32."""
    encoder = tiny_t5("sum").encoder
    width = encoder.embed_tokens.embedding_dim
    dtype = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode():
            embeddings = torch.empty(2, 3, width, device="cuda", dtype=torch.bfloat16)
            assert embeddings.sum(0).dtype == torch.float32
            (block,) = encoder.lift(embeddings)
    finally:
        torch.set_autocast_dtype("cuda", dtype)
        torch.set_autocast_enabled("cuda", False)
    assert block.dtype == torch.bfloat16


class _Unwritten(torch.autograd.Function):
    """NaN with the gradient of x: what stands beside a norm in 8 bits."""

    @staticmethod
    def forward(ctx, x):
        return torch.full_like(x, torch.nan)

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("family", ["t5", "decoder"])
def test_a_norm_in_8_bits_is_all_that_its_reader_reads(family, fusing, monkeypatch):
    """The kernel that rounds a norm as it makes it is stood in for by its definition."""
    shape = {"vocab_size": 64, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 3}
    values = {**shape, "num_kv_heads": 1} if family == "decoder" else shape
    torch.manual_seed(0)
    model = FAMILIES[family].model_class(FAMILIES[family].config_class.from_preset("tiny", **values)).train()
    ids = torch.randint(3, 64, (2, 16))
    data = {"input_ids": ids, "labels": ids}
    fusing()
    use_fp8(model)
    want = passes(model, data)
    rounded = []

    def add_norm_fp8(x, update, weight, eps):
        total, normed = add_norm_reference(x, update, weight, eps)
        scale = power_of_two(weight.detach().abs().amax() * len(weight) ** 0.5, VALUE)
        rounded.append(total.shape)
        return total, _Unwritten.apply(normed), quantize_reference(normed.detach(), scale, VALUE), scale

    monkeypatch.setattr("altup.models.layers.add_norm_fp8", add_norm_fp8)
    monkeypatch.setattr("altup.models.layers.rounds_norms", lambda x, update: True)
    torch.testing.assert_close(passes(model, data), want)
    sublayers = 3 * 3 + 3 * 2 if family == "t5" else 3 * 2  # all but each stack's first norm
    assert len(rounded) == sublayers - (2 if family == "t5" else 1)

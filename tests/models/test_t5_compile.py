from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from altup.models.stack import compile_layers, left_uncompiled
from tests.models.helpers import ALL_METHODS, batch, tiny_t5


def gradients(method, backend):
    torch._dynamo.reset()
    model = tiny_t5(method, expert_jitter=0.0, num_layers=3, num_decoder_layers=2).train()
    run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    run(**batch()).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("method", ALL_METHODS)
def test_compiles_without_graph_breaks_forward_and_backward(method):
    want = gradients(method, None)
    for name, got in gradients(method, "aot_eager").items():
        torch.testing.assert_close(got, want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["dense", "altup", "sequence-altup", "altup+moe"])
def test_layers_are_compiled_once_whatever_the_depth(method):
    graphs = []
    for depth in (3, 6):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model = tiny_t5(method, num_layers=depth, num_decoder_layers=depth, expert_jitter=0.0).train()
        want = model(**batch()).loss
        compile_layers(model, backend=counter, fullgraph=True)
        got = model(**batch()).loss
        got.backward()
        torch.testing.assert_close(got, want)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] >= 3  # encoder layer, decoder layer, final norm


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
    compile_layers(first, backend="aot_eager", fullgraph=True)
    ids, labels = (torch.randint(3, 40, (4, length)) for length in (32, 12))
    first(input_ids=ids, labels=labels).loss.backward()
    shapes = [(6, 32, 8), (7, 32, 16), (5, 64, 8)]
    wants = [second(**packed(*shape)).loss for shape in shapes]
    compile_layers(second, backend="aot_eager", fullgraph=True, dynamic=None)
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
    want = gradients(method, None)
    for name, got in gradients(method, "inductor").items():
        torch.testing.assert_close(got, want[name], rtol=1e-3, atol=1e-5)

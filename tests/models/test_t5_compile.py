from __future__ import annotations

import pytest
import torch

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


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "altup", "altup+sequence-altup+moe"])
def test_compiled_code_agrees(method):
    want = gradients(method, None)
    for name, got in gradients(method, "inductor").items():
        torch.testing.assert_close(got, want[name], rtol=1e-3, atol=1e-5)

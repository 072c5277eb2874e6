"""Compiled layers in training on a GPU: joined products, their kernels, handed-on additions; beside float32."""

from __future__ import annotations

import copy

import pytest
import torch

from altup import AltUpT5Config, AltUpT5ForConditionalGeneration
from altup.models.stack import compile_layers

pytestmark = pytest.mark.gpu


def passes(model, data):
    loss = model(**data, return_logits=False).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def build(method, **fields):
    torch.manual_seed(0)
    fields = {"vocab_size": 2048, "num_layers": 3, "num_decoder_layers": 2, **fields}
    return AltUpT5ForConditionalGeneration(AltUpT5Config.from_preset("small", method, **fields)).cuda().train()


def batch(padded):
    torch.manual_seed(1)
    ids = torch.randint(3, 2048, (8, 256), device="cuda")
    data = {"input_ids": ids, "labels": torch.randint(3, 2048, (8, 57), device="cuda")}
    if padded:
        data["attention_mask"] = (
            torch.arange(256, device="cuda") < torch.arange(200, 256, 7, device="cuda")[:8, None]
        ).long()
    return data


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("method", ["dense", "altup", "sequence-altup"])
def test_compiled_training_computes_what_float32_does(method, padded):
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    data, model = batch(padded), build(method)
    compiled = compile_layers(copy.deepcopy(model).to(torch.bfloat16), fullgraph=True)
    loss, gradient = passes(model, data)
    half_loss, half_gradient = passes(compiled, data)
    assert abs(half_loss - loss) < 0.01 * loss
    off = ((half_gradient - gradient).norm() / gradient.norm()).item()
    print(f"{method}: gradient off by {off:.4f}")
    assert off < 0.03


@pytest.mark.parametrize("method", ["altup", "recycled"])
def test_updates_with_the_next_norm_and_the_tables_gradient(method):
    torch._dynamo.reset()
    data, model = batch(False), build(method)
    for update in (*model.encoder.rule.updates, *model.decoder.rule.updates):
        update.P.data.add_(0.1 * torch.randn_like(update.P))
    compiled = compile_layers(copy.deepcopy(model).to(torch.bfloat16), fullgraph=True)
    loss, gradient = passes(model, data)
    half_loss, half_gradient = passes(compiled, data)
    assert abs(half_loss - loss) < 0.01 * loss
    assert ((half_gradient - gradient).norm() / gradient.norm()).item() < 0.03


@pytest.mark.parametrize("padded", [False, True])
def test_float32_weights_under_autocast(padded):
    """How `altup pretrain` computes."""
    torch._dynamo.reset()
    data, model = batch(padded), build("dense")
    compiled = compile_layers(copy.deepcopy(model), fullgraph=True)
    loss, gradient = passes(model, data)
    with torch.autocast("cuda", torch.bfloat16):
        half_loss, half_gradient = passes(compiled, data)
    assert abs(half_loss - loss) < 0.01 * loss
    assert ((half_gradient - gradient).norm() / gradient.norm()).item() < 0.03


@pytest.mark.parametrize("shared", [False, True])
def test_dropout_trains_compiled(shared):
    """With dropout a loss differs from run to run, and its gradient points where that without dropout does."""
    torch._dynamo.reset()
    data = batch(True)
    drops = build("dense", dropout_rate=0.1, sequence_dropout=shared).to(torch.bfloat16)
    model = compile_layers(drops, fullgraph=True)
    loss, gradient = passes(build("dense").to(torch.bfloat16), data)
    runs = []
    for _ in range(3):
        model.zero_grad()
        runs.append(passes(model, data))
    assert len({one for one, _ in runs}) == 3
    assert all(abs(one - loss) < 0.1 * loss for one, _ in runs)
    cosines = [torch.cosine_similarity(one, gradient, dim=0).item() for _, one in runs]
    print(f"losses {[one for one, _ in runs]} beside {loss}, cosines {cosines}")
    assert min(cosines) > 0.35

"""Every method in bfloat16 on a GPU, eager and compiled, against float32."""

from __future__ import annotations

import pytest
import torch

from altup import AltUpT5Config, AltUpT5ForConditionalGeneration
from tests.models.helpers import ALL_METHODS

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def compiled_anew():
    """The methods share their code: together they would reach the limit of compiled versions."""
    torch._dynamo.reset()


def build(method):
    torch.manual_seed(0)
    config = AltUpT5Config.from_preset(
        "small", method, vocab_size=2048, num_layers=3, num_decoder_layers=2, expert_jitter=0.0
    )
    return AltUpT5ForConditionalGeneration(config).cuda().train()


def data():
    torch.manual_seed(1)
    ids = torch.randint(3, 2048, (8, 254), device="cuda")
    mask = torch.ones_like(ids)
    mask[::2, 200:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(3, 2048, (8, 57), device="cuda")}


def run(method, dtype, compiled):
    model = build(method)
    if dtype == torch.bfloat16:
        model.to(dtype)
    forward = torch.compile(model, fullgraph=True) if compiled else model
    output = forward(**data())
    output.loss.backward()
    gradient = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach().float(), output.loss.item(), gradient


def distance(got, want):
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("method", ALL_METHODS)
def test_bfloat16_eager_and_compiled_agree_with_float32(method):
    torch.backends.cuda.matmul.allow_tf32 = False
    logits, loss, gradient = run(method, torch.float32, compiled=False)
    whole = torch.cat([g.flatten() for g in gradient.values()])
    loose = 5 if "moe" in method else 1  # a token near a border may change its expert
    for compiled in (False, True):
        half_logits, half_loss, half_gradient = run(method, torch.bfloat16, compiled)
        assert half_gradient.keys() == gradient.keys()
        assert all(torch.isfinite(g).all() for g in half_gradient.values())
        errors = {
            "logits": distance(half_logits, logits),
            "loss": abs(half_loss - loss) / loss,
            "gradient": distance(torch.cat([half_gradient[n].flatten() for n in gradient]), whole),
        }
        print(f"{method:28s} {'compiled' if compiled else 'eager':9s}", {k: f"{v:.1e}" for k, v in errors.items()})
        assert errors["logits"] < 0.02 * loose, errors
        assert errors["loss"] < 0.002 * loose, errors
        assert errors["gradient"] < 0.05 * loose, errors


@pytest.mark.parametrize("method", ALL_METHODS)
def test_float32_compiled_agrees_with_eager(method):
    torch.backends.cuda.matmul.allow_tf32 = False
    logits, _, gradient = run(method, torch.float32, compiled=False)
    got, _, got_gradient = run(method, torch.float32, compiled=True)
    assert distance(got, logits) < 1e-4
    for name, want in gradient.items():
        if want.norm() > 1e-6:
            assert distance(got_gradient[name], want) < 1e-2, name


@pytest.mark.parametrize("method", ALL_METHODS)
def test_under_autocast_the_state_is_in_bfloat16(method):
    """Which PyTorch's autocast would not do to a sum of embeddings."""
    model = build(method)
    with torch.autocast("cuda", torch.bfloat16):
        state = model.encoder.lift(model.encoder.embed_tokens(data()["input_ids"]))
    assert {block.dtype for block in state} == {torch.bfloat16}

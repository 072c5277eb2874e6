"""BERT and decoder of every method in bfloat16 on a GPU, eager and compiled, against float32."""

from __future__ import annotations

import pytest
import torch

from altup import AltUpBertConfig, AltUpBertForMaskedLM, AltUpDecoderConfig, AltUpDecoderForCausalLM
from altup.models.stack import compile_layers
from tests.models.helpers import STACKS

pytestmark = pytest.mark.gpu
SHAPE = {"d_model": 512, "d_ff": 1024, "d_kv": 64, "num_heads": 8, "num_layers": 3, "vocab_size": 2048}


def build(family, method):
    torch.manual_seed(0)
    config_class, model_class, shape = {
        "bert": (AltUpBertConfig, AltUpBertForMaskedLM, SHAPE),
        "decoder": (AltUpDecoderConfig, AltUpDecoderForCausalLM, {**SHAPE, "num_kv_heads": 2}),
    }[family]
    config = config_class.from_preset("tiny", method, **shape, expert_jitter=0.0)
    return model_class(config).cuda().train()


def data(padded):
    torch.manual_seed(1)
    ids = torch.randint(3, 2048, (8, 254), device="cuda")
    labels = torch.randint(3, 2048, (8, 254), device="cuda")
    if not padded:
        return {"input_ids": ids, "labels": labels}
    mask = torch.ones_like(ids)
    mask[::2, 200:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def run(family, method, dtype, compiled, padded):
    model = build(family, method)
    model.to(dtype)
    if compiled:
        compile_layers(model)
    output = model(**data(padded), return_logits=False)
    output.loss.backward()
    gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return output.loss.item(), torch.cat(gradients)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("family", "method"), [*STACKS, ("bert", "x0"), ("decoder", "x0")])
def test_bfloat16_eager_and_compiled_agree_with_float32(family, method, padded):
    torch.backends.cuda.matmul.allow_tf32 = False
    loss, gradient = run(family, method, torch.float32, False, padded)
    loose = 5 if "moe" in method else 1  # a token near a border may change its expert
    for compiled in (False, True):
        half_loss, half_gradient = run(family, method, torch.bfloat16, compiled, padded)
        error = ((half_gradient - gradient).norm() / gradient.norm()).item()
        print(f"{family} {method:28s} {'compiled' if compiled else 'eager':9s} {error:.1e}")
        assert abs(half_loss - loss) < 0.002 * loose * loss
        assert error < 0.05 * loose


@pytest.mark.parametrize("method", ["dense", "altup", "recycled"])
def test_generation_with_a_static_cache_is_that_with_a_dynamic_one(method):
    """The static cache is read by compiled code."""
    model = build("decoder", method).eval()
    inputs = {name: value.flip(1) for name, value in data(True).items() if name != "labels"}
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    want = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, cache_implementation="static"), want)

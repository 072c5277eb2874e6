"""The counts of BERT and the decoder against the models themselves, torch's counter and what autograd keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from altup import AltUpBertConfig, AltUpBertForMaskedLM, AltUpDecoderConfig, AltUpDecoderForCausalLM
from altup.models.accounting import account
from altup.models.bert.stack import ALIGNED
from tests.models.stacks import STACKS

CLASSES = {
    "bert": (AltUpBertConfig, AltUpBertForMaskedLM),
    "decoder": (AltUpDecoderConfig, AltUpDecoderForCausalLM),
}


def config_of(family, method, **fields):
    experts = 6 if "moe" in method else None
    return CLASSES[family][0].from_preset("tiny", method, experts=experts, **{"vocab_size": 500, **fields})


@pytest.mark.parametrize("tied", [False, None])
@pytest.mark.parametrize(("family", "method"), STACKS)
def test_counts_equal_those_of_the_model_itself(family, method, tied):
    config = config_of(family, method, **({} if tied is None else {"tie_word_embeddings": tied}))
    with torch.device("meta"):
        model = CLASSES[family][1](config)
    model.tie_weights()
    count = account(config)
    tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    assert count.total == sum(p.numel() for p in model.parameters())
    assert count.embedding == sum(p.numel() for p in tables)
    assert count.parameters["norms"] == sum(p.numel() for name, p in model.named_parameters() if "norm" in name)


@pytest.mark.parametrize(("family", "method"), [stack for stack in STACKS if "moe" not in stack[1]])
def test_flops_equal_the_products_that_torch_counts(family, method):
    config = config_of(family, method)
    # In bfloat16 the rule is element-wise; in float32 on a CPU it is a matrix product, and would be counted.
    model, ids = CLASSES[family][1](config).bfloat16(), torch.zeros(1, 37, dtype=torch.long)
    asked = {"masked_positions": torch.arange(5).unsqueeze(0), "return_logits": False} if family == "bert" else {}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, labels=ids, **asked)
    targets = 5 if family == "bert" else None
    bias = 2 * 5 * ALIGNED * 500 if family == "bert" else 0  # the columns that carry the bias of the logits
    assert account(config, 37, targets).flops_matrix == counter.get_total_flops() - bias


def test_targets():
    bert, decoder = config_of("bert", "dense"), config_of("decoder", "dense")
    assert (account(bert, 512).targets, account(decoder, 512).targets) == (77, 512)
    assert account(decoder, 512, 114).targets == 512
    with pytest.raises(ValueError, match="targets=0"):
        account(bert, 512, 0)


def layer_from_torchs_own_parts(x, config, weights):
    """One layer of fused operations; a layer norm stands in for an RMS norm, equal heads for shared ones."""
    bert, width, inner = isinstance(config, AltUpBertConfig), config.d_model, config.num_heads * config.d_kv

    def project(x, out):
        weight = torch.randn(out, x.shape[-1], dtype=x.dtype, requires_grad=True)
        weights.add(weight.untyped_storage().data_ptr())
        return F.linear(x, weight)

    def norm(x):
        return F.layer_norm(x, (width,))

    normed = x if bert else norm(x)
    q, k, v = (project(normed, inner).unflatten(-1, (config.num_heads, -1)).transpose(1, 2) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        mixed = F.scaled_dot_product_attention(q, k, v)
    x = x + project(mixed.transpose(1, 2).flatten(2), width)
    if bert:
        x = norm(x)
        return norm(x + project(F.gelu(project(x, config.d_ff)), width))
    normed = norm(x)
    return x + project(F.silu(project(normed, config.d_ff)) * project(normed, config.d_ff), width)


def kept_bytes(config, tokens):
    """What autograd really keeps for two layers and the rule between and after them."""
    K = config.num_blocks
    state = torch.randn(K, 1, tokens, config.d_model, dtype=torch.bfloat16, requires_grad=True)
    storages, weights = {}, set()

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in range(2):
            y = layer_from_torchs_own_parts(state[layer % K], config, weights)
            if K == 1:
                state = y.unsqueeze(0)
                continue
            M = torch.randn(K, K, dtype=torch.bfloat16, requires_grad=True)
            g = torch.randn(K, 1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
            state = (M @ state.reshape(K, -1)).view(state.shape) + g * y
    return sum(t.untyped_storage().nbytes() for place, t in storages.items() if place not in weights)


@pytest.mark.parametrize("family", ["bert", "decoder"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_activations_equal_what_autograd_keeps_of_two_more_layers(family, k):
    fields = {"num_kv_heads": 4} if family == "decoder" else {}

    def account_for(layers):
        return account(
            config_of(family, "recycled", num_layers=layers, num_blocks=k, **fields), 96
        ).activation_bytes

    kept = kept_bytes(config_of(family, "recycled", num_blocks=k, **fields), 96)
    assert account_for(4) - account_for(2) == pytest.approx(kept, rel=0.01)

"""Models of transformers are counted as altup's equal models are, and as their real tensors are."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BartConfig,
    BertConfig,
    Gemma3nTextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    ViTConfig,
)

from altup import AltUpDecoderConfig, account
from altup.core.errors import UserError


def test_a_llama_costs_what_the_equal_decoder_costs() -> None:
    ours = AltUpDecoderConfig.from_preset("small", "dense", vocab_size=1000)
    heads = {
        "num_attention_heads": ours.num_heads,
        "num_key_value_heads": ours.num_kv_heads,
        "head_dim": ours.d_kv,
    }
    theirs = LlamaConfig(
        vocab_size=1000,
        hidden_size=ours.d_model,
        intermediate_size=ours.d_ff,
        num_hidden_layers=ours.num_layers,
        **heads,
    )
    wanted, found = account(ours, 64), account(theirs, 64)
    assert (found.total, found.embedding) == (wanted.total, wanted.embedding)
    assert found.flops_forward == pytest.approx(wanted.flops_forward, rel=1e-5)  # and angles of positions
    assert found.activation_bytes == pytest.approx(wanted.activation_bytes, rel=0.6)  # less is fused
    assert found.activation_bytes > wanted.activation_bytes
    assert found.activations["logits"] == wanted.activations["logits"]


def test_activations_are_those_of_real_tensors() -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model, kept = LlamaForCausalLM(config).eval(), {}
    own = {p.data_ptr() for p in model.parameters()}
    matrices = [p for p in model.parameters() if p.ndim == 2]
    copies = {p.shape for p in matrices} | {p.T.shape for p in matrices}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own and not (tensor.dtype is torch.bfloat16 and tensor.shape in copies):
            kept[place] = tensor
        return tensor

    ids = torch.zeros(1, 10, dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(input_ids=ids, labels=ids, use_cache=False)
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert account(config, 10).activation_bytes == pytest.approx(real, rel=0.02)  # a mask more


SMALL = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**SMALL, intermediate_size=64),
        GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2),
        T5Config(vocab_size=100, d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2),
        BartConfig(vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2, max_position_embeddings=300),
        Gemma3nTextConfig(
            **SMALL, intermediate_size=64, vocab_size_per_layer_input=100, num_kv_shared_layers=0, head_dim=16
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_kinds_of_models(config) -> None:
    short, long = account(config, 128), account(config, 256)
    assert short.total == long.total > short.embedding > 0
    assert short.flops_forward < long.flops_forward
    assert 1 < long.activation_bytes / short.activation_bytes <= 4.01
    assert short.flops["attention"] > 0


def test_a_model_that_reads_no_text_is_refused() -> None:
    with pytest.raises(UserError, match="ViTConfig is of no language model"):
        account(ViTConfig())

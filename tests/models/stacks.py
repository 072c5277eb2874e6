"""Small BERTs and decoders of every kind, made on the spot, ours and Hugging Face's."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from altup import (
    AltUpBertConfig,
    AltUpBertForMaskedLM,
    AltUpDecoderConfig,
    AltUpDecoderForCausalLM,
)

VOCABULARY = 120
BERT_SHAPE = {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_heads": 3, "num_layers": 4}
DECODER_SHAPE = {**BERT_SHAPE, "num_heads": 6, "num_kv_heads": 2}
WIDENINGS = ["dense", "altup", "sameup", "recycled", "sum", "dense-wide", "moe", "altup+moe"]
STRIDED = ["sequence-altup", "stride-and-skip", "altup+sequence-altup+moe", "recycled+stride-and-skip"]
BERTS = [("bert", method) for method in WIDENINGS + STRIDED]
DECODERS = [("decoder", method) for method in WIDENINGS]
STACKS = [*BERTS, *DECODERS]


def tiny(family, method="dense", k=None, seed=0, **fields):
    """A model of any method with weights that matter, and coefficients that have left their start."""
    torch.manual_seed(seed)
    experts = 6 if "moe" in method else None
    config_class, model_class, shape = {
        "bert": (AltUpBertConfig, AltUpBertForMaskedLM, {**BERT_SHAPE, "max_position_embeddings": 40}),
        "decoder": (AltUpDecoderConfig, AltUpDecoderForCausalLM, DECODER_SHAPE),
    }[family]
    values = {**shape, "initializer_range": 0.2, **fields}
    model = model_class(config_class.from_preset("tiny", method, k=k, experts=experts, **values))
    shake(model, ".rule.", ".update.", "norm", "bias")
    return model.eval()


@torch.no_grad()
def shake(model, *names):
    """Move the parameters with one of `names` in theirs away from the values they start with."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.add_(0.2 * torch.randn_like(parameter))


def hugging_face_bert(tied=True, **fields):
    torch.manual_seed(1)
    shape = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 40}
    config = BertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=40,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        **{**shape, **fields},
    )
    model = BertForMaskedLM(config)
    shake(model, "LayerNorm", "bias")
    return model.eval()


def hugging_face_llama(tied=False, **fields):
    torch.manual_seed(1)
    shape = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 40}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        head_dim=8,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{**shape, **fields},
    )
    model = LlamaForCausalLM(config)
    shake(model, "norm")
    return model.eval()


def batch(family="bert", rows=3, tokens=13, seed=2):
    """Padded on the right; labels at some places (BERT) or everywhere but at padding (decoder)."""
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, tokens))
    mask = torch.ones_like(ids)
    mask[0, tokens - 4 :] = 0
    mask[1, 2:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if family == "bert":
        labels = labels.masked_fill(torch.rand(labels.shape) < 0.5, -100)
        labels[:, 0] = ids[:, 0]
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}

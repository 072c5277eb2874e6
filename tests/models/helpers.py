"""Small models of every kind, made on the spot."""

from __future__ import annotations

import torch
from transformers import T5Config, T5ForConditionalGeneration

from altup import AltUpT5Config, AltUpT5ForConditionalGeneration
from altup.models.config import METHODS

VOCABULARY = 120
SHAPE = {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_heads": 3, "num_layers": 4}
ALL_METHODS = [*METHODS, "altup+sequence-altup+moe", "recycled+stride-and-skip", "altup+average-pooling"]


def tiny_t5(method="dense", k=None, seed=0, **fields) -> AltUpT5ForConditionalGeneration:
    """A model of any method whose coefficients have left their starting values."""
    torch.manual_seed(seed)
    experts = 6 if "moe" in method else None
    config = AltUpT5Config.from_preset("tiny", method, k=k, experts=experts, **{**SHAPE, **fields})
    model = AltUpT5ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".rule." in name or ".update." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def hugging_face_t5(tied=False, **fields) -> T5ForConditionalGeneration:
    torch.manual_seed(1)
    config = T5Config(
        **{**SHAPE, "num_layers": 3, **fields},
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        tie_word_embeddings=tied,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    if not tied:
        width = config.d_model
        model.lm_head.weight = torch.nn.Parameter(torch.randn(config.vocab_size, width) * width**-0.5)
    return model.eval()


def batch(rows=3, inputs=13, targets=7, seed=2):
    """Padded on the right: inputs, their mask, decoder inputs, their mask, and labels."""
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, inputs))
    mask = torch.ones_like(ids)
    mask[0, inputs - 4 :] = 0
    mask[1, 1:] = 0
    decoder_ids = torch.randint(3, VOCABULARY, (rows, targets))
    decoder_mask = torch.ones_like(decoder_ids)
    decoder_mask[1, 4:] = 0
    labels = torch.randint(3, VOCABULARY, (rows, targets)).masked_fill(decoder_mask == 0, -100)
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "decoder_input_ids": decoder_ids,
        "decoder_attention_mask": decoder_mask,
        "labels": labels,
    }

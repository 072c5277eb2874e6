"""Small models of every family and method, made on the spot, ours and Hugging Face's, and a batch for each."""

from __future__ import annotations

import copy

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from altup import AltUpT5Config, AltUpT5ForConditionalGeneration, decelerate
from altup.models.families import FAMILIES
from altup.models.methods import list_presets
from altup.nn import coefficient_names

VOCABULARY = 120
SHAPE = {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_heads": 3, "num_layers": 4}
ALL_METHODS = [*list_presets(), "altup+sequence-altup+moe", "recycled+stride-and-skip", "altup+average-pooling"]
DECODER_SHAPE = {**SHAPE, "num_heads": 6, "num_kv_heads": 2}
WIDENINGS = ["dense", "altup", "sameup", "recycled", "sum", "dense-wide", "moe", "altup+moe"]
STRIDED = ["sequence-altup", "stride-and-skip", "altup+sequence-altup+moe", "recycled+stride-and-skip"]
BERTS = [("bert", method) for method in WIDENINGS + STRIDED]
DECODERS = [("decoder", method) for method in WIDENINGS]
STACKS = [*BERTS, *DECODERS]


def tiny_t5(method="dense", k=None, seed=0, **fields) -> AltUpT5ForConditionalGeneration:
    """A model of any method whose coefficients have left their starting values."""
    torch.manual_seed(seed)
    experts = 6 if "moe" in method else None
    config = AltUpT5Config.from_preset("tiny", method, k=k, experts=experts, **{**SHAPE, **fields})
    model = AltUpT5ForConditionalGeneration(config)
    with torch.no_grad():
        coefficients = coefficient_names(model)
        for name, parameter in model.named_parameters():
            if name in coefficients:
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


def tiny(family, method="dense", k=None, seed=0, **fields):
    """A BERT or decoder of any method with weights that matter, and coefficients that have left their start."""
    torch.manual_seed(seed)
    experts = 6 if "moe" in method else None
    shape = {"bert": {**SHAPE, "max_position_embeddings": 40}, "decoder": DECODER_SHAPE}[family]
    values = {**shape, "initializer_range": 0.2, **fields}
    config = FAMILIES[family].config_class.from_preset("tiny", method, k=k, experts=experts, **values)
    model = FAMILIES[family].model_class(config)
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


def batch(family="t5", rows=3, inputs=13, targets=7, seed=2):
    """Padded on the right: inputs, their mask and labels, of T5 also decoder inputs and their mask.

    BERT has labels at some places, a decoder everywhere but at padding.
    """
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, inputs))
    mask = torch.ones_like(ids)
    mask[0, inputs - 4 :] = 0
    mask[1, 1 if family == "t5" else 2 :] = 0
    given = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    if family == "t5":
        decoder_ids = torch.randint(3, VOCABULARY, (rows, targets))
        decoder_mask = torch.ones_like(decoder_ids)
        decoder_mask[1, 4:] = 0
        labels = torch.randint(3, VOCABULARY, (rows, targets)).masked_fill(decoder_mask == 0, -100)
        return {
            **given,
            "decoder_input_ids": decoder_ids,
            "decoder_attention_mask": decoder_mask,
            "labels": labels,
        }
    labels = ids.masked_fill(mask == 0, -100)
    if family == "bert":
        labels = labels.masked_fill(torch.rand(labels.shape) < 0.5, -100)
        labels[:, 0] = ids[:, 0]
    return {**given, "labels": labels}


def regret(model, inputs, tokens, ends):
    """How far a token's logit lies below the highest at most, in standard deviations, by float64."""
    decelerate(model)
    wide = copy.deepcopy(model).double()
    with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
        logits = wide(**inputs, decoder_input_ids=tokens[:, :-1], use_cache=False).logits
    chosen = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    is_end = (tokens[:, 1:, None] == torch.tensor(ends, device=tokens.device)).any(dim=-1)
    before_end = is_end.cumsum(dim=1) - is_end.int() == 0
    return float(((logits.amax(-1) - chosen) / logits.std(-1))[before_end].max())

"""Tiny random models of every family that `widen` is tested on, and inputs with padding for each."""

from __future__ import annotations

import torch
import transformers as hf

VOCABULARY = 97
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
WHISPER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "decoder_start_token_id": 2,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def _t5():
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_ff=48,
            d_kv=8,
            num_heads=4,
            num_layers=3,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
            eos_token_id=None,
        )
    )


FAMILIES = {
    "t5": _t5,
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**ENCODER)),
    "bert-classifier": lambda: hf.BertForSequenceClassification(hf.BertConfig(**ENCODER)),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**ENCODER)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=4,
            n_head=4,
            n_positions=64,
            eos_token_id=None,
            bos_token_id=1,
        )
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            word_embed_proj_dim=16,
            ffn_dim=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=64,
            eos_token_id=None,
        )
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, tie_word_embeddings=True)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**DECODER, sliding_window=6)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**DECODER, sliding_window=6)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**DECODER, sliding_window=6)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**DECODER)),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=5,
        )
    ),
    "whisper": lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**WHISPER)),
    "whisper-encoder": lambda: hf.WhisperForAudioClassification(hf.WhisperConfig(**WHISPER, num_labels=5)),
}


def build(family: str, attention: str = "sdpa", seed: int = 0):
    """A model whose norms, biases and positions are random too, so that each of them shows in the output."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    # Gemma 2 has lost SDPA in newer versions of transformers.
    model.set_attn_implementation(attention if model._supports_sdpa else "eager")
    return model


def inputs(model, rows: int = 3, tokens: int = 9, seed: int = 1) -> dict[str, torch.Tensor]:
    """A padded batch with labels where the model takes them."""
    torch.manual_seed(seed)
    config = model.config
    if model.main_input_name == "pixel_values":
        images = torch.randn(rows, 3, config.image_size, config.image_size)
        return {"pixel_values": images, "labels": torch.randint(config.num_labels, (rows,))}
    if model.main_input_name == "input_features":
        sound = torch.randn(rows, config.num_mel_bins, 2 * config.max_source_positions)
        if "Classification" in type(model).__name__:
            return {"input_features": sound, "labels": torch.randint(config.num_labels, (rows,))}
        return {"input_features": sound, "labels": torch.randint(3, VOCABULARY, (rows, tokens))}
    ids = torch.randint(3, VOCABULARY, (rows, tokens))
    mask = torch.ones_like(ids)
    if model.can_generate() and not config.is_encoder_decoder:
        mask[0, :4], mask[1, :1] = 0, 0
    else:
        mask[0, -4:], mask[1, -1:] = 0, 0
    pad = config.pad_token_id or 0
    batch = {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}
    if "SequenceClassification" in type(model).__name__:
        return batch | {"labels": torch.randint(config.num_labels, (rows,))}
    if config.is_encoder_decoder:
        return batch | {"labels": torch.randint(3, VOCABULARY, (rows, tokens - 3))}
    return batch | {"labels": ids.masked_fill(mask == 0, -100)}

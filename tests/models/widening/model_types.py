"""Tiny models of forty families, and for each the inputs of every modality that it takes.

Those of `families.py`, and model types with a habit of their own:

- BigBird exchanges its attention when an input is short; Longformer and LED cut padding off every hidden state.
- BLOOM, Falcon, GPT-J, DeBERTa and Mamba collect hidden states themselves, between the layers.
- DiffLlama, ImageGPT and FastSpeech2Conformer make some weights with data even where there is to be none.
- LLaVA and its kin put the features of images between the tokens; Qwen 3 VL also adds them between the layers.
- BarkFine ties its heads in its constructor. RT-DETR's decoder reads the state after each layer.
- ViT-MAE and ViLT draw at random in every forward pass. DINOv2's backbone returns nothing but a tuple of maps.
- CLIP has two towers and a scalar. Qwen 2 Audio puts the features of sounds between the tokens.
"""

from __future__ import annotations

import torch
import transformers as hf

from tests.models.widening.families import DECODER, ENCODER, FAMILIES, build, inputs

IDS = torch.arange(18).reshape(2, 9) % 40 + 3
TEXT = {"input_ids": IDS}
LONG = {"input_ids": torch.arange(64).reshape(1, 64) % 40 + 3}
IMAGE = torch.arange(2 * 3 * 8 * 8).reshape(2, 3, 8, 8).sin()
IMAGE_TOKENS = {"input_ids": torch.cat([IDS[:, :1], torch.full((2, 4), 90), IDS[:, 5:]], dim=1)}
GRID = {
    "input_ids": torch.cat([IDS[:, :1], torch.tensor([[92, 90, 93]] * 2), IDS[:, 4:]], dim=1),
    "mm_token_type_ids": torch.tensor([[0, 0, 1, 0, 0, 0, 0, 0, 0]] * 2).int(),
    "image_grid_thw": torch.tensor([[1, 2, 2]] * 2),
    "pixel_values": torch.arange(8 * 96).reshape(8, 96).sin(),
}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
VISION["num_hidden_layers"] = 3
SIGLIP = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
QWEN_TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
GPT = {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
WITH_IMAGE = IMAGE_TOKENS | {"pixel_values": IMAGE}
SOUND = torch.arange(2 * 8 * 24).reshape(2, 8, 24).sin()
AUDIO_TOKENS = torch.cat([IDS[:, :1], torch.full((2, 6), 90), IDS[:, 7:]], dim=1)
SEQ2SEQ = {f"{part}_layers": 2 for part in ("encoder", "decoder")} | {
    f"{part}_{name}": 4 for part in ("encoder", "decoder") for name in ("attention_heads", "ffn_dim")
}


def rotary(**more):
    return {"rope_type": "default", "mrope_section": [1, 1, 2], **more}


def qwen2_vl():
    text = {**DECODER, "rope_parameters": rotary(type="default")}
    vision = {**QWEN_VISION, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    config = hf.Qwen2VLConfig(vision_config=vision, text_config=text, **QWEN_TOKENS)
    return hf.Qwen2VLForConditionalGeneration(config)


def qwen3_vl():
    text = {**DECODER, "rope_parameters": rotary(mrope_interleaved=True)}
    vision = {**QWEN_VISION, "depth": 3, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
    vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    config = hf.Qwen3VLConfig(vision_config=vision, text_config=text, **QWEN_TOKENS)
    return hf.Qwen3VLForConditionalGeneration(config)


def rt_detr():
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4}
    backbone = hf.RTDetrResNetConfig(**sizes, out_features=["stage2", "stage3", "stage4"])
    config = hf.RTDetrConfig(
        backbone_config=backbone,
        encoder_in_channels=[8, 16, 16],
        decoder_in_channels=[32, 32, 32],
        d_model=32,
        encoder_hidden_dim=32,
        num_queries=5,
        decoder_layers=2,
        **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")},
    )
    return hf.RTDetrForObjectDetection(config)


def fastspeech2():
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "num_attention_heads")}
    sizes |= {f"{part}_predictor_channels": 16 for part in ("duration", "pitch", "energy")}
    sizes |= {"encoder_linear_units": 16, "decoder_linear_units": 16, "speech_decoder_postnet_units": 16}
    config = hf.FastSpeech2ConformerConfig(hidden_size=24, vocab_size=60, num_mel_bins=8, **sizes)
    return hf.FastSpeech2ConformerModel(config)


def musicgen():
    text = {"model_type": "t5", "vocab_size": 97, "d_model": 16, "d_ff": 16, "d_kv": 4, "num_heads": 2}
    audio = {"model_type": "encodec", "num_filters": 2, "hidden_size": 8, "codebook_size": 64, "codebook_dim": 8}
    decoder = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    decoder |= {"ffn_dim": 32, "num_codebooks": 2, "max_position_embeddings": 32}
    config = hf.MusicgenConfig(text_encoder={**text, "num_layers": 2}, audio_encoder=audio, decoder=decoder)
    return hf.MusicgenForConditionalGeneration(config)


def blip(name):
    asking = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    asking |= {"encoder_hidden_size": 16, "vocab_size": 40}
    text = {"model_type": "opt", "vocab_size": 97, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    parts = {"vision_config": VISION, "qformer_config": asking, "text_config": text}
    config = getattr(hf, f"{name}Config")(**parts, num_query_tokens=4, image_token_index=90)
    return getattr(hf, f"{name}ForConditionalGeneration")(config)


def qwen2_audio():
    audio = {"model_type": "qwen2_audio_encoder", "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2}
    audio |= {"encoder_ffn_dim": 16, "num_mel_bins": 8, "max_source_positions": 12}
    text = {"model_type": "qwen2", **DECODER}
    config = hf.Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=90)
    return hf.Qwen2AudioForConditionalGeneration(config)


def clip():
    text = {**ENCODER, "num_hidden_layers": 2, "eos_token_id": 2}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16))


def spectrogram_transformer():
    sizes = {name: size for name, size in VISION.items() if name != "image_size"}
    config = hf.ASTConfig(**sizes, num_mel_bins=8, max_length=16, frequency_stride=4, time_stride=4, num_labels=3)
    return hf.ASTForAudioClassification(config)


def wav2vec2():
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    sizes |= {"conv_dim": [8, 8], "conv_kernel": [4, 4], "conv_stride": [4, 4], "num_feat_extract_layers": 2}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0}
    return hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**sizes, vocab_size=40))


def llava():
    text, vision = hf.LlamaConfig(**DECODER), hf.CLIPVisionConfig(**VISION)
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=90)
    return hf.LlavaForConditionalGeneration(config)


def paligemma():
    parts = {
        "vision_config": {**SIGLIP, "projection_dim": 32},
        "text_config": {"model_type": "gemma", **DECODER},
    }
    config = hf.PaliGemmaConfig(**parts, image_token_index=90, projection_dim=32)
    return hf.PaliGemmaForConditionalGeneration(config)


def gemma3_vision():
    marks = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    text = {**DECODER, "sliding_window": 6}
    config = hf.Gemma3Config(vision_config=SIGLIP, text_config=text, mm_tokens_per_image=4, **marks)
    return hf.Gemma3ForConditionalGeneration(config)


def bark_fine():
    sizes = {"hidden_size": 32, "num_layers": 3, "num_heads": 4, "block_size": 64, "n_codes_total": 4}
    return hf.BarkFineModel(hf.BarkFineConfig(input_vocab_size=97, output_vocab_size=97, **sizes))


def vit_mae():
    decoder = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = hf.ViTMAEConfig(**VISION, **{f"decoder_{name}": size for name, size in decoder.items()})
    return hf.ViTMAEForPreTraining(config)


def vilt():
    sizes = {"vocab_size": 97, "max_position_embeddings": 40, "max_image_length": 2}
    return hf.ViltForQuestionAnswering(hf.ViltConfig(**VISION, **sizes, num_labels=3))


def dinov2_backbone():
    sizes = {name: size for name, size in VISION.items() if name != "intermediate_size"}
    return hf.Dinov2Backbone(hf.Dinov2Config(**sizes, out_features=["stage1", "stage3"]))


def small(name, head, **sizes):
    """A model by the names of its family and its head."""
    return lambda: getattr(hf, f"{name}{head}")(getattr(hf, f"{name}Config")(**{"vocab_size": 97, **sizes}))


WIDE = {"hidden_size": 32}
THREE = {**WIDE, "num_hidden_layers": 3}
TYPES = {
    "big-bird": (small("BigBird", "ForMaskedLM", **ENCODER, block_size=4, num_random_blocks=1), [LONG]),
    "longformer": (small("Longformer", "ForMaskedLM", **ENCODER, attention_window=4), [TEXT]),
    "led": (
        small("LED", "ForConditionalGeneration", d_model=32, **SEQ2SEQ, attention_window=4),
        [TEXT | {"decoder_input_ids": IDS}],
    ),
    "bart": (
        small("Bart", "ForConditionalGeneration", d_model=32, **SEQ2SEQ),
        [TEXT | {"decoder_input_ids": IDS}],
    ),
    "deberta": (small("Deberta", "ForMaskedLM", **ENCODER), [TEXT]),
    "falcon": (small("Falcon", "ForCausalLM", **THREE, num_attention_heads=4), [TEXT]),
    "bloom": (small("Bloom", "ForCausalLM", **WIDE, n_layer=3, n_head=4), [TEXT]),
    "gpt-j": (small("GPTJ", "ForCausalLM", **GPT, rotary_dim=4), [TEXT]),
    "mamba": (small("Mamba", "ForCausalLM", **THREE, state_size=4), [TEXT]),
    "mixtral": (small("Mixtral", "ForCausalLM", **DECODER, num_local_experts=4), [TEXT]),
    "diffllama": (small("DiffLlama", "ForCausalLM", **DECODER), [TEXT]),
    "imagegpt": (small("ImageGPT", "ForCausalImageModeling", **GPT), [TEXT]),
    "fastspeech2": (fastspeech2, [{"input_ids": IDS[:1]}]),
    "bark-fine": (bark_fine, [{"codebook_idx": 2, "input_ids": torch.arange(72).reshape(2, 9, 4) % 40}]),
    "musicgen": (musicgen, [{"input_ids": IDS, "decoder_input_ids": IDS.repeat(2, 1)}]),
    "wav2vec2": (wav2vec2, [{"input_values": torch.arange(800).reshape(2, 400).sin()}]),
    "spectrogram-transformer": (spectrogram_transformer, [{"input_values": SOUND[..., :16].mT}]),
    "qwen2-audio": (
        qwen2_audio,
        [
            {
                "input_ids": AUDIO_TOKENS,
                "attention_mask": torch.ones_like(AUDIO_TOKENS),
                "input_features": SOUND,
                "feature_attention_mask": torch.ones(2, 24).long(),
            },
            TEXT,
        ],
    ),
    "llava": (llava, [WITH_IMAGE, TEXT]),
    "paligemma": (paligemma, [WITH_IMAGE, TEXT]),
    "gemma3-vision": (
        gemma3_vision,
        [WITH_IMAGE | {"token_type_ids": (IMAGE_TOKENS["input_ids"] == 90).long()}, TEXT],
    ),
    "blip-2": (lambda: blip("Blip2"), [WITH_IMAGE]),
    "clip": (clip, [TEXT | {"pixel_values": IMAGE}]),
    "qwen2-vl": (qwen2_vl, [GRID, TEXT]),
    "qwen3-vl": (qwen3_vl, [GRID, TEXT]),
    "vit-mae": (vit_mae, [{"pixel_values": IMAGE}]),
    "vilt": (vilt, [TEXT | {"pixel_values": IMAGE}]),
    "dinov2-backbone": (dinov2_backbone, [{"pixel_values": IMAGE}]),
    "rt-detr": (rt_detr, [{"pixel_values": torch.arange(3 * 64 * 64).reshape(1, 3, 64, 64).sin()}]),
}
NAMES = [*FAMILIES, *TYPES]
ONLY_RECYCLED = {"blip-2", "fastspeech2", "gemma3-vision", "musicgen", "rt-detr", "wav2vec2"}
CANNOT_GENERATE = {"musicgen", "imagegpt"}  # from these inputs alone
MADE_UP = {"big-bird", "longformer"}  # the example made up for them is short, and wakes their habit


def make(name):
    """A model whose norms, biases and positions are random too, so that each of them shows in the output."""
    if name in FAMILIES:
        return build(name)
    torch.manual_seed(0)
    model = TYPES[name][0]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs_of(name, model):
    """The arguments for each modality, those with the most first."""
    if name in TYPES:
        return TYPES[name][1]
    return [inputs(model)]

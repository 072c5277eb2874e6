"""Model types with a habit of their own: widened, each computes what it did with every input, or is refused.

- BigBird exchanges its attention when an input is short; Longformer and LED cut padding off every hidden state.
- BLOOM, Falcon, GPT-J, DeBERTa and Mamba collect hidden states themselves, between the layers.
- DiffLlama, ImageGPT and FastSpeech2Conformer make some weights with data even where there is to be none.
- LLaVA and its kin put the features of images between the tokens; Qwen 3 VL also adds them between the layers.
- BarkFine ties its heads in its constructor. RT-DETR's decoder reads the state after each layer.
- ViT-MAE and ViLT draw at random in every forward pass. DINOv2's backbone returns nothing but a tuple of maps.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

import altup
from altup.core.errors import UserError
from tests.models.widening.families import DECODER, ENCODER, build, inputs

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


TYPES = {
    "big-bird": (
        lambda: hf.BigBirdForMaskedLM(hf.BigBirdConfig(**ENCODER, block_size=4, num_random_blocks=1)),
        LONG,
    ),
    "longformer": (lambda: hf.LongformerForMaskedLM(hf.LongformerConfig(**ENCODER, attention_window=4)), TEXT),
    "led": (
        lambda: hf.LEDForConditionalGeneration(
            hf.LEDConfig(vocab_size=97, d_model=32, **SEQ2SEQ, attention_window=4)
        ),
        TEXT | {"decoder_input_ids": IDS},
    ),
    "deberta": (lambda: hf.DebertaForMaskedLM(hf.DebertaConfig(**ENCODER)), TEXT),
    "falcon": (
        lambda: hf.FalconForCausalLM(
            hf.FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
        ),
        TEXT,
    ),
    "bloom": (
        lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=3, n_head=4)),
        TEXT,
    ),
    "gpt-j": (lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**GPT, rotary_dim=4)), TEXT),
    "mamba": (
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=97, hidden_size=32, state_size=4, num_hidden_layers=3)
        ),
        TEXT,
    ),
    "diffllama": (lambda: hf.DiffLlamaForCausalLM(hf.DiffLlamaConfig(**DECODER)), TEXT),
    "imagegpt": (lambda: hf.ImageGPTForCausalImageModeling(hf.ImageGPTConfig(**GPT)), TEXT),
    "fastspeech2": (fastspeech2, {"input_ids": IDS[:1]}),
    "bark-fine": (
        lambda: hf.BarkFineModel(
            hf.BarkFineConfig(
                input_vocab_size=97,
                output_vocab_size=97,
                hidden_size=32,
                num_layers=3,
                num_heads=4,
                block_size=64,
                n_codes_total=4,
            )
        ),
        {"codebook_idx": 2, "input_ids": torch.arange(72).reshape(2, 9, 4) % 40},
    ),
    "llava": (
        lambda: hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(
                vision_config=hf.CLIPVisionConfig(**VISION),
                text_config=hf.LlamaConfig(**DECODER),
                image_token_index=90,
            )
        ),
        IMAGE_TOKENS | {"pixel_values": IMAGE},
    ),
    "paligemma": (
        lambda: hf.PaliGemmaForConditionalGeneration(
            hf.PaliGemmaConfig(
                vision_config={**SIGLIP, "projection_dim": 32},
                text_config={"model_type": "gemma", **DECODER},
                image_token_index=90,
                projection_dim=32,
            )
        ),
        IMAGE_TOKENS | {"pixel_values": IMAGE},
    ),
    "gemma3-vision": (
        lambda: hf.Gemma3ForConditionalGeneration(
            hf.Gemma3Config(
                vision_config=SIGLIP,
                text_config={**DECODER, "sliding_window": 6},
                mm_tokens_per_image=4,
                image_token_index=90,
                boi_token_index=91,
                eoi_token_index=92,
            )
        ),
        IMAGE_TOKENS | {"pixel_values": IMAGE, "token_type_ids": (IMAGE_TOKENS["input_ids"] == 90).long()},
    ),
    "blip-2": (lambda: blip("Blip2"), IMAGE_TOKENS | {"pixel_values": IMAGE}),
    "qwen2-vl": (qwen2_vl, GRID),
    "qwen3-vl": (qwen3_vl, GRID),
    "vit-mae": (
        lambda: hf.ViTMAEForPreTraining(
            hf.ViTMAEConfig(
                **VISION,
                decoder_hidden_size=32,
                decoder_num_hidden_layers=2,
                decoder_num_attention_heads=2,
                decoder_intermediate_size=24,
            )
        ),
        {"pixel_values": IMAGE},
    ),
    "vilt": (
        lambda: hf.ViltForQuestionAnswering(
            hf.ViltConfig(**VISION, vocab_size=97, max_position_embeddings=40, max_image_length=2, num_labels=3)
        ),
        TEXT | {"pixel_values": IMAGE},
    ),
    "dinov2-backbone": (
        lambda: hf.Dinov2Backbone(
            hf.Dinov2Config(
                **{k: v for k, v in VISION.items() if k != "intermediate_size"}, out_features=["stage1", "stage3"]
            )
        ),
        {"pixel_values": IMAGE},
    ),
    "rt-detr": (rt_detr, {"pixel_values": torch.arange(3 * 64 * 64).reshape(1, 3, 64, 64).sin()}),
    "musicgen": (musicgen, {"input_ids": IDS, "decoder_input_ids": IDS.repeat(2, 1)}),
}
ONLY_RECYCLED = {"blip-2", "fastspeech2", "gemma3-vision", "musicgen", "rt-detr"}
SHORT = ("big-bird", "longformer")  # the example made up is short, as their habits want it


def make(name):
    torch.manual_seed(0)
    return TYPES[name][0]().eval()


def outputs(model, arguments, **options):
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**arguments, **options)


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else []
    return [tensor for each in values for tensor in tensors(each)]


@pytest.mark.parametrize("method", ["recycled", "altup"])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.filterwarnings("ignore:widen")
def test_same_function_hidden_states_disk_and_back(name, method, tmp_path):
    model, arguments = make(name), TYPES[name][1]
    wide = copy.deepcopy(model)
    example = (
        None if name in ("big-bird", "longformer") else arguments
    )  # made up, it is too short for their habits
    if method == "altup" and name in ONLY_RECYCLED:
        with pytest.raises(UserError, match=r"cannot be widened.*method='recycled'"):
            altup.widen(wide, method, example=example)
        assert len(tensors(outputs(wide, arguments))) == len(tensors(outputs(model, arguments)))
        return
    altup.widen(wide, method, example=example)
    before, after = (tensors(outputs(each, arguments, output_hidden_states=True)) for each in (model, wide))
    for ours, theirs in zip(after, before, strict=True):  # hidden states too: block 0, or all blocks at the end
        torch.testing.assert_close(
            ours[..., : theirs.shape[-1]] if theirs.dim() else ours, theirs, atol=1e-5, rtol=1e-4
        )

    wide.save_pretrained(tmp_path)
    loaded = altup.load_widened(tmp_path, type(wide)).eval()
    for ours, theirs in zip(tensors(outputs(loaded, arguments)), tensors(outputs(wide, arguments)), strict=True):
        assert torch.equal(ours, theirs)

    altup.narrow(wide)
    assert wide.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(wide.state_dict()[key], value) for key, value in model.state_dict().items())
    assert wide.all_tied_weights_keys == model.all_tied_weights_keys
    assert wide._no_split_modules == model._no_split_modules
    assert [type(module) for module in wide.modules()] == [type(module) for module in model.modules()]


def test_images_fit_a_model_that_was_widened_with_text_alone():
    """And what was not looked at is told."""
    model = make("qwen3-vl")
    with pytest.warns(UserWarning, match=r"does not run model.visual of Qwen3VLForConditionalGeneration"):
        wide = altup.widen(copy.deepcopy(model))
    torch.testing.assert_close(outputs(wide, GRID).logits, outputs(model, GRID).logits, atol=1e-5, rtol=1e-4)


def deepseek_vl_hybrid():
    fine = {"model_type": "sam_vision_model", "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2}
    fine |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 8, "mlp_dim": 16, "window_size": 2}
    config = hf.DeepseekVLHybridConfig(
        text_config={"model_type": "llama", **DECODER},
        vision_config=SIGLIP,
        high_res_vision_config=fine,
        image_token_id=90,
    )
    return hf.DeepseekVLHybridForConditionalGeneration(config)


def fuyu():
    """The features of its images are made by one linear map."""
    text = {"model_type": "persimmon", **{k: v for k, v in DECODER.items() if k != "num_key_value_heads"}}
    return hf.FuyuForCausalLM(hf.FuyuConfig(text_config=text, **DECODER, patch_size=2, image_size=8))


def layoutlm_v3():
    """Its image is embedded by one convolution."""
    config = hf.LayoutLMv3Config(**ENCODER, input_size=8, patch_size=4, coordinate_size=4, shape_size=8)
    return hf.LayoutLMv3ForTokenClassification(config)


@pytest.mark.parametrize(
    ("make_model", "part"),
    [
        (TYPES["llava"][0], "model.vision_tower"),
        (TYPES["paligemma"][0], "model.vision_tower"),
        (qwen3_vl, "model.visual"),
        (deepseek_vl_hybrid, "model.high_res_vision_model"),
        (fuyu, "model.vision_embed_tokens"),
        (layoutlm_v3, "layoutlmv3.patch_embed"),
    ],
)
def test_a_wide_state_that_images_may_not_fit_is_refused(make_model, part):
    with pytest.raises(UserError, match=f"the example does not run {part}.*every input that the model takes"):
        altup.widen(make_model(), "altup")


@pytest.mark.parametrize("method", ["recycled", "altup"])
def test_the_example_may_have_labels(method):
    """Its first output is a scalar then."""
    model = build("llama")
    wide = altup.widen(copy.deepcopy(model), method, example=inputs(model))
    torch.testing.assert_close(wide(**inputs(model)).loss, model(**inputs(model)).loss, atol=1e-5, rtol=0)


def sam():
    vision = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8, "mlp_dim": 16, "num_pos_feats": 8, "window_size": 2}
    prompt = {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}
    mask = {"hidden_size": 16, "mlp_dim": 16, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
    config = hf.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask)
    return hf.SamModel(config)


@pytest.mark.parametrize(
    ("make_model", "reason"),
    [
        (TYPES["vilt"][0], r"does not run with the example .*: You have to specify either pixel_values"),
        (musicgen, r"does not run with the example .*is invalid for input of size"),
        (rt_detr, r"widened it fails: The size of tensor"),
        (sam, r"found no stack of layers"),
        (
            lambda: blip("InstructBlip"),
            r"does not run with the example .* missing .*'qformer_input_ids'",
        ),
    ],
)
def test_a_refusal_has_a_reason(make_model, reason):
    """Whatever a model makes of the example made up for it, without inputs that it needs."""
    with pytest.raises(UserError, match=f"cannot be widened.*{reason}"):
        altup.widen(make_model(), "altup")


def test_probing_draws_no_random_numbers_of_the_user():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    model = make("vit-mae")
    torch.manual_seed(3)
    altup.widen(model)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_large_states_in_half_precision(num_blocks):
    """A sum of the blocks would be beyond 65,504, the largest float16."""
    model = build("vit").half()
    with torch.no_grad():
        model.vit.embeddings.cls_token.fill_(40_000)
    wide = altup.widen(copy.deepcopy(model), num_blocks=num_blocks)
    images = {"pixel_values": inputs(model)["pixel_values"].half()}
    assert outputs(wide, images).logits.isfinite().all()
    torch.testing.assert_close(outputs(wide, images).logits, outputs(model, images).logits, atol=0.05, rtol=0.05)


def test_layer_drop_of_a_part_is_refused():
    encoder = hf.Wav2Vec2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, layerdrop=0.1)
    config = hf.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, hf.BertConfig(**ENCODER))
    with pytest.raises(UserError, match=r"layerdrop=0.1 of the 'wav2vec2' config skips whole layers"):
        altup.widen(hf.SpeechEncoderDecoderModel(config))


@pytest.mark.parametrize("method", ["recycled", "altup"])
def test_leaving_early_is_refused(method):
    wide = altup.widen(build("llama"), method)
    with pytest.raises(UserError, match=r"run 2 of its 4 layers .*assistant_early_exit"):
        wide.generate(IDS[:1], max_new_tokens=4, assistant_early_exit=2, do_sample=False)


@pytest.mark.parametrize("names", [None, ["T5Block"]])
@pytest.mark.parametrize("prepared", [altup.widen, lambda model: altup.narrow(altup.widen(model))])
def test_accelerate_finds_the_layers_to_shard(prepared, names):
    """By the names that the model or the user gives, for FSDP 1 and 2, widened or narrow again."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    model = prepared(build("t5"))
    plugin = accelerate.FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=names
    )
    plugin.set_auto_wrap_policy(model)
    classes = tuple(plugin.auto_wrap_policy.keywords["transformer_layer_cls"])
    wraps = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert all(isinstance(layer, classes) and wraps(layer) for layer in model.decoder.block)

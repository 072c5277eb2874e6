"""Forty families of text, vision and audio: widened, each does all that it did, or is refused with a reason."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

import altup
from altup.core.errors import UserError
from altup.models.widening.parameters import WideningPlan
from tests.models.widening.families import DECODER, ENCODER, build, inputs
from tests.models.widening.model_types import (
    CANNOT_GENERATE,
    GRID,
    IDS,
    MADE_UP,
    NAMES,
    ONLY_RECYCLED,
    SIGLIP,
    blip,
    inputs_of,
    llava,
    make,
    musicgen,
    paligemma,
    qwen3_vl,
    rt_detr,
    vilt,
)
from tests.models.widening.test_load_and_narrow import assert_same_weights


def outputs(model, arguments, **options):
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**arguments, **options)


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else []
    return [tensor for each in values for tensor in tensors(each)]


def assert_same_outputs(model, wide, arguments, **options):
    """Of what is wide, block 0."""
    before, after = (tensors(outputs(each, arguments, **options)) for each in (model, wide))
    for ours, theirs in zip(after, before, strict=True):
        ours = ours[..., : theirs.shape[-1]] if theirs.dim() else ours
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def gradients(model, arguments):
    torch.manual_seed(0)
    output = next(value for value in tensors(model(**arguments)) if value.requires_grad)
    output.square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(model, wide, arguments):
    """Blocks that start equal move together, so that the layers are asked to move as before."""
    before, after = gradients(model, arguments), gradients(wide, arguments)
    plan = WideningPlan.of(wide)
    stacks = tuple(f"{stack}." for stack in plan.stacks)
    scale = max(float(gradient.abs().max()) for gradient in before.values())
    for name, theirs in before.items():
        if name.startswith(stacks) and name not in plan.shared:
            torch.testing.assert_close(after[name], theirs, atol=1e-5 * scale, rtol=1e-3)
    for stack in stacks:
        if any(name.startswith(stack) for name in before):
            moved = [gradient for name, gradient in after.items() if name.startswith(stack) and ".altup." in name]
            assert any(gradient.abs().max() > 0 for gradient in moved)


def assert_same_text(model, wide, arguments):
    arguments = {name: value for name, value in arguments.items() if name not in ("labels", "decoder_input_ids")}
    texts = [each.generate(**arguments, max_new_tokens=3, do_sample=False) for each in (model, wide)]
    assert torch.equal(*texts)


def last_blocks(model, arguments):
    """The blocks that reach the last layer of each stack."""
    seen, handles = [], []
    plan = WideningPlan.of(model)
    for stack in plan.stacks:
        *_, layer = plan.wide_layers(model, stack).values()
        handles.append(layer.register_forward_pre_hook(lambda _, args: seen.append(args[:2])))
    outputs(model, arguments)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("method", ["recycled", "altup"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:widen")
def test_all_that_a_model_does(name, method, tmp_path):
    """Outputs with every modality, hidden states, gradients and text; blocks that part; disk; and back."""
    model = make(name)
    every = inputs_of(name, model)
    richest = every[0]
    wide = copy.deepcopy(model)
    example = None if name in MADE_UP else richest
    if method == "altup" and name in ONLY_RECYCLED:
        with pytest.raises(UserError, match=r"cannot be widened.*method='recycled'"):
            altup.widen(wide, method, example=example)
        assert_same_outputs(model, wide, richest)
        return
    altup.widen(wide, method, example=example)
    for arguments in every:
        assert_same_outputs(model, wide, arguments, output_hidden_states=True)
    assert_same_gradients(model, wide, richest)
    if model.can_generate() and name not in CANNOT_GENERATE:
        for arguments in every:
            assert_same_text(model, wide, arguments)

    blocks = last_blocks(wide, richest)
    assert blocks
    assert all(torch.allclose(*pair, atol=1e-5) for pair in blocks)
    apart = copy.deepcopy(wide)
    with torch.no_grad():
        for coefficients, value in apart.named_parameters():
            if coefficients.endswith("altup.g"):
                value += torch.tensor([0.3, -0.2])
    assert not any(torch.allclose(*pair, atol=1e-5) for pair in last_blocks(apart, richest))
    with pytest.raises(UserError, match="has moved"):
        altup.narrow(apart)
    apart.save_pretrained(tmp_path)
    loaded = altup.load_widened(tmp_path, type(apart)).eval()
    assert_same_weights(loaded, apart)
    assert_same_outputs(apart, loaded, richest)

    altup.narrow(wide)
    assert_same_weights(wide, model)
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
        (llava, "model.vision_tower"),
        (paligemma, "model.vision_tower"),
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
        (vilt, r"does not run with the example .*: You have to specify either pixel_values"),
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

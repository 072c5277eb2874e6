"""Tiny models of every type of transformers, without a network.

The default config of a type is made small, and those inside it: widths are divided by one number, which keeps what
holds between them (a width is heads times the width of a head, a projection fits what it feeds); layers, experts
and vocabularies are cut; tokens beyond the vocabulary get other numbers.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS, EXPERTS, VOCABULARY = 4, 4, 1024
PARAMETERS = 60_000_000

# Parts that a config does not have by itself, and fields that do not follow from others.
BERT = {"model_type": "bert"}
PARTS: dict[str, dict[str, Any]] = {
    "encoder-decoder": {"encoder": BERT, "decoder": BERT | {"is_decoder": True, "add_cross_attention": True}},
    "speech-encoder-decoder": {
        "encoder": {"model_type": "wav2vec2"},
        "decoder": BERT | {"is_decoder": True, "add_cross_attention": True},
    },
    "vision-encoder-decoder": {
        "encoder": {"model_type": "vit"},
        "decoder": {"model_type": "gpt2", "add_cross_attention": True},
    },
    "vision-text-dual-encoder": {"vision_config": {"model_type": "vit"}, "text_config": BERT},
    "rag": {"question_encoder": {"model_type": "dpr"}, "generator": {"model_type": "bart"}},
    "musicgen": {
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {"model_type": "encodec"},
        "decoder": {"model_type": "musicgen_decoder"},
    },
    "musicgen_melody": {
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {"model_type": "encodec"},
        "decoder": {"model_type": "musicgen_melody_decoder"},
    },
}
RESNET = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}
RESNET["out_features"] = ["stage2", "stage3", "stage4"]
SERIES = {"prediction_length": 8, "context_length": 16}
BY_LAYER = {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}}
INDEXER = {"n_heads": 4, "kv_heads": 1, "head_dim": 8, "budget": 64, "compress_ratio": 2}
INDEXER = {f"indexer_{name}": value for name, value in INDEXER.items()}
GEMMA_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "autoformer": SERIES,
    "informer": SERIES,
    "time_series_transformer": SERIES,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "gemma3": {"mm_tokens_per_image": 16},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "chameleon": {"vocabulary_map": {"<image>": 512} | {f"IMGIMGA{c}Z": 513 + i for i, c in enumerate("ABCD")}},
    "cohere_compass": {"text_config": {"rope_parameters": BY_LAYER}},
    "cohere_compass_text": {"rope_parameters": BY_LAYER},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 1, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense"] + 3 * ["sparse"]}},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense"] + 3 * ["sparse"]},
    "diffusion_gemma": {"text_config": GEMMA_EXPERTS},
    "diffusion_gemma_text": GEMMA_EXPERTS,
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm5_next": {"text_config": {"index_topk": 2048}},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "splinter": {"question_token_id": 5},
    "step3p5": {"sliding_window": 16},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba": ZAMBA
    | {"hidden_size": 64, "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_dt_rank": 4},
    "zamba2": ZAMBA
    | {"hidden_size": 64, "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 16},
}

BASE = PreTrainedConfig().to_dict() | {"_name_or_path": "", "id2label": None, "label2id": None}
WIDTH = re.compile(
    r"hidden_size|hidden_dim|(^|_)dims?$|d_model|d_ff|d_kv|d_inner|n_embd|n_inner|embedding_size|intermediate|ffn|"
    r"_units$|channels|lora_rank|proj_size|width$|embed_dim|projection_size|mlp_dim|_out_size|in_features|"
    r"coordinate_size|shape_size|num_filters|lru|mlp_size|pos_feats|backbone_feature|layer_norm_dim|head_dim|d_head|head_size|d_ssm|d_state|upsample_groups|bottleneck_size"
)
NO_WIDTH = re.compile(r"num_channels|audio_channels|mask_in_channels|vocab|rope_theta|position")
DEPTH = re.compile(r"(^|_)(layers?|depth|blocks)$")
NO_DEPTH = re.compile(
    r"feat_extract|max_window|residual_layers|shared_layers|nextn|vision_feature|conv|look|iou_head"
)
TOKEN = re.compile(r"(?<!_per_)token(_id|_index|_idx)?s?$|_id$")


def shrink(fields: dict[str, Any], factor: int, tokens: dict[int, int]) -> dict[str, Any]:
    """The fields of a config, made small; `tokens` are the new numbers of tokens beyond the vocabulary."""
    depths = {
        value
        for name, value in fields.items()
        if DEPTH.search(str(name)) and not NO_DEPTH.search(str(name)) and type(value) is int
    }
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name in ("out_indices", "out_features", "stage_names") or BASE.get(name, BASE) == value:
            continue
        small[name] = _shrunk(str(name), value, factor, tokens, depths)
    for heads in (
        "num_attention_heads",
        "num_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "n_head",
    ):
        if type(small.get(heads)) is int and not small.get("head_dim"):
            small[heads] = _fewer(small, heads)
            if type(groups := small.get("num_key_value_heads")) is int:
                small["num_key_value_heads"] = math.gcd(groups, small[heads])
    image, patch = small.get("image_size"), small.get("patch_size")
    if type(image) is int and image > 64 and "window_size" not in small:
        small["image_size"] = min(image, 8 * patch) if type(patch) is int else 64
    rope = small.get("rope_parameters")
    if isinstance(rope, dict) and "rope_type" in rope and (width := _rotated(small, rope)) > 3:
        rest = width // 2 * 3 // 8
        rope["mrope_section"] = [
            width // 2 - 2 * rest,
            rest,
            rest,
        ]  # which parts of a head turn by time, height, width
    return small


def _fewer(small: dict[str, Any], name: str) -> int:
    """So many heads that each has a width of eight or more, which rotary positions can turn."""
    width = next((small[n] for n in ("embed_dim", "d_model", "hidden_size", "n_embd") if small.get(n)), 0)
    if type(width) is not int or not width:
        return small[name]
    return max(
        (n for n in range(1, small[name] + 1) if width % n == 0 and width // n % 8 == 0), default=small[name]
    )


def _rotated(fields: dict[str, Any], rope: dict[str, Any]) -> int:
    """How much of a head rotary positions turn."""
    try:
        head = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        return int(head * (rope.get("partial_rotary_factor") or 1))
    except (KeyError, TypeError):
        return 0


def _shrunk(name: str, value: Any, factor: int, tokens: dict[int, int], depths: set[int]) -> Any:
    if isinstance(value, dict):
        if value.get("model_type") == "timm_backbone":
            return RESNET
        if value and all(str(key).isdigit() for key in value):  # by layer
            return {key: part for key, part in value.items() if int(key) < LAYERS}
        return shrink(value, factor, tokens)
    if isinstance(value, list | tuple) and value:
        return _shrunk_list(name, list(value), factor, tokens, depths)
    if "layerdrop" in name:
        return 0.0
    if type(value) is not int:
        return value
    if name == "max_source_positions":
        return 100 if value == 1500 else value  # Whisper's half minute
    if name.endswith("chunk_size") and value > 16:
        return 16
    if TOKEN.search(name):
        return value if value < VOCABULARY else tokens.setdefault(value, VOCABULARY - 1 - len(tokens))
    if "vocab" in name or name in ("codebook_size", "num_embeddings"):
        return min(value, VOCABULARY)
    if DEPTH.search(name) and not NO_DEPTH.search(name):
        return min(value, LAYERS)
    if "experts" in name and "_per_" not in name and "shared" not in name:
        return min(value, EXPERTS)
    if name in (
        "n_group",
        "num_expert_group",
        "topk_group",
        "first_k_dense_replace",
        "num_kv_shared_layers",
        "num_dense_layers",
    ):
        return min(value, 1)
    if re.search(r"experts_per|top_?k$|topk|moe_k$", name) and not name.startswith("index"):
        return min(value, 2)
    if "intermediate" in name and value % (8 * factor):  # fits whatever reads it
        return 8 * math.ceil(value / factor / 8)
    if WIDTH.search(name) and not NO_WIDTH.search(name) and value >= 16 and value % factor == 0:
        small = value // factor
        return 8 * math.ceil(small / 8) if "head_dim" in name or value >= 256 else small
    return value


def _shrunk_list(name: str, value: list, factor: int, tokens: dict[int, int], depths: set[int]) -> list:
    if all(isinstance(each, dict) for each in value):
        return [shrink(each, factor, tokens) for each in value]
    if TOKEN.search(name) and all(type(each) is int for each in value):
        return [_shrunk(name, each, factor, tokens, depths) for each in value]
    places = re.search(r"indexes|indices|idx|index_list|_layers$|_blocks$", name) and not name.startswith("stage")
    if places and all(type(e) is int for e in value):
        if len(value) in depths and set(value) <= {0, 1}:
            return value[:LAYERS]
        kept = [each for each in value if each < LAYERS]
        return kept or list(range(min(len(value), LAYERS // 2)))
    if len(value) in depths and len(value) > LAYERS:  # one for each layer: the first of each kind
        kinds = {str(each): i for i, each in reversed(list(enumerate(value)))}
        chosen = sorted(kinds.values())[:LAYERS]
        more = [i for i in range(len(value)) if i not in chosen][: LAYERS - len(chosen)]
        return [value[i] for i in sorted([*chosen, *more])]
    if name in ("depths", "stage_num_blocks", "num_block_repeats"):
        return [min(each, 2) for each in value]
    if WIDTH.search(name) and all(type(each) is int and each >= 16 and each % factor == 0 for each in value):
        return [each // factor for each in value]
    return value


def tiny_config(model_type: str, factor: int) -> PreTrainedConfig:
    """The config with all widths divided by `factor`, or twice that where the model is large."""
    made = CONFIG_MAPPING[model_type](**_parts(model_type))
    large = factor == 16 and _widest(made.to_dict()) >= 2048
    fields = shrink(made.to_dict(), 2 * factor if large else factor, {})
    _fit_features(fields)
    for name in ("image_token_id", "image_token_index"):
        if name in fields and fields[name] is None:
            fields[name] = VOCABULARY // 2
    _fit_heads(fields)
    _merge(fields, EXCEPTIONS.get(model_type, {}))
    fields.pop("model_type", None)
    return type(made)(**fields)


def _widest(fields: dict[str, Any]) -> int:
    own = [value for name, value in fields.items() if name in ("hidden_size", "d_model") and type(value) is int]
    return max([0, *own, *(_widest(part) for part in fields.values() if isinstance(part, dict))])


def _fit_features(fields: dict[str, Any]) -> None:
    """Some configs have defaults that do not fit each other: features as wide as the text that they join."""
    width = (fields.get("text_config") or {}).get("hidden_size")
    for part in [value for value in fields.values() if isinstance(value, dict)]:
        _fit_features(part)
        for name in ("out_hidden_size", "output_dim", "text_hidden_size"):
            if width and name in part:
                part[name] = width
        if width and {"embed_dim", "hidden_size", "spatial_merge_size"} <= part.keys():  # Qwen 2 VL
            part["hidden_size"] = width


def _fit_heads(fields: dict[str, Any]) -> None:
    """Widths of heads that a model wants to be told, or that are sums of others."""
    for part in [value for value in fields.values() if isinstance(value, dict)]:
        _fit_heads(part)
    width, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if type(width) is int and type(heads) is int and heads:
        for name, value in (("head_dim", width // heads), ("num_key_value_heads", heads)):
            if fields.get(name, value) is None:
                fields[name] = value
    if {"qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"} <= fields.keys():
        fields["qk_head_dim"] = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]


def _merge(fields: dict[str, Any], others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name.endswith("_config") and isinstance(fields.get(name), dict):
            _merge(fields[name], value)
        else:
            fields[name] = value


def _parts(model_type: str) -> dict[str, Any]:
    """The default configs of the parts of a type that has none."""
    made = {}
    for name, fields in PARTS.get(model_type, {}).items():
        others = {field: value for field, value in fields.items() if field != "model_type"}
        made[name] = CONFIG_MAPPING[fields["model_type"]](**others).to_dict()
    return made


MODALITIES = ("input_ids", "pixel_values", "pixel_values_videos", "input_features", "input_values")
HEADS = (
    "ForConditionalGeneration",
    "ForMaskedLM",
    "ForCausalLM",
    "LMHeadModel",
    "ForCTC",
    "ForPreTraining",
    "ForSequenceClassification",
    "ForImageClassification",
    "ForObjectDetection",
    "Model",
)


def classes_of(model_type: str) -> list[type[PreTrainedModel]]:
    """The models of a type, first those that take most, and of these those that do most."""
    config = CONFIG_MAPPING[model_type]
    module = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    found = [
        value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == module.__name__
        and "PreTrainedModel" not in name
        and value.forward is not PreTrainedModel.forward
        and (value.config_class is config or _wants(value) in (config, config.__name__))
    ]
    ranks = {head: rank for rank, head in enumerate(HEADS)}

    def rank(cls: type[PreTrainedModel]) -> tuple[int, int]:
        arguments = inspect.signature(cls.forward).parameters
        head = min((at for head, at in ranks.items() if cls.__name__.endswith(head)), default=len(HEADS))
        return -sum(name in arguments for name in MODALITIES), head

    return sorted(found, key=rank)


def _wants(cls: type[PreTrainedModel]) -> Any:
    """The config that a model's constructor is written for."""
    parameter = inspect.signature(cls.__init__).parameters.get("config")
    return parameter.annotation if parameter else None


def build(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model of `cls` whose norms, biases and positions are random too, so that each shows in the output."""
    with torch.device("meta"):
        sizes = {name: parameter.numel() for name, parameter in cls(config).named_parameters()}
    if sum(sizes.values()) > PARAMETERS:
        raise MemoryError(f"{sum(sizes.values()):,} parameters, {max(sizes, key=lambda name: sizes[name])} most")
    torch.manual_seed(0)
    model = cls(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model

"""The weights of AltUp's small maps (router, coefficients), whoever has wrapped them.

Kernels read weights and do not call modules. So the weights of LoRA are added to those below them, and weights in
four or eight bits are dequantized once: of E2B these maps are a quarter of a million numbers in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from altup.core.errors import UserError
from altup.nn.linear import is_unhooked

SMALL = ("modality_router", "prediction_coefs", "correction_coefs")
# With the head, as transformers has it by default, and the map whose output Gemma 3n's code scales in place.
UNQUANTIZED = ("lm_head", "per_layer_model_projection", *SMALL)
_dequantized: WeakKeyDictionary[nn.Module, tuple[Any, Tensor]] = WeakKeyDictionary()


def skip_modules(model_or_config: Any) -> list[str]:
    """What of a Gemma 3n stays in 16 bits when the rest is quantized, by the ends of its modules' names.

    In training Gemma 3n clips the weights of AltUp's coefficients, which fails where they are integers.

    Args:
        model_or_config: A Gemma 3n, its config, or the name or folder from which `AutoConfig` reads one.

    Returns:
        The names, for `BitsAndBytesConfig(llm_int8_skip_modules=…)` or torchao's `modules_to_not_convert`.

    Examples:
        >>> import altup
        >>> from transformers import BitsAndBytesConfig, Gemma3nTextConfig
        >>> skipped = altup.skip_modules(Gemma3nTextConfig())
        >>> skipped
        ['lm_head', 'per_layer_model_projection', 'modality_router', 'prediction_coefs', 'correction_coefs']
        >>> quantization = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skipped)
    """
    config = model_or_config
    if isinstance(config, str | PathLike):
        from altup.core.pretrained import load_config

        config = load_config(str(config))
    config = getattr(config, "config", config)
    kind = getattr(config, "model_type", None)
    if kind not in ("gemma3n", "gemma3n_text"):
        raise UserError(
            f"altup.skip_modules knows what a Gemma 3n needs, not {kind or type(config).__name__}; leave "
            "llm_int8_skip_modules unset for others"
        )
    return list(UNQUANTIZED)


def is_unwatched(module: Any) -> bool:
    """Whether a module's weights may be read instead of calling it: nobody waits for the call. Hooks by which
    accelerate moves inputs to the device of a module that lies there (`device_map`) do not count."""
    hook: Any = getattr(module, "_hf_hook", None)
    if type(hook).__name__ == "AlignDevicesHook" and not hook.offload:
        names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        return not any(getattr(module, name) for name in names)
    return is_unhooked(module)


def is_bare(module: Any) -> bool:
    """Whether a linear map's weight may be taken for the map."""
    return type(module) is nn.Linear and module.bias is None and is_unwatched(module)


def obstacle(linear: Any) -> str | None:
    """Why a map is not the product with one weight, if it is not."""
    if not is_unwatched(linear):
        return "a hook is registered on it"
    if _is_lora(linear):
        return _lora_obstacle(linear) or obstacle(linear.base_layer)
    if is_bare(linear) or (_is_quantized(linear) and linear.bias is None):
        return None
    return f"{type(linear).__module__.partition('.')[0]}'s {type(linear).__name__} has taken its place"


def base_weight(linear: Any) -> Tensor:
    """The weight below all adapters, dequantized where it has to be."""
    while _is_lora(linear):
        linear = linear.base_layer
    return _dequantize(linear) if _is_quantized(linear) else linear.weight


def folded_weight(linear: Any) -> Tensor:
    """W + Σ scaling · B·A; gradients go to A and B."""
    weight = base_weight(linear)
    while _is_lora(linear):
        with torch.autocast(weight.device.type, enabled=False):
            for name in _active(linear):
                A, B = linear.lora_A[name].weight, linear.lora_B[name].weight
                weight = weight + linear.scaling[name] * (B @ A)
        linear = linear.base_layer
    return weight


def _is_lora(linear: Any) -> bool:
    """Known by what is read of it, so that PEFT is not imported."""
    return type(linear).__module__.startswith("peft.tuners.lora") and hasattr(linear, "lora_A")


def _active(lora: Any) -> Iterator[str]:
    if not (lora.disable_adapters or lora.merged):
        yield from (name for name in lora.active_adapters if name in lora.lora_A)


def _lora_obstacle(lora: Any) -> str | None:
    for name in _active(lora):
        A, B, dropout = lora.lora_A[name], lora.lora_B[name], lora.lora_dropout[name]
        if name in getattr(lora, "lora_variant", {}):
            return f"its adapter is a variant of LoRA ({type(lora.lora_variant[name]).__name__})"
        if not (is_bare(A) and is_bare(B)):
            return "its adapter has a bias or a hook"
        if lora.training and isinstance(dropout, nn.Dropout) and dropout.p > 0:
            return f"its adapter has dropout (lora_dropout={dropout.p})"
    return None


def _is_quantized(linear: Any) -> bool:
    """By bitsandbytes, or by torchao, which leaves `nn.Linear` and replaces the weight's class."""
    if type(linear) is not nn.Linear:
        return type(linear).__module__.startswith("bitsandbytes")
    kind = type(linear.weight)
    return kind is not nn.Parameter and kind.__module__.startswith("torchao")


@torch.no_grad()
def _dequantize(linear: Any) -> Tensor:
    weight = linear.weight
    key = (id(weight), weight.device, weight._version)
    held = _dequantized.get(linear)
    if held is None or held[0] != key:
        if type(weight).__module__.startswith("torchao"):
            made = weight.dequantize()
        elif type(linear) is not nn.Linear and weight.dtype.is_floating_point:  # not quantized yet
            made = weight.detach()
        else:
            from transformers.integrations.bitsandbytes import dequantize_bnb_weight

            made = dequantize_bnb_weight(weight, getattr(linear, "state", None))
        dtype = getattr(linear, "compute_dtype", None) or made.dtype
        held = _dequantized[linear] = (key, made.to(dtype))
    return held[1]

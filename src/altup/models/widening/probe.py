"""Running a model to see what it does, leaving nothing behind."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from altup.core.errors import UserError
from altup.models.widening.parameters import SIZES


def make_example(model: PreTrainedModel) -> dict[str, Tensor]:
    """A small batch of the kind that the model's first input calls for."""
    config = model.config
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 32)
        size = size if isinstance(size, list | tuple) else (size, size)
        shape = (1, getattr(config, "num_channels", 3), *size)
        return {"pixel_values": torch.linspace(-1, 1, math.prod(shape)).reshape(shape).sin()}
    end = getattr(config, "eos_token_id", None)
    end = end if isinstance(end, int) else 2
    vocabulary = _vocabulary(config) or max(end, 6) + 1
    ids = torch.tensor([[3, 4, 5, 6, end]]).clamp(max=vocabulary - 1)  # some classifiers look for the end token
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids, "decoder_input_ids": ids}
    return {"input_ids": ids}


def _vocabulary(config: PreTrainedConfig) -> int | None:
    try:
        text = config.get_text_config()
    except ValueError:  # several texts: an encoder's and a decoder's
        text = config
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) else None


def run(model: PreTrainedModel, example: dict[str, Any]) -> dict[str, Tensor]:
    """The model's outputs that are numbers, by name: no dropout, no gradients, and the same draws each time."""
    inputs = {
        key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in example.items()
    }
    inputs = {
        key: value.to(model.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }
    arguments = inspect.signature(model.forward).parameters.values()
    if any(each.name == "return_dict" or each.kind is each.VAR_KEYWORD for each in arguments):
        inputs["return_dict"] = True
    devices = [model.device] if model.device.type == "cuda" else []
    with leaving_no_trace(model), torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(0)
        model.eval()
        return dict(_numbers(model(**inputs)))


def as_generate_asks(model: PreTrainedModel, example: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments that `generate` would give the model for `example`, if it adds any and the model takes them.

    XLNet then has a second state, which no other example shows.
    """
    if not model.can_generate() or "input_ids" not in example:
        return None
    try:
        ids = example["input_ids"].to(model.device)
        asked = model.prepare_inputs_for_generation(**(example | {"input_ids": ids}))  # type: ignore[operator]
        added = {name: value for name, value in asked.items() if value is not None}
        if not added.keys() - example.keys():
            return None
        run(model, example | added)
        return example | added
    except Exception:  # a model may need more than this to begin with
        return None


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, Mapping | tuple | list):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _numbers(part, f"{name}.{key}" if name else str(key))


@contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Afterwards every module and config has the attributes, parts and hooks that it had, and its mode.

    BigBird, for one, exchanges its attention for good when an input is short. What `widen` itself changes while a
    model runs stays: parameters and the sizes kept beside them.
    """
    kept = {"_parameters", *SIZES}
    before = [(each, _copied(each, kept)) for each in [*model.modules(), *configs_of(model)]]
    try:
        yield
    finally:
        for each, attributes in before:
            now = vars(each)
            for name in [name for name in now if name not in attributes and name not in kept]:
                del now[name]
            for name, (value, contents) in attributes.items():
                if contents is not None:
                    value.clear()
                    value.extend(contents) if isinstance(value, list) else value.update(contents)
                now[name] = value


def _copied(each: Any, kept: set[str]) -> dict[str, tuple[Any, Any]]:
    """Each attribute with a copy of what it holds, where it is a dict, list or set."""
    return {
        name: (value, value.copy() if isinstance(value, dict | list | set) else None)
        for name, value in vars(each).items()
        if name not in kept
    }


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """The configs of a model and its parts, and those inside them."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [value for module in model.modules() for value in vars(module).values()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += vars(config).values()
    return list(found.values())


def refuse_not_finite(model: nn.Module) -> None:
    """UserError for a model whose weights are not all finite: nothing that it computes could be compared."""
    for name, weight in model.named_parameters():
        if weight.dtype.is_floating_point and weight.element_size() > 1 and not weight.isfinite().all():
            raise UserError(
                f"{name} of this {type(model).__name__} holds numbers that are not finite; "
                "give a checkpoint from before it diverged"
            )


def tolerance(output: Tensor) -> float:
    """The relative error that rounding alone may make."""
    return 1e-3 if output.dtype in (torch.float32, torch.float64) else 0.05


def difference(before: Tensor, after: Tensor) -> float:
    """The relative error of an output; one that is wide must be the narrow one repeated.

    Of masked positions both may be infinite or, for padding, not a number; of all of them they may not.
    """
    if before.numel() and not before.isfinite().any():
        return math.inf
    copies = after.shape[-1] // before.shape[-1] if before.dim() and after.dim() and before.shape[-1] else 1
    expected = torch.cat([before] * copies, dim=-1).double() if copies > 1 else before.double()
    if expected.shape != after.shape:
        return math.inf
    same = (expected == after) | (expected.isnan() & after.isnan())
    error = (after.double() - expected).masked_fill(same, 0)
    size = expected.masked_fill(~expected.isfinite(), 0).norm() + 1e-3 * math.sqrt(max(1, expected.numel()))
    return float(error.norm() / size)

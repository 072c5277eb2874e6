"""`accelerate`: faster code for a model in anyone's loop, and `decelerate`, which takes it away again."""

from __future__ import annotations

import inspect
from typing import TypeVar

import torch
from torch import nn

from altup.core.errors import UserError, check_choice, warn_once
from altup.kernels.launch import IMPLEMENTATIONS, runs_triton
from altup.models.recorded_calls import RecordedCalls
from altup.models.stack import COMPILED, compile_layers, uncompile_layers
from altup.models.widening.parameters import WideningPlan

Model = TypeVar("Model", bound=nn.Module)


def accelerate(
    model: Model,
    *,
    implementation: str = "auto",
    head: bool = True,
    compile: bool | None = None,
    record: bool | None = None,
    remake: bool = False,
) -> Model:
    """Give a model our fast code, in place, for training and inference in a loop of your own.

    - **Gemma 3n of Hugging Face** (text alone or with vision and audio, under PEFT too): AltUp's prediction and
      correction, the per-layer input's norm and addition, the feed-forward network's gate, the projections before
      the first layer and behind the last, and the head with its loss, on Triton kernels; sliding layers by
      FlashAttention; `generate` replays a token's pass as a CUDA graph.
    - **Models of this library**: layers compiled by `torch.compile`, as `altup pretrain` compiles them, and calls
      replayed as CUDA graphs, one for each shape of batch, in training a second one for the backward pass; T5's
      greedy `generate` replays a token as one.
    - **Models widened by it**: compiled layers.

    Weights, their names, config, `save_pretrained`, `generate`, caches, PEFT, `Trainer` and gradient checkpointing
    stay as they are. The fast code runs on CUDA GPUs that Triton supports; elsewhere the model computes exactly
    what it did, and a warning says so once.

    Args:
        model: A model of one of these kinds, or one that contains it.
        implementation: Of Gemma 3n's parts: `auto` takes the kernels where they can run and the original code
            elsewhere, `triton` requires the kernels, `plain` takes our formulas in plain PyTorch.
        head: Whether the loss in training is computed without holding the logits, of Gemma 3n and, unless `record`
            is off, of our models. The output's `logits` is then None in training, where labels are given.
        compile: Whether layers are compiled. By default those of our models and of widened ones are, on a GPU, and
            those of Gemma 3n are not.
        record: Whether passes, forward and backward, are replayed as CUDA graphs. By default those of our models
            are, on a GPU, and those of Gemma 3n are not. Calls that cannot be are launched: with a cache, with
            hooks, with gradient checkpointing, under FSDP; of Gemma 3n also those with a mask. The gradients of a
            recorded Gemma 3n are overwritten by the next pass unless they are still some parameter's `grad`.
        remake: Whether the backward pass of Gemma 3n makes activations again that a pass or two can make: a
            quarter less memory, and a little slower.

    Returns:
        The model itself.

    Examples:
        >>> import altup, torch, warnings
        >>> from transformers import Gemma3nForCausalLM, Gemma3nTextConfig
        >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20, "vocab_size_per_layer_input": 20}
        >>> heads = {"num_attention_heads": 2, "head_dim": 8, "num_kv_shared_layers": 0, "intermediate_size": 32}
        >>> model = Gemma3nForCausalLM(Gemma3nTextConfig(**sizes, **heads, hidden_size_per_layer_input=4))
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # of a computer without a GPU
        ...     model = altup.accelerate(model)
        >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 20])
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    _check_model("accelerate", model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if _has_gemma3n(model):
        from altup.models.gemma3n import classes, recognition

        if refused := classes.fuse(model, implementation, head, remake):
            warn_once(recognition.warning_text(refused))
        if implementation == "auto" and not runs_triton(device):
            warn_once(f"altup.accelerate: no GPU that Triton supports ({device}), so Gemma 3n's own code runs")
    elif not _is_ours(model):
        raise UserError(
            f"{type(model).__name__} is neither a model of altup, nor widened by it, nor a Gemma 3n: there is "
            "nothing to accelerate; widen it first (altup.widen)"
        )
    elif device.type != "cuda":
        warn_once(f"altup.accelerate: layers are compiled on a CUDA GPU, not on {device}, so the plain code runs")
    wanted = compile if compile is not None else device.type == "cuda" and not _has_gemma3n(model)
    if wanted and not _has_compiled_layers(model):
        compile_layers(model, ends=False, dynamic=None)
        setattr(model, COMPILED, True)
    _record_calls(model, record, head)
    if _has_gemma3n(model):
        from altup.models.gemma3n.explanation import fallen_back

        if line := fallen_back(model):
            warn_once(f"altup.accelerate: {line}; altup.explain(model) says more")
    return model


def _has_compiled_layers(model: nn.Module) -> bool:
    """A copy of a model has the mark, but no compiled code."""
    calls = (part._compiled_call_impl for part in model.modules() if part is not model)
    return getattr(model, COMPILED, False) and any(
        call is not None and not isinstance(call, RecordedCalls) for call in calls
    )


def _record_calls(model: nn.Module, record: bool | None, head: bool) -> None:
    """See `accelerate`. By default a model whose call the user has compiled (`model.compile()`) keeps that."""
    calls: object = model._compiled_call_impl
    if record is None:
        on_gpu = any(p.is_cuda for p in model.parameters())
        wanted = on_gpu and _is_one_of_ours(model) and (calls is None or isinstance(calls, RecordedCalls))
    else:
        wanted = record
    if not wanted:
        if isinstance(calls, RecordedCalls):
            _forget_calls(model)
        return
    skips_logits = head and "return_logits" in inspect.signature(type(model).forward).parameters
    if not (isinstance(calls, RecordedCalls) and calls.skips_logits == skips_logits):
        recorded = RecordedCalls(model, skips_logits, lends=_has_gemma3n(model))
        recorded.replaced = calls.replaced if isinstance(calls, RecordedCalls) else calls
        model._compiled_call_impl = recorded
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and _is_one_of_ours(model):
        encoder: nn.Module = model.encoder  # type: ignore[assignment]  # which `generate` calls apart
        if encoder._compiled_call_impl is None:
            encoder._compiled_call_impl = RecordedCalls(encoder, with_gradients=False)


def _forget_calls(model: nn.Module) -> None:
    """What was compiled before (`model.compile()`) comes back."""
    for part in model.modules():  # an adapter may have been put around what was accelerated
        calls: object = part._compiled_call_impl
        if isinstance(calls, RecordedCalls):
            part._compiled_call_impl = calls.replaced


def decelerate(model: Model) -> Model:
    """Undo `accelerate`, in place: the model computes, bit for bit, what it would have without it.

    Args:
        model: An accelerated model; any other is left alone.

    Returns:
        The model itself.

    Examples:
        >>> import altup, torch, warnings
        >>> model = altup.AltUpDecoderForCausalLM(altup.AltUpDecoderConfig.from_preset("tiny", vocab_size=20))
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # of a computer without a GPU
        ...     model = altup.decelerate(altup.accelerate(model))
        >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 20])
    """
    _check_model("decelerate", model)
    if _has_gemma3n(model):
        from altup.models.gemma3n import classes

        classes.unfuse(model)
    _forget_calls(model)
    for part in model.modules():
        if vars(part).pop(COMPILED, False):
            uncompile_layers(part)
    return model


def _check_model(verb: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"altup.{verb} takes a model (a torch.nn.Module), not {model!r:.80}")


def _has_gemma3n(model: nn.Module) -> bool:
    """By name first, so that other models do not load Gemma 3n's code."""
    return any(type(part).__name__ == "Gemma3nTextAltUp" for part in model.modules())


def _is_one_of_ours(model: nn.Module) -> bool:
    from altup.models.base import AltUpPreTrainedModel

    return isinstance(model, AltUpPreTrainedModel)


def _is_ours(model: nn.Module) -> bool:
    from altup.models.base import AltUpPreTrainedModel

    return any(isinstance(part, AltUpPreTrainedModel) or WideningPlan.of(part) for part in model.modules())

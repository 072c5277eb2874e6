"""What was widened in a model, in words."""

from __future__ import annotations

from torch import nn

from altup.models.config import AltUpConfig
from altup.models.widening.parameters import WideningPlan
from altup.nn import coefficient_names


def describe(model: nn.Module) -> str:
    """What is wide in a model, where, and how many parameters that takes.

    Args:
        model: One that `widen` has widened, or one of ours; of others it says that they are not widened.

    Returns:
        A few lines to print.

    Examples:
        >>> import altup
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=20))
        >>> print(altup.describe(altup.widen(model)))
        GPT2LMHeadModel, widened by recycled, K = 2
          transformer.h: 2 layers, which work on blocks 0, 1
          coefficients: 12 of 7,724 parameters (0.16 %)
    """
    total = sum(p.numel() for p in model.parameters())
    names = coefficient_names(model)
    coefficients = sum(p.numel() for name, p in model.named_parameters() if name in names)
    lines = [type(model).__name__]
    plan = WideningPlan.of(model)
    config = getattr(model, "config", None)
    if plan is not None:
        lines[0] += f", widened by {plan.method}, K = {plan.num_blocks}"
        for stack in plan.stacks:
            layers = plan.wide_layers(model, stack)
            blocks = ", ".join(str(block) for block in plan.rule(len(layers)).active)
            lines.append(f"  {stack}: {_which(model, plan, stack)}, which work on blocks {blocks}")
        lines += [f"  {name}: {_shape(model, name)}, repeated" for name in plan.repeated]
        lines += [
            f"  {name}: {_shape(model, name)}, shared out" for name in plan.shared if name not in plan.repeated
        ]
        lines += [f"  {name}: untied from {table}" for name, table in plan.untied.items()]
    elif isinstance(config, AltUpConfig) and config.widening_method.has_blocks:
        lines[0] += f", {config.widening} built in, K = {config.num_blocks}"
    else:
        lines[0] += ", not widened"
    share = f" ({100 * coefficients / total:.2g} %)" if coefficients else ""
    lines.append(f"  coefficients: {coefficients:,} of {total:,} parameters{share}")
    return "\n".join(lines)


def _which(model: nn.Module, plan: WideningPlan, stack: str) -> str:
    number = len(list(model.get_submodule(stack).children()))
    if stack not in plan.layers:
        return f"{number} layers"
    start, stop = plan.layers[stack]
    return f"layers {start} to {stop - 1} of {number}"


def _shape(model: nn.Module, name: str) -> str:
    return " × ".join(f"{size:,}" for size in model.get_parameter(name).shape)

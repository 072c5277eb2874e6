"""A stack of layers: built from a config, run under its update rule, compiled layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from altup.kernels.add_norm import add_norm, add_norm_fp8, rounds_norms
from altup.kernels.altup_update import with_norm
from altup.kernels.dropout import block_dropout, dropout
from altup.kernels.fp8 import Low
from altup.models.config import AltUpConfig
from altup.nn import (
    AltUp,
    AveragePooling,
    DynamicAltUp,
    FixedAltUp,
    PartialExperts,
    RMSNorm,
    SequenceAltUp,
    StrideAndSkip,
    Sum,
)
from altup.nn.dynamic import DynamicUpdate
from altup.nn.layers import bound_of
from altup.nn.linear import Fp8Maps, is_unhooked, join_maps, joins_in, weights_rounded_together
from altup.nn.sequence import SequenceUpdate

Blocks = tuple[Tensor, ...]  # the state between two layers: K blocks [batch, tokens, d]

# What stands between the layers and is no kernel of its own.
BETWEEN = (RMSNorm, SequenceUpdate, AveragePooling, DynamicUpdate)
# Kinds of layers × of inputs (training, evaluation, padded, packed) that one process may meet.
RECOMPILE_LIMIT = 64
# Dtypes of weights with which compiled layers on a GPU join products, additions and norms in training; float32
# under autocast, as in `altup pretrain` (`joins_in`).
JOINS = (torch.bfloat16, torch.float32)
COMPILED = "altup_compiled"  # set on a model whose layers `altup.accelerate` has compiled


def build_rule(config: AltUpConfig, num_layers: int, lowering: str | None = None) -> AltUp | Sum:
    """The rule that updates a stack's state; `lowering` is how Recycled-AltUp joins its blocks."""
    if config.widening == "sum":
        return Sum(config.num_blocks)
    if config.selects_blocks:
        recycled = config.widening == "recycled"
        selection = config.selection or "alternating"
        if config.coefficients == "fixed":
            return FixedAltUp(config.num_blocks, num_layers, selection)
        options: dict[str, Any] = {"recycled": recycled, "lowering": lowering if recycled else None}
        if config.coefficients == "dynamic":
            return DynamicAltUp(config.num_blocks, num_layers, config.d_model, selection, **options)
        return AltUp(config.num_blocks, num_layers, selection, **options)
    if config.widening in ("none", "wide"):
        return AltUp(1, num_layers)
    raise ValueError(f"widening={config.widening!r} has no rule yet")


def build_experts(config: AltUpConfig) -> PartialExperts | None:
    if not config.experts:
        return None
    return PartialExperts(
        config.layer_width,
        config.experts,
        config.expert_hidden,
        config.expert_top_k,
        config.expert_jitter,
        balance=config.expert_balance > 0,
    )


class LayerInputs(NamedTuple):
    """What a layer is given beside the hidden state.

    Gradients reach what is in `args` through reentrant checkpointing too; Hugging Face's layers look for a cache
    in `kwargs`, under `past_key_values`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LayerStack:
    """Lift, update with one layer after the other, lower: what every model does with its `layers` and `rule`.

    Mixed into a module that sets both. `dropout` is that of the embeddings. The layers numbered in `strided` see
    every `stride`-th token.

    `run_layers` goes one of three ways, with the same result up to rounding. The plain one always works. The
    others save kernels in training on a GPU; `compile_layers` sets their flags, and they are left where a single
    layer is watched by hooks or computed again:

    - `hands_on`, where one block moves (dense, Sum, fixed coefficients): the next layer does a layer's last
      addition.
    - `hands_norms`, where few blocks move (AltUp and Recycled with static coefficients): an update and the norm
      that reads it are one kernel.
    """

    rule: Any
    layers: nn.ModuleList
    training: bool
    dropout: float = 0.0
    per_sequence: bool = False  # whether dropout decides for all tokens of a sequence at once
    shared_blocks: int = 1  # that dropout outside of the layers treats as one
    stride: int = 1
    strided: frozenset[int] = frozenset()
    hands_on: bool = False  # whether in training a layer leaves its last addition to the next one
    hands_norms: bool = False  # whether in training the rule also computes the next layer's first norm

    def stride_layers(self, config: AltUpConfig) -> None:
        """Wrap the layers that see every `stride`-th token only."""
        self.stride = config.stride
        self.strided = frozenset(config.strided_layers)
        wrappers = {"altup": SequenceAltUp, "skip": StrideAndSkip}
        for index in config.strided_layers:
            self.layers[index] = wrappers[config.sequence](self.layers[index], config.stride)

    def lift(self, embeddings: Tensor) -> Blocks:
        """[batch, tokens, embedding_width] → the first state, in the dtype that the layers compute in."""
        device = embeddings.device.type
        if torch.is_autocast_enabled(device):
            embeddings = embeddings.to(torch.get_autocast_dtype(device))
        # Autocast computes sums, as the rule `Sum` has one, in float32.
        return self.rule.lift(self.drop(embeddings)).to(embeddings.dtype).unbind(0)

    def drop(self, x: Tensor) -> Tensor:
        """Dropout outside of the layers, where `shared_blocks` blocks that lie side by side lose the same."""
        return block_dropout(x, self.shared_blocks, self.dropout, self.training, per_sequence=self.per_sequence)

    def inputs_by_stride(self, view: Callable[[int], LayerInputs]) -> list[LayerInputs]:
        """`view(stride)` for each layer, made once for each stride: masks and positions are those of the tokens
        that a layer sees."""
        views = {stride: view(stride) for stride in ((1, self.stride) if self.strided else (1,))}
        return [views[self.stride if index in self.strided else 1] for index in range(len(self.layers))]

    def run_layers(
        self, state: Blocks, inputs: Sequence[LayerInputs], output_hidden_states: bool | None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """The stack's output [batch, tokens, output_width] and, on request, the inputs of all layers and it."""
        together = (
            weights_rounded_together(self.layers, state[0].dtype) if self._rounds_together() else nullcontext()
        )
        with together:
            return self._run_layers(state, inputs, output_hidden_states)

    def _rounds_together(self) -> bool:
        """Whether the layers' weights are rounded to 8 bits at once: in training, unless layers are computed again
        in the backward pass or this is traced. The first layer stands for all."""
        if not self.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if any(getattr(layer, "gradient_checkpointing", False) for layer in self.layers):
            return False
        return any(isinstance(part, Fp8Maps) and part.fp8 for part in self.layers[0].modules())

    def _run_layers(
        self, state: Blocks, inputs: Sequence[LayerInputs], output_hidden_states: bool | None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        if self.hands_on and self.training and not output_hidden_states and self._is_undisturbed():
            return self._hand_on(state, inputs), None
        hands_norms = self.hands_norms and self.training and joins_in(state[0])
        if hands_norms and not output_hidden_states and self._is_undisturbed():
            return self._hand_norms(state, inputs), None
        hidden = []
        for index, (layer, (args, kwargs)) in enumerate(zip(self.layers, inputs, strict=True)):
            if output_hidden_states:
                hidden.append(self.rule.lower(state))
            state = self.rule(state, layer, index, *args, **kwargs)
        output = self.lower(state)
        return output, (*hidden, output) if output_hidden_states else None

    def can_hand_on(self) -> bool:
        """Whether one block moves, and all layers can do the last addition of the one before."""
        one = isinstance(self.rule, Sum | FixedAltUp) or getattr(self.rule, "num_blocks", 0) == 1
        return one and not self.strided and all(getattr(layer, "takes_pending", False) for layer in self.layers)

    def can_hand_norms(self) -> bool:
        """Whether the rule is Algorithm 1 with few blocks, and all layers can be given their first norm."""
        few = 1 < getattr(self.rule, "num_blocks", 0) <= with_norm.SEEN_BLOCKS
        if type(self.rule) is not AltUp or not few or self.strided:
            return False
        norms = [getattr(layer, "attention_norm", None) for layer in self.layers]
        plain = all(isinstance(norm, RMSNorm) and len(norm.weight) <= with_norm.SEEN_WIDTH for norm in norms)
        return plain and all(getattr(layer, "takes_pending", False) for layer in self.layers)

    def _is_undisturbed(self) -> bool:
        """Whether no layer is computed again in the backward pass, and none's output is watched by hooks."""
        return not any(
            getattr(layer, "gradient_checkpointing", False) or not is_unhooked(layer) for layer in self.layers
        )

    def _hand_on(self, state: Blocks, inputs: Sequence[LayerInputs]) -> Tensor:
        """`run_layers` of one block. A layer's last addition is done by the next one, whose norm reads it; what
        leads from block to block where coefficients are fixed may be added before it."""
        rule, fixed = self.rule, isinstance(self.rule, FixedAltUp)
        update: Tensor | None = None
        for index, (layer, (args, kwargs)) in enumerate(zip(self.layers, inputs, strict=True)):
            x = rule.block(state, rule.active[index]) if fixed else state[0]
            x, update = layer(x, *args, **kwargs, pending=update, leaves=True)
            state = rule.correct(state, x, index) if fixed else (x,)
        assert update is not None
        update = dropout(update, self.dropout, self.training, per_sequence=self.per_sequence)
        return self.lower((state[0] + update, *state[1:]))

    def _hand_norms(self, state: Blocks, inputs: Sequence[LayerInputs]) -> Tensor:
        """`run_layers` where an update and the next layer's norm are one pass (`altup_update_norm`)."""
        rule, last = self.rule, len(self.layers) - 1
        residual = normed = low = None
        for index, (layer, (args, kwargs)) in enumerate(zip(self.layers, inputs, strict=True)):
            given = state[rule.active[index]] if residual is None else residual
            x, computed = layer(given, *args, **kwargs, normed=normed, low=low)
            update = rule.updates[index]
            norm: Any = None if index == last else self.layers[index + 1].attention_norm
            if norm is None or not _is_plain_norm(norm) or not is_unhooked(update):
                state, residual, normed, low = update(state, computed, x), None, None, None
                continue
            coefficients, following = (update.P, update.g, update.active), rule.active[index + 1]
            reader: Any = self.layers[index + 1].attention
            lower = is_unhooked(reader) and reader.takes_low(x)
            state, residual, normed, low = with_norm.altup_update_norm(
                state, computed, x, *coefficients, norm.weight, norm.eps, following, low=lower
            )
        return self.lower(state)

    def lower(self, state: Blocks) -> Tensor:
        """The last state → [batch, tokens, output_width]."""
        return self.rule.lower(state)


class Normed(NamedTuple):
    """A norm's result, or a tensor for its gradient and the result in 8 bits."""

    value: Tensor
    low: Low | None = None


def _is_plain_norm(norm: nn.Module) -> bool:
    """Whether its weight and ε may be taken for the norm: an adapter may have taken its place."""
    return type(norm) is RMSNorm and is_unhooked(norm)


class PreNormLayer(GradientCheckpointingLayer):
    """A layer that ends with a pre-normed feed-forward, and experts beside it where there are any."""

    dropout: float
    per_sequence: bool = False  # as of `LayerStack`
    feed_forward_norm: RMSNorm
    feed_forward: nn.Module
    experts: PartialExperts | None
    leaves_last_addition: bool
    fuses_norms: bool = False  # whether in training an addition and the norm behind it are one kernel

    def _add(self, x: Tensor, update: Tensor, norm: RMSNorm, reader: nn.Module) -> tuple[Tensor, Normed]:
        """x + dropout(update), and its norm for `reader`."""
        wanted = self.fuses_norms and self.training and torch.is_grad_enabled() and joins_in(x)
        if wanted and _is_plain_norm(norm):
            if self._reads_low(x, update, reader):
                total, normed, q, scale = add_norm_fp8(x, update, norm.weight, norm.eps)
                return total, Normed(normed, Low(q, scale))
            total, normed = add_norm(
                x, update, norm.weight, norm.eps, self.dropout, per_sequence=self.per_sequence
            )
            return total, Normed(normed)
        x = x + self._drop(update)
        return x, Normed(norm(x))

    def _reads_low(self, x: Tensor, update: Tensor, reader: nn.Module) -> bool:
        """Whether a norm is rounded to 8 bits where it is made, because nothing else reads it."""
        wanted = not self.dropout and isinstance(reader, Fp8Maps) and is_unhooked(reader)
        alone = self.experts is None or reader is not self.feed_forward
        return wanted and alone and rounds_norms(x, update) and reader.takes_low(x)  # type: ignore[operator]

    def _add_feed_forward(
        self, x: Tensor, normed: Tensor, leaves: bool = False, low: Low | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x + feed-forward of the normed x. Where the update rule does this last addition, x and what is to be
        added; where the next layer does it (`leaves`), that before dropout."""
        given = {} if low is None else {"given": low}
        update = self.feed_forward(normed, bound_of(self.feed_forward_norm), **given)
        if self.experts is not None:
            update = update + self.experts(normed)
        if leaves:
            return x, update
        update = self._drop(update)
        return (x, update) if self.leaves_last_addition else x + update

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training, per_sequence=self.per_sequence)


def compile_layers(
    model: nn.Module, ends: bool = True, device: torch.device | None = None, **options: object
) -> nn.Module:
    """Compile the layers of `model` in place, and what few operations stand between them.

    With `ends` also what stands before the first layer and behind the last, after which a model cannot be copied.
    `device` is where the model will run, by default where its weights are.

    In training on a GPU, with weights of `JOINS`, maps of one input become one product (`join_maps`), an addition
    and the norm behind it one kernel, and a layer of a T5 that is dense or has fixed coefficients leaves its last
    addition to the next one.

    Equal layers share compiled code, so that depth adds no start-up time. The static update rule is a kernel
    already and stays outside. `options` go to `torch.compile`; with `dynamic=None` a size that is seen to vary is
    compiled once for all its values, instead of once for each.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    layers = set(getattr(model, "_no_split_modules", None) or ())
    inside: set[nn.Module] = set()
    options = {"dynamic": False, **options}
    maps = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    joins = bool(maps) and all(
        (device or weight.device).type == "cuda" and weight.dtype in JOINS for weight in maps
    )
    join_maps(model, joins)
    for module in model.modules():
        if isinstance(module, LayerStack):
            module.hands_on = joins and module.can_hand_on()
            module.hands_norms = joins and module.can_hand_norms()
        if isinstance(module, PreNormLayer):
            norms = [part for part in module.children() if isinstance(part, RMSNorm)]
            module.fuses_norms = joins and all(_is_plain_norm(norm) for norm in norms)
        if ends and hasattr(module, "compile_ends"):
            module.compile_ends(**options)  # type: ignore[operator]
        if module in inside:
            continue
        if type(module).__name__ in layers or isinstance(module, BETWEEN):
            inside.update(module.modules())
            module.compile(**options)
    return model


def uncompile_layers(model: nn.Module) -> nn.Module:
    """Undo `compile_layers(model, ends=False)`."""
    join_maps(model, False)
    for module in model.modules():
        if isinstance(module, LayerStack):
            module.hands_on = module.hands_norms = False
        if isinstance(module, PreNormLayer):
            module.fuses_norms = False
        module._compiled_call_impl = None
    return model


def left_uncompiled() -> list[str]:
    """Why torch.compile gave up on parts of this process's code so far: those run, but slowly."""
    counts = torch._dynamo.utils.counters
    return [reason.splitlines()[0] for kind in ("graph_break", "unimplemented") for reason in counts[kind]]

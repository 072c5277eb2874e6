"""A stack of layers: built from a config, run under its update rule, compiled layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from altup.kernels.dropout import block_dropout
from altup.models.config import AltUpConfig
from altup.models.layers import PreNormLayer
from altup.nn import AveragePooling, CoefficientModule, RMSNorm
from altup.nn.linear import Fp8Maps, fuses, is_unhooked, weights_rounded_together
from altup.nn.rule import Reading, Rule, Sublayer, residual_and_update

Blocks = tuple[Tensor, ...]  # the state between two layers: K blocks [batch, tokens, d]

# Kinds of layers × of inputs (training, evaluation, padded, packed) that one process may meet.
RECOMPILE_LIMIT = 64
COMPILED = "altup_compiled"  # set on a model whose layers `altup.accelerate` has compiled


def build_rule(config: AltUpConfig, num_layers: int, lowering: str | None = None, crosses: bool = False) -> Rule:
    """The rule that updates a stack's state; `lowering` is how Recycled-AltUp joins its blocks; `crosses`: whether
    layers have cross-attention."""
    method = config.widening_method
    return method.build_rule(config, num_layers * method.sites_per_layer(config, crosses), lowering)


class LayerInputs(NamedTuple):
    """What a layer is given beside the hidden state.

    Gradients reach what is in `args` through reentrant checkpointing too; Hugging Face's layers look for a cache
    in `kwargs`, under `past_key_values`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Site(NamedTuple):
    """A layer by its number, or one of its sublayers."""

    layer: int
    only: int | None = None


class LayerStack:
    """Lift, update with one layer after the other, lower: what every model does with its `layers` and `rule`.

    Mixed into a module that sets both. `dropout` is that of the embeddings. The layers numbered in `strided` see
    every `stride`-th token.
    """

    rule: Any
    layers: nn.ModuleList
    training: bool
    dropout: float = 0.0
    per_sequence: bool = False  # whether dropout decides for all tokens of a sequence at once
    shared_blocks: int = 1  # that dropout outside of the layers treats as one
    stride: int = 1
    strided: frozenset[int] = frozenset()
    by_sublayer: bool = False  # whether the rule stands around each sublayer, and not around whole layers

    def stride_layers(self, config: AltUpConfig) -> None:
        """Wrap the layers that see every `stride`-th token only."""
        self.stride = config.stride
        self.strided = frozenset(config.strided_layers)
        for index in config.strided_layers:
            self.layers[index] = config.sequence_method.wrap(self.layers[index], config.stride)

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

    def list_sites(self) -> list[Site]:
        """Where the rule reads and writes: around each layer, or around each of their sublayers."""
        if not self.by_sublayer:
            return [Site(index) for index in range(len(self.layers))]
        return [
            Site(index, only)
            for index, layer in enumerate(self.layers)
            for only in range(len(layer.sublayers()))  # type: ignore[operator]
        ]

    def _run_layers(
        self, state: Blocks, inputs: Sequence[LayerInputs], output_hidden_states: bool | None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        rule, hidden, sites = self.rule, [], self.list_sites()
        reading: Reading | None = None
        for number, site in enumerate(sites):
            if output_hidden_states and not site.only:
                hidden.append(rule.lower(state))
            if reading is None:
                reading = rule.read(state, number)
            args, kwargs = inputs[site.layer]
            known = {"only": site.only, "update": reading.update, "normed": reading.normed}
            known = {name: value for name, value in known.items() if value is not None}
            computed = self.layers[site.layer](reading.x, *args, **kwargs, **known)
            (residual, update), kept = residual_and_update(computed), reading.kept
            entry = None
            if number + 1 < len(sites) and residual is not None and not output_hidden_states:
                entry = self._entry(sites[number + 1], residual)
            if entry is None or residual is None:
                state, reading = rule.write(state, number, residual, update, kept), None
            else:
                state, reading = rule.advance(state, number, residual, update, kept, entry)
        output = self.lower(state)
        return output, (*hidden, output) if output_hidden_states else None

    def _entry(self, site: Site, residual: Tensor) -> Sublayer | None:
        """The sublayer that a site begins with, where the addition before it may be joined with its norm: in
        training, unless the layer is computed again in the backward pass or watched by hooks."""
        layer = self.layers[site.layer]
        if not (self.training and isinstance(layer, PreNormLayer) and fuses(residual)):
            return None
        joins = is_unhooked(layer) and not layer.gradient_checkpointing
        return layer.sublayers()[site.only or 0] if joins else None

    def lower(self, state: Blocks) -> Tensor:
        """The last state → [batch, tokens, output_width]."""
        return self.rule.lower(state)


def compile_layers(model: nn.Module, ends: bool = True, **options: object) -> nn.Module:
    """Compile the layers of `model` in place, and what few operations stand between them.

    With `ends` also what stands before the first layer and behind the last, after which a model cannot be copied.

    Equal layers share compiled code, so that depth adds no start-up time. The static update rule is a kernel
    already and stays outside. `options` go to `torch.compile`; with `dynamic=None` a size that is seen to vary is
    compiled once for all its values, instead of once for each.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    layers = set(getattr(model, "_no_split_modules", None) or ())
    inside: set[nn.Module] = set()
    options = {"dynamic": False, **options}
    for module in model.modules():
        if ends and hasattr(module, "compile_ends"):
            module.compile_ends(**options)  # type: ignore[operator]
        if module in inside:
            continue
        coefficients = isinstance(module, CoefficientModule) and module.compiled
        between = coefficients or isinstance(module, RMSNorm | AveragePooling)
        if type(module).__name__ in layers or between:
            inside.update(module.modules())
            module.compile(**options)
    return model


def uncompile_layers(model: nn.Module) -> nn.Module:
    """Undo `compile_layers(model, ends=False)`."""
    for module in model.modules():
        module._compiled_call_impl = None
    return model


def left_uncompiled() -> list[str]:
    """Why torch.compile gave up on parts of this process's code so far: those run, but slowly."""
    counts = torch._dynamo.utils.counters
    reasons = (reason.splitlines()[0] for kind in ("graph_break", "unimplemented") for reason in counts[kind])
    return list(dict.fromkeys(reasons))

"""A layer is a list of sublayers; additions, dropout and norms between them are written here, for every family."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from altup.kernels.add_norm import add_norm, add_norm_fp8, rounds_norms
from altup.kernels.dropout import dropout
from altup.kernels.fp8 import Low
from altup.models.config import AltUpConfig
from altup.nn import PartialExperts
from altup.nn.layers import bound_of, is_plain_norm
from altup.nn.linear import Fp8Maps, Rounding, fuses, is_unhooked
from altup.nn.rule import Normed, Sublayer


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


class Layer(GradientCheckpointingLayer):
    """Sublayers, each of which computes an update of x from what it is given.

    A family lists them in `sublayers`, and its `forward` hands its inputs to `run_sublayers`. A layer gives the
    pair (residual, update), whose sum is its output: who calls it does the addition. `only` picks one sublayer.
    """

    dropout: float = 0.0
    per_sequence: bool = False  # whether dropout decides for all tokens of a sequence at once
    experts: PartialExperts | None  # beside the feed-forward

    def sublayers(self) -> list[Sublayer]:
        raise NotImplementedError

    def drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training, per_sequence=self.per_sequence)

    def _chosen(self, only: int | None) -> list[Sublayer]:
        return self.sublayers() if only is None else [self.sublayers()[only]]


class PreNormLayer(Layer):
    """x ← x + dropout(sublayer(norm(x))) for each sublayer."""

    feed_forward: nn.Module
    feed_forward_norm: nn.Module

    def run_sublayers(
        self,
        x: Tensor,
        *inputs: Any,
        update: Tensor | None = None,
        normed: Normed | None = None,
        only: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`update` is still to be added to x, `normed` is the first norm where it is known (`Reading`)."""
        dropped = 0.0  # of `update`, before it is added
        for sublayer in self._chosen(only):
            if update is not None:
                x, normed = self._add_norm(x, update, dropped, sublayer)
            elif normed is None:
                normed = Normed(sublayer.norm(x))
            rounding: Rounding = bound_of(sublayer.norm) if normed.fp8 is None else normed.fp8
            update, dropped = sublayer.run(normed.value, rounding, *inputs), self.dropout
        assert update is not None
        return x, self.drop(update)

    def _add_norm(self, x: Tensor, update: Tensor, p: float, sublayer: Sublayer) -> tuple[Tensor, Normed]:
        """x + dropout(update), and its norm."""
        norm, reader = sublayer.norm, sublayer.reader
        if self.training and fuses(x) and is_plain_norm(norm):
            reads_fp8 = isinstance(reader, Fp8Maps) and is_unhooked(reader) and reader.takes_fp8(x)
            if reads_fp8 and not p and rounds_norms(x, update):
                total, value, q, scale = add_norm_fp8(x, update, norm.weight, norm.eps)
                return total, Normed(value, Low(q, scale))
            total, value = add_norm(x, update, norm.weight, norm.eps, p, per_sequence=self.per_sequence)
            return total, Normed(value)
        x = x + dropout(update, p, self.training, per_sequence=self.per_sequence)
        return x, Normed(norm(x))

    def feed_forward_sublayer(self) -> Sublayer:
        """The feed-forward with the experts beside it, which both read its norm."""
        reader = self.feed_forward if self.experts is None else None
        return Sublayer(self.feed_forward_norm, self._feed_forward, reader)

    def _feed_forward(self, x: Tensor, rounding: Rounding, *inputs: Any) -> Tensor:
        update = self.feed_forward(x, rounding)
        return update if self.experts is None else update + self.experts(x)


class PostNormLayer(Layer):
    """x ← norm(x + dropout(sublayer(x))) for each sublayer. The last norm ends the layer: there is no residual."""

    def run_sublayers(self, x: Tensor, *inputs: Any, only: int | None = None) -> tuple[None, Tensor]:
        for sublayer in self._chosen(only):
            x = sublayer.norm(x + self.drop(sublayer.run(x, *inputs)))
        return None, x

"""What the pre-normed layers of T5 and of the decoder share."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from altup.kernels.dropout import dropout
from altup.nn import PartialExperts, RMSNorm


class PreNormLayer(GradientCheckpointingLayer):
    """A layer that ends with a feed-forward, and experts beside it where there are any."""

    dropout: float
    feed_forward_norm: RMSNorm
    feed_forward: nn.Module
    experts: PartialExperts | None
    leaves_last_addition: bool

    def _add_feed_forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """x + feed-forward or, where the update rule does this last addition, x and what is to be added."""
        normed = self.feed_forward_norm(x)
        update = self.feed_forward(normed)
        if self.experts is not None:
            update = update + self.experts(normed)
        update = self._drop(update)
        return (x, update) if self.leaves_last_addition else x + update

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)

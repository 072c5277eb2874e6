"""T5 1.1's gated feed-forward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from altup.kernels.dropout import dropout


class GatedFeedForward(nn.Module):
    """wo(dropout(gelu(wi_0·x) ⊙ wi_1·x)), with the tanh form of GELU and no biases."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(width, hidden, bias=False)
        self.wi_1 = nn.Linear(width, hidden, bias=False)
        self.wo = nn.Linear(hidden, width, bias=False)
        self.dropout = dropout
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """By fan-in, as T5 does."""
        for linear in (self.wi_0, self.wi_1, self.wo):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x)
        return self.wo(dropout(hidden, self.dropout, self.training))

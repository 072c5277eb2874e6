"""A mixture of partial experts: small networks beside a layer's main one, a few of which see each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from altup.core.errors import UserError, check_range, check_whole
from altup.nn.coefficients import CoefficientModule, coefficient


class Router(CoefficientModule):
    """softmax(W·x) in float32; in training the input is jittered by factors in [1 − jitter, 1 + jitter]."""

    of_a_rule = False

    def __init__(self, width: int, num_experts: int, jitter: float) -> None:
        super().__init__()
        self.jitter = jitter
        self.weight = coefficient(num_experts, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, width] → probabilities [tokens, experts]."""
        x = x.to(self.weight.dtype)
        if self.training and self.jitter:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, self.weight).softmax(dim=-1)


class PartialExperts(nn.Module):
    """y = Σ_{i ∈ top-k} pᵢ(x) Eᵢ(x) with Eᵢ(x) = w_outᵢ·relu(w_inᵢ·x) and p the router's softmax.

    No token is dropped. Tokens are sorted by expert into blocks that belong to one expert each, so the work is
    that of about twice the routed tokens at most, however many experts there are.
    With `balance=True`, `balance_loss` holds E·Σᵢ fᵢ·mean(pᵢ) of the last training forward, where f is an
    expert's share of the routed tokens (padding included): 1 when all are used alike.

    Args:
        width: d of the tokens.
        num_experts: How many experts there are.
        hidden: The width of an expert's hidden layer.
        top_k: How many experts each token visits.
        jitter: In training the router's input is multiplied by factors in [1 − jitter, 1 + jitter].
        balance: Whether to compute `balance_loss` in training.

    Examples:
        >>> import torch
        >>> from altup import PartialExperts
        >>> experts = PartialExperts(width=8, num_experts=4)
        >>> experts(torch.randn(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        hidden: int = 16,
        top_k: int = 1,
        jitter: float = 0.01,
        balance: bool = False,
    ) -> None:
        super().__init__()
        check_whole("width", width, 1)
        check_whole("num_experts", num_experts, 1)
        check_whole("hidden", hidden, 1)
        check_whole("top_k", top_k, 1)
        check_range("jitter", jitter, 0, 1)
        if top_k > num_experts:
            raise UserError(f"top_k={top_k} is more than num_experts={num_experts}; lower one")
        self.num_experts = num_experts
        self.top_k = top_k
        self.balance = balance
        self.router = Router(width, num_experts, jitter)
        self.w_in = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.w_out = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.balance_loss: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert by its fan-in, as the feed-forward."""
        for weight in (self.w_in, self.w_out):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def __getstate__(self) -> dict[str, Any]:
        """State without the last forward's loss, whose autograd graph can be neither copied nor saved."""
        return {**self.__dict__, "balance_loss": None}

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., width]."""
        tokens = x.flatten(0, -2)
        probabilities = self.router(tokens)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        if self.training and self.balance:
            self.balance_loss = self._balance(probabilities, experts)
        rows = tokens.repeat_interleave(self.top_k, dim=0) if self.top_k > 1 else tokens
        outputs = self._run_experts(rows, experts.flatten())
        weighted = outputs.unflatten(0, (-1, self.top_k)) * weights.unsqueeze(-1).to(outputs.dtype)
        return weighted.sum(dim=1).view(x.shape).to(x.dtype)

    if TYPE_CHECKING:  # torch has Any
        __call__ = forward

    def _run_experts(self, rows: Tensor, expert: Tensor) -> Tensor:
        """Row r through expert[r], as one batched product over blocks of rows of one expert."""
        number = rows.shape[0]
        size = _block_size(number, self.num_experts)
        num_blocks = -(-number // size) + min(self.num_experts, number)

        order = expert.argsort(stable=True)
        of_row = expert[order]
        end_row = torch.searchsorted(of_row, torch.arange(self.num_experts, device=rows.device), right=True)
        per_expert = end_row.diff(prepend=end_row.new_zeros(1))
        blocks_of = (per_expert + size - 1) // size
        end_block = blocks_of.cumsum(0)

        # Row r of the sorted rows goes to its rank within its expert, counted from that expert's first block.
        first_place = (end_block - blocks_of) * size
        first_row = end_row - per_expert
        place = (first_place - first_row)[of_row] + torch.arange(number, device=rows.device)
        blocks = rows.new_zeros(num_blocks * size, rows.shape[1]).index_copy(0, place, rows[order])
        block_ids = torch.arange(num_blocks, device=rows.device)
        of_block = torch.searchsorted(end_block, block_ids, right=True).clamp(max=self.num_experts - 1)

        hidden = torch.bmm(blocks.unflatten(0, (num_blocks, size)), self.w_in[of_block].to(rows.dtype)).relu()
        out = torch.bmm(hidden, self.w_out[of_block].to(hidden.dtype)).flatten(0, 1)
        return out[place][order.argsort()]

    def _balance(self, probabilities: Tensor, experts: Tensor) -> Tensor:
        share = F.one_hot(experts.flatten(), self.num_experts).float().mean(dim=0)
        return self.num_experts * (share * probabilities.mean(dim=0)).sum()


def _block_size(rows: int, experts: int) -> int:
    """A power of two near rows / experts: small enough that padding at most doubles the rows, at most 64."""
    return max(1, min(64, 1 << (max(1, rows // experts).bit_length() - 1)))

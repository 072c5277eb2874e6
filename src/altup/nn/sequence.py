"""Three ways to run layers on a shorter sequence. All expect padding, if any, on the right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from altup.core.errors import UserError, check_whole
from altup.kernels import sequence_update
from altup.nn.coefficients import CoefficientModule, coefficient
from altup.nn.rule import residual_and_update


def refuse_left_padding(mask: Tensor) -> None:
    """Stop if a row of `mask` [batch, tokens] has padding before a real token.

    A real token would then have padding for an anchor, and the result would depend on the padding.
    Inside a compiled or recorded graph, where the host cannot wait for an answer, the check runs on the device.
    """
    real = mask.bool()
    only_right = (real[:, 1:] <= real[:, :-1]).all()
    message = "strided and pooled sequences need padding on the right; set tokenizer.padding_side = 'right'"
    if torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        torch._assert_async(only_right, message)
    elif not bool(only_right):
        raise UserError(f"attention_mask has padding before real tokens; {message}")


class SequenceUpdate(CoefficientModule):
    """The prediction and correction of all tokens from the kept ones: a₁, a₂ (in `a`) and b.

    1, 0 and 1 at the start: skipped tokens move as their anchor does.
    """

    compiled = True

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.a = coefficient(2)
        self.b = coefficient(1)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.a.copy_(torch.tensor([1.0, 0.0]))
        self.b.fill_(1.0)

    def forward(self, x: Tensor, computed: Tensor) -> Tensor:
        return sequence_update(x, computed, self.a, self.b, self.stride)


class SequenceAltUp(nn.Module):
    """Sequence-AltUp (Algorithm 2) around one layer: it sees every `stride`-th token, yet all are updated.

    Extra arguments go to the layer as they are: masks and positions must be those of the kept tokens.

    Args:
        layer: Any module that maps [batch, tokens, d] to the same shape.
        stride: Every how many tokens the layer sees one.

    Examples:
        >>> import torch
        >>> from altup import SequenceAltUp
        >>> fast = SequenceAltUp(torch.nn.Linear(8, 8), stride=4)
        >>> fast(torch.randn(3, 10, 8)).shape  # the layer ran on tokens 0, 4 and 8
        torch.Size([3, 10, 8])
    """

    def __init__(self, layer: nn.Module, stride: int) -> None:
        super().__init__()
        check_whole("stride", stride, 1)
        self.layer = layer
        self.stride = stride
        self.update = SequenceUpdate(stride)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x: [batch, tokens, d]."""
        residual, update = residual_and_update(self.layer(x[:, :: self.stride], *args, **kwargs))
        return self.update(x, update if residual is None else residual + update)

    if TYPE_CHECKING:  # torch has Any
        __call__ = forward


class StrideAndSkip(nn.Module):
    """The baseline that leaves the skipped tokens as they were.

    Args:
        layer: Any module that maps [batch, tokens, d] to the same shape.
        stride: Every how many tokens the layer sees one.

    Examples:
        >>> import torch
        >>> from altup import StrideAndSkip
        >>> x = torch.randn(3, 10, 8)
        >>> y = StrideAndSkip(torch.nn.Linear(8, 8), stride=4)(x)
        >>> torch.equal(y[:, 1:4], x[:, 1:4])
        True
    """

    def __init__(self, layer: nn.Module, stride: int) -> None:
        super().__init__()
        check_whole("stride", stride, 1)
        self.layer = layer
        self.stride = stride

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x: [batch, tokens, d]."""
        residual, update = residual_and_update(self.layer(x[:, :: self.stride], *args, **kwargs))
        computed = update if residual is None else residual + update
        return torch.slice_scatter(x, computed.to(x.dtype), dim=1, step=self.stride)

    if TYPE_CHECKING:  # torch has Any
        __call__ = forward


class AveragePooling(nn.Module):
    """The baseline that shortens the sequence once: the mean of each window of `stride` tokens.

    Args:
        stride: How many tokens a window has.

    Examples:
        >>> import torch
        >>> from altup import AveragePooling
        >>> AveragePooling(stride=4)(torch.randn(3, 10, 8)).shape
        torch.Size([3, 3, 8])
    """

    def __init__(self, stride: int) -> None:
        super().__init__()
        check_whole("stride", stride, 1)
        self.stride = stride

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, tokens, d] → [batch, ⌈tokens/stride⌉, d]; padding takes no part in a mean."""
        real = x.new_ones(x.shape[:2]) if mask is None else mask.to(x.dtype)
        total = self._windows(x * real.unsqueeze(-1)).sum(dim=2)
        number = self._windows(real).sum(dim=2).clamp(min=1)
        return total / number.unsqueeze(-1)

    if TYPE_CHECKING:  # torch has Any
        __call__ = forward

    def pool_mask(self, mask: Tensor) -> Tensor:
        """[batch, tokens] → [batch, ⌈tokens/stride⌉]: a window is real if any of its tokens is."""
        return self._windows(mask).amax(dim=2)

    def _windows(self, x: Tensor) -> Tensor:
        """Split dimension 1 into windows of `stride`, the last one filled up with zeros."""
        missing = -x.shape[1] % self.stride
        if missing:
            x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
        return x.unflatten(1, (-1, self.stride))

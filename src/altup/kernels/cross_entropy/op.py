"""Head and loss as one operator that `torch.compile` sees whole.

The loss is a sum of one scalar for each token, so its gradients are known as soon as a token's logits are, up to
the factor that arrives in the backward pass. So the forward pass takes the tokens in chunks, and from the logits
of one chunk makes the loss, overwrites them with their own gradient, and multiplies that into the gradients of
`hidden` and `weight`. All chunks use the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from altup.kernels.launch import can_launch, ceil_div, without_autocast
from altup.kernels.operators import Gradients, operator

CHUNK_BYTES = 512 * 2**20
MULTIPLIED = 4096  # numbers of a program
WHOLE_TILES = 128  # tokens; the matrix units work on such numbers of rows


def chunk_rows(tokens: int, vocabulary: int, itemsize: int, width: int = 0) -> int:
    """Tokens of a chunk: about equal parts whose logits take at most `CHUNK_BYTES`.

    `width` is that of the hidden states where the weight wants a gradient. The products of many chunks are added
    in float32, in two arrays as large as the weight: as long as all logits take less than those, there are two
    chunks, the second of which adds to what the first has made.
    """
    most = max(1, CHUNK_BYTES // (vocabulary * itemsize))
    if tokens <= most:
        return max(1, tokens)
    if tokens * itemsize <= 2 * 4 * width:
        return -(-tokens // (2 * WHOLE_TILES)) * WHOLE_TILES
    rows = -(-tokens // -(-tokens // most))
    tiled = min(-(-rows // WHOLE_TILES), most // WHOLE_TILES) * WHOLE_TILES
    return tiled or rows


@operator("altup::fused_head")
def fused_head(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, softcap: float, hidden_grad: bool,
    weight_grad: bool,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Sums [3] (loss, nll, correct) over the tokens, and the loss's gradients where asked for, else empty tensors.

    hidden: [N, D], weight: [V, D], labels: [N]; softcap 0 is none.
    """
    # A sum over all tokens can leave float16's range before the backward pass divides it.
    dtype = torch.float32 if weight.dtype == torch.float16 else weight.dtype
    d_hidden = hidden.new_empty(hidden.shape if hidden_grad else (0,))
    d_weight = weight.new_empty(weight.shape if weight_grad else (0,), dtype=dtype)
    sums = hidden.new_empty(3, dtype=torch.float32)
    yield sums, d_hidden, d_weight
    from altup.kernels.cross_entropy.triton import loss_and_gradient_

    sums.zero_()
    tokens, vocabulary = len(hidden), len(weight)
    if not tokens:
        d_weight.zero_()
        return
    rows = chunk_rows(tokens, vocabulary, hidden.element_size(), weight.shape[1] if weight_grad else 0)
    total = None  # of the weight's gradient, in float32 where there are several chunks
    with without_autocast(hidden.device.type):
        weight = weight.to(hidden.dtype)
        logits = hidden.new_empty(rows, -(-vocabulary // 16) * 16)[:, :vocabulary]  # rows aligned for wide loads
        for start in range(0, tokens, rows):
            part = hidden[start : start + rows]
            scores = torch.mm(part, weight.t(), out=logits[: len(part)])
            targets = labels[start : start + rows]
            sums += loss_and_gradient_(scores, targets, z_loss, hidden_grad or weight_grad, softcap=softcap)
            if hidden_grad:
                torch.mm(scores, weight, out=d_hidden[start : start + rows])
            if weight_grad and 2 * rows >= tokens and d_weight.dtype == scores.dtype:
                if start:
                    d_weight.addmm_(scores.t(), part)
                else:
                    torch.mm(scores.t(), part, out=d_weight)
            elif weight_grad:
                product = _wide_product(scores.t(), part)
                total = product if total is None else total.add_(product)
    if total is not None:
        d_weight.copy_(total)


@fused_head.gradient
def _(
    d_sums: Tensor | None, _d_hidden: None, _d_weight: None, *, d_hidden: Tensor, d_weight: Tensor, weight: Tensor,
    hidden_grad: bool, weight_grad: bool,
) -> Gradients:  # fmt: skip
    if d_sums is None:
        return {}
    return {
        "hidden": _times(d_hidden, d_sums[0], d_hidden.dtype) if hidden_grad else None,
        "weight": _times(d_weight, d_sums[0], weight.dtype) if weight_grad else None,
    }


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a·b in float32, which the GPU's matrix units sum in anyway."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _times(x: Tensor, number: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == torch.bfloat16 and can_launch(x.device):
        return times_number(x, number, dtype)
    return (x * number).to(dtype)


@operator("altup::times_number")
def times_number(x: Tensor, number: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """x·number, a float32 of the device, in `dtype`; x is dense. PyTorch's own reads a number at a time if dtypes
    differ."""
    out = torch.empty_like(x, dtype=dtype)
    yield out
    from altup.kernels.cross_entropy.triton import multiply_kernel

    multiply_kernel[(ceil_div(x.numel(), MULTIPLIED),)](out, x, number, x.numel(), BLOCK=MULTIPLIED, num_warps=8)

"""Head and loss as one operator that `torch.compile` sees whole.

The loss is a sum of one scalar for each token, so its gradients are known as soon as a token's logits are, up to
the factor that arrives in the backward pass. So the forward pass takes the tokens in chunks, and from the logits
of one chunk makes the loss, overwrites them with their own gradient, and multiplies that into the gradients of
`hidden` and `weight`. All chunks use the same memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from altup.kernels.launch import can_launch, on_its_device

CHUNK_BYTES = 512 * 2**20
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


@library.custom_op("altup::fused_head", mutates_args=())
@on_its_device
def fused_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    z_loss: float,
    softcap: float,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums [3] (loss, nll, correct) over the tokens, and the loss's gradients where asked for, else empty tensors.

    hidden: [N, D], weight: [V, D], labels: [N]; softcap 0 is none.
    """
    from altup.kernels.cross_entropy.triton import loss_and_gradient_

    tokens = hidden.shape[0]
    sums = hidden.new_zeros(3, dtype=torch.float32)
    d_hidden, d_weight = _gradients(hidden, weight, hidden_grad, weight_grad)
    if not tokens:
        return sums, d_hidden, d_weight.zero_()
    rows = chunk_rows(tokens, weight.shape[0], hidden.element_size(), weight.shape[1] if weight_grad else 0)
    with torch.autocast(hidden.device.type, enabled=False):
        weight = weight.to(hidden.dtype)
        vocabulary = weight.shape[0]
        logits = hidden.new_empty(rows, -(-vocabulary // 16) * 16)[:, :vocabulary]  # rows aligned for wide loads
        total = None  # of the weight's gradient, in float32 where there are several chunks
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
        d_weight = total if total.dtype == d_weight.dtype else d_weight.copy_(total)
    return sums, d_hidden, d_weight


def _gradients(hidden: Tensor, weight: Tensor, hidden_grad: bool, weight_grad: bool) -> tuple[Tensor, Tensor]:
    # A sum over all tokens can leave float16's range before the backward pass divides it.
    dtype = torch.float32 if weight.dtype == torch.float16 else weight.dtype
    return (
        hidden.new_empty(hidden.shape if hidden_grad else (0,)),
        weight.new_empty(weight.shape if weight_grad else (0,), dtype=dtype),
    )


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a·b in float32, which the GPU's matrix units sum in anyway."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


@fused_head.register_fake
def _(
    hidden: Tensor, weight: Tensor, labels: Any, z_loss: Any, softcap: Any, hidden_grad: bool, weight_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return hidden.new_empty(3, dtype=torch.float32), *_gradients(hidden, weight, hidden_grad, weight_grad)


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, d_hidden, d_weight = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(d_hidden, d_weight)
    ctx.save_for_backward(d_hidden, d_weight)
    ctx.weight_dtype = inputs[1].dtype
    ctx.wanted = inputs[5:]


def _scale_gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    d_hidden, d_weight = ctx.saved_tensors
    if grad is None:
        return (None,) * 7
    hidden_grad, weight_grad = ctx.wanted
    return (
        _times(d_hidden, grad[0], d_hidden.dtype) if hidden_grad else None,
        _times(d_weight, grad[0], ctx.weight_dtype) if weight_grad else None,
        *[None] * 5,
    )


def _times(x: Tensor, number: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == torch.bfloat16 and can_launch(x.device):
        return times_number(x, number, dtype)
    return (x * number).to(dtype)


@library.custom_op("altup::times_number", mutates_args=())
@on_its_device
def times_number(x: Tensor, number: Tensor, dtype: torch.dtype) -> Tensor:
    """x·number, a float32 of the device, in `dtype`; PyTorch's own reads a number at a time if dtypes differ."""
    from altup.kernels.cross_entropy.triton import multiply

    out = torch.empty_like(x, dtype=dtype)
    multiply(out, x, number)
    return out


@times_number.register_fake
def _(x: Tensor, number: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


fused_head.register_autograd(_scale_gradients, setup_context=_keep_gradients)

"""Block sizes, warps and chunk sizes of the fused head: each checked against float32, then timed.

    python benchmarks/tune_cross_entropy.py

Under TRITON_INTERPRET=1 it runs on a CPU at toy sizes and times nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from tuning import DEVICE, INTERPRETED, distance, milliseconds

from altup.kernels.cross_entropy import head_sums, op, token_sums
from altup.kernels.cross_entropy import triton as kernel

SHAPES = [(29, 16, 301), (29, 32, 301)] if INTERPRETED else [(7296, 768, 32128), (7296, 1536, 32128)]
KERNELS = [(64, 4), (512, 4)] if INTERPRETED else [(4096, 8), (8192, 8), (8192, 16), (16384, 16), (32768, 32)]
CHUNKS = [2**12, 2**14] if INTERPRETED else [2**27, 2**28, 2**29]
Z_LOSS = 1e-4


def problem(tokens: int, width: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=DEVICE) * width**-0.5).bfloat16().requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=DEVICE)
    labels[::9] = -100
    return hidden, weight, labels


def tune_kernel(tokens: int, vocabulary: int) -> None:
    logits = torch.randn(tokens, vocabulary, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.randint(0, vocabulary, (tokens,), device=DEVICE)
    wide = logits.float().requires_grad_()
    (want,) = torch.autograd.grad(token_sums(wide, labels, Z_LOSS).loss, wide)
    work = torch.empty_like(logits)
    for block, warps in KERNELS:
        kernel.loss_and_gradient_(work.copy_(logits), labels, Z_LOSS, True, block, warps)
        error = distance(work, want)
        assert error < 1e-2, (block, warps, error)
        # Times itself on its own output after the first run: finite numbers, the same traffic.
        took = milliseconds(partial(kernel.loss_and_gradient_, work, labels, Z_LOSS, True, block, warps))
        print(f"kernel  {tokens}×{vocabulary}  block {block:5d}  warps {warps:2d}  error {error:.1e}  {took}")
    if not INTERPRETED:
        print(f"kernel  floor, a copy of the logits: {milliseconds(lambda: work.copy_(logits))}")


def tune_head(tokens: int, width: int, vocabulary: int) -> None:
    hidden, weight, labels = problem(tokens, width, vocabulary)
    wide = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    want = torch.autograd.grad(token_sums(F.linear(*wide), labels, Z_LOSS).loss, wide)

    def fused(chunk: int) -> tuple[torch.Tensor, ...]:
        op.CHUNK_BYTES = chunk
        return torch.autograd.grad(
            head_sums(hidden, weight, labels, Z_LOSS, implementation="triton").loss, (hidden, weight)
        )

    whole = torch.compile(lambda h, w, y: token_sums(F.linear(h, w), y, Z_LOSS).loss, dynamic=False)
    if INTERPRETED:
        whole = lambda h, w, y: token_sums(F.linear(h, w), y, Z_LOSS).loss  # noqa: E731
    ways: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
        "plain compiled": lambda: torch.autograd.grad(whole(hidden, weight, labels), (hidden, weight)),
        **{f"fused, chunks of {chunk / 2**20:.3g} MiB": partial(fused, chunk) for chunk in CHUNKS},
    }
    for name, run in ways.items():
        error = max(distance(a, b) for a, b in zip(run(), want, strict=True))
        assert error < 2e-2, (name, error)
        peak = ""
        if not INTERPRETED:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            peak = f"peak {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB"
        print(f"head    {tokens}×{width}×{vocabulary}  {name:28s}  error {error:.1e}  {milliseconds(run)}  {peak}")
    if INTERPRETED:
        return
    logits = torch.randn(tokens, vocabulary, device=DEVICE, dtype=torch.bfloat16)
    h, w = hidden.detach(), weight.detach()
    floor = milliseconds(lambda: (torch.mm(h, w.t()), torch.mm(logits, w), torch.mm(logits.t(), h)))
    print(f"head    {tokens}×{width}×{vocabulary}  floor, its three matrix products: {floor}")


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if not INTERPRETED else 'interpreter'}")
    tune_kernel(SHAPES[0][0] // 2, SHAPES[0][2])
    for shape in SHAPES:
        tune_head(*shape)

"""Tiles of FlexAttention for Gemma 3n's layers, tried one after the other (`gemma3n_steps.py tune`)."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.attention.flex_attention
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from turns import in_words, say

from altup.bench.cases import gemma3n as case
from altup.bench.problem import Setup, Work, distance
from altup.bench.runner import TimeIsUp, stopped_after
from altup.bench.timing import Stopwatch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SETUP = Setup(DEVICE, quick=not ON_GPU, compiles=ON_GPU, runs_triton=ON_GPU)
COMPILER: dict[str, Any] = {} if ON_GPU else {"backend": "aot_eager"}
FORWARD = tuple(f"fwd_{name}" for name in ("BLOCK_M", "BLOCK_N", "num_stages", "num_warps"))
BACKWARD = tuple(
    f"bwd_{name}" for name in ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_stages", "num_warps")
)
# What `FORWARD` and `BACKWARD` name. The first are those that PyTorch 2.11 takes on Hopper for heads of 256.
TILES = (
    ((64, 32, 3, 4), (64, 64, 64, 64, 2, 4)),
    ((128, 64, 2, 8), (64, 64, 64, 64, 1, 8)),
    ((64, 64, 2, 4), (64, 64, 64, 64, 2, 8)),
    ((128, 32, 3, 8), (32, 64, 64, 32, 2, 4)),
    ((64, 64, 2, 8), (32, 64, 64, 32, 2, 8)),
    ((128, 32, 2, 4), (32, 32, 32, 32, 2, 4)),
)


def options_of(forward: tuple[int, ...], backward: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(FORWARD + BACKWARD, forward + backward, strict=True))


BEST = options_of((128, 64, 2, 8), (64, 64, 64, 64, 2, 8))  # on an H200, of those above


def permit_flex() -> None:
    """On a CPU, too: FlexAttention's formulas have a backward pass there, its kernels do not."""
    if not ON_GPU:
        torch.nn.attention.flex_attention._validate_device = lambda *given: None


def try_tiles(options: Any, rows: int, length: int, repetitions: int = 3) -> dict[str, float]:
    """The shortest of some forward and backward passes of a sliding layer's attention, ms; and how far they are
    from float32."""
    config = case.text_config(**({} if ON_GPU else case.QUICK))
    config._attn_implementation = "flex_attention"
    masks: Any = case.block_masks(SimpleNamespace(config=config, device=DEVICE), torch.Size((rows, length)))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        mask = masks["sliding_attention"]
        return flex_attention(q, k, v, None, mask, scale=1.0, enable_gqa=True, kernel_options=options)

    run: Any = torch.compile(attend, dynamic=False, **COMPILER)
    torch.manual_seed(0)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    inputs = [
        (0.25 * torch.randn(rows, length, n, config.head_dim, device=DEVICE)).to(SETUP.dtype).transpose(1, 2)
        for n in heads
    ]
    inputs = [x.requires_grad_() for x in inputs]
    upstream = torch.randn_like(inputs[0])
    gradients: Any = partial(torch.autograd.grad, inputs=inputs, grad_outputs=upstream)
    watch = Stopwatch(Work(lambda i: run(*inputs), gradients), DEVICE)
    watch.start_up()
    watch.warm_up()
    for _ in range(repetitions):
        watch.burst()
    places = torch.arange(length, device=DEVICE)
    back = places[:, None] - places
    exact = [x.detach().float().requires_grad_() for x in inputs]
    seen = (back >= 0) & (back < config.sliding_window)
    q, k, v = exact
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0, enable_gqa=True)
    wanted = torch.autograd.grad(want, exact, upstream.float())
    out = run(*inputs)
    return {
        **{mode: min(values) for mode, values in watch.samples.items()},
        "output": distance(out, want),
        "gradient": distance(gradients(out), wanted),
    }


def best_tiles(found: dict[Any, dict[str, float]]) -> dict[str, int]:
    """Kernel options of the fastest forward and the fastest backward pass, by tiles and what `try_tiles` found."""
    right = {t: times for t, times in found.items() if times["output"] < 2e-2 and times["gradient"] < 2e-2}
    if not right:
        return {}
    forward, _ = min(right, key=lambda t: right[t]["forward"])
    _, backward = min(right, key=lambda t: right[t]["backward"])
    return options_of(forward, backward)


def tune(rows: int, length: int, seconds: float) -> dict[str, int]:
    """The best of `TILES`, as far as `seconds` allow."""
    found: dict[Any, dict[str, float]] = {}
    try:
        with stopped_after(seconds):
            for tiles in TILES:
                try:
                    found[tiles] = try_tiles(options_of(*tiles), rows, length)
                    say(f"{tiles}: {found[tiles]}")
                except Exception as error:  # some need more shared memory than there is
                    say(f"FAILED {tiles}: {in_words(error)}")
    except TimeIsUp:
        say("time limit")
    return best_tiles(found)

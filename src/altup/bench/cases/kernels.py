"""Every kernel beside compiled code of its plain expression, at the shapes where models use it.

A kernel that is not at least 5 % faster there is not worth its code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altup.bench.problem import Problem, Provider, Setup, Work, doubled, errors
from altup.kernels import attention, sequence_update
from altup.kernels.add_norm import add_norm
from altup.kernels.altup_update import altup_update
from altup.kernels.altup_update.with_norm import altup_update_norm
from altup.kernels.cross_entropy import head_sums
from altup.kernels.embedding import embedding
from altup.kernels.fp8 import op as fp8
from altup.kernels.fp8 import reference as fp8_reference
from altup.kernels.gated import gated
from altup.kernels.gemma3n import (
    Router,
    causal_attention,
    correct,
    correction,
    gated_linear,
    match_magnitudes,
    norm_beside,
    norm_rotary,
    predict,
    residual,
)
from altup.kernels.gemma3n import gated as gemma_gated
from altup.kernels.rotary import rotary_heads
from altup.nn.positions import rotation

Results = Tensor | Sequence[Any]
ENCODER, DECODER, LARGE = (64, 512), (64, 114), (8, 2048)  # sequences and tokens: T5-base's, decoder `large`'s
GEMMA = (4, 2048)  # E2B's
EPS = 1e-6


class Made(NamedTuple):
    """`run(implementation, *inputs)`; inputs want gradients. `exact`: whether it is compared with float64."""

    run: Callable[..., Results]
    inputs: list[Tensor]
    exact: bool = True


class Draw:
    """Random tensors of a case; with `--quick` no dimension is above 16."""

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(0)
        self.setup = setup

    def size(self, n: int) -> int:
        return min(n, 16) if self.setup.quick else n

    def x(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        sizes = [self.size(n) for n in shape]
        return (scale * torch.randn(sizes, device=self.setup.device)).to(dtype or self.setup.dtype)

    def pair(self, *shape: int) -> Tensor:
        """[gate | linear]."""
        return torch.cat([self.x(*shape), self.x(*shape)], dim=-1)

    def ids(self, words: int, *shape: int) -> Tensor:
        return torch.randint(self.size(words), [self.size(n) for n in shape], device=self.setup.device)


def update(rows: Sequence[int], d: int, K: int, draw: Draw) -> Made:
    def run(kind: str, state: Tensor, y: Tensor, P: Tensor, g: Tensor) -> Results:
        return altup_update(state, y, P, g, 0, implementation=kind)

    return Made(run, [draw.x(K, *rows, d), draw.x(*rows, d), *coefficients(draw, K)])


def update_norm(rows: Sequence[int], d: int, draw: Draw) -> Made:
    """Beside the update's own kernel and a compiled norm: what it takes the place of."""

    def run(kind: str, *given: Tensor) -> Results:
        *state, y, added, P, g, weight = given
        made = altup_update_norm(state, y, added, P, g, 0, weight, EPS, 1, implementation=kind)
        return *made.state, made.normed

    blocks = [draw.x(*rows, d) for _ in range(4)]
    return Made(run, [*blocks, *coefficients(draw, 2), draw.x(d, dtype=torch.float32)])


def coefficients(draw: Draw, K: int) -> tuple[Tensor, Tensor]:
    return draw.x(K, K, dtype=torch.float32), draw.x(K, dtype=torch.float32)


def sequence(rows: Sequence[int], d: int, stride: int, draw: Draw) -> Made:
    batch, tokens = rows

    def run(kind: str, x: Tensor, computed: Tensor, a: Tensor, b: Tensor) -> Results:
        return sequence_update(x, computed, a, b, stride, kind)

    x = draw.x(batch, tokens, d)
    few = torch.randn_like(x[:, ::stride])
    return Made(run, [x, few, draw.x(2, dtype=torch.float32), draw.x(1, dtype=torch.float32)])


def addition(rows: Sequence[int], d: int, p: float, draw: Draw) -> Made:
    def run(kind: str, x: Tensor, added: Tensor, weight: Tensor) -> Results:
        return add_norm(x, added, weight, EPS, p, implementation=kind)

    return Made(run, [draw.x(*rows, d), draw.x(*rows, d), draw.x(d, dtype=torch.float32)], not p)


def gate(rows: Sequence[int], d: int, activation: str, p: float, draw: Draw) -> Made:
    return Made(lambda kind, h: gated(h, activation, p, implementation=kind), [draw.pair(*rows, d)], not p)


def rotary(rows: Sequence[int], queries: int, keys: int, d: int, draw: Draw) -> Made:
    batch, tokens = (draw.size(n) for n in rows)
    angles = rotation(torch.arange(tokens, device=draw.setup.device)[None], d)

    def run(kind: str, joined: Tensor) -> Results:
        return rotary_heads(joined, *angles, queries, keys, kind)

    joined = torch.randn(batch, tokens, (queries + 2 * keys) * d, device=draw.setup.device)
    return Made(run, [joined.to(draw.setup.dtype)])


def head(tokens: int, d: int, words: int, softcap: float | None, draw: Draw) -> Made:
    labels = draw.ids(words, tokens)

    def run(kind: str, hidden: Tensor, weight: Tensor) -> Results:
        return head_sums(hidden, weight, labels, softcap=softcap, implementation=kind).loss

    return Made(run, [draw.x(tokens, d), draw.x(words, d, scale=d**-0.5)], exact=False)


def table(rows: Sequence[int], d: int, words: int, draw: Draw) -> Made:
    ids = draw.ids(words, *rows)
    return Made(lambda kind, weight: embedding(ids, weight, kind), [draw.x(words, d)])


def biased_attention(rows: Sequence[int], heads: int, d: int, causal: bool, draw: Draw) -> Made:
    batch, tokens = rows

    def run(kind: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Results:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention(q, k, v, by_distance=bias, causal=causal, implementation=kind)

    qkv = [draw.x(batch, tokens, heads, d, scale=d**-0.25) for _ in range(3)]
    return Made(run, [*qkv, torch.randn(heads, 2 * draw.size(tokens) - 1, device=qkv[0].device)])


def gemma_predict(rows: Sequence[int], d: int, K: int, draw: Draw) -> Made:
    def run(kind: str, state: Tensor, A: Tensor, weight: Tensor, norm: Tensor) -> Results:
        return predict(state, Router(weight, norm, EPS), A, 0, kind, stacked=True)

    return Made(run, [draw.x(K, *rows, d), draw.x(K * K, K), *router(draw, K, d)])


def gemma_correction(rows: Sequence[int], d: int, K: int, draw: Draw) -> Made:
    def run(kind: str, y: Tensor, C: Tensor, x: Tensor, scale: Tensor, weight: Tensor, norm: Tensor) -> Results:
        return correction(y, Router(weight, norm, EPS), C, x, 0, scale, kind)

    return Made(run, [draw.x(*rows, d), draw.x(K, K), draw.x(*rows, d), draw.x(d), *router(draw, K, d)])


def router(draw: Draw, K: int, d: int) -> tuple[Tensor, Tensor]:
    return draw.x(K, d, scale=d**0.5), draw.x(d)


def gemma_correct(rows: Sequence[int], d: int, K: int, draw: Draw) -> Made:
    def run(kind: str, state: Tensor, y: Tensor, g: Tensor, branch: Tensor, norm: Tensor) -> Results:
        return correct(state, y, g, 0, branch, norm, EPS, kind)

    blocks = draw.x(K, *rows, d), draw.x(*rows, d)
    return Made(run, [*blocks, draw.x(*rows, K, dtype=torch.float32), draw.x(*rows, d), draw.x(d)])


def gemma_match(rows: Sequence[int], d: int, K: int, mean: bool, draw: Draw) -> Made:
    def run(kind: str, h: Tensor, *projected: Tensor) -> Results:
        return match_magnitudes(h, projected, mean, kind)

    return Made(run, [draw.x(*rows, d) for _ in range(K)])


def gemma_gate(rows: Sequence[int], d: int, sparsity: float, draw: Draw) -> Made:
    return Made(lambda kind, gate, up: gemma_gated(gate, up, sparsity, kind), [draw.x(*rows, d) for _ in range(2)])


def gemma_gated_linear(rows: Sequence[int], d: int, out: int, sparsity: float, draw: Draw) -> Made:
    def run(kind: str, gate: Tensor, up: Tensor, weight: Tensor) -> Results:
        return gated_linear(gate, up, weight, sparsity, kind)

    return Made(run, [draw.x(*rows, d), draw.x(*rows, d), draw.x(out, d, scale=d**-0.5)])


def gemma_residual(rows: Sequence[int], d: int, whole: bool, draw: Draw) -> Made:
    """Around the feed-forward network, with both additions and the norm behind; or the first addition alone."""

    def run(kind: str, x: Tensor, a: Tensor, of_a: Tensor, *more: Tensor) -> Results:
        others = dict(zip(("n", "r", "r_norm", "norm"), more, strict=False))
        out, normed = residual(x, a, of_a, EPS, **others, implementation=kind)
        return out if normed is None else (out, normed)

    more = [draw.x(*rows, d), draw.x(*rows, d), draw.x(d), draw.x(d)] if whole else []
    return Made(run, [draw.x(*rows, d), draw.x(*rows, d), draw.x(d), *more])


def gemma_norm(rows: Sequence[int], d: int, draw: Draw) -> Made:
    return Made(lambda kind, x, w: norm_beside(x, w, EPS, kind), [draw.x(*rows, d), draw.x(d)])


def gemma_rotary(rows: Sequence[int], heads: int, d: int, draw: Draw) -> Made:
    cos, sin = (draw.x(1, rows[1], d, dtype=torch.float32) for _ in range(2))

    def run(kind: str, x: Tensor, norm: Tensor) -> Results:
        return norm_rotary(x, norm, EPS, cos.to(norm.dtype), sin.to(norm.dtype), kind)

    return Made(run, [draw.x(*rows, heads, d), draw.x(d)])


def gemma_window(rows: Sequence[int], heads: int, shared: int, d: int, window: int, draw: Draw) -> Made:
    def run(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Results:
        return causal_attention(q, k, v, d**-0.5, window, implementation=kind)

    return Made(run, [draw.x(*rows, heads, d), draw.x(*rows, shared, d), draw.x(*rows, shared, d)])


def fp8_product(m: int, k: int, n: int, draw: Draw) -> Made:
    """Beside the same product in bf16."""
    x, w = draw.x(m, k), draw.x(n, k, scale=k**-0.5)
    one = torch.ones((), device=x.device)
    low = [t.to(fp8_reference.VALUE) for t in (x, w)]

    def run(kind: str) -> Results:
        return fp8.product_op(*low, one, one, x.dtype, True) if kind == "triton" else x @ w.t()

    return Made(run, [], exact=False)


def fp8_cast(m: int, n: int, draw: Draw) -> Made:
    x = draw.x(m, n)
    most = x.abs().amax().float().reshape(1)

    def run(kind: str) -> Results:
        if kind == "triton":
            return fp8.cast_op([x], most, x.dtype, False)
        scale = fp8_reference.power_of_two(most, fp8_reference.VALUE)
        q = fp8_reference.quantize_reference(x, scale, fp8_reference.VALUE)
        return q, q.t().contiguous(), scale

    return Made(run, [], exact=False)


def fp8_geglu(m: int, n: int, backward: bool, draw: Draw) -> Made:
    h, grad = draw.pair(m, n), draw.x(m, n)
    one = torch.ones((), device=h.device)

    def run(kind: str) -> Results:
        if backward:
            compute = fp8.geglu_backward_op if kind == "triton" else fp8_reference.geglu_backward_reference
            return compute(grad, h, one, one)
        return (fp8.geglu_op if kind == "triton" else fp8_reference.geglu_reference)(h)

    return Made(run, [], exact=False)


def fp8_transpose(m: int, n: int, draw: Draw) -> Made:
    q = draw.x(m, n).to(fp8_reference.VALUE)
    return Made(lambda kind: fp8.transpose_op(q) if kind == "triton" else q.t().contiguous(), [], exact=False)


# What matters to most users first: a time limit may end the run.
KERNELS: tuple[tuple[str, partial[Made]], ...] = (
    ("altup_update", partial(update, ENCODER, 768, 2)),
    ("altup_update", partial(update, LARGE, 1024, 2)),
    ("altup_update", partial(update, LARGE, 1024, 4)),
    ("altup_update_norm", partial(update_norm, ENCODER, 768)),
    ("altup_update_norm", partial(update_norm, LARGE, 1024)),
    ("add_norm", partial(addition, ENCODER, 768, 0.0)),
    ("add_norm", partial(addition, DECODER, 768, 0.0)),
    ("add_norm", partial(addition, LARGE, 1024, 0.0)),
    ("add_norm", partial(addition, ENCODER, 768, 0.1)),
    ("gated", partial(gate, ENCODER, 2048, "gelu", 0.0)),
    ("gated", partial(gate, LARGE, 2816, "silu", 0.0)),
    ("gated", partial(gate, ENCODER, 2048, "gelu", 0.1)),
    ("rotary", partial(rotary, LARGE, 16, 4, 64)),
    ("gemma3n predict", partial(gemma_predict, GEMMA, 2048, 4)),
    ("gemma3n correction", partial(gemma_correction, GEMMA, 2048, 4)),
    ("gemma3n correct", partial(gemma_correct, GEMMA, 2048, 4)),
    ("gemma3n residual", partial(gemma_residual, GEMMA, 2048, True)),
    ("gemma3n residual", partial(gemma_residual, GEMMA, 2048, False)),
    ("gemma3n norm_beside", partial(gemma_norm, GEMMA, 2048)),
    ("gemma3n norm_rotary", partial(gemma_rotary, GEMMA, 8, 256)),
    ("gemma3n gated", partial(gemma_gate, GEMMA, 8192, 0.0)),
    ("gemma3n gated", partial(gemma_gate, GEMMA, 8192, 0.95)),
    ("gemma3n gated_linear", partial(gemma_gated_linear, GEMMA, 8192, 2048, 0.0)),
    ("gemma3n match", partial(gemma_match, GEMMA, 2048, 4, False)),
    ("gemma3n match", partial(gemma_match, GEMMA, 2048, 4, True)),
    ("gemma3n window", partial(gemma_window, GEMMA, 8, 2, 256, 512)),
    ("sequence_update", partial(sequence, ENCODER, 768, 4)),
    ("embedding", partial(table, ENCODER, 768, 32128)),
    ("embedding", partial(table, LARGE, 1024, 32128)),
    ("head", partial(head, 64 * 114, 768, 32128, None)),
    ("head", partial(head, 8 * 2048, 1024, 32128, None)),
    ("head with softcap", partial(head, 4 * 2048, 2048, 262_144, 30.0)),
    ("attention", partial(biased_attention, ENCODER, 12, 64, False)),
    ("attention", partial(biased_attention, DECODER, 12, 64, True)),
    ("fp8 product", partial(fp8_product, 64 * 512, 768, 4096)),
    ("fp8 product", partial(fp8_product, 64 * 512, 2048, 768)),
    ("fp8 cast", partial(fp8_cast, 64 * 512, 768)),
    ("fp8 transpose", partial(fp8_transpose, 64 * 512, 768)),
    ("fp8 geglu", partial(fp8_geglu, 64 * 512, 2048, False)),
    ("fp8 geglu backward", partial(fp8_geglu, 64 * 512, 2048, True)),
)


def problems(setup: Setup) -> Iterator[Problem]:
    for name, make in KERNELS:
        yield problem(setup, name, make)


def problem(setup: Setup, name: str, make: partial[Made]) -> Problem:
    made = make(Draw(setup))
    for x in made.inputs:
        x.requires_grad_()
    words = [str(value).replace(" ", "") for value in make.args]
    return Problem(
        "kernels",
        {"method": " ".join([name, *words])},
        [
            Provider("triton", partial(work, made, "triton"), triton=True),
            Provider("plain compiled", partial(work, made, "plain", True), "plain", compiled=True)
            if setup.compiles
            else Provider("plain eager", partial(work, made, "plain"), "plain"),
        ],
        baseline="plain compiled" if setup.compiles else "plain eager",
        tolerances={"": 3e-2 if setup.dtype == torch.bfloat16 else 1e-4},
    )


def work(made: Made, kind: str, compiled: bool = False) -> Work:
    run: Callable[..., Results] = partial(made.run, kind)
    if compiled:
        run = torch.compile(run, dynamic=False)

    def outputs(results: Results) -> list[Tensor]:
        return [t for t in ([results] if isinstance(results, Tensor) else results) if t.requires_grad]

    if not made.inputs:
        return Work(lambda i: run())
    first = outputs(run(*made.inputs))
    upstream = [torch.randn_like(t) if t.dim() else torch.ones_like(t) for t in first]
    del first

    def backward(results: list[Tensor], inputs: Sequence[Tensor] = made.inputs) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            results, inputs, [u.to(t.dtype) for u, t in zip(upstream, results, strict=True)]
        )

    def compare() -> dict[str, float]:
        wide = doubled(made.inputs)
        exact = outputs(made.run("plain", *wide))
        want = {"results": exact, "gradients": backward(exact, wide)}
        got = outputs(run(*made.inputs))
        return errors({"results": got, "gradients": backward(got)}, want)

    return Work(lambda i: outputs(run(*made.inputs)), backward, compare if made.exact else None)

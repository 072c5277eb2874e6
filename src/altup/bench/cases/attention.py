"""Self-attention with a trainable bias that depends on the distance, as T5 has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from altup.bench.problem import Answer, Problem, Provider, Setup, Work, autograd_work, doubled, errors
from altup.kernels import attention
from altup.nn import RelativeBias

Attend = Callable[..., Tensor]
FLEX_TILE = 128  # tokens; FlexAttention's tiles divide it


def problems(setup: Setup) -> Iterator[Problem]:
    """Base's self-attention with 12 heads, 64 sequences: the encoder's of 512 tokens, the decoder's of 114, and
    the encoder's where each row holds examples of 205, 205 and 102 tokens, as fine-tuning packs them."""
    batch, heads, d = (2, 2, 16) if setup.quick else (64, 12, 64)
    long, short, examples = (24, 9, (10, 10, 4)) if setup.quick else (512, 114, (205, 205, 102))
    for kind, length in {"full": long, "causal": short, "packed": long}.items():
        inputs = Inputs(setup, batch, heads, length, d, kind == "causal", examples if kind == "packed" else None)
        plain = partial(dense_bias, hidden=inputs.hidden)
        providers = [
            Provider("triton", partial(inputs.work, inputs.kernel), triton=True),
            Provider("plain eager", partial(inputs.work, plain), "plain"),
            Provider("plain compiled", partial(inputs.work, plain, compiled=True), "plain", compiled=True),
            Provider(
                "sdpa memory-efficient", partial(inputs.work, partial(efficient, hidden=inputs.hidden)), "peer"
            ),
            Provider("flex", inputs.flex, "peer", compiled=True),
        ]
        if kind != "packed":  # of which flash knows nothing
            providers.append(Provider("flash without bias", inputs.without_bias, "floor"))
        yield Problem(
            "attention",
            {"batch": batch, "heads": heads, "tokens": length, "d": d, "method": kind},
            providers,
            tolerances={"": 2e-2 if setup.dtype == torch.bfloat16 else 1e-4},
        )


def lay_out(by_distance: Tensor, length: int, hidden: Tensor | None) -> Tensor:
    """[heads, 2·length − 1] → [heads, length, length]: entry (i, j) is that of distance j − i."""
    bias = by_distance.unfold(1, length, 1).flip(1)
    return bias if hidden is None else bias.masked_fill(hidden, torch.finfo(torch.float32).min / 2)


def dense_bias(q: Tensor, k: Tensor, v: Tensor, by_distance: Tensor, hidden: Tensor | None) -> Tensor:
    """The definition; softmax in float32 or better."""
    scores = (q @ k.transpose(-1, -2)).to(by_distance.dtype) + lay_out(by_distance, q.shape[2], hidden)
    return scores.softmax(dim=-1).to(v.dtype) @ v


def efficient(q: Tensor, k: Tensor, v: Tensor, by_distance: Tensor, hidden: Tensor | None) -> Tensor:
    bias = lay_out(by_distance, q.shape[2], hidden).to(q.dtype)
    backends = [SDPBackend.EFFICIENT_ATTENTION] if q.is_cuda else [SDPBackend.MATH]
    pad = -q.shape[2] % 8 if q.is_cuda else 0  # its bias must be aligned
    bias = F.pad(bias, (0, pad))[..., : q.shape[2]].expand(len(q), -1, -1, -1)
    with sdpa_kernel(backends):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)


def unbiased(q: Tensor, k: Tensor, v: Tensor, by_distance: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION if q.is_cuda else SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0)


class Inputs:
    """q, k, v as [batch, heads, tokens, d] views of [batch, tokens, heads, d], as projections leave them.

    `hidden` [tokens, tokens] tells which keys a query does not see, for those who need it so.
    """

    def __init__(
        self,
        setup: Setup,
        batch: int,
        heads: int,
        length: int,
        d: int,
        causal: bool,
        examples: Sequence[int] | None,
    ) -> None:
        torch.manual_seed(0)

        def random(scale: float) -> Tensor:
            values = torch.randn(batch, length, heads, d, device=setup.device) * scale
            return values.to(setup.dtype).transpose(1, 2)

        self.qkv = [random(d**-0.5).requires_grad_(), random(1.0).requires_grad_(), random(1.0).requires_grad_()]
        buckets = {"num_buckets": 8, "max_distance": 12} if setup.quick else {}
        self.relative = RelativeBias(heads, **buckets, bidirectional=not causal).to(setup.device)
        self.by_distance = self.relative(length, length).detach().contiguous().requires_grad_()
        self.upstream = random(1.0)
        self.causal, self.device = causal, setup.device
        self.segments = None
        self.hidden = torch.ones(length, length, dtype=torch.bool, device=setup.device).triu(1) if causal else None
        if examples is not None:
            numbers = torch.arange(1, len(examples) + 1).repeat_interleave(torch.tensor(examples)).to(setup.device)
            self.segments = numbers.expand(batch, -1)
            self.hidden = numbers[:, None] != numbers
        self.reference = cache(self._reference)

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, by_distance: Tensor) -> Tensor:
        return attention(
            *(q, k, v),
            by_distance=by_distance,
            causal=self.causal,
            query_segments=self.segments,
            key_segments=self.segments,
            constant_beyond=self.relative.constant_beyond(),
            implementation="triton",
        )

    def work(self, attend: Attend, compiled: bool = False, reference: Any = None) -> Work:
        run = torch.compile(attend, dynamic=False) if compiled else attend
        reference = reference or self.reference
        inputs = [*self.qkv, self.by_distance] if reference is self.reference else self.qkv

        return autograd_work(
            lambda: run(*self.qkv, self.by_distance),
            inputs,
            self.upstream,
            lambda out, gradients: errors(self._answer(out, gradients), reference()),
        )

    def flex(self) -> Work:
        """FlexAttention that looks the bias up in the table, with the table's gradient; it skips hidden blocks.

        It computes whole tiles, and asks for the bias of positions behind the last token too: its gradient of the
        queries is wrong then, even where our function answers with some number. So tokens fill its tiles here."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        length, seen = self.qkv[0].shape[2], None
        more = -length % FLEX_TILE
        full = length + more
        if self.hidden is not None or more:
            hidden = torch.zeros(length, length, device=self.device) if self.hidden is None else self.hidden
            visible = F.pad(~hidden.bool(), (0, more, 0, more))

            def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return i >= j if self.causal and self.segments is None else visible[i, j]

            seen = create_block_mask(sees, None, None, full, full, device=str(self.device))

        def attend(q: Tensor, k: Tensor, v: Tensor, by_distance: Tensor) -> Tensor:
            def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return score + by_distance[h, j - i + full - 1]

            return flex_attention(q, k, v, score_mod=add_bias, block_mask=seen, scale=1.0)

        compiled = torch.compile(attend, dynamic=False)

        def fill(q: Tensor, k: Tensor, v: Tensor, by_distance: Tensor) -> Tensor:
            if not more:
                return compiled(q, k, v, by_distance)
            q, k, v = (F.pad(x, (0, 0, 0, more)) for x in (q, k, v))
            return compiled(q, k, v, F.pad(by_distance, (more, more)))[:, :, :length]

        return self.work(fill)

    def without_bias(self) -> Work:
        return self.work(partial(unbiased, causal=self.causal), reference=self._unbiased_reference)

    def _reference(self) -> Answer:
        inputs = doubled([*self.qkv, self.by_distance])
        q, k, v, by_distance = inputs
        out = dense_bias(q, k, v, by_distance, self.hidden)
        return self._answer(out, torch.autograd.grad(out, inputs, self.upstream.double()))

    def _unbiased_reference(self) -> Answer:
        q, k, v = inputs = doubled(self.qkv)
        out = dense_bias(q, k, v, torch.zeros_like(self.by_distance, dtype=q.dtype), self.hidden)
        return self._answer(out, torch.autograd.grad(out, inputs, self.upstream.double()))

    def _answer(self, out: Tensor, gradients: Sequence[Tensor]) -> Answer:
        """The bias's gradient is compared where it counts: in the table of buckets."""
        answer = {"output": out, **dict(zip(("q", "k", "v"), gradients, strict=False))}
        if len(gradients) == 4:
            laid_out = self.relative(out.shape[2], out.shape[2])
            (answer["table"],) = torch.autograd.grad(laid_out, self.relative.weight, gradients[3].float())
        return answer

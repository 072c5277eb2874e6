"""What the public function promises on any machine, and the definition that the kernels are held against."""

from __future__ import annotations

import math

import pytest
import torch

from altup.core.errors import UserError
from altup.kernels.attention import attention, attention_reference, keep_mask

B, H, Q, K, D = 2, 3, 5, 7, 4


def tensors(dtype=torch.float64):
    q = torch.randn(B, Q, H, D, dtype=dtype).transpose(1, 2)
    k, v = (torch.randn(B, K, H, D, dtype=dtype).transpose(1, 2) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v, torch.randn(H, Q + K - 1, dtype=dtype))]


def by_hand(q, k, v, by_distance, bias=None, causal=False, query_segments=None, key_segments=None, scale=1.0):
    """One query at a time, with lists."""
    q, k, v, by_distance = (x.detach() for x in (q, k, v, by_distance))
    out = torch.zeros(B, H, Q, D, dtype=q.dtype)
    for b in range(B):
        for h in range(H):
            for i in range(Q):
                seen = [
                    j
                    for j in range(K)
                    if (not causal or j <= i)
                    and (query_segments is None or query_segments[b, i] == key_segments[b, j])
                ]
                scores = [
                    scale * float(q[b, h, i] @ k[b, h, j])
                    + float(by_distance[h, j - i + Q - 1])
                    + (0 if bias is None else float(bias[b, 0, i, j]))
                    for j in seen
                ]
                total = sum(map(math.exp, scores))
                for j, score in zip(seen, scores, strict=True):
                    out[b, h, i] += math.exp(score) / total * v[b, h, j]
    return out


def segments():
    """Packed examples, padding, and in the second sequence a query that sees nothing."""
    return {
        "query_segments": torch.tensor([[1, 1, 1, 2, 2], [1, 1, 1, 1, 9]]),
        "key_segments": torch.tensor([[1, 1, 2, 2, 2, 2, 1], [1, 1, 1, 1, 1, 0, 0]]),
    }


CASES = {
    "all": dict,
    "causal": lambda: {"causal": True},
    "segments": segments,
    "causal segments": lambda: {"causal": True, **segments()},
    "scale": lambda: {"scale": 0.3},
    "dense bias": lambda: {"bias": torch.randn(B, 1, Q, K, dtype=torch.float64), **segments()},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("function", [attention, attention_reference])
def test_by_hand(function, case):
    q, k, v, by_distance = tensors()
    options = CASES[case]()
    out = function(q, k, v, by_distance=by_distance, **options)
    torch.testing.assert_close(out, by_hand(q, k, v, by_distance, **options))


@pytest.mark.parametrize("case", CASES)
def test_gradients(case):
    options = CASES[case]()

    def run(q, k, v, by_distance):
        return attention(q, k, v, by_distance=by_distance, **options)

    torch.autograd.gradcheck(run, tensors())


@pytest.mark.parametrize("with_bias", [False, True])
def test_query_that_sees_no_key(with_bias):
    q, k, v, by_distance = tensors()
    options = segments() | {"by_distance": by_distance if with_bias else None}
    out = attention(q, k, v, **options)
    assert not out[1, :, 4].any()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert not gradients[0][1, :, 4].any()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("causal", [False, True])
def test_without_bias_or_segments(causal):
    q, k, v, by_distance = tensors()
    torch.testing.assert_close(
        attention(q, k, v, causal=causal), attention(q, k, v, by_distance=0 * by_distance, causal=causal)
    )


def test_half_precision_with_masks_is_finite():
    q, k, v, by_distance = tensors(torch.float16)
    out = attention(q, k, v, by_distance=by_distance, causal=True, **segments())
    assert out.dtype == torch.float16
    assert out.isfinite().all()


def test_dropout_keeps_the_mean():
    q, k, v, by_distance = tensors(torch.float32)
    exact = attention(q, k, v, by_distance=by_distance)
    mean = sum(attention(q, k, v, by_distance=by_distance, dropout=0.5) for _ in range(2000)) / 2000
    torch.testing.assert_close(mean, exact, atol=0.15, rtol=0)


def test_keep_mask_is_even_handed():
    keep = keep_mask(123456789012345, 2, 3, 96, 80, 0.3).double()
    assert keep.shape == (2, 3, 96, 80)
    assert abs(keep.mean() - 0.7) < 4 * math.sqrt(0.21 / keep.numel())
    for dims in [(1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]:
        rest = keep.numel() // keep.mean(dims).numel()
        assert (keep.mean(dims) - 0.7).abs().max() < 5 * math.sqrt(0.21 / rest)
    flat = keep.flatten(0, 1).flatten(1) - 0.7
    correlation = flat @ flat.t() / flat.shape[1] / 0.21
    assert (correlation - torch.eye(6)).abs().max() < 0.06


def test_keep_mask_depends_on_seed_and_place_alone():
    keep = keep_mask(5, 1, 2, 40, 50, 0.5)
    assert torch.equal(keep_mask(5, 1, 2, 20, 30, 0.5), keep[:, :, :20, :30])
    assert not torch.equal(keep_mask(6, 1, 2, 40, 50, 0.5), keep)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"query_segments": torch.ones(B, Q)}, "key_segments"),
        ({"key_segments": torch.ones(B, K)}, "query_segments"),
        ({"by_distance": torch.zeros(H, Q + K)}, r"by_distance has the shape \[3, 12\]"),
        ({"implementation": "fast"}, "implementation='fast'"),
        ({"implementation": "triton"}, "cpu"),
        ({"dropout": 1.0}, "dropout=1.0"),
    ],
)
def test_what_is_refused(options, words):
    q, k, v, _ = tensors()
    with pytest.raises(UserError, match=words):
        attention(q, k, v, **options)


@pytest.mark.parametrize(
    ("name", "shape"), [("query_segments", (2, 3)), ("query_segments", (3, 4)), ("key_segments", (2, 1))]
)
def test_segments_of_other_tokens_are_refused(name, shape):
    shapes = {"query_segments": (2, 4), "key_segments": (2, 4), name: shape}
    with pytest.raises(UserError, match=name):
        attention(*[torch.ones(2, 2, 4, 16)] * 3, **{name: torch.ones(shape) for name, shape in shapes.items()})


def test_one_row_of_segments_serves_all():
    q, k, v = torch.randn(3, 2, 2, 4, 16).unbind()
    row = torch.tensor([[1, 1, 2, 2]])
    want = attention(q, k, v, query_segments=row.expand(2, 4), key_segments=row.expand(2, 4))
    assert torch.equal(attention(q, k, v, query_segments=row, key_segments=row), want)

"""Attention: the definition by hand, what the public function promises on any machine, and the kernels, forward
and every gradient, against the definition in float64 on the same inputs."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from altup.core.errors import UserError
from altup.kernels.attention import (
    WIDTHS,
    attention,
    attention_reference,
    joined,
    joined_attention,
    keep_mask,
    launch,
)
from altup.kernels.attention.reference import keep_bits_reference, unpack_bits
from altup.kernels.cuda_graph import record, warm_up
from altup.kernels.dropout.reference import draw_kept
from tests.kernels.interpreter import (
    BACKEND,
    CHEAP_CHECKS,
    DEVICE,
    INTERPRETED,
    check_operator,
    fewer,
    needs_gpu,
    runs_kernel,
)

B, H, Q, K, D = 2, 3, 5, 7, 4
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16]


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


def small_segments():
    """Packed examples, padding, and in the second sequence a query that sees nothing."""
    return {
        "query_segments": torch.tensor([[1, 1, 1, 2, 2], [1, 1, 1, 1, 9]]),
        "key_segments": torch.tensor([[1, 1, 2, 2, 2, 2, 1], [1, 1, 1, 1, 1, 0, 0]]),
    }


CASES = {
    "all": dict,
    "causal": lambda: {"causal": True},
    "segments": small_segments,
    "causal segments": lambda: {"causal": True, **small_segments()},
    "scale": lambda: {"scale": 0.3},
    "dense bias": lambda: {"bias": torch.randn(B, 1, Q, K, dtype=torch.float64), **small_segments()},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("function", [attention, attention_reference])
def test_by_hand(function, case):
    q, k, v, by_distance = tensors()
    options = CASES[case]()
    out = function(q, k, v, by_distance=by_distance, **options)
    torch.testing.assert_close(out, by_hand(q, k, v, by_distance, **options))


@pytest.mark.parametrize("case", CASES)
def test_plain_gradients(case):
    options = CASES[case]()

    def run(q, k, v, by_distance):
        return attention(q, k, v, by_distance=by_distance, **options)

    torch.autograd.gradcheck(run, tensors())


@pytest.mark.parametrize("with_bias", [False, True])
def test_query_that_sees_no_key(with_bias):
    q, k, v, by_distance = tensors()
    options = small_segments() | {"by_distance": by_distance if with_bias else None}
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
    out = attention(q, k, v, by_distance=by_distance, causal=True, **small_segments())
    assert out.dtype == torch.float16
    assert out.isfinite().all()


def test_dropout_keeps_the_mean():
    q, k, v, by_distance = tensors(torch.float32)
    exact = attention(q, k, v, by_distance=by_distance)
    mean = sum(attention(q, k, v, by_distance=by_distance, dropout=0.5) for _ in range(2000)) / 2000
    torch.testing.assert_close(mean, exact, atol=0.15, rtol=0)


@pytest.fixture(params=[False, True], ids=["", "bits"])
def keeps_bits(request, monkeypatch):
    """Dropout drawn in each kernel, and once as bits."""
    monkeypatch.setattr(launch, "MOST_KEYS_WITH_BITS", 1024 if request.param else 0)


def test_keep_mask_is_even_handed(keeps_bits):
    keep = kept_under(123456789012345, 2, 3, 96, 80, 0.3).double()
    assert keep.shape == (2, 3, 96, 80)
    assert abs(keep.mean() - 0.7) < 4 * math.sqrt(0.21 / keep.numel())
    for dims in [(1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]:
        rest = keep.numel() // keep.mean(dims).numel()
        assert (keep.mean(dims) - 0.7).abs().max() < 5 * math.sqrt(0.21 / rest)
    flat = keep.flatten(0, 1).flatten(1) - 0.7
    correlation = flat @ flat.t() / flat.shape[1] / 0.21
    assert (correlation - torch.eye(6)).abs().max() < 0.06


def test_keep_mask_depends_on_seed_and_place_alone(keeps_bits):
    keep = kept_under(5, 1, 2, 140, 150, 0.5)
    assert torch.equal(kept_under(5, 1, 2, 20, 130, 0.5), keep[:, :, :20, :130])
    assert torch.equal(kept_under(5, 1, 2, 140, 30, 0.5), keep[:, :, :140, :30])
    assert not torch.equal(kept_under(6, 1, 2, 140, 150, 0.5), keep)


@pytest.mark.parametrize("dropout", [0.1, 0.5, 2**-16, 0.9999])
def test_bits_are_dropped_as_often_as_asked(dropout):
    """Each of a word's numbers, and as often where the one before it is kept."""
    bits = keep_bits_reference(11, 50, 256, 256, dropout).view(torch.uint8).numpy()
    keep = torch.from_numpy(np.unpackbits(bits, bitorder="little")).view(-1, 32).double()
    spread = math.sqrt(dropout * (1 - dropout))
    assert (keep.mean(0) - (1 - dropout)).abs().max() < 5 * spread / math.sqrt(len(keep)) + 1e-9
    both = (keep[:, 1:] * keep[:, :-1]).mean(0)
    assert (both - (1 - dropout) ** 2).abs().max() < 8 * spread / math.sqrt(len(keep)) + 1e-9


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


@pytest.fixture
def tiles(monkeypatch):
    """Set the queries and keys of a tile in every kernel."""

    def cut(queries: int, keys: int) -> None:
        of_keys = (launch.KEYS, launch.KEYS_OF_FEW, launch.KEYS_BEFORE_HOPPER)
        for table in (launch.FORWARD, launch.QUERIES, *of_keys):
            for width, config in table.items():
                monkeypatch.setitem(table, width, config._replace(queries=queries, keys=keys))

    return cut


@pytest.fixture
def small(tiles):
    """Tiles for short sequences, so that there are several; on a GPU the real ones are put to the test."""
    return tiles if INTERPRETED else lambda queries, keys: None


def problem(B=1, H=2, Q=32, K=None, D=16, dtype=torch.float32, beyond=None):
    """q, k, v as projections leave them, and a bias by distance that is constant from `beyond` on."""
    K = K or Q
    q, k, v = (
        torch.randn(B, n, H, D, device=DEVICE).mul(D**-0.25 if n == Q else 1).to(dtype).transpose(1, 2)
        for n in (Q, K, K)
    )
    by_distance = torch.randn(H, Q + K - 1, device=DEVICE)
    if beyond is not None:
        distance = torch.arange(Q + K - 1, device=DEVICE) - (Q - 1)
        by_distance[:, distance <= -beyond] = 0.8
        by_distance[:, distance >= beyond] = -0.6
    return [x.requires_grad_() for x in (q, k, v, by_distance)]


def distance(got, want, norm=None):
    """Relative to `norm`, by default its own; where the exact result is zero, the root of the mean square."""
    norm = want.norm() if norm is None else norm
    return ((got.double() - want).norm() / (norm if norm > 1e-9 else want.numel() ** 0.5)).item()


def fold(gradient, Q, beyond):
    """Sums the gradient of a bias over each of its constant parts."""
    place = torch.arange(gradient.shape[1], device=DEVICE) - (Q - 1)
    parts = [gradient[:, place <= -beyond], gradient[:, place >= beyond]]
    return torch.cat([*(part.sum(1, keepdim=True) for part in parts), gradient[:, place.abs() < beyond]], 1)


def kernels(q, k, v, by_distance, **options):
    return attention(q, k, v, by_distance=by_distance, implementation="triton", **options)


def kept_under(seed, B, H, Q, K, dropout):
    if not launch.MOST_KEYS_WITH_BITS:
        return keep_mask(seed, B, H, Q, K, dropout)
    return unpack_bits(keep_bits_reference(seed, B * H, Q, K, dropout), Q, K).view(B, H, Q, K)


def compare(inputs, run=kernels, dropout=0.0, per_sequence=False, constant_beyond=None, **options):
    """The result and all gradients of a random linear function of it, against float64."""
    wide = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    keep = None
    if dropout:
        state = torch.random.get_rng_state() if INTERPRETED else torch.cuda.get_rng_state()
        if per_sequence:
            keep = draw_kept(inputs[1].shape[:3], dropout, inputs[1].device)[:, :, None]
        else:
            seed = torch.randint(2**62, (1,), device=DEVICE).item()
            keep = kept_under(seed, *inputs[0].shape[:3], inputs[1].shape[2], dropout).to(DEVICE)
        torch.random.set_rng_state(state) if INTERPRETED else torch.cuda.set_rng_state(state)
    exact = attention_reference(*wide[:3], by_distance=wide[3], keep=keep, dropout=dropout, **options)
    more = {"per_sequence": True} if per_sequence else {}
    out = run(*inputs, dropout=dropout, constant_beyond=constant_beyond, **options, **more)
    inputs, wide = ([x for x in tensors if x is not None] for tensors in (inputs, wide))
    upstream = torch.randn(out.shape, device=DEVICE).to(out.dtype)
    gradients = list(torch.autograd.grad(out, inputs, upstream))
    exact_gradients = list(torch.autograd.grad(exact, wide, upstream.double()))
    assert out.transpose(1, 2).is_contiguous()
    for got, like in zip([out, *gradients], [inputs[0], *inputs], strict=True):
        assert got.dtype == like.dtype
        assert got.shape == like.shape
    norms = [None] * (1 + len(gradients))
    if constant_beyond is not None:
        norms[4] = exact_gradients[3].norm()  # the parts' terms cancel
        gradients[3], exact_gradients[3] = (
            fold(g, inputs[0].shape[2], constant_beyond) for g in (gradients[3], exact_gradients[3])
        )
    errors = [distance(*all) for all in zip([out, *gradients], [exact, *exact_gradients], norms, strict=True)]
    assert all(error < TOLERANCE[out.dtype] for error in errors), errors  # max() would pass over NaN


def segments(B, Q, K):
    """Packed examples, padding at the end, and one query that sees no key."""
    query_segments = (torch.arange(Q, device=DEVICE) * 3 // Q + 1).expand(B, Q).clone()
    key_segments = (torch.arange(K, device=DEVICE) * 3 // K + 1).expand(B, K).clone()
    key_segments[:, -(K // 4) :] = 0
    query_segments[0, Q // 2] = 7
    return {"query_segments": query_segments, "key_segments": key_segments}


@runs_kernel
@pytest.mark.parametrize("dtype", DTYPES if INTERPRETED else list(TOLERANCE))
@pytest.mark.parametrize("D", fewer([32, 128], WIDTHS))
def test_widths(D, dtype, poisoned, small):
    small(16, 16)
    compare(problem(H=fewer(1, 2), D=D, dtype=dtype))


@runs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("Q", "K"),
    fewer([(1, 1), (1, 33), (40, 1), (17, 35)], [(1, 1), (17, 17), (1, 33), (40, 1), (17, 50), (50, 17)]),
)
def test_odd_lengths(Q, K, dtype, poisoned, small):
    small(16, 16)
    compare(problem(fewer(1, 2), 1, Q, K, dtype=dtype))


@runs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "causal"), fewer([(257, True)], [(511, False), (513, True)]))
def test_long_odd_lengths(length, causal, dtype, poisoned, small):
    small(128, 128)
    compare(problem(1, 1, length, dtype=dtype, beyond=91), causal=causal, constant_beyond=91)


@runs_kernel
@pytest.mark.parametrize(("queries", "keys"), [(32, 16), (16, 64), (64, 32)])
def test_shapes_of_tiles(queries, keys, poisoned, tiles):
    tiles(queries, keys)
    compare(problem(1, 1, *fewer((40, 70), (70, 90))))


@runs_kernel
@pytest.mark.parametrize("options", fewer([{"causal": True}], [{}, {"causal": True}, {"dropout": 0.3}]))
def test_copy_engine(options, poisoned, tiles, monkeypatch):
    """It loads tiles, also beyond the last row; rows that it cannot count in 16 bytes, or that are one row
    repeated, are loaded without it."""
    tiles(16, 16)
    monkeypatch.setattr(launch, "FEW_QUERIES", 0)
    monkeypatch.setattr(launch, "TUNED", DTYPES)
    for table in (launch.FORWARD, launch.QUERIES, launch.KEYS):
        monkeypatch.setitem(table, 16, table[16]._replace(engine=True))
    inputs = problem(2, 1, 40, dtype=DTYPES[0])
    call = launch.AttentionCall(*inputs, None, None, None, False, 0.0, 1.0, None)
    for table in (launch.FORWARD, launch.QUERIES, launch.KEYS):
        assert None not in launch.descriptors(call.cut(table), 16, *inputs[:3])
    compare(inputs, **options)
    shifted = [
        torch.randn(2, 40, 17, device=DEVICE).to(DTYPES[0])[:, None, :, 1:].requires_grad_() for _ in range(3)
    ]
    assert launch.descriptors(call.cut(launch.KEYS), 16, shifted[0]) == [None]
    expanded = torch.randn(2, 1, 1, 16, device=DEVICE).to(DTYPES[0]).expand(2, 1, 40, 16)
    assert launch.descriptors(call.cut(launch.KEYS), 16, expanded) == [None]
    compare([*shifted, inputs[3]], **options)


@runs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("Q", "K"), fewer([(32, 32), (20, 36), (37, 20)], [(48, 48), (37, 37), (30, 50), (50, 30)])
)
def test_causal(Q, K, dtype, poisoned, small):
    small(16, 16)
    compare(problem(1, fewer(1, 2), Q, K, dtype=dtype), causal=True)


@runs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_segments(causal, dtype, poisoned, small):
    small(16, 16)
    compare(problem(2, 1, 40, dtype=dtype), causal=causal, **segments(2, 40, 40))


def packed(lengths, tokens, start=1):
    """Rising segments of these lengths from `start` on, then padding."""
    numbers = torch.arange(start, start + len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return torch.cat([numbers, numbers.new_zeros(tokens - len(numbers))]).to(DEVICE)


@runs_kernel
@pytest.mark.parametrize(
    ("causal", "beyond"),
    fewer(
        [(False, 9), (True, 9)],
        [(causal, beyond) for causal in (False, True) for beyond in (None, 9, 20)],
    ),
)
def test_packed_rows_skip_tiles(causal, beyond, poisoned, small):
    """Most tiles of these rows have no segment in common with a block, before, between and behind those that do;
    in the last row segments come in no order, and meet in tiles that lie apart."""
    small(32, 16)
    tokens, tenth = fewer((80, 8), (100, 10))
    rows = [packed([40, 3, 20, 7], tokens), packed([5] * (tokens // 5), tokens), packed([], tokens)]
    if not INTERPRETED:
        rows.append(packed([99], tokens))
    mixed = torch.tensor([5, 1, 4, 1, 0, 9, 5, 2, 6, 5], device=DEVICE).repeat_interleave(tenth)
    both = torch.stack([*rows, mixed])
    options = {"query_segments": both, "key_segments": both}
    compare(problem(len(both), 1, tokens, beyond=beyond), causal=causal, constant_beyond=beyond, **options)


@runs_kernel
def test_packed_rows_of_two_sides_skip_tiles(poisoned, small):
    """As a decoder reads its encoder; the last row's targets belong to no input."""
    small(16, 16)
    inputs = torch.stack([packed([30, 20, 10], 64), packed([8] * 8, 64), packed([40, 24], 64)])
    targets = torch.stack([packed([3, 18, 3], 32), packed([4] * 8, 32), packed([17, 12], 32, start=7)])
    compare(problem(3, fewer(1, 2), 32, 64), query_segments=targets, key_segments=inputs)


@runs_kernel
def test_wide_rows(poisoned, small, monkeypatch):
    """Wider than the piece of segments that is looked at at once, with an example across its end."""
    small(16, 16)
    if INTERPRETED:
        from altup.kernels.attention import tiles

        monkeypatch.setattr(tiles, "SCANNED", type(tiles.SCANNED)(32))
    lengths, tokens, beyond = fewer(([20, 6, 25, 4], 60, 10), ([400, 100, 600, 90], 1200, 100))
    inputs = packed(lengths, tokens)[None]
    options = {"query_segments": inputs, "key_segments": inputs, "constant_beyond": beyond}
    compare(problem(1, 1, tokens, beyond=beyond), **options)
    compare(problem(1, 1, 30, tokens), query_segments=packed([9, 2, 5, 10], 30)[None], key_segments=inputs)


@runs_kernel
def test_padding_and_a_sequence_of_nothing_else(poisoned, small):
    small(16, 16)
    mask = torch.arange(35, device=DEVICE)[None] < torch.tensor([[20], [0], [35]], device=DEVICE)
    inputs = problem(3, fewer(1, 2), 20, 35)
    compare(inputs, query_segments=torch.ones(3, 20, device=DEVICE).int(), key_segments=mask.int())
    out = kernels(*inputs, query_segments=torch.ones(3, 20, device=DEVICE), key_segments=mask)
    assert not out[1].any()


@runs_kernel
@pytest.mark.parametrize(
    ("Q", "K", "causal", "beyond"),
    fewer(
        [(100, 100, False, 20), (70, 70, True, 1), (60, 80, False, 1), (9, 99, True, 33), (90, 60, False, 33)],
        [
            (*shape, beyond)
            for shape in [(100, 100, False), (100, 100, True), (90, 60, False), (9, 99, True)]
            for beyond in (1, 20, 33)
        ],
    ),
)
def test_constant_edges(Q, K, causal, beyond, poisoned, small):
    small(32, 16)
    compare(problem(1, 1, Q, K, beyond=beyond), causal=causal, constant_beyond=beyond)


@runs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("options", "packed"),
    fewer(
        [({}, False), ({"causal": True}, True), ({"constant_beyond": 10}, True)],
        [
            (options, packed)
            for options in ({}, {"causal": True}, {"constant_beyond": 10})
            for packed in (False, True)
        ],
    ),
)
def test_dropout(packed, options, dtype, poisoned, small, keeps_bits):
    small(16, 32)
    options = options | (segments(2, 40, 40) if packed else {})
    compare(problem(2, 1, 40, dtype=dtype, beyond=10), dropout=0.3, **options)


@runs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"constant_beyond": 10}])
@pytest.mark.parametrize("packed", [False, True])
def test_keys_dropped_for_all_queries(packed, options, dtype, poisoned, small):
    small(16, 32)
    options = options | (segments(2, 40, 56) if packed else {})
    compare(problem(2, 2, 40, 56, dtype=dtype, beyond=10), dropout=0.3, per_sequence=True, **options)


@pytest.mark.parametrize("packed", [False, True])
def test_plain_drops_keys_for_all_queries(packed):
    q, k, v, by_distance = tensors()
    options = {"query_segments": torch.ones(B, Q), "key_segments": torch.arange(K).expand(B, K) // 4 + 1}
    options = options if packed else {}
    torch.manual_seed(3)
    keep = draw_kept((B, H, K), 0.3, q.device)[:, :, None]
    assert 0 < keep.mean() < 1
    torch.manual_seed(3)
    got = attention(q, k, v, by_distance=by_distance, dropout=0.3, per_sequence=True, **options)
    want = attention_reference(q, k, v, by_distance=by_distance, keep=keep, dropout=0.3, **options)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    ones = torch.ones(2, 2, 8, 16, dtype=torch.bfloat16)
    mean = attention(ones, ones, ones, dropout=0.1, per_sequence=True)  # of values that are 0 or 1.1113
    kept = (mean.float() * 8 / 1.1113).round() / 8
    torch.testing.assert_close(mean.float(), kept * 1.1113, rtol=4e-3, atol=0)


@runs_kernel
@pytest.mark.parametrize(("queries", "keys"), fewer([(64, 64), (32, 16), (16, 64)], [(64, 64)]))
def test_bits_of_several_squares(queries, keys, poisoned, tiles, monkeypatch):
    """Also where tiles are smaller than squares; the forward pass may have larger ones."""
    tiles(queries, keys)
    monkeypatch.setitem(launch.FORWARD, 16, launch.FORWARD[16]._replace(queries=2 * queries))
    compare(problem(1, 2, 90, 140, dtype=DTYPES[0]), dropout=0.4)


@runs_kernel
@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_bits_that_are_drawn(dropout):
    from altup.kernels.attention.kept import keep_bits_op

    seed = torch.tensor([2**61 + 12345], device=DEVICE)
    drawn = keep_bits_op(seed, 3, 70, 150, dropout)
    assert torch.equal(drawn.cpu(), keep_bits_reference(2**61 + 12345, 3, 70, 150, dropout))


@runs_kernel
def test_scale(poisoned, small):
    small(16, 16)
    compare(problem(1, 1, 20, 30, D=32), scale=32**-0.5)


@runs_kernel
def test_segments_without_a_bias(poisoned, small):
    small(16, 16)
    q, k, v, _ = problem(2, fewer(1, 2), 24, 40)
    compare([q, k, v, None], **segments(2, 24, 40), scale=0.7)


@runs_kernel
def test_inputs_of_many_layouts(poisoned, small):
    small(16, 16)
    q, k, v, by_distance = problem(2, 2, 16, 20)
    inputs = [q.contiguous(), k, v.repeat_interleave(2, -1)[..., ::2], by_distance.t().contiguous().t()]
    compare([x.detach().requires_grad_() for x in inputs])
    packed = torch.randn(2, 16, 3, 2, 16, device=DEVICE).unbind(2)
    compare([*(x.transpose(1, 2).requires_grad_() for x in packed), problem(Q=16)[3]])


@runs_kernel
def test_gradient_that_is_one_number_spread_out(small):
    small(16, 16)
    inputs = problem(H=1, Q=20)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    got = torch.autograd.grad(kernels(*inputs).sum(), inputs)
    want = torch.autograd.grad(attention_reference(*wide[:3], by_distance=wide[3]).sum(), wide)
    assert distance(got[2], want[2]) < 3e-6


@runs_kernel
def test_fixed_bias(small):
    small(16, 16)
    q, k, v, by_distance = problem(H=1, Q=20)
    with_grad = torch.autograd.grad(kernels(q, k, v, by_distance).square().sum(), (q, k, v))
    without = torch.autograd.grad(kernels(q, k, v, by_distance.detach()).square().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(with_grad, without, strict=True))


@runs_kernel
def test_dropout_follows_the_seed_and_checkpointing_replays_it(small, keeps_bits):
    small(16, 16)
    inputs = problem(H=1, Q=20)

    def run(*inputs):
        return kernels(*inputs, dropout=0.5)

    def gradients(call):
        torch.manual_seed(3)
        out = call()
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    first = gradients(lambda: run(*inputs))
    again = gradients(lambda: checkpoint(run, *inputs, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(run(*inputs), first[0])


@runs_kernel
def test_operator_registrations(small):
    from altup.kernels.attention.op import attend, attend_backward

    small(16, 16)
    *qkv, by_distance = problem(H=1, Q=16, K=20)
    masks, settings = (None, None, None), (True, 0.0, 1.0, None)
    check_operator(attend, qkv, by_distance, *masks, torch.zeros(3, device=DEVICE, requires_grad=True), *settings)
    check_operator(attend, qkv, None, *masks, None, *settings, checks=CHEAP_CHECKS)
    parts, by_distance = [x.detach() for x in qkv], by_distance.detach()
    out, lse = attend(parts, by_distance, *masks, None, *settings)
    for bias_grad in (False, True):
        given = torch.randn_like(out), out, lse, parts, by_distance, *masks, *settings, bias_grad, 3
        check_operator(attend_backward, *given, checks=CHEAP_CHECKS)


def whole(q, k, v, by_distance, **options):
    """Of queries, keys and values in one tensor."""
    qkv = torch.stack([x.transpose(1, 2) for x in (q, k, v)], dim=2)
    return joined_attention(qkv, by_distance=by_distance, implementation="triton", **options)


def of_memory(q, k, v, by_distance, **options):
    """Of keys and values that are the second of three layers' in one tensor."""
    rows = torch.stack([x.transpose(1, 2) for x in (v, k, k, v, q.new_zeros(k.shape), k)], dim=2)
    both = rows[:, :, 2:4]
    return joined_attention(
        q.transpose(1, 2).unsqueeze(2), both, by_distance=by_distance, implementation="triton", **options
    )


@runs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("run", [whole, of_memory])
def test_joined_queries_keys_and_values(run, dtype, poisoned, small):
    small(16, 16)
    inputs = problem(2, 2, 40, dtype=dtype, beyond=10)
    compare(inputs, run, constant_beyond=10, causal=run is whole, **segments(2, 40, 40))
    compare([*inputs[:3], None], run, dropout=0.3)


@runs_kernel
def test_queries_over_a_longer_memory(poisoned, small):
    """As a decoder reads its encoder's output: without a bias, and few queries."""
    small(16, 16)
    compare([*problem(2, 2, *fewer((14, 40), (114, 512)))[:3], None], of_memory)


@pytest.mark.parametrize("run", [whole, of_memory])
def test_joined_is_plain_where_no_kernel_runs(run, monkeypatch):
    q, k, v, by_distance = tensors()
    k, v = (x[:, :, :Q] for x in (k, v))
    by_distance = by_distance[:, : 2 * Q - 1]
    options = {"causal": True, "scale": 0.5}
    want = attention_reference(q, k, v, by_distance=by_distance, **options)
    parts = [torch.stack([x.transpose(1, 2) for x in (q, k, v)], dim=2)]
    parts = [parts[0][:, :, :1], parts[0][:, :, 1:]] if run is of_memory else parts
    torch.testing.assert_close(joined_attention(*parts, by_distance=by_distance, **options), want)


def test_joining_gradients_that_lie_side_by_side_copies_nothing():
    rows = torch.randn(2, 5, 12)
    parts = list(rows.split(4, dim=-1))
    assert joined(parts).data_ptr() == rows.data_ptr()
    assert torch.equal(joined(parts), rows)
    for other in ([parts[1], parts[0], parts[2]], parts[:2], [x.clone() for x in parts]):
        together = joined(other)
        assert torch.equal(together, torch.cat(other, -1))
        assert together.data_ptr() not in [part.data_ptr() for part in other]


@runs_kernel
def test_gradients_of_many_layers_are_one_tensor(small):
    """Three layers read parts of one tensor; a pass that is repeated does not write over the first one's."""
    small(16, 16)
    q = torch.randn(2, 20, 1, 2, 16, device=DEVICE)
    rows = torch.randn(2, 20, 3, 2, 2, 16, device=DEVICE)
    layers = [x.requires_grad_() for x in rows.detach().unbind(2)]
    outs = [joined_attention(q, both, implementation="triton") for both in layers]

    def backward():
        return [
            torch.autograd.grad(out.sum(), x, retain_graph=True)[0].flatten(2)
            for out, x in zip(outs, layers, strict=True)
        ]

    first = backward()
    before = [x.clone() for x in first]
    assert joined(first).data_ptr() == first[0].data_ptr()
    again = backward()
    assert joined(again).data_ptr() == again[0].data_ptr() != first[0].data_ptr()
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(first, before, again, strict=True))


@runs_kernel
def test_joined_operator_registrations(small):
    from altup.kernels.attention.op import attend, attend_backward

    small(16, 16)
    rows = torch.randn(1, 16, 3, 1, 16, device=DEVICE)
    by_distance = torch.randn(1, 31, device=DEVICE, requires_grad=True)
    masks, settings = (None, None, None), (True, 0.0, 1.0, None)
    check_operator(attend, [rows.clone().requires_grad_()], by_distance, *masks, None, *settings)
    parts, by_distance = [rows[:, :, :1], rows[:, :, 1:]], by_distance.detach()
    out, lse = attend(parts, by_distance, *masks, None, *settings)
    given = torch.randn_like(out), out, lse, parts, by_distance, *masks, *settings, True, 0
    check_operator(attend_backward, *given, checks=CHEAP_CHECKS)


@runs_kernel
@pytest.mark.parametrize("dropout", fewer([0.3], [0.0, 0.3]))
def test_compiles_as_one_graph(dropout, small, keeps_bits):
    small(16, 16)

    def run(*inputs, **options):
        return kernels(*inputs, **options)

    compiled = torch.compile(run, backend=BACKEND, fullgraph=True, dynamic=False)
    if dropout and not INTERPRETED:  # draws other seeds than eager PyTorch
        assert compiled(*problem(), dropout=dropout).isfinite().all()
    else:
        compare(problem(), compiled, dropout=dropout, **segments(1, 32, 32))


@runs_kernel
@pytest.mark.parametrize(
    ("k", "v"),
    [
        ((2, 3, 5, 16), (2, 3, 5, 16)),
        ((1, 2, 5, 16), (1, 2, 5, 16)),
        ((2, 2, 5, 32), (2, 2, 5, 32)),
        ((2, 2, 5, 16), (2, 2, 4, 16)),
        ((2, 2, 0, 16), (2, 2, 0, 16)),
    ],
)
def test_what_does_not_fit_together_reaches_no_kernel(k, v):
    """It would read what lies behind."""
    q, k, v = (torch.randn(shape, device=DEVICE) for shape in ((2, 2, 4, 16), k, v))
    with pytest.raises(UserError, match="q, k and v"):
        attention(q, k, v, implementation="triton")
    with pytest.raises(UserError, match="q, k and v"):
        attention(q, q.half(), q.half(), implementation="triton")


@runs_kernel
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v, w: ({"q": q.double(), "k": k.double(), "v": v.double()}), "float64"),
        (lambda q, k, v, w: ({"q": q[..., :8], "k": k[..., :8], "v": v[..., :8]}), "not 8"),
        (lambda q, k, v, w: ({"bias": torch.zeros(32, 32, device=DEVICE)}), "dense bias"),
        (lambda q, k, v, w: ({"scale": 0.0}), "scale=0.0"),
        (lambda q, k, v, w: ({"constant_beyond": 0}), "constant_beyond=0"),
    ],
)
def test_what_the_kernels_refuse(change, words):
    q, k, v, by_distance = problem()
    options = {"q": q, "k": k, "v": v, "by_distance": by_distance} | change(q, k, v, by_distance)
    with pytest.raises(UserError, match=words):
        attention(**options, implementation="triton")


@needs_gpu
def test_copy_engine_in_a_graph():
    """Descriptors are recorded with the kernels: a replay reads what lies in the tensors then."""
    inputs = problem(4, 4, 512, D=64, dtype=torch.bfloat16)
    upstream = torch.randn(4, 4, 512, 64, device=DEVICE).bfloat16()

    def run():
        out = kernels(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, upstream)

    warm_up(run, torch.device(DEVICE))
    replay = record(run)
    with torch.no_grad():
        for x in inputs:
            x.copy_(torch.randn_like(x))
    recorded = [x.clone() for x in replay()]
    for got, launched in zip(recorded, run(), strict=True):
        assert torch.equal(got, launched)


@needs_gpu
@pytest.mark.parametrize(
    ("B", "H", "Q", "K", "D", "options", "beyond", "dtype"),
    [
        (4, 12, 512, 512, 64, {}, None, torch.bfloat16),
        (4, 12, 512, 512, 64, {}, 91, torch.bfloat16),
        (4, 12, 512, 512, 64, {}, 91, torch.float16),
        (4, 12, 114, 114, 64, {"causal": True}, 91, torch.bfloat16),
        (2, 3, 511, 513, 64, {}, 91, torch.bfloat16),
        (2, 3, 513, 513, 32, {"causal": True}, 91, torch.bfloat16),
        (2, 4, 512, 512, 128, {}, 91, torch.bfloat16),
        (4, 12, 512, 512, 64, {"dropout": 0.1}, 91, torch.bfloat16),
        (4, 12, 114, 114, 64, {"causal": True, "dropout": 0.1}, None, torch.bfloat16),
        (2, 2, 1024, 1024, 16, {"dropout": 0.1}, 91, torch.float16),
    ],
)
def test_training_sizes(B, H, Q, K, D, options, beyond, dtype, poisoned, keeps_bits):
    compare(problem(B, H, Q, K, D, dtype, beyond), constant_beyond=beyond, **options)


@needs_gpu
@pytest.mark.parametrize("causal", [False, True])
def test_training_size_with_segments(causal, poisoned):
    compare(problem(4, 12, 512, D=64, dtype=torch.bfloat16), causal=causal, **segments(4, 512, 512))


@needs_gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("beyond", [None, 91])
def test_training_size_of_packed_rows(beyond, dropout, poisoned, keeps_bits):
    rows = [packed([200, 150, 120], 512), packed([26] * 19, 512), packed([512], 512), packed([400, 30], 512)]
    options = {"query_segments": torch.stack(rows), "key_segments": torch.stack(rows), "dropout": dropout}
    compare(problem(4, 12, 512, D=64, dtype=torch.bfloat16, beyond=beyond), constant_beyond=beyond, **options)


@needs_gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_two_runs_give_the_same_bits(dropout):
    inputs = problem(64, 12, 512, D=64, dtype=torch.bfloat16)
    upstream = torch.randn(64, 12, 512, 64, device=DEVICE, dtype=torch.bfloat16)
    runs = []
    for _ in range(3):
        torch.manual_seed(0)
        out = kernels(*inputs, dropout=dropout)
        runs.append([out, *torch.autograd.grad(out, inputs, upstream)])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@needs_gpu
def test_memory_is_far_from_a_score_for_each_pair():
    inputs = problem(64, 12, 512, D=64, dtype=torch.bfloat16, beyond=91)
    out = kernels(*inputs, constant_beyond=91)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out.sum(), inputs)
    gradients = sum(x.numel() * x.element_size() for x in inputs[:3])
    assert torch.cuda.max_memory_allocated() - before - gradients < 64 * 12 * 512 * 512 * 2 / 4


@needs_gpu
def test_auto_takes_the_kernels_on_a_gpu():
    q, k, v, by_distance = problem(dtype=torch.bfloat16)
    out = attention(q, k, v, by_distance=by_distance)
    assert out.grad_fn.operator.name == "altup::attention"


@needs_gpu
def test_under_autocast():
    q, k, v, by_distance = problem(D=64)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = attention(*(x.bfloat16() for x in (q, k, v)), by_distance=by_distance)
    gradients = torch.autograd.grad(out.float().sum(), (q, by_distance))
    assert [g.dtype for g in gradients] == [torch.float32, torch.float32]


KERNELS = ("forward", "queries", "keys")
FLAGS = ("BIAS", "BIAS_GRAD", "EDGES", "CAUSAL", "SEGMENTS", "DROPOUT", "BITS", "SHARED", "EVEN")
NEEDED_BY = {
    "bias": "BIAS",
    "strips": "BIAS_GRAD",
    "query_segments": "SEGMENTS",
    "key_segments": "SEGMENTS",
    "seed": "DROPOUT",
}
TYPES = (
    dict.fromkeys(("q", "k", "v", "out", "d_out", "dq", "dk", "dv"), "*bf16")
    | dict.fromkeys(("lse", "pairs", "bias", "strips"), "*fp32")
    | {"seed": "*i64", "query_segments": "*i32", "key_segments": "*i32", "scale": "fp32", "keep_scale": "fp32"}
)


TILES = ("q_tiles", "do_tiles", "k_tiles", "v_tiles")  # descriptors


def kernel_and_configs(name):
    from altup.kernels.attention import forward, keys_backward, queries_backward

    return {
        "forward": (forward.forward_kernel, launch.FORWARD),
        "queries": (queries_backward.queries_kernel, launch.QUERIES),
        "keys": (keys_backward.keys_kernel, launch.KEYS),
    }[name]


def build(hopper, kernel, config, width, flags, capability=90, **fixed):
    """Compile for bfloat16; flags are named, and all others are off."""
    by_pair = "DROPOUT" in flags and "SHARED" not in flags
    if capability < 90 or (config.registers and by_pair):  # as it is launched
        config = config._replace(registers=None, engine=False)
    constants = {"D": width, "BM": config.queries, "BN": config.keys, "PRECISION": "tf32"}
    constants |= {flag: flag in flags for flag in FLAGS} | {"SLOTS": 0, "peaks": None} | fixed
    absent = {name: None for name, flag in NEEDED_BY.items() if not constants[flag]}
    given = {name: TYPES.get(name, "i32") for name in kernel.arg_names} | absent
    if "BITS" in flags:
        given["seed"] = "*i32"
    if "SHARED" in flags:
        given["seed"] = "*fp32"
    for name, rows in zip(TILES, (config.queries, config.queries, config.keys, config.keys), strict=True):
        if name in given:
            given[name] = f"tensordesc<bf16[1,1,{rows},{width}]>" if config.engine else None
    arguments = given | {name: value for name, value in constants.items() if name in given}
    steps = [name for name in given if name.endswith(("_batch", "_head", "_row"))]
    return hopper.build(
        kernel,
        arguments,
        divisible=[*steps, *(("queries", "keys") if "EVEN" in flags else ())],
        capability=capability,
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers,
    )


@pytest.mark.parametrize("flags", [("BIAS", "BIAS_GRAD", "EVEN"), ("BIAS", "BIAS_GRAD", "EDGES", "EVEN")])
@pytest.mark.parametrize("name", KERNELS)
def test_pretraining_stays_in_registers(name, flags, hopper):
    kernel, configs = kernel_and_configs(name)
    compiled = build(hopper, kernel, configs[64], 64, flags)
    assert hopper.stack_bytes(compiled) <= 64
    assert "wgmma" in compiled.asm["ptx"]
    # Products that wait for each other, three programs at a time, were timed against two whose products overlap.
    assert name == "forward" or "serialized" not in hopper.remarks(compiled)
    inside = compiled.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
    moved = re.findall(r"convert_layout .* : tensor<(\d+)x(\d+)xf32.*#mma", inside)
    assert not [shape for shape in moved if shape == (str(configs[64].queries), str(configs[64].keys))]


def call(width, flags, dtype=torch.bfloat16, queries=512):
    """A call with these flags, of tensors that are nowhere."""
    q, k = (torch.empty(1, 1, length, width, dtype=dtype, device="meta") for length in (queries, 512))
    bias, packed = (torch.empty(1, device="meta") if flag in flags else None for flag in ("BIAS", "SEGMENTS"))
    seed = torch.empty(1, dtype=torch.int64, device="meta") if "DROPOUT" in flags else None
    return launch.AttentionCall(q, k, k, bias, packed, packed, seed, "CAUSAL" in flags, 0.0, 1.0, None)


KEY_FLAGS = [
    ("BIAS", "CAUSAL", "EVEN"),
    ("BIAS", "CAUSAL", "DROPOUT"),
    ("BIAS", "CAUSAL", "SEGMENTS"),
    ("BIAS", "CAUSAL", "SEGMENTS", "DROPOUT"),
    ("BIAS", "SEGMENTS", "EVEN"),
    ("BIAS", "EVEN"),
    ("CAUSAL",),
]


@pytest.mark.parametrize("capability", [80, pytest.param(86, marks=pytest.mark.slow)])
@pytest.mark.parametrize("width", [64, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("flags", KEY_FLAGS)
def test_keys_stay_in_registers_before_hopper(flags, width, capability, hopper, monkeypatch):
    """With tiles of 64 queries and keys, an A100's causal attention would have 4 kilobytes on the stack."""
    monkeypatch.setattr(launch, "_has_copy_engine", lambda device: False)
    kernel, _ = kernel_and_configs("keys")
    given = call(width, flags)
    compiled = build(hopper, kernel, given.cut(given.key_tiles), width, flags, capability)
    assert hopper.stack_bytes(compiled) <= 64


def test_smaller_tiles_are_for_keys_that_would_spill(monkeypatch):
    monkeypatch.setattr(launch, "_has_copy_engine", lambda device: False)
    packed = ("BIAS", "CAUSAL", "SEGMENTS")
    for width, flags in [(64, ("BIAS",)), (64, packed), (32, packed)]:
        assert call(width, flags).key_tiles is launch.KEYS_BEFORE_HOPPER
    for width, flags in [(64, ("CAUSAL",)), (32, ("BIAS",))]:
        assert call(width, flags).key_tiles is launch.KEYS
    assert call(64, packed, torch.float32).key_tiles is launch.KEYS
    assert call(64, ("BIAS", "CAUSAL"), queries=100).key_tiles is launch.KEYS_OF_FEW
    monkeypatch.setattr(launch, "_has_copy_engine", lambda device: True)
    for width, flags, dtype in itertools.product(WIDTHS, KEY_FLAGS, TOLERANCE):
        assert call(width, flags, dtype).key_tiles is launch.KEYS


@runs_kernel
@pytest.mark.parametrize("D", [32, 64])
@pytest.mark.parametrize(("Q", "K"), [(128, 128), (70, 100)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_smaller_tiles_of_keys(Q, K, D, dropout, poisoned, monkeypatch):
    """As before Hopper, on any machine."""
    monkeypatch.setattr(launch, "_has_copy_engine", lambda device: False)
    monkeypatch.setattr(launch, "MOST_KEYS_WITH_BITS", 0)
    flags = ("BIAS", "CAUSAL", "SEGMENTS")
    assert call(D, flags, torch.float16, Q).key_tiles is launch.KEYS_BEFORE_HOPPER
    compare(problem(1, 1, Q, K, D, torch.float16), dropout=dropout, causal=True, **segments(1, Q, K))


@pytest.mark.parametrize("name", KERNELS)
def test_dropout_in_packed_rows_is_cheap(name, hopper):
    kernel, configs = kernel_and_configs(name)
    flags = ("BIAS", "BIAS_GRAD", "EDGES", "EVEN", "SEGMENTS")
    without, compiled = (build(hopper, kernel, configs[64], 64, (*flags, *more)) for more in ((), ("DROPOUT",)))
    assert hopper.stack_bytes(compiled) <= 64
    lengths = [hopper.loop_length(one) for one in (without, compiled)]
    print(f"{name}: {lengths[0]} instructions a tile without dropout, {lengths[1]} with")
    assert lengths[1] < 1.7 * lengths[0]


@pytest.mark.parametrize("name", KERNELS)
def test_reading_bits_is_cheaper_than_drawing(name, hopper):
    """A test and a choice for each weight, and no tile of them is moved between threads."""
    kernel, configs = kernel_and_configs(name)
    flags = ("BIAS", "BIAS_GRAD", "EDGES", "EVEN")
    none, bits, draws = (
        build(hopper, kernel, configs[64]._replace(registers=None, engine=False), 64, (*flags, *more))
        for more in ((), ("DROPOUT", "BITS"), ("DROPOUT",))
    )
    lengths = [hopper.loop_length(one) for one in (none, bits, draws)]
    print(f"{name}: {lengths[0]} instructions a tile without dropout, {lengths[1]} and {lengths[2]} with")
    assert lengths[1] - lengths[0] < 0.6 * (lengths[2] - lengths[0])
    inside = bits.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
    assert not re.search(r"convert_layout .* : tensor<\d+x\d+xi", inside)


@pytest.mark.parametrize("name", KERNELS)
def test_dropping_keys_for_all_queries_costs_next_to_nothing(name, hopper):
    kernel, configs = kernel_and_configs(name)
    flags = ("BIAS", "BIAS_GRAD", "EDGES", "EVEN")
    none, shared = (
        build(hopper, kernel, configs[64], 64, (*flags, *more)) for more in ((), ("DROPOUT", "SHARED"))
    )
    assert hopper.stack_bytes(shared) <= 64
    lengths = [hopper.loop_length(one) for one in (none, shared)]
    print(f"{name}: {lengths[0]} instructions a tile without dropout, {lengths[1]} with")
    assert lengths[1] < 1.15 * lengths[0]


VARIANTS = [
    ("BIAS", "BIAS_GRAD", "CAUSAL"),
    ("BIAS", "BIAS_GRAD", "SEGMENTS", "DROPOUT", "CAUSAL", "EDGES"),
    ("BIAS", "BIAS_GRAD", "SEGMENTS", "DROPOUT", "BITS", "CAUSAL", "EDGES"),
    ("BIAS", "BIAS_GRAD", "SEGMENTS", "DROPOUT", "SHARED", "CAUSAL", "EDGES"),
    ("SEGMENTS",),
]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("flags", VARIANTS)
@pytest.mark.parametrize("name", KERNELS)
def test_every_variant_compiles(name, flags, width, capability, hopper):
    kernel, configs = kernel_and_configs(name)
    build(hopper, kernel, configs[width], width, flags, capability)


@pytest.mark.slow
@pytest.mark.parametrize("single", ["queries", "keys"])
@pytest.mark.parametrize("dropout", [(), ("DROPOUT", "BITS")])
@pytest.mark.parametrize("name", KERNELS)
def test_a_single_query_or_key_compiles(name, dropout, single, hopper):
    """Triton takes an argument of 1 for a constant."""
    kernel, configs = kernel_and_configs(name)
    config = configs[64]._replace(**{single: 16})
    build(hopper, kernel, config, 64, ("BIAS", "BIAS_GRAD", "CAUSAL", *dropout), **{single: 1})

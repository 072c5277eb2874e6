from __future__ import annotations

import math

import pytest
import torch

from altup.kernels.attention import lay_out
from altup.kernels.rotary import rotate
from altup.nn import RelativeBias
from altup.nn.positions import OfEachDistance, distance_bucket, rotation


def bucket_by_hand(distance, buckets, far, bidirectional):
    """T5's bucket of one distance, from its description."""
    start = 0
    if bidirectional:
        buckets //= 2
        start = buckets if distance > 0 else 0
        n = abs(distance)
    else:
        n = max(0, -distance)
    exact = buckets // 2
    if n < exact:
        return start + n
    grown = exact + int(math.log(n / exact) / math.log(far / exact) * (buckets - exact) + 1e-6)
    return start + min(grown, buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (8, 20)])
def test_buckets(bidirectional, buckets, far):
    distances = torch.arange(-700, 700)
    got = distance_bucket(distances, buckets, far, bidirectional)
    want = [bucket_by_hand(d, buckets, far, bidirectional) for d in distances.tolist()]
    assert got.tolist() == want


@pytest.mark.parametrize(
    ("queries", "keys", "offset", "stride"),
    [(5, 5, 0, 1), (1, 7, 6, 1), (3, 10, 7, 1), (6, 6, 0, 4), (1, 1, 0, 1)],
)
@pytest.mark.parametrize("bidirectional", [True, False])
def test_layout_and_gradient(queries, keys, offset, stride, bidirectional):
    module = RelativeBias(2, 8, 20, bidirectional=bidirectional).double()
    got = lay_out(module(queries, keys, offset, stride), queries, keys)
    rows = []
    for i in range(queries):
        for j in range(keys):
            d = (j - offset - i) * stride
            rows.append(module.weight[bucket_by_hand(d, 8, 20, bidirectional)])
    want = torch.stack(rows).view(queries, keys, 2).permute(2, 0, 1).unsqueeze(0)
    torch.testing.assert_close(got, want)
    grad = torch.randn(2, queries, keys, dtype=torch.float64)
    a = torch.autograd.grad((got * grad).sum(), module.weight)[0]
    b = torch.autograd.grad((want * grad).sum(), module.weight)[0]
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("stride", [1, 3, 4, 200])
def test_constant_beyond_is_where_the_last_bucket_begins(bidirectional, stride):
    module = RelativeBias(2, 32, 128, bidirectional=bidirectional)
    far = module.constant_beyond(stride)
    by_distance = module(300, 300, stride=stride)
    for side in (by_distance[:, : 299 - far + 1], by_distance[:, 299 + far :]):
        assert (side == side[:, :1]).all()
    if far > 1:
        past = by_distance[:, 299 - far]
        assert not torch.equal(by_distance[:, 299 - far + 1], past)


def test_offset_may_be_a_tensor():
    module = RelativeBias(2, bidirectional=False)
    assert torch.equal(module(2, 9, offset=torch.tensor(5)), module(2, 9, offset=5))


def test_rotation_turns_pairs_by_their_angles():
    """Against complex numbers: x·exp(i·position·θ^(−2j/width)), one for each pair."""
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 9, 9, 1000, 0]])
    angles = positions[:, None, :, None].double() * 10_000.0 ** (-torch.arange(4).double() / 4)
    want = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    got = rotate(x, *rotation(positions, 8))
    torch.testing.assert_close(got, torch.cat([want.real, want.imag], -1), rtol=1e-4, atol=1e-4)


def test_rotated_scores_depend_on_distances_alone():
    q, k = torch.randn(2, 1, 1, 6, 16)
    scores = []
    for first in (0, 50):
        turn = rotation(torch.arange(first, first + 6).unsqueeze(0), 16, theta=100.0)
        scores.append(rotate(q, *turn) @ rotate(k, *turn).transpose(-1, -2))
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


def test_of_each_distance_is_a_lookup_with_its_gradient():
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    bucket = torch.tensor([4, 0, 0, 2, 2, 2, 4])
    got, want = OfEachDistance.apply(weight, bucket), weight[bucket].t()
    assert torch.equal(got, want)
    grad = torch.randn(3, 7, dtype=torch.float64)
    for one, other in zip(*(torch.autograd.grad(x, weight, grad) for x in (got, want)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert OfEachDistance.apply(weight.bfloat16(), bucket).dtype == torch.float32

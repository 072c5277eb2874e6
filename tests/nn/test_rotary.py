from __future__ import annotations

import torch

from altup.nn.rotary import rotate, rotation


def test_turns_pairs_by_their_angles():
    """Against complex numbers: x·exp(i·position·θ^(−2j/width)), one for each pair."""
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 9, 9, 1000, 0]])
    angles = positions[:, None, :, None].double() * 10_000.0 ** (-torch.arange(4).double() / 4)
    want = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    got = rotate(x, *rotation(positions, 8))
    torch.testing.assert_close(got, torch.cat([want.real, want.imag], -1), rtol=1e-4, atol=1e-4)


def test_scores_depend_on_distances_alone():
    q, k = torch.randn(2, 1, 1, 6, 16)
    scores = []
    for first in (0, 50):
        turn = rotation(torch.arange(first, first + 6).unsqueeze(0), 16, theta=100.0)
        scores.append(rotate(q, *turn) @ rotate(k, *turn).transpose(-1, -2))
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)

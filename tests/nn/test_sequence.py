from __future__ import annotations

import pytest
import torch
from torch import nn

from altup import AltUp, AveragePooling, SequenceAltUp, StrideAndSkip
from altup.nn.sequence import refuse_left_padding


class Recorder(nn.Module):
    """A layer that mixes tokens (so order and number matter) and remembers what it saw."""

    def forward(self, x, offset=0.0):
        self.seen = x
        return torch.tanh(x) + x.cumsum(dim=1) + offset


@pytest.mark.parametrize(("T", "stride"), [(1, 4), (8, 4), (10, 4), (7, 3)])
def test_layer_sees_the_kept_tokens_only(T, stride):
    x = torch.randn(2, T, 3)
    for wrapper in (SequenceAltUp, StrideAndSkip):
        layer = Recorder()
        wrapper(layer, stride)(x, offset=1.0)
        torch.testing.assert_close(layer.seen, x[:, list(range(0, T, stride))])


def test_start_moves_skipped_tokens_as_their_anchor():
    x = torch.randn(2, 10, 3)
    layer = Recorder()
    y = SequenceAltUp(layer, 4)(x)
    moved = layer(x[:, ::4]) - x[:, ::4]
    for i in range(10):
        torch.testing.assert_close(y[:, i], x[:, i] + moved[:, i // 4])


def test_stride_and_skip_leaves_the_others_untouched():
    x = torch.randn(2, 10, 3)
    layer = Recorder()
    y = StrideAndSkip(layer, 4)(x)
    for i in range(10):
        want = layer(x[:, ::4])[:, i // 4] if i % 4 == 0 else x[:, i]
        torch.testing.assert_close(y[:, i], want)


@pytest.mark.parametrize("wrapper", [SequenceAltUp, StrideAndSkip])
def test_stride_one_is_the_layer(wrapper):
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(wrapper(Recorder(), 1)(x), Recorder()(x))


def test_average_pooling_by_hand():
    x = torch.arange(1.0, 8.0).view(1, 7, 1)
    pool = AveragePooling(3)
    assert pool(x).flatten().tolist() == [2.0, 5.0, 7.0]
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0]])
    assert pool(x, mask).flatten().tolist() == [2.0, 4.0, 0.0]
    assert pool.pool_mask(mask).tolist() == [[1, 1, 0]]


@pytest.mark.parametrize("T", [5, 6, 7, 12])
def test_padding_never_reaches_a_pooled_token(T):
    x = torch.randn(1, T, 4)
    padded = torch.cat([x, torch.full((1, 5, 4), 1e6)], dim=1)
    mask = torch.cat([torch.ones(1, T), torch.zeros(1, 5)], dim=1)
    pool = AveragePooling(4)
    n = -(-T // 4)
    torch.testing.assert_close(pool(padded, mask)[:, :n], pool(x))
    assert pool.pool_mask(mask)[0].tolist() == [1.0] * n + [0.0] * (-(-(T + 5) // 4) - n)


def test_left_padding_is_refused():
    refuse_left_padding(torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]]))
    for bad in ([[0, 1, 1]], [[1, 0, 1]]):
        with pytest.raises(ValueError, match="padding"):
            refuse_left_padding(torch.tensor(bad))


def test_left_padding_is_refused_in_a_compiled_graph_too():
    check = torch.compile(lambda m: (refuse_left_padding(m), m + 1)[1], backend="aot_eager", fullgraph=True)
    check(torch.tensor([[1, 1, 0]]))
    with pytest.raises(RuntimeError, match="padding on the right"):
        check(torch.tensor([[0, 1, 1]]))


def test_nests_inside_altup():
    """AltUp around Sequence-AltUp around a layer: the active block takes the strided update."""
    x = torch.randn(2, 9, 6)
    rule, layer = AltUp(2, 2), SequenceAltUp(Recorder(), 4)
    state = rule.lift(x)
    new = rule(state, layer, 1)
    step = layer(state[1]) - state[1]
    torch.testing.assert_close(new, state + step)


@pytest.mark.parametrize(
    "build", [lambda s: SequenceAltUp(Recorder(), s), lambda s: StrideAndSkip(Recorder(), s), AveragePooling]
)
def test_stride_zero_is_refused(build):
    with pytest.raises(ValueError, match="stride=0"):
        build(0)


def test_coefficients_stay_float32_while_the_layer_is_rounded():
    module = SequenceAltUp(nn.Linear(3, 3), 2).to(torch.bfloat16)
    assert {p.dtype for p in module.update.parameters()} == {torch.float32}
    assert module.layer.weight.dtype == torch.bfloat16
    assert module(torch.randn(1, 5, 3).bfloat16()).dtype == torch.bfloat16

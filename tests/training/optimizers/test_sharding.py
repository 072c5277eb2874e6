"""Which way of an update the processes choose, against how PyTorch cuts a parameter."""

from __future__ import annotations

import pytest
import torch

from altup.training.optimizers.sharding import kind, no_piece_is_empty


@pytest.mark.parametrize("rows", [1, 127, 128, 130, 512, 768, 1024])
def test_empty_pieces_are_those_of_chunk(rows: int) -> None:
    for count in range(1, 130):
        assert no_piece_is_empty(rows, count) == (len(torch.empty(rows).chunk(count)) == count), count


def test_a_parameter_on_one_device_is_everywhere() -> None:
    assert kind(torch.zeros(3, 4)).is_everywhere

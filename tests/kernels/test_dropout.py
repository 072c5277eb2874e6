"""Dropout: its random bits against the published words, its masks against the definition, and what they do."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from altup.core.errors import UserError
from altup.kernels.dropout import block_dropout, dropout, keep_mask_reference
from altup.kernels.dropout.reference import LANES, philox, stream_keys
from tests.kernels.interpreter import BACKEND, DEVICE, check_operator, needs_gpu, runs_kernel

PI = 0x243F6A88, 0x85A308D3, 0x13198A2E


@pytest.mark.parametrize(
    ("rounds", "counter_and_key", "words"),
    [
        (7, (0, 0, 0), "257a3673 cd26be2a"),
        (7, (2**32 - 1,) * 3, "ab302c4d 3dc9d239"),
        (7, PI, "bedbbe6b e4c770b3"),
        (10, (0, 0, 0), "ff1dae59 6cd10df2"),
        (10, (2**32 - 1,) * 3, "2c3f628b ab4fd7ad"),
        (10, PI, "dd7ce038 f62a4c12"),
    ],
)
def test_philox_gives_the_published_words(rounds, counter_and_key, words):
    """Random123's known answers for Philox 2×32."""
    c0, c1, key = (torch.tensor(number) for number in counter_and_key)
    assert " ".join(f"{int(w):08x}" for w in philox(c0, c1, key, rounds)) == words


def test_streams_have_their_own_keys():
    keys = torch.cat([torch.stack(stream_keys(s, torch.arange(1000)), 1) for s in (0, 1, 2**40, 2**62 - 1)])
    for column in keys.unbind(1):
        assert len(column.unique()) == len(column)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_are_even_handed(p):
    keep = keep_mask_reference(200_000, 987654321987, p).double()
    spread = math.sqrt(p * (1 - p))
    assert abs(keep.mean() - (1 - p)) < 4 * spread / math.sqrt(len(keep))
    off = (keep - (1 - p)) / spread
    for distance in (1, 2, LANES, 2 * LANES, 3 * LANES, 4 * LANES, 768):  # neighbours, and halves of one word
        assert abs((off[distance:] * off[:-distance]).mean()) < 4 / math.sqrt(len(off) - distance)


@runs_kernel
@pytest.mark.parametrize(
    "shape", [(), (1,), (3, 5, 7), (4 * LANES,), (4 * LANES + 1,), (3, LANES * 3 + 17), (0, 3)]
)
def test_the_kernel_draws_the_mask_of_the_definition(shape):
    from altup.kernels.dropout.triton import keep_mask_op

    x = torch.randn(shape, device=DEVICE)
    for seed in (0, 1, 2**62 - 1):
        mask = keep_mask_op(torch.tensor([seed], device=DEVICE), x.shape, 0.3)
        assert mask.dtype == torch.bool
        assert mask.shape == x.shape
        assert torch.equal(mask.flatten().cpu(), keep_mask_reference(x.numel(), seed, 0.3))


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_grows_and_gradients_follow(dtype):
    x = torch.randn(7, 300, device=DEVICE, dtype=dtype, requires_grad=True)
    y = dropout(x, 0.25, implementation="triton")
    kept = y != 0
    assert y.dtype == dtype
    assert 0.7 < kept.double().mean() < 0.8
    torch.testing.assert_close(y, torch.where(kept, x / 0.75, 0))
    (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, 3))
    torch.testing.assert_close(gradient, torch.where(kept, torch.full_like(x, 4), 0))


@runs_kernel
def test_a_view_is_dropped_by_its_places():
    x = torch.ones(5, 40, device=DEVICE).t()
    torch.manual_seed(1)
    want = dropout(x.contiguous(), 0.5, implementation="triton")
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.5, implementation="triton"), want)


@runs_kernel
def test_checkpointing_draws_the_same_mask_again():
    x = torch.randn(50, 20, device=DEVICE, requires_grad=True)

    def run(x):
        return dropout(x, 0.5, implementation="triton").square()

    def gradient(call):
        torch.manual_seed(3)
        return torch.autograd.grad(call().sum(), x)[0]

    first = gradient(lambda: run(x))
    assert torch.equal(gradient(lambda: checkpoint(run, x, use_reentrant=False)), first)
    assert not torch.equal(torch.autograd.grad(run(x).sum(), x)[0], first)


@runs_kernel
def test_compiles_as_one_graph():
    def run(x):
        return dropout(dropout(x, 0.5, implementation="triton"), 0.5, implementation="triton")

    compiled = torch.compile(run, backend=BACKEND, fullgraph=True)
    x = torch.ones(100, 100, device=DEVICE, requires_grad=True)
    y = compiled(x)
    assert set(y.unique().tolist()) == {0.0, 4.0}
    assert 0.2 < (y != 0).double().mean() < 0.3  # two masks, not one twice
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y)


@runs_kernel
def test_operator_registrations():
    from altup.kernels.dropout.triton import keep_mask_op

    check_operator(keep_mask_op, torch.tensor([5], device=DEVICE), (3, 4), 0.1)


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_elsewhere_it_is_pytorchs_own(p):
    x = torch.randn(30, 30)
    torch.manual_seed(0)
    want = F.dropout(x, p)
    torch.manual_seed(0)
    assert torch.equal(dropout(x, p), want)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_nothing_to_drop(p, training):
    x = torch.randn(4)
    assert dropout(x, p, training) is x


def test_what_is_refused():
    with pytest.raises(UserError, match="cpu"):
        dropout(torch.ones(3), 0.5, implementation="triton")
    with pytest.raises(UserError, match="implementation='fast'"):
        dropout(torch.ones(3), 0.5, implementation="fast")
    for p in (-0.5, 1.5):
        with pytest.raises(UserError, match="p="):
            dropout(torch.ones(3), p)


@needs_gpu
def test_compiled_code_on_a_gpu_uses_it():
    x = torch.randn(64, 512, 2048, device="cuda", dtype=torch.bfloat16)
    torch.manual_seed(0)
    seed = torch.randint(2**62, (1,), device="cuda").item()
    torch.manual_seed(0)
    y = torch.compile(lambda x: dropout(x, 0.1), backend="aot_eager", fullgraph=True)(x)
    assert torch.equal((y != 0).flatten()[:100_000].cpu(), keep_mask_reference(100_000, seed, 0.1))


@needs_gpu
def test_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from altup.kernels.dropout.triton import keep_mask_op

    mask = keep_mask_op(torch.tensor([5], device="cuda:1"), (3, LANES), 0.3)
    assert torch.equal(mask.flatten().cpu(), keep_mask_reference(3 * LANES, 5, 0.3))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("numel", ["i32", "i64"])
def test_masks_are_written_by_vectors(numel, capability, hopper):
    from altup.kernels.dropout.triton import keep_mask_kernel

    arguments = {"mask": "*i1", "seed": "*i64", "numel": numel, "drop_below": "i32", "LANES": LANES}
    compiled = hopper.build(keep_mask_kernel, arguments, divisible=("numel",), capability=capability, num_warps=4)
    assert "st.global.v2" in compiled.asm["ptx"] or "st.global.b64" in compiled.asm["ptx"]
    assert not hopper.spills(compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_lose_the_same(dtype):
    x = torch.randn(4, 6, 3 * 8).to(dtype)
    torch.manual_seed(0)
    dropped = block_dropout(x, 3, 0.4)
    first, *others = (dropped == 0).chunk(3, dim=-1)
    assert 0 < first.float().mean() < 1
    assert all(torch.equal(first, other) for other in others)
    kept = dropped != 0
    scale = torch.ones(()).div(1 - 0.4)  # in float32, and rounded with the product
    torch.testing.assert_close(dropped[kept], (x[kept].float() * scale).to(dtype), rtol=1e-6, atol=0)
    assert dropped.dtype == dtype


def test_blocks_that_need_no_dropout_stay_as_they_are():
    x = torch.randn(2, 6)
    assert block_dropout(x, 2, 0.4, training=False) is x
    assert block_dropout(x, 2, 0.0) is x


@pytest.mark.parametrize("blocks", [1, 2])
def test_tokens_of_a_sequence_share_decisions(blocks):
    """And sequences do not; those that are kept are as much larger as makes the mean stay."""
    torch.manual_seed(0)
    x = torch.rand(40, 3, 2 * 256, requires_grad=True)
    out = block_dropout(x, blocks, 0.3, per_sequence=True)
    kept = out != 0
    assert torch.equal(kept, kept[:, :1].expand_as(kept))
    assert torch.equal(kept[..., :256], kept[..., 256:]) == (blocks == 2)
    assert abs(kept[:, 0].float().mean() - 0.7) < 0.02
    assert not torch.equal(kept[0, 0], kept[1, 0])
    torch.testing.assert_close(out[kept], x[kept] / 0.7, rtol=1e-4, atol=0)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, kept / 0.7, rtol=1e-4, atol=0)


@pytest.mark.parametrize("implementation", ["auto", "plain"])
def test_shared_decisions_are_off_where_nothing_is_dropped(implementation):
    x = torch.randn(2, 3, 8)
    assert dropout(x, 0.0, implementation=implementation, per_sequence=True) is x
    assert dropout(x, 0.5, training=False, implementation=implementation, per_sequence=True) is x
    assert not dropout(x, 1.0, implementation=implementation, per_sequence=True).any()
    with pytest.raises(UserError, match="needs tokens"):
        dropout(x[0, 0], 0.5, implementation=implementation, per_sequence=True)

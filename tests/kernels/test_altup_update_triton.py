"""The fused update, forward and every gradient, against the paper's lines in float64 on the same rounded inputs.

On a machine without a GPU the kernels run in Triton's interpreter, in a process of its own: the interpreter is
chosen when a kernel is defined, and must not be chosen for other tests.
"""

from __future__ import annotations

import pytest
import torch
from torch import library

from altup.kernels import altup_update
from altup.kernels.altup_update.op import update, update_backward
from tests.kernels.interpreter import (
    DEVICE,
    INTERPRETED,
    needs_gpu,
    outside_the_interpreter,
    pass_in_the_interpreter,
    runs_kernel,
)
from tests.kernels.updates import (
    SUM_TOLERANCE,
    TOLERANCE,
    assert_autocast_rounds_nothing,
    assert_same_backward,
    checkpointed,
)


@pytest.fixture
def configs(monkeypatch):
    """Set how the kernels are cut: programs a multiprocessor, and 16-byte vectors a thread."""
    kernels = pytest.importorskip("altup.kernels.altup_update.triton")

    def cut(programs: int, vectors: int = 1) -> None:
        for table in (kernels.FORWARD, kernels.BACKWARD):
            for K, config in table.items():
                monkeypatch.setitem(table, K, config._replace(programs_per_sm=programs, vectors=vectors))

    return cut


def problem(K, shape=(2, 3, 17), dtype=torch.float32, residual=True, y_dtype=None):
    """Blocks, y, residual or None, P, g. Blocks' numbers lie around 1, so that long sums do not cancel."""

    def block(dtype):
        return (1 + torch.randn(*shape, device=DEVICE)).to(dtype).requires_grad_()

    y_dtype = y_dtype or dtype
    P, g = (torch.randn(*size, device=DEVICE).requires_grad_() for size in [(K, K), (K,)])
    return [block(dtype) for _ in range(K)], block(y_dtype), block(y_dtype) if residual else None, P, g


def algorithm_1(blocks, y, residual, P, g, active):
    """Predict every block, then correct every block."""
    y = y if residual is None else y + residual
    predicted = [sum(P[i, j] * blocks[j] for j in range(len(blocks))) for i in range(len(blocks))]
    return [x + g[i] * (y - predicted[active]) for i, x in enumerate(predicted)]


def distance(got, want):
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-30)).item()


def fused(blocks, y, residual, P, g, active, stacked=False):
    if stacked:
        return altup_update(torch.stack(blocks), y, P, g, active, residual, "triton").unbind(0)
    return altup_update(blocks, y, P, g, active, residual, "triton")


def compare(blocks, y, residual, P, g, active, run=fused, **options):
    """Outputs and all gradients of a random linear function of them, against float64."""
    inputs = [*blocks, y, *([] if residual is None else [residual]), P, g]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    d_residual = None if residual is None else wide[len(blocks) + 1]
    exact = algorithm_1(wide[: len(blocks)], wide[len(blocks)], d_residual, wide[-2], wide[-1], active)
    upstream = [(1 + torch.randn(x.shape, device=DEVICE)).to(blocks[0].dtype) for x in exact]
    exact_gradients = torch.autograd.grad(exact, wide, [u.double() for u in upstream])

    new = run(blocks, y, residual, P, g, active, **options)
    gradients = torch.autograd.grad(new, inputs, upstream)
    for got, want, like in zip([*new, *gradients], [*exact, *exact_gradients], [*blocks, *inputs], strict=True):
        assert got.dtype == like.dtype
        assert got.shape == like.shape
        is_sum = any(like is coefficient for coefficient in (P, g))
        assert distance(got, want) < (SUM_TOLERANCE if is_sum else TOLERANCE[like.dtype])


@runs_kernel
@pytest.mark.parametrize("K", range(1, 9))
def test_every_number_of_blocks_and_every_active_one(K, poisoned):
    for active in range(K):
        compare(*problem(K, residual=active % 2 == 0), active, stacked=active % 3 == 1)


@runs_kernel
@pytest.mark.parametrize("d", [1, 48, 769])
@pytest.mark.parametrize("length", [1, 17, 511, 513])
def test_odd_sizes(length, d, poisoned, configs):
    if INTERPRETED:
        configs(programs=2, vectors=16)
    compare(*problem(2, (1, length, d)), 1, stacked=True)  # the second block starts at any address


@runs_kernel
@pytest.mark.parametrize("elements", [511, 512, 513, 5 * 512, 7 * 512 + 3])
@pytest.mark.parametrize("programs", [1, 3])
def test_few_programs_walk_through_many_chunks(elements, programs, poisoned, configs):
    configs(programs)
    compare(*problem(3, (elements,)), 2)


@runs_kernel
@pytest.mark.parametrize(
    ("dtype", "y_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_dtypes(dtype, y_dtype, stacked, poisoned):
    compare(*problem(4, (2, 9, 48), dtype, y_dtype=y_dtype), 2, stacked=stacked)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter cuts where a GPU rounds")
def test_sums_run_in_float32_and_are_rounded_once():
    """Nearest bfloat16 to the exact result, nearly always, though residual + y has no place in bfloat16."""
    blocks, y, residual, P, g = problem(2, (4096,), torch.bfloat16)
    with torch.no_grad():
        residual.copy_(y * 300)
        new = fused(blocks, y, residual, P, g, 0)
        exact = algorithm_1([b.double() for b in blocks], y.double(), residual.double(), P.double(), g.double(), 0)
    for got, want in zip(new, exact, strict=True):
        assert (got == want.bfloat16()).float().mean() > 0.99


@runs_kernel
def test_residual_of_another_dtype():
    blocks, y, _, P, g = problem(2, dtype=torch.bfloat16)
    residual = torch.randn(y.shape, device=DEVICE).requires_grad_()
    compare(blocks, y, residual, P, g, 0)


@runs_kernel
def test_non_contiguous_inputs(poisoned):
    blocks, y, residual, P, g = problem(3, (4, 6, 8))
    compare([b.transpose(0, 1) for b in blocks], y.transpose(0, 1), residual.transpose(0, 1), P.t(), g, 1)
    blocks, y, residual, P, g = problem(3, (4, 6, 16))
    g = torch.randn(3, 2, device=DEVICE, requires_grad=True)[:, 0]
    compare([b[..., ::2] for b in blocks], y[:, :, 8:], residual[..., 1::2], P, g, 1)


@runs_kernel
def test_gradients_may_be_expanded_or_missing():
    """A sum's upstream gradient is one number spread over a shape; an output nobody uses has none."""
    blocks, y, residual, P, g = problem(3)
    inputs = [*blocks, y, residual, P, g]
    got = torch.autograd.grad(fused(blocks, y, residual, P, g, 1)[2].sum(), inputs)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    want = torch.autograd.grad(algorithm_1(wide[:3], *wide[3:], 1)[2].sum(), wide)
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < 2e-6


@runs_kernel
def test_recycled_state_is_one_block_repeated():
    x, y, _, P, g = problem(1)
    P, g = torch.randn(4, 4, device=DEVICE), torch.randn(4, device=DEVICE)
    state = x[0].unsqueeze(0).expand(4, *x[0].shape)
    new = altup_update(state, y, P, g, 3, implementation="triton")
    want = algorithm_1([x[0].double()] * 4, y.double(), None, P.double(), g.double(), 3)
    assert distance(new, torch.stack(want)) < 2e-6
    (gradient,) = torch.autograd.grad(new.sum(), x)
    (exact,) = torch.autograd.grad(torch.stack(want).sum(), x)
    assert distance(gradient, exact.double()) < 2e-6


@runs_kernel
def test_nothing_in_nothing_out():
    blocks, y, residual, P, g = problem(2, (0, 5, 8))
    new = fused(blocks, y, residual, P, g, 0)
    gradients = torch.autograd.grad(sum(x.sum() for x in new), [*blocks, P, g])
    assert new[1].shape == (0, 5, 8)
    assert all(not gradient.any() for gradient in gradients)


@runs_kernel
@pytest.mark.parametrize("stacked", [False, True])
def test_operator_registrations(stacked):
    blocks, y, residual, P, g = problem(2, (3, 4))
    state = [torch.stack(blocks).detach().requires_grad_()] if stacked else blocks
    library.opcheck(update, (state, y, residual, P, g, 1))
    library.opcheck(update, (state, y, None, P, g, 1))
    plain = [[t.detach() for t in state], y.detach(), None, P.detach(), g.detach(), 1]
    library.opcheck(update_backward, ([torch.randn_like(t) for t in state], *plain))


@runs_kernel
@pytest.mark.parametrize("stacked", [False, True])
def test_compiles_as_one_graph(stacked):
    backend = "aot_eager" if INTERPRETED else "inductor"
    compare(
        *problem(2), 1, run=torch.compile(fused, backend=backend, fullgraph=True, dynamic=False), stacked=stacked
    )


@runs_kernel
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant):
    run = checkpointed(fused, reentrant)
    if reentrant:
        assert_same_backward(fused, run, *problem(2), 0)
    else:
        compare(*problem(2), 0, run=run)


@runs_kernel
def test_autocast_rounds_nothing():
    assert_autocast_rounds_nothing(fused, *problem(2), 0)


@runs_kernel
def test_a_second_derivative_is_refused():
    """Not silently wrong: the plain expressions have one."""
    blocks, y, _, P, g = problem(2)
    new = fused(blocks, y, None, P, g, 0)
    (first,) = torch.autograd.grad((new[0] ** 2).sum(), blocks[0], create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        torch.autograd.grad(first.sum(), y)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("K", "d"), [(2, 768), (4, 768), (2, 2048), (8, 512)])
def test_training_size(K, d, dtype, poisoned):
    compare(*problem(K, (8, 512, d), dtype), K - 1)


@needs_gpu
def test_two_runs_give_the_same_bits():
    blocks, y, residual, P, g = problem(4, (64, 512, 768), torch.bfloat16)
    upstream = [torch.randn_like(b) for b in blocks]
    inputs = [*blocks, y, residual, P, g]
    runs = [torch.autograd.grad(fused(blocks, y, residual, P, g, 1), inputs, upstream) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@needs_gpu
def test_blocks_beyond_32_bit_offsets():
    """2³¹ + 4096 numbers a block: the last ones are reached too."""
    n = 2**31 + 4096
    x = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    x[-5:] = 3
    P, g = torch.full((1, 1), 2.0, device="cuda"), torch.full((1,), 0.5, device="cuda")
    (new,) = altup_update([x], x, P, g, 0, implementation="triton")
    assert new[-5:].tolist() == [3 * (2 - 0.5 * 2 + 0.5)] * 5
    assert not new[:-5].any()


@needs_gpu
def test_auto_takes_the_kernels_on_a_gpu():
    blocks, y, residual, P, g = problem(2)
    assert "update" in type(altup_update(blocks, y, P, g, 0, residual)[0].grad_fn).__name__.lower()


@outside_the_interpreter
def test_kernels_in_the_interpreter():
    pass_in_the_interpreter(__file__)

"""Algorithm 1's update: the definition against the paper's lines, the public function, and the kernels, forward
and every gradient, against the definition in float64 on the same rounded inputs."""

from __future__ import annotations

import pytest
import torch

from altup.core.errors import UserError
from altup.kernels import altup_update, altup_update_reference
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
from tests.kernels.updates import (
    SUM_TOLERANCE,
    TOLERANCE,
    assert_autocast_rounds_nothing,
    assert_same_backward,
    checkpointed,
    distance,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def algorithm_1(x_old, computed, p, g, j_star):
    """The paper's Algorithm 1 after its second line, with Python loops over vectors."""
    K = len(x_old)
    x_hat = []
    for i in range(K):
        total = torch.zeros_like(x_old[0])
        for j in range(K):
            total = total + p[i][j] * x_old[j]
        x_hat.append(total)
    return [x_hat[i] + g[i] * (computed - x_hat[j_star]) for i in range(K)]


def random(K, dtype=torch.float64, shape=(2, 5, 6)):
    """x, y, residual, P, g on the CPU."""
    x, y, residual = (torch.randn(*s, dtype=dtype) for s in [(K, *shape), shape, shape])
    wide = torch.promote_types(dtype, torch.float32)
    return x, y, residual, torch.randn(K, K, dtype=wide), torch.randn(K, dtype=wide)


@pytest.mark.parametrize("K", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("update", [altup_update, altup_update_reference])
def test_update_is_algorithm_1(K, update):
    x, y, _, P, g = random(K)
    for active in range(K):
        new = update(x, y, P, g, active)
        for b in range(x.shape[1]):
            for t in range(x.shape[2]):
                want = algorithm_1([x[i, b, t] for i in range(K)], y[b, t], P.tolist(), g.tolist(), active)
                for i in range(K):
                    torch.testing.assert_close(new[i, b, t], want[i], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("K", [1, 2, 3, 5])
def test_update_gradients(K):
    x, y, _, P, g = random(K, shape=(1, 2, 3))
    inputs = [t.requires_grad_() for t in (x, y, P, g)]
    assert torch.autograd.gradcheck(lambda *a: altup_update(*a, active=K - 1), inputs)


@pytest.mark.parametrize("K", [3])
def test_compiled_form_equals_reference_with_gradients(K):
    """Under torch.compile another expression is used; it must be the same function."""
    x, y, _, P, g = random(K)
    inputs = [t.requires_grad_() for t in (x, y, P, g)]
    compiled = torch.compile(altup_update, backend="aot_eager", fullgraph=True)
    grad = torch.randn(K, 2, 5, 6, dtype=torch.float64)
    got = torch.autograd.grad((compiled(*inputs, 1) * grad).sum(), inputs)
    want = torch.autograd.grad((altup_update_reference(*inputs, 1) * grad).sum(), inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_bfloat16_state_is_rounded_once():
    """Sums run in float32: the result is the exact one, rounded to bfloat16 once."""
    x, y, _, P, g = random(3, torch.bfloat16, (4, 16, 32))
    new = altup_update(x, y, P, g, 0)
    exact = altup_update_reference(x.double(), y.double(), P.double(), g.double(), 0)
    assert new.dtype == torch.bfloat16
    torch.testing.assert_close(new.double(), exact, rtol=2**-8, atol=1e-6)


def test_coefficients_in_bfloat16_as_fsdp2_may_gather_them():
    """They are as good as the same numbers in float32, and the state keeps its dtype."""
    x, y, _, P, g = random(2, torch.bfloat16)
    new = altup_update(x, y, P.bfloat16(), g.bfloat16(), 1)
    assert new.dtype == torch.bfloat16
    assert torch.equal(new, altup_update(x, y, P.bfloat16().float(), g.bfloat16().float(), 1))


def test_autocast_does_not_round_the_coefficients():
    x, y, _, P, g = random(2, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        new = altup_update(x, y, P, g, 1)
    torch.testing.assert_close(new, altup_update_reference(x, y, P, g, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("K", [1, 2, 4, 9])
@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_go_in_and_come_out_as_a_tuple(K, kind, dtype):
    x, y, _, P, g = random(K, dtype)
    new = altup_update(kind(x.unbind(0)), y, P, g, K - 1)
    assert isinstance(new, tuple)
    torch.testing.assert_close(torch.stack(new), altup_update(x, y, P, g, K - 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_is_added_without_rounding(dtype):
    """Against float64: residual + y is held in float32 at least, whatever the state's dtype."""
    x, y, residual, P, g = random(3, dtype)
    residual = residual * 100
    new = altup_update(x, y, P, g, 1, residual)
    exact = altup_update_reference(x.double(), y.double() + residual.double(), P.double(), g.double(), 1)
    assert new.dtype == dtype
    torch.testing.assert_close(new, exact.to(dtype), rtol=1e-5, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_blocks_and_residual(compiled):
    x, y, residual, P, g = random(3, shape=(2, 3))

    def run(y, residual, P, g, *blocks):
        return altup_update(blocks, y, P, g, 2, residual)

    inputs = [t.requires_grad_() for t in (y, residual, P, g, *(b.clone() for b in x))]
    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.autograd.gradcheck(run, inputs)


def test_plain_residual_of_another_dtype():
    x, y, residual, P, g = random(2, torch.float32)
    got = altup_update(x, y.bfloat16(), P, g, 0, residual)
    torch.testing.assert_close(got, altup_update_reference(x, y.bfloat16() + residual, P, g, 0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"y": torch.zeros(2, 5, 7)}, r"\[2, 2, 5, 6\]"),
        ({"x": [torch.zeros(2, 5, 6), torch.zeros(2, 5, 7)]}, r"\[2, 5, 7\]"),
        ({"x": [torch.zeros(2, 5, 6), torch.zeros(2, 5, 6).half()]}, "float16"),
        ({"P": torch.zeros(3, 3)}, r"P \[3, 3\]"),
        ({"g": torch.zeros(3)}, r"g \[3\]"),
        ({"active": 2}, "active=2"),
        ({"active": -1}, "active=-1"),
        ({"residual": torch.zeros(6)}, r"residual \[6\]"),
        ({"implementation": "cuda"}, "implementation='cuda'"),
        ({"implementation": "triton", "x": torch.zeros(2, 2, 5, 6).double()}, "float64"),
    ],
)
def test_what_does_not_fit_is_refused(change, says):
    x, y, _, P, g = random(2, torch.float32)
    arguments = {"x": x, "y": y, "P": P, "g": g, "active": 0} | change
    with pytest.raises(UserError, match=says):
        altup_update(**arguments)


def test_triton_is_refused_where_it_cannot_run():
    x, y, _, P, g = random(2, torch.float32)
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        altup_update(x, y, P, g, 0, implementation="triton")


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


def exact_update(blocks, y, residual, P, g, active):
    y = y if residual is None else y + residual
    return altup_update_reference(torch.stack(list(blocks)), y, P, g, active).unbind(0)


def fused(blocks, y, residual, P, g, active, stacked=False):
    if stacked:
        return altup_update(torch.stack(blocks), y, P, g, active, residual, "triton").unbind(0)
    return altup_update(blocks, y, P, g, active, residual, "triton")


def compare(blocks, y, residual, P, g, active, run=fused, **options):
    """Outputs and all gradients of a random linear function of them, against float64."""
    inputs = [*blocks, y, *([] if residual is None else [residual]), P, g]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    d_residual = None if residual is None else wide[len(blocks) + 1]
    exact = exact_update(wide[: len(blocks)], wide[len(blocks)], d_residual, wide[-2], wide[-1], active)
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
    for active in fewer({0, K - 1}, range(K)):
        compare(*problem(K, residual=active % 2 == 0), active, stacked=active % 3 == 1)


@runs_kernel
@pytest.mark.parametrize(
    ("length", "d"),
    fewer(
        [(1, 1), (17, 48), (17, 769), (511, 1), (513, 48)],
        [(length, d) for length in (1, 17, 511, 513) for d in (1, 48, 769)],
    ),
)
def test_odd_sizes(length, d, poisoned, configs):
    if INTERPRETED:
        configs(programs=2, vectors=16)
    compare(*problem(2, (1, length, d)), 1, stacked=True)  # the second block starts at any address


@runs_kernel
@pytest.mark.parametrize(
    ("elements", "programs"),
    fewer(
        [(512, 1), (513, 3), (3 * 512 + 3, 3)],
        [(elements, programs) for elements in (511, 512, 513, 5 * 512, 7 * 512 + 3) for programs in (1, 3)],
    ),
)
def test_few_programs_walk_through_many_chunks(elements, programs, poisoned, configs):
    configs(programs)
    compare(*problem(3, (elements,)), 2)


@runs_kernel
@pytest.mark.parametrize(
    ("dtype", "y_dtype", "stacked"),
    [
        (torch.bfloat16, torch.bfloat16, False),
        (torch.float16, torch.float16, True),
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
    ],
)
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
        exact = exact_update(
            [b.double() for b in blocks], y.double(), residual.double(), P.double(), g.double(), 0
        )
    for got, want in zip(new, exact, strict=True):
        assert (got == want.bfloat16()).float().mean() > 0.99


@runs_kernel
def test_without_gradients_it_is_launched_at_once():
    """The same numbers as those of the operator that compiled code sees."""
    from altup.kernels.altup_update.triton import update

    blocks, y, residual, P, g = problem(3, (2, 1, 24))
    want = update.registered(blocks, y, residual, P, g, 1)
    with torch.no_grad():
        assert all(map(torch.equal, fused(blocks, y, residual, P, g, 1), want))


@runs_kernel
def test_arrays_of_every_kind_after_others_of_the_same_size():
    """What was compiled for one kind (dtypes, contiguous, aligned) is launched again for that kind alone."""
    shape = (1, 2, 32)
    for dtype, y_dtype in [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)]:
        for residual in (False, True):
            for place in (lambda t: t, lambda t: t, shifted, lambda t: t.mT.contiguous().mT, lambda t: t):
                blocks, y, other, P, g = problem(2, shape, dtype, residual, y_dtype)
                given = [*map(place, blocks)], place(y), other if other is None else place(other), place(P), g
                with torch.no_grad():
                    new = fused(*given, 1)
                    exact = exact_update([b.double() for b in blocks], y, other, P.double(), g.double(), 1)
                assert max(distance(a, b) for a, b in zip(new, exact, strict=True)) < TOLERANCE[dtype]


def shifted(tensor):
    """The same numbers, from an address on that is no multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].view(tensor.shape).copy_(tensor.detach())


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
    want = torch.autograd.grad(exact_update(wide[:3], *wide[3:], 1)[2].sum(), wide)
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < 2e-6


@runs_kernel
def test_recycled_state_is_one_block_repeated():
    x, y, _, P, g = problem(1)
    P, g = torch.randn(4, 4, device=DEVICE), torch.randn(4, device=DEVICE)
    state = x[0].unsqueeze(0).expand(4, *x[0].shape)
    new = altup_update(state, y, P, g, 3, implementation="triton")
    want = exact_update([x[0].double()] * 4, y.double(), None, P.double(), g.double(), 3)
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
    from altup.kernels.altup_update.triton import update, update_backward

    blocks, y, residual, P, g = problem(2, (3, 4))
    state = [torch.stack(blocks).detach().requires_grad_()] if stacked else blocks
    check_operator(update, state, y, residual, P, g, 1)
    check_operator(update, state, y, None, P, g, 1, checks=CHEAP_CHECKS)
    plain = [[t.detach() for t in state], y.detach(), None, P.detach(), g.detach(), 1]
    check_operator(update_backward, [torch.randn_like(t) for t in state], *plain, checks=CHEAP_CHECKS)


@runs_kernel
@pytest.mark.parametrize("stacked", fewer([True], [False, True]))
def test_compiles_as_one_graph(stacked):
    compare(
        *problem(2), 1, run=torch.compile(fused, backend=BACKEND, fullgraph=True, dynamic=False), stacked=stacked
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
    with pytest.raises(RuntimeError, match="twice"):
        first.sum().backward()


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
    assert altup_update(blocks, y, P, g, 0, residual)[0].grad_fn.operator.name == "altup::update"


def state(K, dtype):
    return dict.fromkeys(("outs", "dxs", "grads", "xs"), (f"*{dtype}",) * K) | {
        "y": f"*{dtype}",
        "dy": f"*{dtype}",
        "P": "*fp32",
        "g": "*fp32",
        "active": "i32",
        "n": "i32",
    }


@pytest.mark.parametrize(("K", "dtype", "residual"), [(2, "bf16", True), (4, "bf16", True), (3, "fp32", False)])
def test_forward_moves_16_bytes_at_a_time(K, dtype, residual, hopper):
    from altup.kernels.altup_update import triton as kernels

    given, config = state(K, dtype), kernels.FORWARD[K]
    names = ("outs", "xs", "y", "residual", "P", "g", "active", "n")
    arguments = {name: given.get(name, f"*{dtype}" if residual else None) for name in names}
    width = 8 if dtype == "bf16" else 4
    block = width * 32 * config.warps * config.vectors
    arguments |= {"K": K, "BLOCK": block}
    compiled = hopper.build(kernels._forward_kernel, arguments, divisible=("n",), num_warps=config.warps)
    assert not hopper.spills(compiled)
    assert compiled.asm["ptx"].count("ld.global.v4") == (K + 1 + residual) * config.vectors
    assert compiled.asm["ptx"].count("st.global.v4") == K * config.vectors


@pytest.mark.parametrize(
    ("K", "dtype", "residual"), [(2, "bf16", True), (4, "bf16", True), (3, "fp32", False), (8, "fp16", False)]
)
def test_backward_moves_16_bytes_at_a_time(K, dtype, residual, hopper):
    from altup.kernels.altup_update import triton as kernels

    given, config = state(K, dtype), kernels.BACKWARD[K]
    names = ("dxs", "dy", "partials", "grads", "xs", "y", "residual", "P", "g", "active", "n")
    arguments = {name: given.get(name, f"*{dtype}" if residual else None) for name in names}
    arguments["partials"] = "*fp32"
    width = 8 if dtype != "fp32" else 4
    block = width * 32 * config.warps * config.vectors
    constants = {"K": K, "BLOCK": block, "WIDTH": width, "STAGES": config.stages}
    arguments |= constants
    compiled = hopper.build(kernels._backward_kernel, arguments, divisible=("n",), num_warps=config.warps)
    assert not hopper.spills(compiled)
    assert compiled.asm["ptx"].count("st.global.v4") == (K + 1) * config.vectors


@pytest.mark.parametrize("K", [1, 4, 8])
def test_sums_of_coefficients_stay_in_registers(K, hopper):
    from altup.kernels.altup_update import triton as kernels

    rows, columns, config = 1 << (K - 1).bit_length(), 1 << K.bit_length(), kernels.COEFFICIENTS
    chunk = config.vectors * 4 * 32 * config.warps // (rows * columns)
    constants = {"K": K, "ROWS": rows, "COLUMNS": columns, "CHUNK": chunk}
    arguments = dict.fromkeys(("dP", "dg", "partials", "P", "g"), "*fp32") | {"active": "i32", "programs": "i32"}
    compiled = hopper.build(kernels._coefficients_kernel, arguments | constants, num_warps=config.warps)
    assert not hopper.spills(compiled)

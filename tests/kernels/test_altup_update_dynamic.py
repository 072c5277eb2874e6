"""The update with coefficients of each token: the definition, the public function, and the kernels, forward and
every gradient, against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from altup.core.errors import UserError
from altup.kernels import altup_update, altup_update_dynamic, altup_update_dynamic_reference
from altup.kernels.altup_update_dynamic import mix_blocks
from altup.nn.dynamic import DynamicUpdate
from tests.kernels.interpreter import BACKEND, CHEAP_CHECKS, DEVICE, check_operator, fewer, needs_gpu, runs_kernel
from tests.kernels.updates import (
    SUM_TOLERANCE,
    TOLERANCE,
    assert_autocast_rounds_nothing,
    assert_same_backward,
    checkpointed,
    distance,
)


def random(K, tokens=(2, 3), d=4, dtype=torch.float64):
    """x, y, P, g on the CPU."""
    sizes = [(K, *tokens, d), (*tokens, d), (*tokens, K, K), (*tokens, K)]
    return [torch.randn(*size, dtype=dtype) for size in sizes]


@pytest.mark.parametrize("K", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("update", [altup_update_dynamic, altup_update_dynamic_reference])
def test_is_the_static_rule_of_each_token(K, update):
    x, y, P, g = random(K)
    for active in range(K):
        new = update(x, y, P, g, active)
        for b in range(2):
            for t in range(3):
                want = altup_update(x[:, b, t], y[b, t], P[b, t], g[b, t], active)
                torch.testing.assert_close(new[:, b, t], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("K", [1, 3])
def test_gradients(K):
    inputs = [t.requires_grad_() for t in random(K, (2,), 3)]
    assert torch.autograd.gradcheck(lambda *a: altup_update_dynamic(*a, active=K - 1), inputs)


def test_without_p_it_only_corrects():
    x, y, P, g = random(3)
    predicted = mix_blocks(x, P)
    new = altup_update_dynamic(predicted, y, None, g, 2)
    torch.testing.assert_close(new, altup_update_dynamic_reference(x, y, P, g, 2))
    as_tuple = altup_update_dynamic(predicted.unbind(0), y, None, g, 2)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(torch.stack(as_tuple), new)


def test_bfloat16_is_rounded_once():
    x, y, P, g = (t.float() for t in random(4, (8, 16), 32))
    x, y = x.bfloat16(), y.bfloat16()
    new = altup_update_dynamic(x, y, P, g, 0)
    exact = altup_update_dynamic_reference(x.double(), y.double(), P.double(), g.double(), 0)
    assert new.dtype == torch.bfloat16
    torch.testing.assert_close(new.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"P": (2, 3, 2, 3)}, "P is"),
        ({"g": (3, 2, 2)}, "g is"),
        ({"y": (2, 3, 5)}, r"y \[2, 3, 5\]"),
        ({"y": (2, 4, 4)}, "do not fit"),
        ({"active": 2}, "active=2"),
        ({"implementation": "fast"}, "implementation='fast'"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    x, y, P, g = random(2)
    given = {"y": y, "P": P, "g": g, "active": 1}
    given |= {name: torch.zeros(value) if isinstance(value, tuple) else value for name, value in change.items()}
    with pytest.raises(UserError, match=message):
        altup_update_dynamic(x, **given)


def test_blocks_unlike_one_another_are_refused():
    x, y, P, g = random(2)
    with pytest.raises(UserError, match="float32"):
        altup_update_dynamic([x[0], x[1].float()], y, P, g, 0)


def test_kernels_asked_for_where_they_cannot_run_are_refused():
    x, y, P, g = random(2, dtype=torch.float32)
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        altup_update_dynamic(x, y, P, g, 0, "triton")
    with pytest.raises(UserError, match="float64"):
        altup_update_dynamic(x.double(), y, P, g, 0, "triton")


@pytest.fixture
def short_chunks(monkeypatch):
    """A program that walks through a row in many steps."""
    kernels = pytest.importorskip("altup.kernels.altup_update_dynamic.triton")
    monkeypatch.setattr(kernels, "FORWARD", kernels.FORWARD._replace(warps=1))
    monkeypatch.setattr(kernels, "BACKWARD", kernels.BACKWARD._replace(warps=1))


def problem(K, shape=(2, 3, 17), dtype=torch.float32, y_dtype=None, coefficient_dtype=torch.float32):
    """Blocks, y, P, g. Blocks' numbers lie around 1, so that long sums do not cancel."""

    def random(*size, dtype):
        return (1 + torch.randn(*size, device=DEVICE)).to(dtype).requires_grad_()

    blocks = [random(*shape, dtype=dtype) for _ in range(K)]
    P, g = (random(*shape[:-1], *size, dtype=coefficient_dtype) for size in [(K, K), (K,)])
    return blocks, random(*shape, dtype=y_dtype or dtype), P, g


def exact_update(blocks, y, P, g, active):
    """P = None: the blocks are predicted already."""
    if P is None:
        P = torch.eye(len(blocks), dtype=g.dtype, device=DEVICE).expand(*g.shape, len(blocks))
    return altup_update_dynamic_reference(torch.stack(list(blocks)), y, P, g, active).unbind(0)


def fused(blocks, y, P, g, active, stacked=False):
    if stacked:
        return altup_update_dynamic(torch.stack(blocks), y, P, g, active, "triton").unbind(0)
    return altup_update_dynamic(blocks, y, P, g, active, "triton")


def compare(blocks, y, P, g, active, run=fused, **options):
    """Outputs and all gradients of a random linear function of them, against float64."""
    coefficients = [t for t in (P, g) if t is not None]
    inputs = [*blocks, y, *coefficients]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = exact_update(wide[: len(blocks)], wide[len(blocks)], None if P is None else wide[-2], wide[-1], active)
    upstream = [(1 + torch.randn(x.shape, device=DEVICE)).to(blocks[0].dtype) for x in exact]
    exact_gradients = torch.autograd.grad(exact, wide, [u.double() for u in upstream])

    new = run(blocks, y, P, g, active, **options)
    gradients = torch.autograd.grad(new, inputs, upstream)
    for got, want, like in zip([*new, *gradients], [*exact, *exact_gradients], [*blocks, *inputs], strict=True):
        assert got.dtype == like.dtype
        assert got.shape == like.shape
        is_sum = like.dtype == torch.float32 and any(like is coefficient for coefficient in coefficients)
        assert distance(got, want) < (SUM_TOLERANCE if is_sum else TOLERANCE[like.dtype])


@runs_kernel
@pytest.mark.parametrize("K", range(1, 9))
def test_every_number_of_blocks(K, poisoned):
    for active in {0, K - 1}:
        compare(*problem(K, (1, 2, 17)), active, stacked=active > 0)


@runs_kernel
@pytest.mark.parametrize(
    ("tokens", "d"),
    fewer(
        [(1, 1), (3, 127), (1, 129), (2, 513)], [(tokens, d) for tokens in (1, 5) for d in (1, 48, 127, 129, 769)]
    ),
)
def test_odd_sizes(tokens, d, poisoned, short_chunks):
    compare(*problem(2, (1, tokens, d)), 1, stacked=True)  # the second block starts at any address


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
    compare(*problem(4, (2, 3, 48), dtype, y_dtype), 2, stacked=stacked)


@runs_kernel
def test_coefficients_in_the_states_dtype(poisoned):
    compare(*problem(3, (2, 3, 48), torch.bfloat16, coefficient_dtype=torch.bfloat16), 2)


@runs_kernel
def test_a_state_without_token_dimensions():
    compare(*problem(2, (40,)), 1)
    compare(*problem(2, (40,)), 1, stacked=True)


@runs_kernel
@pytest.mark.parametrize("K", [1, 4])
def test_correction_alone(K, poisoned):
    blocks, y, _, g = problem(K)
    compare(blocks, y, None, g, K - 1)


@runs_kernel
@pytest.mark.parametrize("stacked", [False, True])
def test_prediction_alone(stacked, poisoned):
    blocks, _, P, _ = problem(3)
    new = mix_blocks(torch.stack(blocks) if stacked else blocks, P, implementation="triton")
    wide = [t.detach().double().requires_grad_() for t in (*blocks, P)]
    exact = [sum(wide[-1][..., i, j, None] * wide[j] for j in range(3)) for i in range(3)]
    got = torch.autograd.grad(sum((x**2).sum() for x in new), [*blocks, P])
    want = torch.autograd.grad(sum((x**2).sum() for x in exact), wide)
    for a, b in zip([*new, *got], [*exact, *want], strict=True):
        assert distance(a, b) < 2e-6


@runs_kernel
def test_non_contiguous_inputs(poisoned):
    blocks, y, P, g = problem(3, (2, 3, 8))
    turned = [t.transpose(0, 1) for t in (*blocks, y, P, g)]
    compare(turned[:3], *turned[3:], 1)
    blocks, y, P, g = problem(3, (2, 3, 16))
    g = torch.randn(2, 3, 3, 2, device=DEVICE, requires_grad=True)[..., 0]
    compare([b[..., ::2] for b in blocks], y[:, :, 8:], P.transpose(2, 3), g, 1)
    shared = torch.randn(3, 3, device=DEVICE).expand(2, 3, 3, 3).requires_grad_()
    compare(blocks, y, shared, g, 1)


@runs_kernel
def test_gradients_may_be_expanded_or_missing():
    """A sum's upstream gradient is one number spread over a shape; an output nobody uses has none."""
    blocks, y, P, g = problem(3)
    inputs = [*blocks, y, P, g]
    got = torch.autograd.grad(fused(blocks, y, P, g, 1)[2].sum(), inputs)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    want = torch.autograd.grad(exact_update(wide[:3], *wide[3:], 1)[2].sum(), wide)
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < 2e-6


@runs_kernel
def test_recycled_state_is_one_block_repeated():
    (x,), y, _, _ = problem(1)
    _, _, P, g = problem(4)
    new = altup_update_dynamic(x.unsqueeze(0).expand(4, *x.shape), y, P, g, 3, "triton")
    want = torch.stack(exact_update([x.double()] * 4, y.double(), P.double(), g.double(), 3))
    assert distance(new, want) < 2e-6
    (gradient,), (exact,) = (torch.autograd.grad((t**2).sum(), x) for t in (new, want))
    assert distance(gradient, exact.double()) < 2e-6


@runs_kernel
@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 3, 0)])
def test_nothing_in_nothing_out(shape, poisoned):
    blocks, y, P, g = problem(2, shape)
    new = fused(blocks, y, P, g, 0)
    gradients = torch.autograd.grad(sum(x.sum() for x in new), [*blocks, y, P, g])
    assert new[1].shape == shape
    assert all(not gradient.any() for gradient in gradients)


@runs_kernel
@pytest.mark.parametrize("stacked", [False, True])
def test_operator_registrations(stacked):
    from altup.kernels.altup_update_dynamic.triton import mix, mix_backward

    blocks, y, P, g = problem(2, (3, 4))
    state = [torch.stack(blocks).detach().requires_grad_()] if stacked else blocks
    check_operator(mix, state, y, P, g, 0)
    check_operator(mix, state, None, P, None, 0, checks=CHEAP_CHECKS)
    plain = [[t.detach() for t in state], y.detach(), P.detach(), g.detach()]
    check_operator(mix_backward, [torch.randn_like(t) for t in state], *plain, 0, checks=CHEAP_CHECKS)


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
    blocks, y, P, g = problem(2)
    (first,) = torch.autograd.grad((fused(blocks, y, P, g, 0)[0] ** 2).sum(), blocks[0], create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        first.sum().backward()


@runs_kernel
@pytest.mark.parametrize(
    ("dtype", "compiled"),
    fewer(
        [(torch.float32, False), (torch.bfloat16, True)],
        [(dtype, compiled) for dtype in (torch.float32, torch.bfloat16) for compiled in (False, True)],
    ),
)
def test_equals_gemmas_module_with_all_gradients(dtype, compiled, poisoned):
    """Hugging Face's module in float64 on the same rounded weights and inputs, clipped as in training."""
    from tests.nn.test_dynamic import gemma

    K, d, active = 4, 40, 1
    theirs = gemma(K, d, active, clip=0.4).to(DEVICE, dtype).train()
    with torch.no_grad():  # theirs clips A's weights for good, ours in passing, where the gradient is cut off
        theirs.prediction_coefs.weight.clamp_(-0.39, 0.39)
    ours = DynamicUpdate.from_gemma3n(theirs, implementation="triton")
    theirs = theirs.double()
    run = ours
    if compiled:
        run = torch.compile(ours, backend=BACKEND, fullgraph=True)

    blocks, y, _, _ = problem(K, (2, 3, d), dtype)
    new = run(tuple(blocks), y)
    upstream = [torch.randn_like(x) for x in new]
    weights = [ours.C, ours.A, ours.R, ours.norm]
    got = torch.autograd.grad(new, [*blocks, y, *weights], upstream)

    wide = [t.detach().double().requires_grad_() for t in (*blocks, y)]
    exact = theirs.correct(theirs.predict(torch.stack(wide[:K])), wide[K]).unbind(0)
    names = ("correction_coefs", "prediction_coefs", "modality_router", "router_norm")
    their_weights = [getattr(theirs, name).weight for name in names]
    want = torch.autograd.grad(exact, [*wide, *their_weights], [u.double() for u in upstream])
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    for a, b in zip([*new, *got], [*exact, *want], strict=True):
        assert distance(a.reshape(b.shape), b) < tolerance


@runs_kernel
def test_a_stack_fed_with_predictions():
    """Prediction and correction by themselves, through the kernels, as one after the other without them."""
    module = DynamicUpdate(3, 1, 24, implementation="triton").to(DEVICE)
    with torch.no_grad():
        for weight in (module.A, module.C):
            weight.normal_()
    state = torch.randn(3, 2, 5, 24, device=DEVICE)
    steps = {}
    for name in ("triton", "plain"):
        module.implementation = name
        predicted = module.predict(state)
        steps[name] = torch.stack([predicted, module.correct(predicted, predicted[1].sin())])
    assert distance(steps["triton"], steps["plain"].double()) < 2e-6


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("K", "d"), [(2, 768), (4, 768), (4, 2048), (8, 512)])
def test_training_size(K, d, dtype, poisoned):
    compare(*problem(K, (8, 512, d), dtype), K - 1)


@needs_gpu
def test_two_runs_give_the_same_bits():
    blocks, y, P, g = problem(4, (64, 512, 768), torch.bfloat16)
    upstream = [torch.randn_like(b) for b in blocks]
    runs = [torch.autograd.grad(fused(blocks, y, P, g, 1), [*blocks, y, P, g], upstream) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@needs_gpu
def test_blocks_beyond_32_bit_offsets():
    """More than 2³¹ numbers a block: the last token is reached too."""
    tokens = 2**18 + 1
    x = torch.zeros(tokens, 8192, device="cuda", dtype=torch.bfloat16)
    x[-1, -5:] = 3
    P, g = torch.full((tokens, 1, 1), 2.0, device="cuda"), torch.full((tokens, 1), 0.5, device="cuda")
    (new,) = altup_update_dynamic([x], x, P, g, 0, "triton")
    assert new[-1, -5:].tolist() == [3 * (2 - 0.5 * 2 + 0.5)] * 5
    assert new.count_nonzero() == 5


@needs_gpu
def test_auto_takes_the_kernels_on_a_gpu():
    blocks, y, P, g = problem(2)
    assert altup_update_dynamic(blocks, y, P, g, 0)[0].grad_fn.operator.name == "altup::mix"


SIZES = ("d", "x_row", "out_row")


def arguments(names, K, dtype, y):
    """Types of the arguments `names`; y and what belongs to it are None where there is no y."""
    wide = dict.fromkeys(("M", "g", "dM", "dg"), "*fp32")
    given = dict.fromkeys(("outs", "dxs", "grads", "xs"), (f"*{dtype}",) * K) | wide
    given |= dict.fromkeys(SIZES, "i32")
    given |= dict.fromkeys(("y", "dy"), f"*{dtype}")
    return {name: given[name] if y or name not in ("y", "dy", "g", "dg") else None for name in names}


@pytest.mark.parametrize(("K", "dtype", "y"), [(2, "bf16", True), (4, "bf16", True), (3, "fp32", False)])
def test_forward_moves_16_bytes_at_a_time(K, dtype, y, hopper):
    from altup.kernels.altup_update_dynamic import triton as kernels

    width, config = 8 if dtype == "bf16" else 4, kernels.FORWARD
    constants = {"ROWS": K, "K": K, "BLOCK": width * 32 * config.warps * config.vectors}
    given = arguments(("outs", "xs", "y", "M", "g", *SIZES), K, dtype, y)
    compiled = hopper.build(kernels._forward_kernel, given | constants, divisible=SIZES, num_warps=config.warps)
    assert not hopper.spills(compiled)
    assert compiled.asm["ptx"].count("ld.global.v4") == (K + y) * config.vectors
    assert compiled.asm["ptx"].count("st.global.v4") == K * config.vectors


@pytest.mark.parametrize(
    ("K", "dtype", "y"), [(2, "bf16", True), (4, "bf16", True), (3, "fp32", False), (8, "fp16", True)]
)
def test_backward_moves_16_bytes_at_a_time(K, dtype, y, hopper):
    from altup.kernels.altup_update_dynamic import triton as kernels

    width, config = 8 if dtype != "fp32" else 4, kernels.BACKWARD
    constants = {"ROWS": K, "K": K, "BLOCK": width * 32 * config.warps * config.vectors, "WIDTH": width}
    given = arguments(("dxs", "dy", "dM", "dg", "grads", "xs", "y", "M", "g", *SIZES), K, dtype, y)
    compiled = hopper.build(kernels._backward_kernel, given | constants, divisible=SIZES, num_warps=config.warps)
    assert not hopper.spills(compiled)
    assert compiled.asm["ptx"].count("ld.global.v4") == (2 * K + y) * config.vectors
    assert compiled.asm["ptx"].count("st.global.v4") == (K + y) * config.vectors

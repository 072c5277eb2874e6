"""The fused update with coefficients a token, forward and every gradient, against the rule's lines in float64.

Where there is no GPU the kernels run in Triton's interpreter, as in test_altup_update_triton.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import library

from altup.kernels.altup_update_dynamic import altup_update_dynamic, mix_blocks
from altup.kernels.altup_update_dynamic.op import mix, mix_backward
from altup.nn.dynamic import DynamicUpdate
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


def rule(blocks, y, P, g, active):
    """Predict every block of every token, then correct it; P = None: the blocks are predicted already."""
    K = len(blocks)
    predicted = blocks
    if P is not None:
        predicted = [sum(P[..., i, j].unsqueeze(-1) * blocks[j] for j in range(K)) for i in range(K)]
    return [x + g[..., i].unsqueeze(-1) * (y - predicted[active]) for i, x in enumerate(predicted)]


def distance(got, want):
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-30)).item()


def fused(blocks, y, P, g, active, stacked=False):
    if stacked:
        return altup_update_dynamic(torch.stack(blocks), y, P, g, active, "triton").unbind(0)
    return altup_update_dynamic(blocks, y, P, g, active, "triton")


def compare(blocks, y, P, g, active, run=fused, **options):
    """Outputs and all gradients of a random linear function of them, against float64."""
    coefficients = [t for t in (P, g) if t is not None]
    inputs = [*blocks, y, *coefficients]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = rule(wide[: len(blocks)], wide[len(blocks)], None if P is None else wide[-2], wide[-1], active)
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
@pytest.mark.parametrize("d", [1, 48, 127, 129, 769])
@pytest.mark.parametrize("tokens", [1, 5])
def test_odd_sizes(tokens, d, poisoned, short_chunks):
    compare(*problem(2, (1, tokens, d)), 1, stacked=True)  # the second block starts at any address


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
    blocks, y, P, g = problem(3, (4, 6, 8))
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
    want = torch.autograd.grad(rule(wide[:3], *wide[3:], 1)[2].sum(), wide)
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < 2e-6


@runs_kernel
def test_recycled_state_is_one_block_repeated():
    (x,), y, _, _ = problem(1)
    _, _, P, g = problem(4)
    new = altup_update_dynamic(x.unsqueeze(0).expand(4, *x.shape), y, P, g, 3, "triton")
    want = torch.stack(rule([x.double()] * 4, y.double(), P.double(), g.double(), 3))
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
    blocks, y, P, g = problem(2, (3, 4))
    state = [torch.stack(blocks).detach().requires_grad_()] if stacked else blocks
    library.opcheck(mix, (state, y, P, g))
    library.opcheck(mix, (state, None, P, None))
    plain = [[t.detach() for t in state], y.detach(), P.detach(), g.detach()]
    library.opcheck(mix_backward, ([torch.randn_like(t) for t in state], *plain))


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
    blocks, y, P, g = problem(2)
    (first,) = torch.autograd.grad((fused(blocks, y, P, g, 0)[0] ** 2).sum(), blocks[0], create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        torch.autograd.grad(first.sum(), y)


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
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
        run = torch.compile(ours, backend="aot_eager" if INTERPRETED else "inductor", fullgraph=True)

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
    assert "mix" in type(altup_update_dynamic(blocks, y, P, g, 0)[0].grad_fn).__name__.lower()


@outside_the_interpreter
def test_kernels_in_the_interpreter():
    pass_in_the_interpreter(__file__)

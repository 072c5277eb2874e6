"""Gemma 3n's AltUp: the definition against Hugging Face's module, and the kernels, forward and every gradient,
against the definition in float64."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from altup.core.errors import UserError
from altup.kernels import operators
from altup.kernels.gemma3n import (
    Router,
    Segments,
    causal_attention,
    correct,
    correction,
    gated,
    gated_linear,
    match_magnitudes,
    norm_beside,
    norm_rotary,
    predict,
    residual,
)
from tests.kernels.interpreter import BACKEND, CHEAP_CHECKS, DEVICE, check_operator, fewer, runs_kernel
from tests.kernels.updates import SUM_TOLERANCE, TOLERANCE, distance
from tests.models.gemma3n.tiny import accelerated, assert_same, batch, gradients, tiny_gemma

EPS = 1e-6


def random(*size, dtype=torch.float32, device=DEVICE):
    return torch.randn(*size, device=device).to(dtype).requires_grad_()


def weights(K, d, dtype=torch.float32, device=DEVICE):
    """Router, its norm, A and C; the router's size leaves the tanh neither flat nor straight."""
    router = (torch.randn(K, d, device=device) * d**0.5).to(dtype).requires_grad_()
    norm = (1 + 0.2 * torch.randn(d, device=device)).to(dtype).requires_grad_()
    return router, norm, random(K * K, K, dtype=dtype, device=device), random(K, K, dtype=dtype, device=device)


def layer(blocks, y, branch, router, norm, A, C, scale, branch_norm, *, active, implementation, stacked=False):
    """All three functions as a layer calls them, with a branch that depends on the corrected active block."""
    maps = Router(router, norm, EPS)
    x = torch.stack(blocks) if stacked else blocks
    predicted = predict(x, maps, A, active, implementation, stacked)
    g, z = correction(y, maps, C, predicted[active], active, scale, implementation)
    if branch is None:
        return [*predicted, g, z, correct(predicted, y, g, active, implementation=implementation)]
    new = correct(predicted, y, g, active, branch * z, branch_norm, EPS, implementation)
    return [*predicted, g, z, new]


def problem(K, shape=(2, 3, 17), dtype=torch.float32, weight_dtype=None, *, branch=True, scale=True):
    weight_dtype = weight_dtype or dtype
    blocks = [random(*shape, dtype=dtype) for _ in range(K)]
    d = shape[-1]
    return (
        blocks,
        random(*shape, dtype=dtype),
        random(*shape, dtype=dtype) if branch else None,
        *weights(K, d, weight_dtype),
        random(d, dtype=weight_dtype) if scale else None,
        random(d, dtype=weight_dtype) if branch else None,
    )


def compare(blocks, *rest, active, tolerance=None, **options):
    """Outputs and all gradients of a random linear function of them, against float64."""
    inputs = [*blocks, *(t for t in rest if t is not None)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    their = iter(wide)
    exact_blocks = [next(their) for _ in blocks]
    exact_rest = [None if t is None else next(their) for t in rest]
    exact = layer(exact_blocks, *exact_rest, active=active, implementation="plain")
    upstream = [torch.randn(x.shape, device=DEVICE) for x in exact]
    want = torch.autograd.grad(exact, wide, [u.double() for u in upstream])
    made = layer(blocks, *rest, active=active, implementation="triton", **options)
    got = torch.autograd.grad(made, inputs, [u.to(x.dtype) for u, x in zip(upstream, made, strict=True)])
    dtype = blocks[0].dtype
    for one, other in zip(made, exact, strict=True):
        assert one.shape == other.shape
        assert distance(one, other) < (tolerance or max(TOLERANCE[dtype], SUM_TOLERANCE))
    for one, other, like in zip(got, want, inputs, strict=True):
        assert one.dtype == like.dtype
        assert one.shape == like.shape
        assert distance(one, other) < (tolerance or 3 * max(TOLERANCE[dtype], SUM_TOLERANCE))


def gemma(K, d, active, clip, training, dtype=torch.float32):
    from transformers import Gemma3nTextConfig
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp

    config = Gemma3nTextConfig(
        hidden_size=d, num_attention_heads=1, altup_num_inputs=K, altup_active_idx=active, altup_coef_clip=clip
    )
    module = Gemma3nTextAltUp(config).to(dtype).train(training)
    router, norm, A, C = weights(K, d, dtype, "cpu")
    with torch.no_grad():
        module.router_norm.weight.copy_(norm)
        module.modality_router.weight.copy_(router)
        module.prediction_coefs.weight.copy_(A)
        module.correction_coefs.weight.copy_(C)
    return module


@pytest.mark.parametrize("K", [2, 4, 8])
def test_the_definition_is_hugging_faces(K):
    module = gemma(K, 12, K - 1, 120.0, False)
    maps = Router(module.modality_router.weight, module.router_norm.weight, module.router_norm.eps)
    x, y = random(K, 2, 3, 12, device="cpu"), random(2, 3, 12, device="cpu")
    predicted = predict(x, maps, module.prediction_coefs.weight, K - 1, "plain", stacked=True)
    torch.testing.assert_close(predicted, module.predict(x), rtol=1e-5, atol=1e-5)
    g, active = correction(y, maps, module.correction_coefs.weight, predicted[-1], K - 1, implementation="plain")
    new = correct(predicted, y, g, K - 1, implementation="plain")
    want = module.correct(predicted, y)
    torch.testing.assert_close(new, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(active, want[-1], rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused():
    x, y = torch.zeros(2, 3, 8), torch.zeros(3, 8)
    maps = Router(torch.zeros(2, 8), torch.ones(8), EPS)
    with pytest.raises(UserError, match="active=2"):
        predict(x, maps, torch.zeros(4, 2), 2)
    with pytest.raises(UserError, match=r"A \[3, 2\]"):
        predict(x, maps, torch.zeros(3, 2), 0)
    with pytest.raises(UserError, match=r"C \[3, 3\]"):
        correction(y, maps, torch.zeros(3, 3))
    with pytest.raises(UserError, match=r"g \[3, 3\]"):
        correct(x, y, torch.zeros(3, 3), 0)
    with pytest.raises(UserError, match="implementation='fast'"):
        correct(x, y, torch.zeros(3, 2), 0, implementation="fast")
    with pytest.raises(UserError, match=r"float64"):
        correct(x.double(), y.double(), torch.zeros(3, 2), 0, implementation="triton")


def test_magnitudes_that_do_not_fit_are_refused():
    h = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    p = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda h, p: match_magnitudes(h, [p], False), (h, p))
    matched = match_magnitudes(h, [p], False)
    torch.testing.assert_close(matched[1].norm(dim=-1), h.norm(dim=-1))
    torch.testing.assert_close(match_magnitudes(h, [p], True), matched.mean(dim=0))
    with pytest.raises(UserError, match="do not fit"):
        match_magnitudes(h, [], False)


@pytest.mark.parametrize("sparsity", [0.0, 0.95])
def test_the_gate_is_hugging_faces(sparsity):
    from transformers import Gemma3nTextConfig
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

    sizes = {"hidden_size": 12, "num_attention_heads": 1, "intermediate_size": 200, "num_hidden_layers": 1}
    module = Gemma3nTextMLP(Gemma3nTextConfig(**sizes, activation_sparsity_pattern=[sparsity]))
    x = random(2, 3, 12, device="cpu")
    out = module.down_proj(gated(module.gate_proj(x), module.up_proj(x), sparsity))
    torch.testing.assert_close(out, module(x), rtol=1e-5, atol=1e-6)
    weights = [x, *module.parameters()]
    for one, other in zip(
        *(torch.autograd.grad(y.square().sum(), weights) for y in (out, module(x))), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    with pytest.raises(UserError, match=r"sparsity=1\.5 do not fit"):
        gated(x, x, 1.5)


@runs_kernel
@pytest.mark.parametrize(("d", "dtype"), [(1100, torch.float32), (40, torch.bfloat16), (3000, torch.bfloat16)])
@pytest.mark.parametrize("sparsity", [0.0, 0.6, 0.95])
def test_gated(d, dtype, sparsity, poisoned):
    """Off centre; a token of equal numbers has no deviation, and none of them lies above it."""
    gate = (random(2, 2, d, dtype=dtype) + 3).detach()
    gate[0, 1] = 0.75
    inputs = [gate.requires_grad_(), random(2, 2, d, dtype=dtype)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact, made = gated(*wide, sparsity, "plain"), gated(*inputs, sparsity, "triton")
    upstream = torch.randn_like(exact).to(dtype)
    want = torch.autograd.grad(exact, wide, upstream.double())
    got = torch.autograd.grad(made, inputs, upstream)
    for one, other in zip([made, *got], [exact, *want], strict=True):
        assert one.dtype == dtype
        assert distance(one, torch.nan_to_num(other)) < 3 * max(TOLERANCE[dtype], SUM_TOLERANCE)


@runs_kernel
@pytest.mark.parametrize("sparsity", [0.0, 0.6])
def test_the_gate_with_the_map_behind_it(sparsity, poisoned):
    inputs = [random(2, 3, 72), random(2, 3, 72), random(20, 72)]
    one, other = (
        [made, *torch.autograd.grad(made.square().sum(), inputs)]
        for made in (
            gated_linear(*inputs, sparsity, "triton"),
            F.linear(gated(*inputs[:2], sparsity, "triton"), inputs[2]),
        )
    )
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"weight \[20, 72\]"):
        gated_linear(*(t[..., :9] for t in inputs[:2]), inputs[2])


def positions(batch, tokens, D, device=DEVICE, dtype=torch.float32):
    """Two different halves, so that one taken for the other shows."""
    return [torch.randn(batch, tokens, D, device=device).to(dtype) for _ in range(2)]


def test_norm_and_rotary_positions_are_hugging_faces():
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm, apply_rotary_pos_emb

    norm = Gemma3nRMSNorm(8, eps=EPS)
    torch.nn.init.normal_(norm.weight)
    x = random(2, 5, 3, 8, device="cpu")
    for rows in (1, 2):
        cos, sin = positions(rows, 5, 8, "cpu")
        want = apply_rotary_pos_emb(norm(x), cos, sin, unsqueeze_dim=2)
        torch.testing.assert_close(norm_rotary(x, norm.weight, EPS, cos, sin), want)
    short = (t[:, :3] for t in positions(1, 5, 8, "cpu"))
    with pytest.raises(UserError, match="do not fit"):
        norm_rotary(x, norm.weight, EPS, *short)


@runs_kernel
@pytest.mark.parametrize(
    ("shape", "dtype", "batch", "of_places"),
    [
        ((2, 5, 3, 8), torch.float32, 1, torch.float32),
        ((2, 3, 2, 24), torch.float32, 2, torch.float32),
        ((1, 3, 8, 256), torch.bfloat16, 1, torch.bfloat16),
        ((2, 3, 2, 24), torch.bfloat16, 2, torch.float32),
    ],
)
def test_norm_and_rotary_positions(shape, dtype, batch, of_places, poisoned):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    cos, sin = positions(batch, shape[1], shape[-1], dtype=of_places)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = norm_rotary(*wide, EPS, cos.double(), sin.double(), "plain")
    made = norm_rotary(x, weight, EPS, cos, sin, "triton")
    upstream = torch.randn_like(exact).to(dtype)
    want = torch.autograd.grad(exact, wide, upstream.double())
    got = torch.autograd.grad(made, [x, weight], upstream)
    for one, other in zip([made, *got], [exact, *want], strict=True):
        assert one.dtype == dtype
        assert distance(one, other) < 3 * max(TOLERANCE[dtype], SUM_TOLERANCE)


def test_additions_are_a_layers_of_hugging_face():
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm

    norms = [Gemma3nRMSNorm(8, eps=EPS) for _ in range(3)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    of_a, of_r, of_sum = norms
    x, a, n, r = (random(2, 5, 8, device="cpu") for _ in range(4))
    want = ((x + of_a(a)) + (n + of_r(r))) / 2**0.5
    out, normed = residual(x, a, of_a.weight, EPS, n, r, of_r.weight, of_sum.weight)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(normed, of_sum(want))
    alone, nothing = residual(x, a, of_a.weight, EPS)
    torch.testing.assert_close(alone, x + of_a(a))
    assert nothing is None
    with pytest.raises(UserError, match="do not fit"):
        residual(x, a[:, :3], of_a.weight, EPS)
    with pytest.raises(UserError, match="all or none"):
        residual(x, a, of_a.weight, EPS, n)


@runs_kernel
@pytest.mark.parametrize(
    ("shape", "dtype", "weight_dtype", "of_maps"),
    [
        ((2, 3, 17), torch.float32, torch.float32, torch.float32),
        ((5, 300), torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ((700, 2048) if DEVICE == "cuda" else (3, 64), torch.bfloat16, torch.float32, torch.bfloat16),
        ((5, 300), torch.float32, torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_additions_with_the_norms_around_them(shape, dtype, weight_dtype, of_maps, whole, poisoned):
    """Under autocast what linear maps made (`of_maps`) is narrower than the rest."""
    x, n = (random(*shape, dtype=dtype) for _ in range(2))
    a, r = (random(*shape, dtype=of_maps) for _ in range(2))
    of_a, of_r, of_sum = (random(shape[-1], dtype=weight_dtype) for _ in range(3))
    inputs = [x, a, of_a, *((n, r, of_r, of_sum) if whole else ())]
    wide = [t.detach().double().requires_grad_() for t in inputs]

    def run(kind, x, a, of_a, *rest):
        made = residual(x, a, of_a, EPS, *rest, implementation=kind)
        return [t for t in made if t is not None]

    exact, made = run("plain", *wide), run("triton", *inputs)
    upstream = [torch.randn_like(t).to(dtype) for t in exact]
    want = torch.autograd.grad(exact, wide, [u.double() for u in upstream])
    got = torch.autograd.grad(made, inputs, upstream)
    for one, other, like in zip([*made, *got], [*exact, *want], [*made, *inputs], strict=True):
        assert one.dtype == like.dtype
        assert distance(one, other) < 3 * max(TOLERANCE[of_maps], SUM_TOLERANCE)


@runs_kernel
@pytest.mark.parametrize(("shape", "dtype"), [((2, 3, 17), torch.float32), ((5, 300), torch.bfloat16)])
def test_a_norm_that_adds_up_the_gradients_of_its_input(shape, dtype, poisoned):
    inputs = [random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact, made = norm_beside(*wide, EPS, "plain"), norm_beside(*inputs, EPS, "triton")
    upstream = [torch.randn_like(t).to(dtype) for t in exact]
    want = torch.autograd.grad(exact, wide, [u.double() for u in upstream])
    got = torch.autograd.grad(made, inputs, upstream)
    assert torch.equal(made[0], inputs[0])
    for one, other in zip([*made, *got], [*exact, *want], strict=True):
        assert one.dtype == dtype
        assert distance(one, other) < 3 * max(TOLERANCE[dtype], SUM_TOLERANCE)


def by_hand(q, k, v, scale, window, starts=(0,)):
    """Attention within a window and a text, token by token."""
    out = torch.empty_like(q)
    for token in range(q.shape[1]):
        first = max(start for start in starts if start <= token)
        seen = slice(max(first, token - window + 1), token + 1)
        for head in range(q.shape[2]):
            of = head * k.shape[2] // q.shape[2]
            scores = torch.einsum("bd,bsd->bs", q[:, token, head], k[:, seen, of]) * scale
            out[:, token, head] = torch.einsum("bs,bsd->bd", scores.softmax(-1), v[:, seen, of])
    return out


@pytest.mark.parametrize("window", [1, 3, 6, 20])
def test_attention_within_a_window(window):
    q, k, v = random(2, 6, 4, 8, device="cpu"), random(2, 6, 2, 8, device="cpu"), random(2, 6, 2, 8, device="cpu")
    torch.testing.assert_close(causal_attention(q, k, v, 0.7, window), by_hand(q, k, v, 0.7, window))
    with pytest.raises(UserError, match="window=0"):
        causal_attention(q, k, v, 0.7, 0)
    with pytest.raises(UserError, match="do not fit"):
        causal_attention(q, k[:, :3], v[:, :3], 0.7, window)


def ends(starts, device="cpu"):
    return Segments(torch.tensor(starts, dtype=torch.int32, device=device), max(starts))


@pytest.mark.parametrize("window", [None, 3])
def test_attention_within_texts_end_to_end(window):
    """One of them empty."""
    q, k, v = (random(1, 9, heads, 8, device="cpu") for heads in (4, 2, 2))
    starts = (0, 2, 2, 6, 9)
    made = causal_attention(q, k, v, 0.7, window, ends(starts))
    torch.testing.assert_close(made, by_hand(q, k, v, 0.7, window or 9, starts[:-1]))
    with pytest.raises(UserError, match="do not fit"):
        causal_attention(*(x.expand(2, -1, -1, -1) for x in (q, k, v)), 0.7, window, ends(starts))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "D"), [(1000, 256), (300, 64)])
@pytest.mark.parametrize(("window", "starts"), [(128, None), (128, (0, 5, 5, 250, 300)), (None, (0, 5, 250, 300))])
def test_flash_attention_within_windows_and_texts(tokens, D, window, starts):
    """No further from float64 than SDPA with a mask, which rounds as it does."""
    torch.manual_seed(0)
    segments = None if starts is None else ends((*starts[:-1], tokens), DEVICE)
    rows = 2 if starts is None else 1
    inputs = [random(rows, tokens, heads, D, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    upstream = torch.randn(rows, tokens, 8, D, device=DEVICE).bfloat16()
    wide = [t.detach().double().requires_grad_() for t in inputs]
    errors = {}
    exact = causal_attention(*wide, D**-0.5, window, segments, "plain")
    want = [exact, *torch.autograd.grad(exact, wide, upstream.double())]
    for kind in ("plain", "triton"):
        made = causal_attention(*inputs, D**-0.5, window, segments, kind)
        got = [made, *torch.autograd.grad(made, inputs, upstream)]
        errors[kind] = [distance(one, other) for one, other in zip(got, want, strict=True)]
    assert all(ours < 1.5 * theirs for ours, theirs in zip(errors["triton"], errors["plain"], strict=True)), errors


@runs_kernel
@pytest.mark.parametrize("K", fewer([2, 4, 7], range(2, 9)))
def test_every_number_of_blocks(K, poisoned):
    compare(*problem(K, (1, 17)), active=0)
    compare(*problem(K, (1, 17)), active=K - 1, stacked=True)


@runs_kernel
@pytest.mark.parametrize(("tokens", "d"), fewer([(1, 3), (2, 129), (1, 300)], [(5, 769), (3, 2048), (70, 48)]))
def test_odd_sizes(tokens, d, poisoned):
    compare(*problem(2, (1, tokens, d)), active=1)


@runs_kernel
@pytest.mark.parametrize(("branch", "scale"), [(False, False), (True, False), (False, True)])
def test_what_can_be_left_out(branch, scale, poisoned):
    compare(*problem(3, branch=branch, scale=scale), active=1)


@runs_kernel
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_dtypes(dtype, weight_dtype, poisoned):
    """Between the three functions results are rounded to the state's dtype, and g is large here."""
    compare(*problem(4, (2, 3, 48), dtype, weight_dtype), active=2, tolerance=2e-2)


@runs_kernel
@pytest.mark.parametrize(
    ("K", "d", "dtype"), [(2, 17, torch.float32), (4, 300, torch.float32), (3, 48, torch.bfloat16)]
)
@pytest.mark.parametrize("mean", [False, True])
def test_matched_magnitudes(K, d, dtype, mean, poisoned):
    """A token of zeros has no direction, and a tiny projection is not blown up."""
    blocks = [random(1, 3, d, dtype=dtype).detach() for _ in range(K)]
    blocks[1][0, 1] *= 1e-4
    blocks[0][0, 2] = 0
    blocks = [block.requires_grad_() for block in blocks]
    wide = [block.detach().double().requires_grad_() for block in blocks]
    exact = match_magnitudes(wide[0], wide[1:], mean, "plain")
    made = match_magnitudes(blocks[0], blocks[1:], mean, "triton")
    upstream = torch.randn_like(exact).to(dtype)
    want = torch.autograd.grad(exact, wide, upstream.double())
    got = torch.autograd.grad(made, blocks, upstream)
    for one, other in zip([made, *got], [exact, *want], strict=True):
        assert one.dtype == dtype
        assert distance(one, other) < 3 * max(TOLERANCE[dtype], SUM_TOLERANCE)


@runs_kernel
def test_frozen_weights_cost_nothing_and_change_nothing(poisoned):
    blocks, *rest = problem(2)
    upstream = torch.randn(2, *blocks[0].shape, device=DEVICE)
    want = torch.autograd.grad(
        layer(blocks, *rest, active=0, implementation="triton")[-1], [*blocks, rest[0]], upstream
    )
    frozen = [rest[0], *(t.detach() for t in rest[1:])]
    got = torch.autograd.grad(
        layer(blocks, *frozen, active=0, implementation="triton")[-1], [*blocks, rest[0]], upstream
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@runs_kernel
def test_autocast_rounds_nothing():
    blocks, *rest = problem(2, (1, 20))

    def run():
        made = layer(blocks, *rest, active=1, implementation="triton")
        return [*made, *torch.autograd.grad(made[-1].square().sum(), [*blocks, *rest])]

    want = run()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        product = torch.ones(2, 2, device=DEVICE) @ torch.ones(2, 2, device=DEVICE)
        got = run()
    assert product.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@runs_kernel
def test_the_operators_are_what_pytorch_takes_them_for():
    from altup.kernels.gemma3n import (
        coefficients_kernels,
        correct_kernels,
        ends_kernels,
        gate_kernels,
        predict_kernels,
        residual_kernels,
        rotary_kernels,
    )

    blocks, y, branch, router, norm, A, C, scale, branch_norm = problem(2, (2, 5))
    check_operator(predict_kernels.predict, blocks, router, norm, EPS, A, 1, False)
    check_operator(
        predict_kernels.predict, [torch.stack(blocks)], router, norm, EPS, A, 1, True, checks=CHEAP_CHECKS
    )
    g, weight = random(2, 2), random(3, 5)
    check_operator(coefficients_kernels.correction, y, router, norm, EPS, C, blocks[0], scale, 0)
    check_operator(coefficients_kernels.correction, y, router, norm, EPS, C, None, None, 0, checks=CHEAP_CHECKS)
    check_operator(correct_kernels.correct, blocks, y, g, branch, branch_norm, 0, EPS)
    check_operator(correct_kernels.correct, [torch.stack(blocks)], y, g, None, None, 1, EPS, checks=CHEAP_CHECKS)
    check_operator(gate_kernels.gate, y, branch, 0.3)
    check_operator(gate_kernels.gate, y, branch, None, checks=CHEAP_CHECKS)
    check_operator(gate_kernels.gated_linear, y, branch, weight, 0.3)
    check_operator(rotary_kernels.rotary, random(1, 3, 2, 4), random(4), *positions(1, 3, 4), EPS)
    norm, other, last = (random(5) for _ in range(3))
    check_operator(residual_kernels.residual, y, branch, norm, blocks[0], blocks[1], other, last, EPS)
    check_operator(residual_kernels.residual, y, branch, norm, None, None, None, None, EPS, checks=CHEAP_CHECKS)
    check_operator(residual_kernels.residual, y.detach(), *[None] * 5, norm.detach(), EPS, checks=CHEAP_CHECKS)
    check_operator(ends_kernels.match, y, blocks, False, checks=CHEAP_CHECKS)
    check_operator(ends_kernels.match, y, blocks, True, checks=CHEAP_CHECKS)


@runs_kernel
def test_compiled_it_is_the_same():
    blocks, *rest = problem(2, (2, 5))

    def run(blocks, *rest):
        return layer(blocks, *rest, active=1, implementation="triton")

    compiled = torch.compile(run, backend=BACKEND, fullgraph=True)
    inputs = [*blocks, *rest]
    want = torch.autograd.grad(run(blocks, *rest)[-1].square().sum(), inputs)
    got = torch.autograd.grad(compiled(blocks, *rest)[-1].square().sum(), inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@runs_kernel
def test_compiled_additions_are_the_same():
    x, a, r = (random(2, 5) for _ in range(3))
    norms = [random(5) for _ in range(3)]
    inputs = [x, a, r, *norms]

    def run(x, a, r, of_a, of_r, of_sum):
        x, n = norm_beside(x, of_sum, EPS, "triton")
        out, normed = residual(x, a, of_a, EPS, n, r, of_r, of_sum, "triton")
        return (out * normed).square().sum() + n.square().sum()

    compiled = torch.compile(run, backend=BACKEND, fullgraph=True)
    want, got = (torch.autograd.grad(one(*inputs), inputs) for one in (run, compiled))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@runs_kernel
def test_a_whole_model():
    """Loss and all gradients of a tiny Gemma 3n on the kernels."""
    model = tiny_gemma(2, 1, layers=2, altup_coef_clip=0.3).to(DEVICE)
    ours = accelerated(model, "triton")
    data = {name: value.to(DEVICE) for name, value in batch(1, 3).items()}
    data["labels"][0, 1:] = data["input_ids"][0, 1:]
    assert_same(model, ours, data, tolerance=1e-5 if DEVICE == "cpu" else 5e-5)  # a GPU's products differ too


@runs_kernel
@pytest.mark.parametrize("remake", [False, True])
def test_through_the_dispatcher_a_whole_model_has_the_same_bits(remake, monkeypatch):
    ours = accelerated(tiny_gemma(2, 1, layers=2).to(DEVICE), "triton", remake=remake)
    data = {name: value.to(DEVICE) for name, value in batch(1, 3).items()}
    results = []
    for unwatched in (operators.is_unwatched, lambda first: False):
        monkeypatch.setattr(operators, "is_unwatched", unwatched)
        loss, slopes = gradients(ours, data)
        results.append([loss, *(slope.clone() for slope in slopes.values() if slope is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def types(K, pointer="*bf16"):
    """Of all arguments of the kernels, by name."""
    blocks = ("outs", "xs", "dxs", "grads", "predicted")
    numbers = ("routed", "inverses", "dc", "d_routed", "g", "dg", "d_g", "sums")
    block = ("y", "z", "dz", "dy", "d_predicted", "branch", "d_branch", "weight", "norm", "A", "C", "scale")
    return {
        **dict.fromkeys(blocks, (pointer,) * K),
        **dict.fromkeys(numbers, "*fp32"),
        **dict.fromkeys(block, pointer),
        "d": "i32",
        "eps": "fp32",
        **dict.fromkeys(("projected", "d_projected"), (pointer,) * (K - 1)),
        **dict.fromkeys(("h", "dh"), pointer),
        **dict.fromkeys(("gate", "up", "d_gate", "d_up", "out", "grad"), pointer),
        **dict.fromkeys(("sizes", "stats"), "*fp32"),
        "deviations": "fp32",
        "smallest": "fp32",
    }


@pytest.mark.parametrize(
    ("module", "name", "loads", "stores"),
    [
        ("predict", "_forward_kernel", 10, 4),  # x twice for the active block, router and norm; x̂
        ("predict", "_backward_kernel", 18, 4),
        ("coefficients", "_forward_kernel", 9, 1),
        ("coefficients", "_backward_kernel", 12, 2),
        ("correct", "_forward_kernel", 8, 4),
        ("correct", "_backward_kernel", 13, 3),
        ("gate", "_forward_kernel", 4, 1),
        ("gate", "_backward_kernel", 6, 3),
        ("ends", "_forward_kernel", 8, 4),
        ("ends", "_backward_kernel", 14, 4),
    ],
)
def test_kernels_move_16_bytes_at_a_time_and_spill_nothing(module, name, loads, stores, hopper):
    kernels = importlib.import_module(f"altup.kernels.gemma3n.{module}_kernels")
    config = kernels.BACKWARD if "backward" in name else kernels.FORWARD
    kernel = getattr(kernels, name)
    given = types(4) | {
        "ACTIVE": 0,
        "K": 4,
        "BLOCK": 8 * 32 * config.warps * config.vectors,
        "WIDTH": 8,
        "MEAN": False,
        "SPARSE": True,
    }
    if (module, name) != ("correct", "_forward_kernel"):
        given["predicted"] = "*bf16"  # the active block alone
    given = {argument: given[argument] for argument in kernel.arg_names}
    compiled = hopper.build(kernel, given, divisible=("d",), num_warps=config.warps)
    assert not hopper.spills(compiled)
    assert compiled.asm["ptx"].count("ld.global.v4") == loads
    assert compiled.asm["ptx"].count("st.global.v4") == stores


@pytest.mark.parametrize(("name", "loads", "stores"), [("_forward_kernel", 8, 2), ("_backward_kernel", 10, 2)])
def test_heads_of_256_too(name, loads, stores, hopper):
    kernels = importlib.import_module("altup.kernels.gemma3n.rotary_kernels")
    kernel = getattr(kernels, name)
    numbers = dict.fromkeys(("rows", "heads", "period", "D"), "i32") | {"eps": "fp32", "sums": "*fp32"}
    tiles = {"ROWS": kernels.HEADS, "HALF": 128}
    arrays = dict.fromkeys(("out", "x", "weight", "cos", "sin", "grad", "dx"), "*bf16")
    given = {argument: {**arrays, **numbers, **tiles}[argument] for argument in kernel.arg_names}
    compiled = hopper.build(kernel, given, divisible=("D", "rows"), num_warps=kernels.WARPS)
    assert not hopper.spills(compiled)
    assert compiled.asm["ptx"].count("ld.global.v4") == loads
    assert compiled.asm["ptx"].count("st.global.v4") >= stores


@pytest.mark.parametrize(("name", "loads", "stores"), [("_forward_kernel", 7, 2), ("_backward_kernel", 8, 3)])
def test_additions_too(name, loads, stores, hopper):
    kernels = importlib.import_module("altup.kernels.gemma3n.residual_kernels")
    kernel = getattr(kernels, name)
    numbers = {"d": "i32", "tokens": "i32", "eps": "fp32", "sums": "*fp32", "inverses": "*fp32", "BLOCK": 2048}
    given = {argument: numbers.get(argument, "*bf16") for argument in kernel.arg_names}
    compiled = hopper.build(kernel, given, divisible=("d", "tokens"), num_warps=kernels._tile(2048)["num_warps"])
    assert not hopper.spills(compiled)
    assert compiled.asm["ptx"].count("ld.global.v4") == loads
    assert compiled.asm["ptx"].count("st.global.v4") >= stores

"""Linear maps in fp8: the definition against float64, and kernels and products of a GPU against the definition."""

from __future__ import annotations

import re

import pytest
import torch
from torch import library

from altup.core.errors import UserError
from altup.kernels import fp8
from altup.kernels.attention import PEAKS, attention
from altup.kernels.fp8 import functions, op, reference, self_test
from altup.kernels.fp8.reference import (
    GRADIENT,
    VALUE,
    geglu_backward_reference,
    geglu_reference,
    geglu_scales_reference,
    parts_of,
    power_of_two,
    product_reference,
    quantize_reference,
)
from tests.kernels.interpreter import (
    BACKEND,
    CHEAP_CHECKS,
    DEVICE,
    INTERPRETED,
    check_operator,
    needs_gpu,
    runs_kernel,
)

# Half of the last bit of the mantissa, relative to the smallest number of a binade.
ROUNDING = {VALUE: 2.0**-4, GRADIENT: 2.0**-3}
# The same as a root mean square over a binade, to which errors of many independent terms come.
NOISE = {VALUE: 0.027, GRADIENT: 0.054}


def distance(got, want):
    want = want.detach().double()
    return float((got.detach().double() - want).norm() / want.norm())


def bits(x):
    return x.view(torch.uint8).cpu()


@pytest.mark.parametrize("dtype", [VALUE, GRADIENT])
def test_numbers_of_any_size_are_rounded_to_the_nearest(dtype):
    for size in (1e-25, 1e-6, 1.0, 3e4, 1e25):
        x = size * torch.randn(50, 40)
        scale = power_of_two(x.abs().amax(), dtype)
        assert torch.frexp(scale).mantissa == 0.5
        back = quantize_reference(x, scale, dtype).float() * scale
        large = x.abs() > x.abs().amax() / 2**10  # below, e4m3 runs out of exponents
        assert ((back - x).abs() / x.abs())[large].amax() <= ROUNDING[dtype]
        assert x.abs().amax() / scale > torch.finfo(dtype).max / 2 / (1 + ROUNDING[dtype])


def test_zeros_stay_and_what_is_not_finite_shows():
    for value in (float("nan"), float("inf")):
        x = torch.ones(16, 16)
        x[3, 5] = value
        y = fp8.fp8_linear(x, [torch.ones(16, 16)])[0]
        assert not y[3].isfinite().any()
    zero = fp8.fp8_linear(torch.zeros(16, 16), [torch.ones(16, 16)])[0]
    assert torch.equal(zero, torch.zeros(16, 16))


def problem(m=64, k=96, sizes=(32, 48), dtype=torch.float32, device="cpu"):
    """Activations of which some are large, weights as at the start, and gradients whose rows differ in size."""
    x = torch.randn(2, m // 2, k) * torch.exp(torch.randn(k))
    weights = [torch.randn(n, k) * k**-0.5 for n in sizes]
    grads = [torch.randn(2, m // 2, n) * torch.exp(2 * torch.randn(2, m // 2, 1)) * 1e-5 for n in sizes]
    x, *rest = (t.to(device, dtype) for t in (x, *weights, *grads))
    weights = [w.requires_grad_() for w in rest[: len(sizes)]]
    return x.requires_grad_(), weights, rest[len(sizes) :]


def linear_double(x, weights, grads):
    """Outputs and gradients in float64."""
    x, *weights = (t.detach().double().requires_grad_() for t in (x, *weights))
    out = [x @ w.t() for w in weights]
    return out, torch.autograd.grad(out, [x, *weights], [g.double() for g in grads])


def test_linear_maps_and_gradients_are_off_by_no_more_than_rounding():
    """Each factor is off by its own noise, so a product is by the root of the sum of their squares."""
    x, weights, grads = problem(m=256, k=256, sizes=(128, 64))
    out = fp8.fp8_linear(x, weights)
    got = torch.autograd.grad(out, [x, *weights], grads)
    want_out, want = linear_double(x, weights, grads)
    for a, b in zip(out, want_out, strict=True):
        assert 0.5 * NOISE[VALUE] < distance(a, b) < 1.1 * (2 * NOISE[VALUE] ** 2) ** 0.5
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert 0.5 * NOISE[GRADIENT] < distance(a, b) < 1.1 * (NOISE[VALUE] ** 2 + NOISE[GRADIENT] ** 2) ** 0.5


def test_gradients_keep_their_length():
    """Along the true gradient they are shorter by the square of the noise, as anything rounded to the nearest, and
    by no more."""
    x, weight, grad = torch.randn(512, 256), torch.randn(256, 256) / 16, 1e-5 * torch.randn(512, 256)
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    got = torch.autograd.grad(fp8.fp8_linear(x, [weight]), inputs, grad)
    for a, b in zip(got, linear_double(x, [weight], [grad])[1], strict=True):
        along = float((a.double() * b).sum() / (b * b).sum())
        assert abs(along - 1 + distance(a, b) ** 2) < 1.5e-3


def feed_forward(m=64, k=32, n=48, dtype=torch.float32, device="cpu"):
    x = torch.randn(m, k)
    weights = [torch.randn(n, k) * 1.5 * k**-0.5, torch.randn(n, k) * k**-0.5, torch.randn(k, n) * n**-0.5]
    grad = torch.randn(m, k) * torch.exp(torch.randn(m, 1)) * 1e-6
    *inputs, grad = (t.to(device, dtype) for t in (x, *weights, grad))
    return [t.requires_grad_() for t in inputs], grad


def feed_forward_double(inputs):
    x, wi_0, wi_1, wo = (t.detach().double().requires_grad_() for t in inputs)
    return [x, wi_0, wi_1, wo], (
        torch.nn.functional.gelu(x @ wi_0.t(), approximate="tanh") * (x @ wi_1.t())
    ) @ wo.t()


def test_a_feed_forward_and_its_gradients_are_off_by_no_more_than_rounding():
    inputs, grad = feed_forward(m=256, k=128, n=192)
    out = fp8.fp8_feed_forward(*inputs)
    got = torch.autograd.grad(out, inputs, grad)
    exact, want_out = feed_forward_double(inputs)
    assert distance(out, want_out) < 0.08
    for a, b in zip(got, torch.autograd.grad(want_out, exact, grad.double()), strict=True):
        assert distance(a, b) < 0.13
        assert abs(float((a.double() * b).sum() / (b * b).sum()) - 1) < 0.03


def test_a_bound_that_is_too_large_costs_little():
    """As that of a norm is: √width · max |weight|, where the largest number is a fifth of it."""
    x, weights, _ = problem(m=256, k=256, sizes=(128,))
    x = torch.nn.functional.rms_norm(x.detach(), (256,))
    want = x.double() @ weights[0].double().t()
    exact, bounded = (fp8.fp8_linear(x, weights, bound)[0] for bound in (None, torch.tensor(16.0)))
    assert distance(bounded, want) < 1.1 * distance(exact, want)


def test_the_bound_of_a_feed_forwards_gradient_holds_and_leaves_room_for_small_ones():
    """Nothing is cut off, and hardly anything becomes zero that was not."""
    inputs, grad = feed_forward(m=256, k=128, n=192)
    seen = []
    backward = op.geglu_backward_op

    def spy(*given):
        seen.append(backward(*given))
        return seen[-1]

    functions.geglu_backward_op = spy
    try:
        torch.autograd.grad(fp8.fp8_feed_forward(*inputs), inputs, grad)
    finally:
        functions.geglu_backward_op = backward
    q = seen[0][0].float().abs()
    assert q.amax() < torch.finfo(GRADIENT).max
    assert (q == 0).float().mean() < 1e-3
    assert torch.equal(bits(seen[0][1]), bits(seen[0][0]).t())


def test_a_device_is_tried_before_it_trains(monkeypatch):
    """And a wrong kernel shows: every fourth number of the transposed gradient taken from elsewhere."""
    device = torch.device("cpu")
    self_test.fused_error.cache_clear()
    assert 0 < self_test.products_error(device) < self_test.ALLOWED / 2
    assert 0 < self_test.fused_error(device) < self_test.ALLOWED / 1.5
    self_test.fused_error.cache_clear()

    def wrong(*given):
        q, transposed, hidden = op.geglu_backward_op(*given)
        transposed.view(torch.uint8)[1::4] = 0x70
        return q, transposed, hidden

    monkeypatch.setattr(functions, "geglu_backward_op", wrong)
    assert self_test.fused_error(device) > self_test.ALLOWED
    self_test.fused_error.cache_clear()


def test_sizes_that_do_not_fit_are_known():
    weight = torch.zeros(32, 48)
    assert fp8.fits_fp8(torch.zeros(2, 8, 48), weight)
    assert not fp8.fits_fp8(torch.zeros(2, 9, 48), weight)
    assert not fp8.fits_fp8(torch.zeros(2, 8, 48), weight, torch.zeros(30, 48))


def test_old_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(UserError, match=r"8\.9 or more.*NVIDIA A100 has 8\.0; take 'bf16'"):
        fp8.check_fp8(torch.device("cuda"))
    fp8.check_fp8(torch.device("cpu"))


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tensors", [1, 3])
def test_the_kernel_finds_the_largest_number(poisoned, dtype, tensors):
    from altup.kernels.fp8 import triton as kernels

    parts = [torch.randn(37, 1000, device=DEVICE).to(dtype) for _ in range(tensors)]
    out = torch.empty(tensors, parts_of(37_000, tensors), device=DEVICE)
    for n, part in enumerate(parts):
        part[20, 7 + n] = -9 - n
    kernels.largest(out, parts, dtype)
    assert out.amax(1).tolist() == [9 + n for n in range(tensors)]
    parts[-1][30, 2] = float("nan")
    kernels.largest(out, parts, dtype)
    assert out[-1].isnan().any()
    assert not out[:-1].isnan().any()


@runs_kernel
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_the_kernel_casts_to_both_layouts(poisoned, gradient, known):
    """Side by side: two alike, one that is not, and one cut out of a larger matrix."""
    whole = torch.randn(80, 200, device=DEVICE).bfloat16()
    parts = [torch.randn(80, 48, device=DEVICE).bfloat16() for _ in range(2)]
    parts += [torch.randn(80, 80, device=DEVICE).bfloat16(), whole[:, :176]]
    largest = torch.stack([part.abs().amax().float() for part in parts])
    q, transposed, scale = op.cast_op(parts, largest if known else None, torch.bfloat16, gradient)
    dtype = GRADIENT if gradient else VALUE
    assert scale == power_of_two(largest.amax(), dtype)
    want = quantize_reference(torch.cat(parts, dim=1), scale, dtype)
    assert torch.equal(bits(q), bits(want))
    assert torch.equal(bits(transposed), bits(want).t())


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_casts_weights_one_below_the_other(poisoned, dtype):
    """Whole tiles and parts of tiles, from masters of 32 bits, which bf16 rounds first."""
    weights = [torch.randn(m, 192, device=DEVICE).to(dtype) for m in (128, 128, 80)]
    q, transposed, scale = op.cast_op(weights, None, torch.bfloat16, False, True)
    whole = torch.cat(weights).bfloat16()
    assert scale == power_of_two(whole.abs().amax(), VALUE)
    want = quantize_reference(whole, scale, VALUE)
    assert torch.equal(bits(q), bits(want))
    assert torch.equal(bits(transposed), bits(want).t())


@runs_kernel
@pytest.mark.parametrize(("dtype", "m"), [(torch.float32, 128), (torch.bfloat16, 80)])
def test_many_weights_are_rounded_as_one_by_one(poisoned, dtype, m):
    """Three groups of two, of sizes that differ, in whole tiles and parts of them."""
    weights = [torch.randn(m, 192, device=DEVICE).to(dtype) * 10**n for n in range(6)]
    groups = functions.round_many_weights(weights, 2, torch.bfloat16)
    assert len(groups) == 3
    for n, got in enumerate(groups):
        want = functions.round_weights(weights[2 * n : 2 * n + 2], torch.bfloat16)
        assert got.scale == want.scale
        assert all(x.data_ptr() % 16 == 0 for x in got)  # as cuBLAS takes them
        assert torch.equal(bits(got.q), bits(want.q))
        assert torch.equal(bits(got.transposed), bits(want.transposed))


@runs_kernel
def test_the_kernel_transposes_bytes(poisoned):
    q = torch.randn(80, 208, device=DEVICE).to(VALUE)
    assert torch.equal(bits(op.transpose_op(q)), bits(q).t())


@runs_kernel
def test_the_casting_kernel_lets_what_is_not_finite_show():
    for value in (float("nan"), float("inf")):
        x = torch.ones(16, 16, device=DEVICE)
        x[3, 5] = value
        q, _, scale = op.cast_op([x], None, x.dtype, False)
        assert (q.float() * scale)[3, 5].isnan()


@runs_kernel
def test_the_kernels_of_the_feed_forward_compute_the_definition(poisoned):
    """Up to single numbers on the border of two roundings, where GELU is rounded differently."""
    h = 2 * torch.randn(80, 2 * 176, device=DEVICE).bfloat16()
    got, want = op.geglu_op(h), geglu_reference(h)
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-5, atol=0)
    assert (bits(got[0]) == bits(want[0])).float().mean() > 0.998
    assert distance(got[0].float(), want[0].float()) < 2e-3
    grad = 1e-4 * torch.randn(80, 176, device=DEVICE).bfloat16()
    sizes = 1e-4 * torch.rand(80, device=DEVICE), torch.rand(5000, device=DEVICE)
    scales = op.geglu_scales_op(*sizes, want[2])
    torch.testing.assert_close(scales, geglu_scales_reference(*sizes, want[2]), rtol=0, atol=0)
    scales = scales[0], power_of_two(grad.abs().amax() * 20, GRADIENT)
    got, want = op.geglu_backward_op(grad, h, *scales), geglu_backward_reference(grad, h, *scales)
    for a, b in zip(got, want, strict=True):
        assert (bits(a) == bits(b)).float().mean() > 0.99
        assert distance(a.float(), b.float()) < 4e-3
    assert torch.equal(bits(got[0]).t(), bits(got[1]))


@runs_kernel
def test_operators_are_well_behaved():
    x = torch.randn(16, 32, device=DEVICE).bfloat16()
    one = torch.ones((), device=DEVICE)
    low = op.cast_op([x], None, x.dtype, False)[0]
    library.opcheck(op.product_op, (low, low, one, one, torch.bfloat16, True), test_utils="test_faketensor")
    check_operator(op.cast_op, [x, x], None, x.dtype, False, True, checks=CHEAP_CHECKS)
    check_operator(op.cast_op, [x, x], x.abs().amax().float().reshape(1), x.dtype, True, checks=CHEAP_CHECKS)
    check_operator(op.geglu_op, x, checks=CHEAP_CHECKS)
    check_operator(op.geglu_backward_op, x[:, :16].contiguous(), x, one, one, checks=CHEAP_CHECKS)


@runs_kernel
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_tells_the_largest_numbers_of_its_gradients(compiled, monkeypatch):
    """Queries, keys and values in fp8, whose gradients are rounded by what the attention's kernels have found: the
    same bit for bit as without them."""
    batch, tokens, heads, width = 2, 48, 2, 16
    dtype = (
        torch.float32 if INTERPRETED else torch.bfloat16
    )  # the interpreter cannot multiply matrices of bfloat16
    x = torch.randn(batch, tokens, 32, device=DEVICE).to(dtype).requires_grad_()
    weights = [(0.2 * torch.randn(32, 32, device=DEVICE)).to(dtype).requires_grad_() for _ in range(3)]
    bias = torch.randn(heads, 2 * tokens - 1, device=DEVICE).requires_grad_()
    grad = 1e-3 * torch.randn(batch, heads, tokens, width, device=DEVICE).to(dtype)

    def run(slots):
        q, k, v, *peaks = fp8.fp8_linear(x, weights, slots=slots)
        parts = (part.unflatten(-1, (heads, width)).transpose(1, 2) for part in (q, k, v))
        peak = peaks[0] if peaks else None
        return attention(*parts, by_distance=bias, implementation="triton", peaks=peak)

    inputs = [x, *weights, bias]
    function = torch.compile(run, backend=BACKEND, fullgraph=True) if compiled else run
    want, got = (torch.autograd.grad(function(slots), inputs, grad) for slots in (0, PEAKS))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    largest = []
    round_gradients = functions.round_gradients

    def spy(parts, peaks=None):
        largest.append((max(part.abs().amax().float() for part in parts), peaks.amax()))
        return round_gradients(parts, peaks)

    monkeypatch.setattr(functions, "round_gradients", spy)
    torch.autograd.grad(run(PEAKS), inputs, grad)
    torch.testing.assert_close(*largest[0], rtol=2**-8, atol=0)  # of 16 bits, and before they were rounded


@runs_kernel
def test_compiled_code_computes_the_same():
    """In one graph, with what comes before and behind."""
    x, weights, _ = problem(dtype=torch.bfloat16, device=DEVICE)
    inputs, grad = feed_forward(dtype=torch.bfloat16, device=DEVICE)

    def run(x, weights, inputs):
        a, b = fp8.fp8_linear(2 * x, weights)
        bounded = fp8.fp8_linear(x.tanh(), weights, x.new_ones(()))[0]
        total = a.sum() + (b * b).mean() + bounded.sum()
        return total, fp8.fp8_feed_forward(inputs[0].tanh(), *inputs[1:], bound=x.new_ones(()))

    wanted = [x, *weights, *inputs]
    results = []
    for function in (run, torch.compile(run, backend=BACKEND, fullgraph=True)):
        total, out = function(x, weights, inputs)
        results.append([out, *torch.autograd.grad([total, out], wanted, [torch.ones_like(total), grad])])
    for a, b in zip(*results, strict=True):
        assert distance(a, b) < 0.05  # a border of two roundings is crossed where sums are rounded elsewhere


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(
    "kernel",
    [
        "largest",
        "cast",
        "transpose",
        "geglu",
        "geglu_peaks",
        "geglu_scales",
        "geglu_backward",
        "largest_many",
        "cast_many",
    ],
)
def test_kernels_compile_for_hopper_without_spilling(hopper, kernel, even):
    from altup.kernels.fp8 import many_triton
    from altup.kernels.fp8 import triton as kernels

    sizes = ("m", "n", "x_stride", "q_stride", "words_stride", "numel")
    rows, columns, warps = {"cast": kernels.CAST, "transpose": kernels.TRANSPOSE}.get(
        kernel.removesuffix("_many"), kernels.GEGLU
    )
    arguments = {
        **dict.fromkeys((*sizes, "rounds", "numbers", "each", "programs"), "i32"),
        **dict.fromkeys(("scale", "largest", "peaks", "hidden_scale", "grad_scale", "rows", "columns"), "*fp32"),
        **dict.fromkeys(("words", "hidden_words"), "*i32"), **dict.fromkeys(("h", "grad"), "*bf16"),
        "ROWS": rows, "COLUMNS": columns, "CHUNK": reference.CHUNK, "BLOCK": 4096, "MOST": 448.0, "NUMBERS": 512,
        "EVEN": even, "BELOW": even, "HALF": even, "parts": ("*fp32" if even else "*bf16",) * 3,
        "out": "*u8" if kernel == "transpose" else "*fp32", "found": "*fp32",
        "q": {"transpose": "*u8", "geglu_backward": "*fp8e5"}.get(kernel, "*fp8e4nv"),
    }  # fmt: skip
    if kernel.endswith("_many"):
        arguments |= {"addresses": "*i64", "like": "*fp32" if even else "*bf16", "parts": "i32", "scales": "*fp32"}
        arguments |= {"apart": "i32"}
    function = getattr(many_triton if kernel.endswith("_many") else kernels, f"{kernel}_kernel")
    given = {name: arguments[name] for name in function.arg_names}
    built = hopper.build(function, given, divisible=sizes, num_warps=warps)
    assert not hopper.spills(built)
    # The stack's register, which nothing here uses: ptxas 12.8 has taken bytes from it (see `four_bytes`).
    assert len(re.findall(r"\bR1\b", hopper._dump(built, "-sass"))) <= 1
    if kernel not in ("largest", "largest_many", "transpose", "geglu_peaks", "geglu_scales"):
        assert "cvt.rn.satfinite.e" in built.asm["ptx"]


@needs_gpu
@pytest.mark.parametrize("tokens", [256, 4096])
def test_products_on_a_gpu_are_those_of_the_definition(tokens):
    """By tensor and by row, in all three layouts of a linear map's products."""
    x = torch.randn(tokens, 768, device="cuda")
    w = torch.randn(512, 768, device="cuda") / 28
    for dtype, fast in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)):
        a, _, scale_a = op.cast_op([x], None, x.dtype, True)
        b, _, scale_b = op.cast_op([w], None, w.dtype, False)
        got = functions.product(a, b, scale_a, scale_b, dtype, fast)
        want = product_reference(a, b, scale_a, scale_b, torch.float32)
        assert got.dtype == dtype
        assert distance(got, want) < 4e-3
    low, _, _ = op.cast_op([x], None, x.dtype, False)
    rows, columns = torch.rand(tokens, 1, device="cuda") + 0.5, torch.rand(1, 512, device="cuda") + 0.5
    got = functions.product(low, b, rows, columns, torch.bfloat16)
    assert distance(got, product_reference(low, b, rows, columns, torch.float32)) < 4e-3


@needs_gpu
def test_a_whole_layer_on_a_gpu_is_as_near_to_float64_as_the_definition():
    x, weights, grads = problem(m=8192, k=768, sizes=(768, 768), dtype=torch.bfloat16, device="cuda")
    got = torch.autograd.grad(fp8.fp8_linear(x, weights), [x, *weights], grads)
    for a, b in zip(got, linear_double(x, weights, grads)[1], strict=True):
        assert distance(a, b) < 0.07
        assert abs(float((a.double() * b).sum() / (b * b).sum()) - 1) < 0.03
    inputs, grad = feed_forward(m=8192, k=768, n=2048, dtype=torch.bfloat16, device="cuda")
    got = torch.autograd.grad(fp8.fp8_feed_forward(*inputs), inputs, grad)
    exact, out = feed_forward_double(inputs)
    for a, b in zip(got, torch.autograd.grad(out, exact, grad.double()), strict=True):
        assert distance(a, b) < 0.13
        assert abs(float((a.double() * b).sum() / (b * b).sum()) - 1) < 0.03

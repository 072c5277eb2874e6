"""The loss over tokens, from logits or from hidden states: every answer compared with float64 arithmetic on the
same rounded inputs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from altup.core.errors import UserError
from altup.kernels import head_sums, token_sums
from altup.kernels.cross_entropy import op
from tests.kernels.interpreter import BACKEND, DEVICE, check_operator, fewer, needs_gpu, runs_kernel
from tests.kernels.updates import distance

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def test_sums_against_torch_and_by_hand():
    logits = torch.randn(3, 7, 11, dtype=torch.float64)
    labels = torch.randint(0, 11, (3, 7))
    labels[0, 4:] = -100
    sums = token_sums(logits, labels, z_loss=0.1)
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    z = correct = tokens = 0
    for row, label in zip(logits.flatten(0, 1), labels.flatten(), strict=True):
        if label == -100:
            continue
        z += math.log(sum(math.exp(v) for v in row.tolist())) ** 2
        correct += int(row.argmax()) == int(label)
        tokens += 1
    torch.testing.assert_close(sums.nll, nll)
    torch.testing.assert_close(sums.loss, nll + 0.1 * z)
    assert (sums.correct.item(), sums.tokens.item()) == (correct, tokens)


def test_no_label_counts():
    sums = token_sums(torch.randn(2, 3, 5), torch.full((2, 3), -100), z_loss=1e-4)
    assert [s.item() for s in sums] == [0, 0, 0, 0]


@pytest.mark.parametrize("label", [-1, 5])
def test_a_label_that_is_no_token_is_an_error(label):
    """Not the loss of another token."""
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        token_sums(torch.randn(2, 5), torch.tensor([0, label]))


def test_labels_of_another_shape_are_refused():
    """One label would otherwise be spread over all tokens of its row."""
    for labels in (torch.zeros(2, 1).long(), torch.zeros(2, 5).long(), torch.zeros(1, 3).long()):
        with pytest.raises(UserError, match="do not fit"):
            token_sums(torch.randn(2, 3, 5), labels)


def test_huge_half_precision_logits_stay_finite():
    logits = torch.tensor([[6e4, -6e4, 0.0]], dtype=torch.float16, requires_grad=True)
    loss = token_sums(logits, torch.tensor([2]), z_loss=0.0).loss
    loss.backward()
    assert loss.item() == 60000
    assert torch.isfinite(logits.grad).all()


def problem(tokens=(3, 7), D=24, V=50, dtype=torch.float32, weight_dtype=None, device=None):
    """Hidden states and head whose logits differ by a few units, and labels of which some do not count."""
    device = device or DEVICE
    hidden = torch.randn(*tokens, D, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(V, D, device=device) * 2 * D**-0.5).to(weight_dtype or dtype).requires_grad_()
    labels = torch.randint(0, V, tokens, device=device)
    labels[torch.rand(tokens, device=device) < 0.3] = -100
    return hidden, weight, labels


def by_hand(hidden, weight, labels, z_loss, scale=1.0):
    """Loss, nll, correct and the gradients of scale·loss in float64, with the chain rule written out."""
    h, w = hidden.detach().double().flatten(0, -2), weight.detach().to(hidden.dtype).double()
    rows = labels.flatten() != -100
    h, y = h[rows], labels.flatten()[rows]
    logits = h @ w.t()
    log_z = logits.exp().sum(1).log()
    nll = log_z - logits[torch.arange(len(y)), y]
    slope = (logits - log_z[:, None]).exp() * (1 + 2 * z_loss * log_z)[:, None] - F.one_hot(y, len(w))
    d_hidden = torch.zeros_like(hidden.detach().double()).flatten(0, -2)
    d_hidden[rows] = slope @ w * scale
    correct = sum(
        int(row.tolist().index(max(row.tolist())) == label) for row, label in zip(logits, y, strict=True)
    )
    loss = (nll + z_loss * log_z**2).sum()
    return loss.item(), nll.sum().item(), correct, d_hidden.view(hidden.shape), slope.t() @ h * scale


def compare(hidden, weight, labels, z_loss=0.1, scale=0.3, implementation="triton", run=head_sums):
    sums = run(hidden, weight, labels, z_loss, implementation=implementation)
    d_hidden, d_weight = torch.autograd.grad(sums.loss * scale, (hidden, weight))
    loss, nll, correct, want_hidden, want_weight = by_hand(hidden, weight, labels, z_loss, scale)
    tolerance = TOLERANCE[hidden.dtype]
    assert sums.loss.item() == pytest.approx(loss, rel=tolerance)
    assert sums.nll.item() == pytest.approx(nll, rel=tolerance)
    assert sums.tokens.item() == (labels != -100).sum().item()
    if hidden.dtype in (torch.float32, torch.float64):  # rounding makes ties
        assert sums.correct.item() == correct
    assert not sums.nll.requires_grad
    assert (d_hidden.dtype, d_weight.dtype) == (hidden.dtype, weight.dtype)
    assert distance(d_hidden, want_hidden) < tolerance
    assert distance(d_weight, want_weight) < tolerance


@runs_kernel
def test_the_kernel_that_multiplies_by_a_number_rounds_once(poisoned):
    number = torch.tensor(0.3, device=DEVICE)
    for dtype, to in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)):
        x = torch.randn(9, 1003, device=DEVICE).to(dtype)
        assert torch.equal(op.times_number(x, number, to), (x * number).to(to))


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of four tokens, so that 21 tokens make six, the last of one token."""
    monkeypatch.setattr(op, "chunk_rows", lambda tokens, vocabulary, itemsize, width: 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_plain(dtype):
    compare(*problem(dtype=dtype, device="cpu"), implementation="plain")
    compare(*problem(dtype=dtype, device="cpu"), implementation="auto")


def test_plain_under_autocast_keeps_the_master_weights_dtype():
    hidden, weight, labels = problem(device="cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = head_sums(hidden, weight, labels)
        rounded = head_sums(hidden.bfloat16(), weight.bfloat16(), labels)
    assert sums.loss == rounded.loss
    assert torch.autograd.grad(sums.loss, weight)[0].dtype == torch.float32


def test_refuses_what_does_not_fit():
    hidden, weight, labels = problem(device="cpu")
    with pytest.raises(UserError, match=r"labels \(7,\)"):
        head_sums(hidden, weight, labels[0])
    with pytest.raises(UserError, match="implementation='fast'"):
        head_sums(hidden, weight, labels, implementation="fast")
    with pytest.raises(UserError, match="float64 on cpu"):
        head_sums(hidden.double(), weight, labels, implementation="triton")


def test_chunks_are_equal_and_small():
    for tokens, vocabulary, itemsize in [(7296, 32128, 2), (1, 32128, 2), (40_000, 250_112, 4), (5, 10**9, 2)]:
        rows = op.chunk_rows(tokens, vocabulary, itemsize)
        assert rows == 1 or rows * vocabulary * itemsize <= 512 * 2**20
        assert tokens - (-(-tokens // rows) - 1) * rows > 0  # the last chunk holds a token


def test_logits_that_take_less_than_sums_of_chunks_are_two_chunks():
    """Gemma 3n: two arrays of 262,400 × 2048 in float32 are as large as the logits of 8,192 tokens in bfloat16."""
    assert op.chunk_rows(8192, 262_400, 2, 2048) == 4096
    assert op.chunk_rows(8193, 262_400, 2, 2048) < 1024
    assert op.chunk_rows(8192, 262_400, 2) % 128 == 0  # frozen


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_chunks(dtype, monkeypatch):
    monkeypatch.setattr(op, "chunk_rows", lambda tokens, vocabulary, itemsize, width: 11)
    compare(*problem(dtype=dtype))


@runs_kernel
@pytest.mark.parametrize(
    ("dtype", "tokens", "D", "V"),
    [
        *((dtype, (3, 7), 24, 50) for dtype in DTYPES),
        (torch.float32, (1,), 1, 1),
        (torch.bfloat16, (17,), 109, 257),
        (torch.float32, (2, 9), 48, 64),
    ],
)
def test_kernel(dtype, tokens, D, V):
    compare(*problem(tokens, D, V, dtype))


@runs_kernel
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
@pytest.mark.usefixtures("small_chunks")
def test_several_chunks(dtype, weight_dtype):
    """With a float32 master weight the gradient keeps float32 all the way."""
    compare(*problem(dtype=dtype, weight_dtype=weight_dtype))


@runs_kernel
@pytest.mark.parametrize("block", [16, 64])
def test_rows_of_many_blocks(block, monkeypatch):
    """The vocabulary ends within a block; the largest logit and its tie stand in different blocks."""
    from altup.kernels.cross_entropy import triton as kernel

    logits = torch.randn(9, 133, device=DEVICE)
    logits[0, [40, 120]] = 9.0
    logits[1, 70] = logits[1, 71] = 9.0
    logits[2, :64] = -torch.inf
    labels = torch.randint(64, 133, (9,), device=DEVICE)
    labels[:3] = torch.tensor([40, 71, 100])
    wide = logits.double().requires_grad_()
    want = token_sums(wide, labels, 0.1)
    (slope,) = torch.autograd.grad(want.loss, wide)
    with_gap = torch.full((9, 140), torch.nan, device=DEVICE)
    rows = with_gap[:, :133].copy_(logits)
    for gradient in (False, True):
        got = kernel.loss_and_gradient_(rows, labels, 0.1, gradient, block=block, warps=4)
        torch.testing.assert_close(
            got.double(), torch.stack([want.loss, want.nll, want.correct.double()]).detach()
        )
        assert torch.equal(rows, logits) != gradient
    torch.testing.assert_close(rows.double(), slope, rtol=1e-5, atol=1e-6)
    assert with_gap[:, 133:].isnan().all()


def test_a_soft_cap_bounds_the_logits():
    hidden, weight = torch.randn(5, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    labels = torch.tensor([3, -100, 0, 10, 7])
    logits = 2 * torch.tanh(hidden @ weight.t() / 2)
    want = F.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(head_sums(hidden, weight, labels, softcap=2.0).loss, want)
    with pytest.raises(UserError, match="softcap=0"):
        head_sums(hidden, weight, labels, softcap=0)


@runs_kernel
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_with_a_soft_cap(dtype):
    """Logits here reach several times the cap, where its slope is almost nothing."""
    hidden, weight, labels = problem(dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    want = head_sums(*wide, labels, 0.1, 3.0, implementation="plain")
    got = head_sums(hidden, weight, labels, 0.1, 3.0, implementation="triton")
    slopes = torch.autograd.grad(got.loss, (hidden, weight))
    exact = torch.autograd.grad(want.loss, wide)
    for one, other in zip([got.loss, got.nll, *slopes], [want.loss, want.nll, *exact], strict=True):
        assert distance(one, other) < TOLERANCE[dtype]


@runs_kernel
def test_ties_go_to_the_lowest_index():
    hidden = torch.ones(2, 1, device=DEVICE)
    weight = torch.tensor([[0.0], [3.0], [3.0]], device=DEVICE)
    labels = torch.tensor([1, 2], device=DEVICE)
    for implementation in ("plain", "triton"):
        assert head_sums(hidden, weight, labels, implementation=implementation).correct.item() == 1


@runs_kernel
@pytest.mark.usefixtures("small_chunks")
def test_no_label_counts_and_no_token():
    hidden, weight, labels = problem()
    for h, y in [(hidden, torch.full_like(labels, -100)), (hidden[:0], labels[:0])]:
        sums = head_sums(h, weight, y, 0.1, implementation="triton")
        assert [s.item() for s in sums] == [0, 0, 0, 0]
        gradients = torch.autograd.grad(sums.loss, (h, weight))
        assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


@runs_kernel
def test_a_label_that_does_not_exist_shows():
    hidden, weight, labels = problem()
    for wrong in (-1, 50, 10**6):
        labels[0, 0] = wrong
        assert head_sums(hidden, weight, labels, implementation="triton").loss.isnan()


@runs_kernel
@pytest.mark.usefixtures("small_chunks")
def test_strided_inputs_and_fresh_memory(monkeypatch):
    """No result rests on what memory held before, nor on how the inputs lie in it."""
    hidden = torch.randn(7, 24, 3, device=DEVICE).permute(2, 0, 1).requires_grad_()
    weight = torch.randn(24, 50, device=DEVICE).t().requires_grad_()
    labels = torch.randint(0, 50, (7, 3), device=DEVICE, dtype=torch.int32).t()

    def poisoned(allocate):
        def fresh(*args, **kwargs):
            memory = allocate(*args, **kwargs)
            return memory.fill_(torch.nan) if memory.is_floating_point() else memory

        return fresh

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    compare(hidden, weight, labels.long())
    assert torch.equal(
        head_sums(hidden, weight, labels, implementation="triton").loss,
        head_sums(hidden, weight, labels.long(), implementation="triton").loss,
    )


@runs_kernel
@pytest.mark.parametrize("frozen", [0, 1])
def test_only_what_asks_for_a_gradient_gets_one(frozen):
    inputs = list(problem())
    want = by_hand(*inputs, 0.1)[3:]
    inputs[frozen] = inputs[frozen].detach()
    sums = head_sums(*inputs, 0.1, implementation="triton")
    (got,) = torch.autograd.grad(sums.loss, inputs[1 - frozen])
    assert distance(got, want[1 - frozen]) < 1e-5
    with torch.no_grad():
        sums = head_sums(*problem(), implementation="triton")
    assert not sums.loss.requires_grad


@runs_kernel
def test_autocast_and_checkpointing():
    hidden, weight, labels = problem()
    rounded = hidden.detach().bfloat16().requires_grad_()

    def loss(h, w):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return head_sums(h, w, labels, 0.1, implementation="triton").loss

    got = torch.autograd.grad(checkpoint(loss, hidden, weight, use_reentrant=False), (hidden, weight))
    want = torch.autograd.grad(loss(rounded, weight), (rounded, weight))
    assert got[0].dtype == got[1].dtype == torch.float32
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=0, atol=0)


@runs_kernel
@pytest.mark.usefixtures("small_chunks")
def test_twice_through_one_graph():
    hidden, weight, labels = problem()
    loss = head_sums(hidden, weight, labels, implementation="triton").loss
    first = torch.autograd.grad(2 * loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(2 * loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@runs_kernel
def test_operator_registrations():
    hidden, weight, labels = problem(tokens=(5,))
    for flags in [(True, True), (False, True), (False, False)]:
        check_operator(op.fused_head, hidden, weight, labels, 0.1, 0.0, *flags)


@runs_kernel
@pytest.mark.parametrize("dtype", fewer([torch.bfloat16], [torch.float32, torch.bfloat16]))
def test_compiles_as_one_graph(dtype):
    compiled = torch.compile(head_sums, backend=BACKEND, fullgraph=True)
    compare(*problem(dtype=dtype), run=compiled)


@needs_gpu
@pytest.mark.parametrize("D", [768, 1536])
def test_training_size(D):
    """Against float32 on the same bf16 inputs; twice the same bits; memory bounded by the chunk."""
    hidden, weight, labels = problem((7296,), D, 32128, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sums = head_sums(hidden, weight, labels, 1e-4)
    gradients = torch.autograd.grad(sums.loss, (hidden, weight))
    peak = torch.cuda.max_memory_allocated() - before
    again = torch.autograd.grad(head_sums(hidden, weight, labels, 1e-4).loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    limit = 256 * 2**20 + 10 * weight.numel() + 4 * hidden.numel() + 64 * 2**20
    assert peak < limit, f"{peak / 2**20:.0f} MiB"
    wide = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    want = head_sums(*wide, labels, 1e-4, implementation="plain")
    assert sums.loss.item() == pytest.approx(want.loss.item(), rel=1e-3)
    for got, exact in zip(gradients, torch.autograd.grad(want.loss, wide), strict=True):
        assert distance(got, exact.double()) < 1e-2


@pytest.mark.parametrize(
    ("dtype", "columns", "gradient"), [("bf16", 8, True), ("bf16", 8, False), ("fp32", 4, True)]
)
def test_loads_are_16_bytes_wide(dtype, columns, gradient, hopper):
    """A vocabulary of 32,128 ends within a block, and rows are aligned: nothing is read one number at a time."""
    from altup.kernels.cross_entropy import triton as kernel

    types = {"logits": f"*{dtype}", "labels": "*i64", "sums": "*fp32", "z_loss": "fp32", "softcap": "fp32"}
    types |= {"rows": "i32", "row_stride": "i32"}
    constants = {"V": 32128, "IGNORED": -100, "CAPPED": False, "GRADIENT": gradient, "BLOCK": kernel.BLOCK}
    compiled = hopper.build(kernel._rows, types | constants, divisible=("row_stride",), num_warps=kernel.WARPS)
    vectors = kernel.BLOCK // (32 * kernel.WARPS * columns)
    wide, scalar = compiled.asm["ptx"].count("ld.global.v4"), 2  # the label, and the label's logit
    assert wide == vectors * (1 + gradient)
    assert compiled.asm["ptx"].count("ld.global") - wide == scalar

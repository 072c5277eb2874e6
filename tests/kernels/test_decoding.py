"""The kernels of a decoder's step against their definitions in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from altup.kernels import altup_update_reference, decoding
from altup.models.t5.generation import decode_greedily
from tests.kernels.interpreter import DEVICE, INTERPRETED, fewer, runs_kernel
from tests.models.helpers import regret, tiny_t5

ROWS = fewer([1, 3], [1, 2, 3, 16, 20, 64])
HALF = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]  # whose dot knows no bf16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def random(*shape, dtype=torch.float32, scale=1.0):
    return (scale * torch.randn(*shape, device=DEVICE)).to(dtype)


def in_parts(x):
    """As a product in two parts gives it."""
    return torch.stack([0.25 * x.float(), 0.75 * x.float()])


def agrees(got, want, dtype):
    error = (got.double() - want).norm() / want.norm()
    assert error < TOLERANCE[dtype], float(error)


@runs_kernel
@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.bfloat16), *((r, d) for r in ROWS for d in HALF)])
@pytest.mark.parametrize(
    ("n", "k"), fewer([(24, 40)], [(24, 40), (768, 768), (2304, 768), (768, 2048), (10_000, 96)])
)
def test_linear_maps_with_norm_gate_and_addition(rows, dtype, n, k, poisoned):
    torch.manual_seed(0)
    x, residual = random(rows, k, dtype=dtype, scale=30), random(rows, n, dtype=dtype)
    weight, norm = random(2 * n, k, dtype=dtype, scale=k**-0.5), random(k, dtype=dtype)
    exact = [t.double() for t in (x, weight, norm, residual)]
    for normed, gated, added in [(1, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 1)]:
        used, exact_weight = (weight, exact[1]) if gated else (weight[:n], exact[1][:n])
        options = (norm if normed else None, 1e-6, bool(gated))
        want = decoding.linear_reference(
            exact[0], exact_weight, exact[2] if normed else None, 1e-6, bool(gated), exact[3] if added else None
        )
        got = decoding.linear(x, used, *options, residual=residual if added else None)
        assert got.dtype == dtype
        agrees(got, want, dtype)


SHAPES = fewer([(24, 40)], [(24, 40), (2304, 768), (768, 768), (4096, 768), (768, 2048)])
TILES = fewer([None, (16, 16, 16, 3), (16, 32, 16, 3)], [None, (16, 16, 16, 3), (32, 256, 128, 3)])


@runs_kernel
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", fewer([3], [8, 64, 100]))
def test_products_in_parts(rows, n, k, tile, dtype, poisoned):
    """As they are by default, by cuBLAS or the tiles of their shape, and by other tiles."""
    from altup.kernels.decoding import many_rows

    torch.manual_seed(0)
    x, weight = random(rows, k, dtype=dtype), random(n, k, dtype=dtype, scale=k**-0.5)
    if tile is None:
        parts = decoding.product(x, weight)
    else:
        parts = many_rows.product_by_tiles(x, weight, many_rows.Tile(*tile), programmatic=False)
        assert parts.shape == (-(-k // tile[1]), rows, n)
    agrees(parts.double().sum(dim=0), x.double() @ weight.double().t(), dtype)
    gate, linear = parts.double().sum(dim=0).chunk(2, dim=1)
    got = decoding.gate(parts, dtype)
    assert got.dtype == dtype
    agrees(got, F.gelu(gate, approximate="tanh") * linear, dtype)


@runs_kernel
@pytest.mark.parametrize(("wide", "dtype"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_parts_are_added_and_normed(number, wide, dtype, poisoned):
    torch.manual_seed(0)
    rows, n = 3, 40
    x, parts, norm = random(rows, n, dtype=wide, scale=9), random(number, rows, n), random(n, dtype=dtype)
    got, normed = decoding.add_and_norm(x, parts if number else None, norm, 1e-6, dtype)
    assert (got.dtype, normed.dtype) == (wide, dtype)
    want = x.double() + parts.double().sum(dim=0)
    agrees(got, want, wide)
    agrees(normed, decoding.linear_reference(want, torch.eye(n).to(want), norm.double(), 1e-6), dtype)


@runs_kernel
@pytest.mark.parametrize("K", [2, 4])
@pytest.mark.parametrize("has_norm", [True, False])
def test_parts_are_added_updated_and_normed(K, has_norm, poisoned):
    torch.manual_seed(0)
    rows, n = 3, 40
    x, parts, norm = random(rows, n), random(2, rows, n), random(n)
    state, P, g = [random(rows, n) for _ in range(K)], random(K, K), random(K)
    options = {"following": 1, "norm": norm if has_norm else None, "eps": 1e-6, "dtype": torch.float32}
    got, normed = decoding.update_and_norm(x, parts, tuple(state), P, g, K - 1, **options)
    y = x.double() + parts.double().sum(dim=0)
    want = altup_update_reference(torch.stack(state).double(), y, P.double(), g.double(), K - 1)
    agrees(torch.stack(got), want, torch.float32)
    assert (normed is not None) == has_norm
    if normed is not None:
        exact = decoding.linear_reference(want[1], torch.eye(n).to(want), norm.double(), 1e-6)
        agrees(normed, exact, torch.float32)


@runs_kernel
def test_the_sum_keeps_the_residuals_dtype():
    """Under autocast weights are bf16, and what runs through the model may be float32."""
    torch.manual_seed(0)
    for rows in fewer((1,), (1, 3)):
        x, residual, norm = random(rows, 40), random(rows, 24), random(40)
        weight = random(24, 40, dtype=torch.bfloat16)
        got = decoding.linear(x, weight, norm, 1e-6, residual=residual)
        want = decoding.linear_reference(
            x.double(), weight.double(), norm.double(), 1e-6, residual=residual.double()
        )
        assert got.dtype == torch.float32
        agrees(got, want, torch.bfloat16)


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K", [2, 4])
def test_the_last_map_of_a_layer_with_altups_update(dtype, K, poisoned):
    """Of one row."""
    torch.manual_seed(0)
    x, weight, residual = random(1, 40, dtype=dtype), random(24, 40, dtype=dtype), random(1, 24, dtype=dtype)
    state, P, g = [random(1, 24, dtype=dtype) for _ in range(K)], random(K, K), random(K)
    got = decoding.linear_and_update(x, weight, residual, tuple(state), P, g, K - 1)
    y = decoding.linear_reference(x.double(), weight.double(), residual=residual.double())
    want = altup_update_reference(torch.stack(state).double(), y, P.double(), g.double(), K - 1)
    assert [block.dtype for block in got] == [dtype] * K
    agrees(torch.stack(got), want, dtype)


@runs_kernel
@pytest.mark.parametrize("rows", fewer([1, 3], [1, 3, 64]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_a_growing_cache(rows, dtype, poisoned):
    """The future of the cache holds NaN, which must not be read."""
    torch.manual_seed(0)
    heads, d, places = 3, 16, 136
    keys, values = (torch.empty(rows, heads, places, d, device=DEVICE, dtype=dtype) for _ in range(2))
    bias, past = random(heads, places), []
    for now in (0, 1, 63, 64, 65, 130):
        place = torch.full((rows,), now, device=DEVICE)
        while len(past) <= now:
            past.append(random(rows, 3 * heads * d, dtype=dtype))
            if len(past) <= now:
                for cache, part in zip(
                    (keys, values), past[-1].view(rows, 3, heads, d).unbind(1)[1:], strict=True
                ):
                    cache[:, :, len(past) - 1] = part
        qkv = past[-1] if now % 2 else in_parts(past[-1])
        got = decoding.attend_to_cache(qkv, keys, values, place, bias)
        q, k, v = torch.stack(past, dim=2).double().view(rows, 3, heads, d, now + 1).transpose(3, 4).unbind(1)
        want = decoding.attend_reference(q[:, :, -1].flatten(1), k, v, bias[:, : now + 1].flip(1).double())
        agrees(got, want, dtype)
        assert torch.equal(keys[:, :, now], k[:, :, -1].to(dtype))
        assert torch.equal(values[:, :, now], v[:, :, -1].to(dtype))


@runs_kernel
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.bfloat16), *((r, d) for r in fewer((1, 3), (1, 3, 64)) for d in HALF)]
)
@pytest.mark.parametrize("tokens", [5, 64, 200])
def test_attention_over_a_memory(rows, dtype, tokens, poisoned):
    """With and without hidden keys; a row that sees none attends to all alike, as PyTorch's does."""
    torch.manual_seed(0)
    heads, d = 3, 16
    q = random(rows, heads * d, dtype=dtype)
    keys, values = (random(rows, heads, tokens, d, dtype=dtype) for _ in range(2))
    out = random(24, heads * d, dtype=dtype)
    hidden = random(rows, tokens) > 0
    hidden[-1] = True
    added = torch.zeros(rows, tokens, device=DEVICE, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    for mask in (None, added):
        wide = None if mask is None else mask.double()[:, None]
        want = decoding.attend_reference(q.double(), keys.double(), values.double(), wide)
        got = decoding.attend_to_memory(q, keys, values, mask)
        if isinstance(got, torch.Tensor):
            agrees(got, want, dtype)
            agrees(decoding.attend_to_memory(in_parts(q), keys, values, mask), want, dtype)
        agrees(decoding.linear(got, out), want @ out.double().t(), dtype)  # which joins the parts of one row
    assert isinstance(got, torch.Tensor) == (rows > 1 or tokens <= 64)


@runs_kernel
@pytest.mark.parametrize("rows", ROWS)
def test_the_likeliest_token_goes_to_its_place(rows, poisoned):
    """Of equal logits the first; rows that have ended are padded."""
    torch.manual_seed(0)
    vocabulary, width, limit = 9_007, 32, 5
    hidden, head, norm = random(rows, width), random(vocabulary, width), random(width)
    head[77] = head[8999] = 10 * hidden[0] * norm
    logits = decoding.linear_reference(hidden.double(), head.double(), norm.double(), 1e-6)
    likeliest = logits.argmax(dim=1)
    assert likeliest[0] == 77
    ended = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    ended[-1] = rows > 1
    tokens = torch.full((rows, limit), -1, device=DEVICE)
    latest = torch.zeros(rows, 1, dtype=torch.long, device=DEVICE)
    place = torch.full((rows,), 2, device=DEVICE)
    eos = torch.tensor([5, 77], device=DEVICE)
    decoding.choose(
        hidden, head, norm, 1e-6, tokens=tokens, latest=latest, place=place, ended=ended, eos=eos, pad=3
    )
    want = likeliest.masked_fill(torch.arange(rows, device=DEVICE) == (rows - 1 if rows > 1 else -1), 3)
    assert torch.equal(latest[:, 0], want)
    assert torch.equal(tokens[:, 3], want)
    assert (tokens[:, [0, 1, 2, 4]] == -1).all()
    assert torch.equal(place, torch.full_like(place, 3))
    assert ended[0]
    assert torch.equal(ended, (want == 77) | (want == 3))


BASE = {"n": "i32", "k": "i32", "active": "i32", "eps": "fp32", "found": None, "residual": None, "K": 1}
ONE = dict.fromkeys(("outs", "state", "P", "g"))
TWO = {"outs": ("*bf16",) * 2, "state": ("*bf16",) * 2, "P": "*fp32", "g": "*fp32", "K": 2, "out": None}


@pytest.mark.parametrize("programmatic", [False, True])
def test_kernels_for_hopper_need_no_stack(hopper, programmatic):
    from altup.kernels.decoding import attention, choice, many_rows, maps

    common = {
        **BASE,
        **ONE,
        "PROGRAMMATIC": programmatic,
        "out": "*bf16",
        "x": "*bf16",
        "weight": "*bf16",
        "norm": "*bf16",
    }
    row = {**common, "heads": "i32", "tops": None, "sums": None, "SPLITS": 1, "D": 64, "CHOOSES": False}
    parts = {"x": "*fp32", "tops": "*fp32", "sums": "*fp32", "SPLITS": 8, "norm": None, "residual": "*bf16"}
    chosen = {"out": "*fp32", "found": "*i32", "CHOOSES": True}
    built = [
        hopper.build(maps.vector_kernel, {**row, **more}, divisible=("n", "k"), num_warps=4)
        for more in (
            {"GATED": False, "BLOCK_N": 2, "BLOCK_K": 1024},
            {"GATED": True, "BLOCK_N": 2, "BLOCK_K": 1024},
            {**parts, "GATED": False, "BLOCK_N": 2, "BLOCK_K": 1024},
            {**TWO, "norm": None, "residual": "*bf16", "GATED": False, "BLOCK_N": 1, "BLOCK_K": 2048},
            {**chosen, "GATED": False, "BLOCK_N": 8, "BLOCK_K": 1024},
        )
    ]
    many = {**common, "batch": "i32", "BLOCK_K": 256}
    built += [
        hopper.build(maps.rows_kernel, {**many, **more}, divisible=("n", "k", "batch"), num_warps=4, num_stages=3)
        for more in (
            {"GATED": False, "CHOOSES": False, "BLOCK_B": 16, "BLOCK_N": 16},
            {"GATED": True, "CHOOSES": False, "BLOCK_B": 16, "BLOCK_N": 16},
            {**chosen, "GATED": False, "BLOCK_B": 64, "BLOCK_N": maps.HEAD_COLUMNS, "BLOCK_K": maps.HEAD_DEPTH},
        )
    ]
    cache = dict.fromkeys(("out", "qkv", "keys", "values", "q", "added"), "*bf16")
    sizes = {"heads": "i32", "places": "i32", "tokens": "i32", "span": "i32", "D": 64, "BLOCK": attention.BLOCK}
    sizes |= {"place": "*i64", "bias": "*fp32", "PROGRAMMATIC": programmatic, "tops": None, "sums": None}
    sizes |= {"FETCHED": attention.FETCHED, "STAGES": attention.STAGES, "PARTS": 1}
    split = {"out": "*fp32", "tops": "*fp32", "sums": "*fp32", "SPLIT": True, "SINGLE": True}
    built.append(hopper.build(attention.cache_kernel, {**cache, **sizes}, num_warps=4))
    whole = {"BLOCK": attention.MEMORY_BLOCK, "SPLIT": False, "SINGLE": False, "PARTS": 6, "q": "*fp32"}
    built.append(hopper.build(attention.memory_kernel, {**cache, **sizes, **whole}, num_warps=4))
    built.append(hopper.build(attention.memory_kernel, {**cache, **sizes, **split}, num_warps=4))
    tiles = {**common, "out": "*fp32", "batch": "i32", "span": "i32", "BLOCK_B": 64}
    for tile in set(many_rows.TILES.values()):
        tiles |= {"BLOCK_N": tile.columns, "BLOCK_K": tile.depth, "SINGLE": tile.span == tile.depth}
        options = {"divisible": ("batch", "n", "k", "span"), "num_warps": 4, "num_stages": tile.stages}
        built.append(hopper.build(many_rows.product_kernel, tiles, **options))
    between = {**common, "batch": "i32", "parts": "*fp32", "normed": "*bf16", "SPLITS": 3, "BLOCK": 1024}
    between |= {"ACTIVE": 0, "NEXT": 1, "outs": ("*bf16",)}
    built.append(hopper.build(many_rows.gate_kernel, between, num_warps=4))
    built.append(hopper.build(many_rows.add_kernel, between, num_warps=4))
    built.append(hopper.build(many_rows.add_kernel, {**between, **TWO}, num_warps=4))
    places = {"tokens": "*i64", "latest": "*i64", "place": "*i64", "ended": "*u8", "eos": "*i64", "tops": "*fp32"}
    numbers = {"found": "*i32", "tiles": "i32", "limit": "i32", "pad": "i32", "ENDS": 1, "BLOCK": choice.BLOCK}
    arguments = {**places, **numbers, "PROGRAMMATIC": programmatic}
    built.append(hopper.build(choice.choice_kernel, arguments, num_warps=4))
    assert not any(map(hopper.spills, built))
    waits = ["griddepcontrol.wait" in kernel.asm["ptx"] for kernel in built]
    assert waits == [programmatic] * len(built)
    before = [kernel.asm["ptx"].partition("griddepcontrol.wait")[0] for kernel in built if programmatic]
    assert all("ld.global" in text for text in before[:4])  # weights are read before they wait
    assert sum("prefetch.global" in text for text in before) == programmatic  # and a cache is fetched


@runs_kernel
@pytest.mark.parametrize("method", fewer(["dense", "altup"], ["dense", "altup", "recycled", "sum"]))
@pytest.mark.parametrize("rows", fewer([8], [8, 64]))
@pytest.mark.parametrize("autocast", [False, True])
def test_many_rows_decode_the_tokens_of_plain_code(method, rows, autocast, monkeypatch):
    """The interpreter's dot knows no bf16: under autocast the head is plain there."""
    monkeypatch.delattr("altup.models.t5.kept_decoding.KeptDecoding._fused_step")
    if autocast and INTERPRETED:
        monkeypatch.setattr("altup.models.t5.kept_decoding.choose", choose_plainly)
    decodes_the_tokens_of_its_plain_code(method, rows, autocast)


@runs_kernel
@pytest.mark.parametrize(
    ("method", "rows"), [("altup", 1), ("dense", 2), *fewer([], [("dense", 1), ("dense", 7), ("recycled", 1)])]
)
def test_few_rows_decode_the_tokens_of_plain_code(method, rows, monkeypatch):
    monkeypatch.delattr("altup.models.t5.kept_decoding.KeptDecoding._step_of_many_rows")
    decodes_the_tokens_of_its_plain_code(method, rows)


@runs_kernel
def test_one_row_with_fixed_coefficients(monkeypatch):
    """Two layers, so that one reads another block than the first."""
    monkeypatch.delattr("altup.models.t5.kept_decoding.KeptDecoding._step_of_many_rows")
    decodes_the_tokens_of_its_plain_code("altup", 1, coefficients="fixed", num_decoder_layers=2)


def decodes_the_tokens_of_its_plain_code(method, rows, autocast=False, **fields):
    """All kernels together, of prompts of several lengths; the trial before their first use has found nothing
    wrong. The first call is decoded by plain code. Under autocast tokens are nearly as likely."""
    fields = {"num_layers": 1, "num_decoder_layers": fewer(1, 4), **fields}
    model, kept = tiny_t5(method, **fields).eval().to(DEVICE), {}
    prompts = (3 + torch.arange(6 * rows, device=DEVICE) % 110).view(rows, 6)
    mask = (torch.arange(6, device=DEVICE) < 6 - torch.arange(rows, device=DEVICE)[:, None] % 4).long()
    options = {"limit": fewer(5, 20), "eos": torch.tensor([1], device=DEVICE), "pad": 0, "attention_mask": mask}
    start = torch.zeros(rows, 1, dtype=torch.long, device=DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        options["encoder_outputs"] = model.encoder(prompts, mask)
        found = [decode_greedily(model, start, **options, kept=kept) for _ in range(fewer(2, 4))]
    (decoding_of_it,) = kept.values()
    assert decoding_of_it.is_fused
    assert decoding_of_it.dtype == (torch.bfloat16 if autocast else torch.float32)
    if autocast:
        inputs = {"input_ids": prompts, "attention_mask": mask}
        assert all(regret(model, inputs, tokens, [1]) < 0.2 for tokens in found)
    else:
        assert all(torch.equal(tokens, found[0]) for tokens in found)


def choose_plainly(hidden, head, norm, eps, *, tokens, latest, place, ended, eos, pad):
    assert norm is None
    latest.copy_(F.linear(hidden, head).argmax(dim=-1).masked_fill(ended, pad)[:, None])
    place.add_(1)
    tokens.scatter_(1, place[:, None], latest)
    ended.logical_or_((latest == eos).any(dim=1))

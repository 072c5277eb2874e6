"""Muon against a definition of its own in float64, which parameters it takes, and rates by part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.training.tiny import optimizer_of

from altup import AltUpT5Config, AltUpT5ForConditionalGeneration
from altup.core.errors import UserError
from altup.kernels.muon import orthogonalized
from altup.training.optimizers.build import parts_of, set_rate
from altup.training.optimizers.state import load_state_tensors, state_tensors


def tiny(method: str = "altup", **fields: Any) -> AltUpT5ForConditionalGeneration:
    torch.manual_seed(0)
    shape = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2, "vocab_size": 40}
    config = AltUpT5Config.from_preset("tiny", method, **{**shape, **fields})
    return AltUpT5ForConditionalGeneration(config)


def set_gradients(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (step % 3 - 1)


def update_of(direction: np.ndarray) -> np.ndarray:
    """U, with each singular value s taken through the polynomial a·s + b·s³ + c·s⁵."""
    u, s, vt = np.linalg.svd(direction, full_matrices=False)
    s = s / np.linalg.norm(s, axis=-1, keepdims=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return 0.2 * np.sqrt(max(direction.shape[-2:])) * (u * s[..., None, :]) @ vt


def by_definition(
    p: np.ndarray, gradients: list[np.ndarray], lr: float, block: tuple[int, int] | None = None
) -> np.ndarray:
    """The docstring's formula."""
    momentum, largest = np.zeros_like(p), 10 * max(1e-3, np.sqrt(np.mean(p**2)))
    rows, columns = block or p.shape[-2:]
    for g in gradients:
        momentum = 0.95 * momentum + 0.05 * g
        direction = 0.95 * momentum + 0.05 * g
        update = np.empty_like(p)
        for i in range(0, p.shape[-2], rows):
            for j in range(0, p.shape[-1], columns):
                part = (..., slice(i, i + rows), slice(j, j + columns))
                update[part] = update_of(direction[part])
        p = p - lr * min(max(1e-3, np.sqrt(np.mean(p**2))), largest) * update
    return p


def adamw_by_definition(p: np.ndarray, gradients: list[np.ndarray], lr: float, growth: float) -> np.ndarray:
    """AdamW's direction, times a size of at most `growth` times that of the start; zeros count as 0.02."""
    mean, square, rms = np.zeros_like(p), np.zeros_like(p), np.sqrt(np.mean(p**2))
    largest = growth * (max(1e-3, rms) if rms > 0 else 0.02)
    for t, g in enumerate(gradients, start=1):
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
        size = min(max(1e-3, np.sqrt(np.mean(p**2))), largest)
        p = p - lr * size * mean / (1 - 0.9**t) / (np.sqrt(square / (1 - 0.999**t)) + 1e-8)
    return p


def test_ten_steps_equal_the_definition():
    """Matrices by Muon, experts as piles of matrices; all else by AdamW, zeros too."""
    model = tiny("altup+moe", experts=4)
    torch.nn.init.zeros_(model.get_parameter("encoder.final_norm.weight"))  # as biases begin
    parts = parts_of(model)
    start = {n: p.detach().double().numpy() for n, p in model.named_parameters()}
    gradients: dict[str, list[np.ndarray]] = {n: [] for n in start}
    optimizer = optimizer_of("muon", model, lr=0.05)
    for step in range(10):
        set_gradients(model, step)
        for n, p in model.named_parameters():
            gradients[n].append(p.grad.double().numpy())
        optimizer.step()
    compared = {"matrix": 0, "rest": 0}
    for n, p in model.named_parameters():
        if parts[n] == "matrix":
            expected = by_definition(start[n], gradients[n], 0.05)
            np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-3, atol=1e-4, err_msg=n)
            compared["matrix"] += 1
        else:
            growth = 1 if parts[n] == "coefficients" else 10
            expected = adamw_by_definition(start[n], gradients[n], 0.05, growth)
            np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-4, atol=1e-5, err_msg=n)
            compared["rest"] += 1
    assert compared == {"matrix": 2 * (7 + 3) + 2 * (11 + 3), "rest": len(start) - 48}


def test_heads_and_blocks_equal_the_definition():
    """By head, then by block too; all other matrices stay whole."""
    heads = {"q": (8, 16), "k": (8, 16), "v": (8, 16), "o": (16, 8)}
    hidden = {"wi_0": (48, 16), "wi_1": (48, 16), "wo": (16, 48)}
    for muon_by, blocks in (("head", heads), ("block", heads | hidden)):
        model = tiny("moe", experts=4, d_ff=96)  # of which 48 is the largest divisor up to 64
        parts = parts_of(model)
        start = {n: p.detach().double().numpy() for n, p in model.named_parameters()}
        optimizer = optimizer_of("muon", model, lr=0.05, muon_by=muon_by)
        set_gradients(model, 0)
        optimizer.step()
        for n, p in model.named_parameters():
            if parts[n] == "matrix":
                expected = by_definition(start[n], [p.grad.double().numpy()], 0.05, blocks.get(n.split(".")[-2]))
                np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-3, atol=1e-4, err_msg=n)


@pytest.mark.parametrize("shape", [(5, 5), (3, 9), (9, 3), (2, 6, 4), (2, 3, 4, 6)])
def test_singular_values_become_about_one(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalized(x))
    assert values.min() > 0.6
    assert values.max() < 1.3
    mixed = torch.einsum("...ij,...ij->...", orthogonalized(x), x)
    torch.testing.assert_close(mixed, torch.linalg.svdvals(x).sum(-1), rtol=0.25, atol=0)


@pytest.mark.parametrize("bound", [10, 3])
def test_weights_do_not_grow_by_a_factor_in_every_step(bound):
    """A gradient that always points the same way, at a high rate: beyond so many times their size at the start
    weights grow by the same amount in every step. Without the bound each would make them 1.5 times as large."""
    model = tiny()
    optimizer = optimizer_of("muon", model, lr=0.5, **({} if bound == 10 else {"muon_growth": bound}))
    table = model.get_input_embeddings().weight
    matrix = model.get_parameter("decoder.layers.0.feed_forward.wo.weight")
    sizes = []
    for _ in range(60):
        for p in model.parameters():
            p.grad = -p.detach().sign()
        optimizer.step()
        sizes.append([p.detach().square().mean().sqrt().item() for p in (table, matrix)])
    growth = torch.tensor(sizes).diff(dim=0)[-20:]
    torch.testing.assert_close(growth, growth[:1].expand_as(growth), rtol=0.02, atol=0)
    start = tiny().get_input_embeddings().weight.detach().square().mean().sqrt()
    torch.testing.assert_close(growth[-1, 0], 0.5 * bound * start, rtol=0.05, atol=0)  # AdamW's U of ones


@pytest.mark.parametrize(("method", "name"), [("altup", "encoder.rule.updates.0.g"), ("sequence-altup", ".b")])
def test_coefficients_move_by_the_same_amount_however_large_they_are(method, name):
    """Their gradient always points the same way. Were steps relative to their size, they would run away. What
    makes coefficients from the data begins with zeros and may grow as all weights do."""
    model = tiny(method, num_layers=3)
    optimizer = optimizer_of("muon", model, lr=0.5, lr_factors={"coefficients": 0.1})
    (found,) = [p for n, p in model.named_parameters() if n.endswith(name)][:1]
    values = [found.detach().clone()]
    for _ in range(30):
        for p in model.parameters():
            p.grad = -torch.ones_like(p)
        optimizer.step()
        values.append(found.detach().clone())
    torch.testing.assert_close(torch.stack(values).diff(dim=0), torch.full((30, *found.shape), 0.05))

    dynamic = tiny("altup", coefficients="dynamic")
    optimizer = optimizer_of("muon", dynamic, lr=0.5)
    bounds = [optimizer.state[p]["largest"].item() for p in dynamic.parameters() if not p.any()]
    assert bounds
    assert bounds == pytest.approx([0.2] * len(bounds))


@pytest.mark.parametrize("method", ["altup", "sequence-altup"])
def test_coefficients_are_held_near_their_start(method):
    """A gradient that always points the same way moves them by 1 / decay of their size and no further. A skipped
    step pulls nothing, other weights are as without the pull, and a loaded state knows where they began."""
    models = tiny(method, num_layers=3), tiny(method, num_layers=3)
    options = {"lr": 0.5, "lr_factors": {"coefficients": 0.1}}
    pulled, free = (
        optimizer_of("muon", m, **options, coefficient_decay=d) for m, d in zip(models, (4, 0), strict=True)
    )
    parts = parts_of(models[0])
    start = {n: p.detach().clone() for n, p in models[0].named_parameters()}

    def step(optimizer, steps=1, **skip):
        for _ in range(steps):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = -torch.ones_like(p)
            optimizer.step(**skip)

    step(pulled, 60)
    step(free, 60)
    for (n, p), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if parts[n] == "coefficients":
            size = start[n].square().mean().sqrt().where(start[n].any(), 0.02)
            torch.testing.assert_close(p.detach() - start[n], (size * 0.2).expand_as(p), rtol=0.01, atol=1e-5)
        else:
            assert torch.equal(p, other), n
    before = [p.detach().clone() for p in models[0].parameters()]
    step(pulled, skip=torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip(before, models[0].parameters(), strict=True))

    resumed = optimizer_of("muon", models[0], **options, coefficient_decay=4)  # begins where they stand now
    load_state_tensors(resumed, models[0], state_tensors(pulled, models[0]))
    step(resumed, 20)
    assert all(
        (p.detach() - start[n]).abs().max() < 0.3 for n, p in models[0].named_parameters() if "coef" in parts[n]
    )


def test_a_gradient_of_zeros_moves_nothing():
    model = tiny()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = optimizer_of("muon", model, lr=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_parts_of_a_model():
    parts = parts_of(tiny("altup"))
    assert parts["encoder.embed_tokens.weight"] == "embeddings"
    assert parts["lm_head.weight"] == "head"
    assert parts["encoder.rule.updates.0.P"] == parts["decoder.rule.updates.1.g"] == "coefficients"
    assert parts["encoder.relative_bias.weight"] == "positions"
    assert parts["encoder.final_norm.weight"] == "vectors"
    assert parts["decoder.layers.0.cross_attention.k.weight"] == "matrix"
    of_sequence = parts_of(tiny("sequence-altup", num_layers=4, stride=2))
    assert of_sequence["encoder.layers.1.update.a"] == "coefficients"
    assert parts_of(tiny("moe", experts=4))["encoder.layers.0.experts.router.weight"] == "matrix"


def test_a_tied_head_belongs_to_the_embeddings():
    from transformers import GPT2Config, GPT2LMHeadModel

    parts = parts_of(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=20, n_positions=8)))
    assert {name for name, part in parts.items() if part == "embeddings"} == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
    }
    assert "head" not in parts.values()


def test_tables_of_relative_positions_and_convolutions_are_no_embeddings_and_no_matrices():
    from transformers import MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

    t5 = T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    parts = parts_of(T5ForConditionalGeneration(t5))
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert parts[bias] == "positions"
    assert parts["shared.weight"] == "embeddings"
    mamba = parts_of(
        MambaForCausalLM(MambaConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, state_size=4))
    )
    assert mamba["backbone.layers.0.mixer.A_log"] == mamba["backbone.layers.0.mixer.conv1d.weight"] == "vectors"
    assert mamba["backbone.layers.0.mixer.in_proj.weight"] == "matrix"


@pytest.mark.parametrize("name", ["adafactor", "adamw", "adamw-rms", "muon"])
@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)])
@pytest.mark.parametrize("positions", [{}, {"positions": 0.5}])
def test_a_part_moves_at_its_own_rate(name, rate, positions):
    """By a factor of ½ half as far, by 0 not at all, everything else as without factors; norms are vectors.
    Relative positions move as vectors do, unless they are named."""
    factors = {"coefficients": 0.5, "head": 0.0, "vectors": 0.25, **positions}
    whole, parted = tiny(), tiny()
    parts = parts_of(whole)
    before = {n: p.detach().clone() for n, p in whole.named_parameters()}
    for model, chosen in ((whole, {}), (parted, factors)):
        optimizer = optimizer_of(name, model, lr=rate, lr_factors=chosen)
        set_rate(optimizer, 0.02)
        set_gradients(model, 0)
        optimizer.step()
    factors.setdefault("positions", factors["vectors"])
    moved = dict(parted.named_parameters())
    if name == "muon" and positions:
        parts = {n: part for n, part in parts.items() if part != "positions"}  # told by a test of their own
    for n, p in ((n, p) for n, p in whole.named_parameters() if n in parts):
        expected = before[n] + (p - before[n]) * factors.get(parts[n], 1.0)
        torch.testing.assert_close(moved[n], expected, rtol=1e-5, atol=1e-7, msg=n)


def test_relative_positions_that_are_named_move_in_the_unit_of_scores():
    """However small they begin, by lr · factor in the first step; norms and the rest move as before."""
    plain, named = tiny("dense"), tiny("dense")
    before = {n: p.detach().clone() for n, p in named.named_parameters()}
    for model, factors in ((plain, {}), (named, {"positions": 4.0})):
        optimizer = optimizer_of("muon", model, lr=0.02, lr_factors=factors)
        set_gradients(model, 0)
        optimizer.step()
    moved = dict(plain.named_parameters())
    for n, p in named.named_parameters():
        if parts_of(named)[n] == "positions":
            torch.testing.assert_close((p - before[n]).abs(), torch.full_like(p, 0.08), rtol=1e-4, atol=1e-7)
            assert (moved[n] - before[n]).abs().max() < 0.02
        else:
            assert torch.equal(p, moved[n]), n


def test_a_model_of_others_has_no_heads_that_are_known():
    """Its matrices would silently stay whole."""
    other = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(UserError, match=r"muon_by='head' is for the layers .* has none"):
        optimizer_of("muon", other, lr=0.1, muon_by="head")
    optimizer_of("muon", other, lr=0.1)


def test_factors_that_make_no_sense_are_refused():
    with pytest.raises(UserError, match="lr_factors='heads' is not known"):
        optimizer_of("muon", tiny(), lr=0.1, lr_factors={"heads": 1.0})
    with pytest.raises(UserError, match=r"lr_factors\.head=-1"):
        optimizer_of("muon", tiny(), lr=0.1, lr_factors={"head": -1.0})
    with pytest.raises(UserError, match=r"coefficients=2\.0: AltUpT5ForConditionalGeneration has no coefficients"):
        optimizer_of("muon", tiny("dense"), lr=0.1, lr_factors={"coefficients": 2.0})
    optimizer_of("muon", tiny("dense"), lr=0.1, lr_factors={"coefficients": 1.0})
    without = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    with pytest.raises(UserError, match=r"positions=1\.0: Sequential has no tables of relative positions"):
        optimizer_of("muon", without, lr=0.1, lr_factors={"positions": 1.0})
    optimizer_of("muon", without, lr=0.1, lr_factors={"vectors": 2.0})

"""Every case at toy size: all its providers agree with float64, and what follows from their times is right."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from altup.bench.cases import CASES, gemma3n, problems, rule, step
from altup.bench.cases.floors import extra_shapes, product_shapes
from altup.bench.problem import Problem, Provider, Setup
from altup.bench.runner import Runner
from altup.bench.timing import Spread
from altup.kernels import altup_update
from altup.models import AltUpT5Config, AltUpT5ForConditionalGeneration

SETUP = Setup(torch.device("cpu"), quick=True)
# What every case must time, besides what else it has.
EXPECTED = {
    "step": {
        "hf eager",
        "hf sdpa",
        "dense eager",
        "altup k2 eager",
        "sequence-altup eager",
        "products of dense",
        "extra products of altup k4",
    },
    "rule": {"plain eager", "plain dynamic", "gemma3n eager", "copy"},
    "attention": {"plain eager", "sdpa memory-efficient", "flash without bias"},
    "head": {"plain eager", "matrix products"},
    "dropout": {"plain eager", "addition"},
    "optimizer": {
        "adafactor",
        "adamw",
        "adamw-rms",
        "muon",
        "muon by head",
        "muon by block",
        "hf adafactor",
        "torch adamw fused",
        "forward and backward",
    },
    "generation": {"hf dense", "dense", "altup k2"},
    "gemma3n": {"hf eager", "altup plain", "copy", "hf"},
    "data": {"span corruption", "tokenising"},
    "kernels": {"plain eager"},
    "streams": {"plain eager", "hf eager", "copy"},
}


def run(names, setup=SETUP, **options):
    rows = []
    Runner(setup, rows.append, rounds=1, **options).run(problems(names, setup))
    return rows


@pytest.mark.parametrize("case", CASES)
def test_all_providers_agree_and_are_timed(case):
    rows = run([case])
    assert [row for row in rows if row.status not in ("ok", "skipped")] == []
    assert {row.provider for row in rows if row.metric == "ms"} >= EXPECTED[case]
    assert all(row.p50 > 0 for row in rows if row.metric not in ("", "overhead", "floor", "overhead/floor"))


def forget_coefficients(x, y, P, g, active):
    return altup_update(x, y, P.detach() + 0 * P, g, active)


def test_a_rule_without_its_coefficients_gradients_is_caught():
    inputs = rule.Inputs(SETUP, 3, (2, 5, 8))
    providers = [
        Provider("right", partial(inputs.work, altup_update)),
        Provider("wrong", partial(inputs.work, forget_coefficients)),
    ]
    rows = []
    Runner(SETUP, rows.append, rounds=1).run([Problem("rule", {}, providers, "right", {"": 1e-4})])
    wrong = [row for row in rows if row.provider == "wrong"]
    assert [(row.status, row.note[:23]) for row in wrong] == [("disagrees", "coefficients' gradients")]


def test_a_model_with_other_weights_is_caught():
    models = step.Models(SETUP, "tiny")
    other = copy.deepcopy(models.master("dense"))
    with torch.no_grad():
        other.decoder.layers[1].attention.q.weight.mul_(1.1)
    work = models.ours("dense", compiled=False)
    assert all(error < 1e-3 for error in work.errors().values())
    models.master = lambda name: other
    errors = models.ours("dense", compiled=False).errors()
    assert errors["gradient"] > 1e-3


@pytest.mark.parametrize("method", ["dense", "altup", "recycled", "sequence-altup"])
def test_products_are_those_of_the_model(method):
    """Counted with hooks on every linear map of a real forward pass."""
    config = AltUpT5Config.from_preset("tiny", method, vocab_size=96)
    model = AltUpT5ForConditionalGeneration(config)
    seen = Counter()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda m, inputs, out: seen.update([(inputs[0].shape[:-1].numel(), m.in_features, m.out_features)])
            )
    model(input_ids=torch.zeros(3, 21, dtype=torch.int64), decoder_input_ids=torch.zeros(3, 5, dtype=torch.int64))
    assert product_shapes(config, 3, 21, 5) == seen


@pytest.mark.parametrize(("method", "k"), [("altup", 2), ("altup", 4), ("recycled", 2)])
def test_extra_products_are_what_a_dense_model_has_not(method, k):
    def work(shapes):
        return sum(rows * wide * out * count for (rows, wide, out), count in shapes.items())

    dense, wide = (AltUpT5Config.from_preset("base", m, n) for m, n in (("dense", None), (method, k)))
    extra = work(extra_shapes(wide, 3, 21, 5))
    assert work(product_shapes(wide, 3, 21, 5)) == work(product_shapes(dense, 3, 21, 5)) + extra
    assert (extra > 0) == (method == "altup")


def test_overheads_and_floors_by_hand():
    """base: 12 encoder layers of 512 and 12 decoder layers of 114 tokens, 64 sequences, 768 columns, 4 bytes."""
    setup = Setup(torch.device("cpu"), quick=False)
    models = step.Models.__new__(step.Models)
    models.setup = setup
    models.configs = {"altup k2": AltUpT5Config.from_preset("base", "altup", 2)}
    ids = torch.zeros(64, 512), torch.zeros(64, 114)
    models.batch = step.Batch(*ids)
    assert models.rule_bytes("altup k2") == 13 * 12 * (512 + 114) * 64 * 768 * 4

    def ms(value):
        return {"both": Spread(value, value, value, 1)}

    timings = {
        "dense": ms(100.0),
        "altup k2": ms(112.0),
        "products of dense": ms(40.0),
        "extra products of altup k2": ms(6.0),
        "copy": {"copy": Spread(0.5, 0.5, 0.5, 1)},
    }
    facts = {(f.provider, f.metric): f.value for f in step.compare_methods(timings, models)}
    moving = 13 * 12 * 626 * 64 * 768 * 4 * 0.5 / 2**31
    assert facts == {
        ("dense", "fraction"): 0.4,
        ("altup k2", "fraction"): pytest.approx(46 / 112),
        ("altup k2", "overhead"): pytest.approx(0.12),
        ("altup k2", "floor"): pytest.approx((6 + moving) / 100),
        ("altup k2", "overhead/floor"): pytest.approx(12 / (6 + moving)),
    }


def test_rule_as_share_of_copy_speed_by_hand():
    timings = {"triton": {"both": Spread(1, 2.0, 3, 9)}, "copy": {"copy": Spread(1, 1.0, 1, 9)}}
    (fact,) = rule.of_copy_speed(timings, k=2, block=2**28, quick=False)
    assert fact.value == pytest.approx(13 * 2**28 / 2**31 / 2)  # 13 blocks in 2 ms beside 2³¹ bytes in 1 ms


@pytest.mark.slow
@pytest.mark.parametrize("case", ["step", "rule", "attention", "head", "dropout", "generation"])
def test_compiled_providers_agree(case):
    """Compiled for the CPU, where FlexAttention has no backward pass."""
    rows = run([case], Setup(torch.device("cpu"), quick=True, compiles=True))
    assert {row.provider for row in rows if row.status not in ("ok", "skipped")} <= {"flex"}
    assert any(row.metric == "s" for row in rows)


INTERPRETED = """
import torch
from tests.kernels.interpreter import repair
repair()
from tests.bench.test_cases import Setup, run
cases = ["rule", "attention", "head", "dropout", "kernels", "streams"]
rows = run(cases, Setup(torch.device("cpu"), True, runs_triton=True), only=["triton*"])
assert [row for row in rows if row.status != "ok"] == [], rows
assert {"triton", "triton dynamic"} <= {row.provider for row in rows if row.case == "rule" and row.metric == "ms"}
assert {row.case for row in rows if row.metric == "ms"} == set(cases)
"""


@pytest.mark.slow
def test_triton_providers_agree_in_the_interpreter():
    pytest.importorskip("triton")
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], cwd=root, env=environment, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case):
    rows = run([case], Setup(torch.device("cuda"), quick=True, compiles=True, runs_triton=True))
    assert [row for row in rows if row.status not in ("ok", "skipped") and row.kind == "ours"] == []
    if case not in ("data", "optimizer"):
        assert any(row.metric == "GiB" for row in rows)


def test_a_peer_computes_attention_as_its_name_says(monkeypatch):
    """The stacks of Hugging Face's T5 have configs of their own."""
    seen = []
    monkeypatch.setattr(step.Models, "_work", lambda self, model, *rest: seen.append(model))
    models = step.Models(SETUP, "tiny")
    for attention in ("sdpa", "eager"):
        models.hugging_face(attention)
        parts = [m for m in seen[-1].modules() if type(m).__name__ == "T5Attention"]
        assert {part.config._attn_implementation for part in parts} == {attention}


def test_flex_masks_of_gemma3n_are_windows() -> None:
    """The peer with FlexAttention is given its masks once: those of a token that sees the window before it."""
    config = gemma3n.text_config(**gemma3n.QUICK)
    config._attn_implementation = "flex_attention"
    masks = gemma3n.block_masks(SimpleNamespace(config=config, device=SETUP.device), torch.Size((2, 20)))
    places = torch.arange(20)
    back = places[:, None] - places
    zero = torch.tensor(0)
    for kind, window in {"full_attention": 20, "sliding_attention": config.sliding_window}.items():
        seen = masks[kind].mask_mod(zero, zero, places[:, None], places)
        torch.testing.assert_close(seen, (back >= 0) & (back < window))

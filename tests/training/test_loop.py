"""The loop learns, counts, skips, clips, logs and keeps as it says."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from altup.core.errors import UserError
from altup.training.checkpoints import read_state
from altup.training.engine import Engine
from altup.training.metrics import held_out_loss
from altup.training.prefetch import prefetch
from tests.training.compare import assert_same_bits, records, weights
from tests.training.tiny import ALONE, Fixed, MadeUp, build, run, tiny_loop

STILL = {"model": {"dropout_rate": 0.0}}


def test_it_learns(tmp_path: Path) -> None:
    run(tmp_path, steps=60, log_every=10, save_every=60, eval_every=60)
    kept = [r for r in records(tmp_path) if r["split"] == "train"]
    assert kept[0]["loss"] > 3
    assert kept[-1]["loss"] < 1.5
    assert records(tmp_path)[-1]["accuracy"] > 0.8


def test_the_first_records_say_what_the_model_computes(tmp_path: Path) -> None:
    """Loss, accuracy and gradient norm of step 1 against autograd on the plain model."""
    run(tmp_path, steps=2, log_every=1, **STILL)
    torch.manual_seed(0)
    model = build(dropout_rate=0.0)
    arrays = MadeUp().examples(0, 0, 8)
    labels = torch.from_numpy(arrays["labels"]).long()
    logits = model(input_ids=torch.from_numpy(arrays["input_ids"]).long(), labels=labels).logits
    counted = labels != -100
    nll = F.cross_entropy(logits[counted], labels[counted])
    z = 1e-4 * logits[counted].logsumexp(-1).square().mean()
    (nll + z).backward()
    nll, z = nll.detach(), z.detach()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    first = records(tmp_path)[0]
    assert first["step"] == 1
    assert first["loss"] == pytest.approx(float(nll), rel=1e-5)
    assert first["total_loss"] == pytest.approx(float(nll + z), rel=1e-5)
    assert first["accuracy"] == pytest.approx(
        float((logits.argmax(-1) == labels)[counted].float().mean()), abs=1e-6
    )
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert first["epoch"] == pytest.approx(8 / 40)
    assert first["lr"] == 0.02


@pytest.mark.parametrize("other", [{"micro_batch": 2}, {"micro_batch": 1}, {"activation_checkpointing": True}])
def test_the_update_does_not_depend_on_how_it_is_computed(tmp_path: Path, other: dict[str, Any]) -> None:
    """Micro-batches hold different numbers of labels, so a mean of means would show."""
    run(tmp_path / "plain", steps=4, **STILL)
    run(tmp_path / "other", steps=4, **STILL, **other)
    for name, tensor in weights(tmp_path / "plain").items():
        torch.testing.assert_close(weights(tmp_path / "other")[name], tensor, rtol=1e-4, atol=1e-5)


def poisoned(steps: set[int], value: float = math.nan) -> Any:
    """`build`, with one weight whose gradient is `value` in one place at the given steps (from 0)."""

    def make(checkpoint: Path | None) -> torch.nn.Module:
        model = build(checkpoint, dropout_rate=0.0)
        weight = next(p for n, p in model.named_parameters() if n.endswith("lm_head.weight"))
        seen = iter(range(10**6))

        def hook(grad: torch.Tensor) -> torch.Tensor:
            if next(seen) not in steps:
                return grad
            grad = grad.clone()
            grad[0, 0] = value
            return grad

        weight.register_hook(hook)
        return model

    return make


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.5}, {"optimizer": "adamw", "lr": 1e-2}])
def test_a_step_that_is_not_finite_changes_nothing(tmp_path: Path, value: float, settings: dict[str, Any]) -> None:
    loop = tiny_loop(tmp_path, steps=4, save_every=1, keep_last=9, log_every=1, **settings)
    loop.build_model = poisoned({2}, value)
    loop.run()
    before, after, later = (tmp_path / "checkpoints" / f"step-{n}" for n in (2, 3, 4))
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert_same_bits(load_file(before / file), load_file(after / file))
    assert any(
        not torch.equal(t, load_file(later / "model.safetensors")[n])
        for n, t in load_file(after / "model.safetensors").items()
    )
    kept = [r for r in records(tmp_path) if r["split"] == "train"]
    assert [r["skipped"] for r in kept] == [0, 0, 1, 1]
    assert "loss" not in kept[2]
    assert all(math.isfinite(r["loss"]) for r in kept if "loss" in r)


def test_too_many_skipped_steps_stop_the_run(tmp_path: Path) -> None:
    loop = tiny_loop(tmp_path, steps=20, log_every=2, max_skipped=3)
    loop.build_model = poisoned({1, 4, 5, 6, 7, 8})
    with pytest.raises(UserError, match=r"steps in a row had a gradient that is not finite.*lower lr"):
        loop.run()
    assert [r["skipped"] for r in records(tmp_path) if r["split"] == "train"] == [1, 1, 3]


def test_clipping_bounds_the_gradient(tmp_path: Path) -> None:
    loop, norms = tiny_loop(tmp_path, steps=3, clip_norm=0.25), []

    def watch(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))

    def see_engine(engine: Engine) -> None:
        engine.optimizer.register_step_pre_hook(watch)

    loop.make_evaluate = see_engine
    loop.run()
    assert norms == pytest.approx([0.25] * 3, rel=1e-4)


def test_it_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    losses = {2: 3.0, 4: 1.0, 6: math.nan, 8: 2.0, 10: 5.0}
    loop = tiny_loop(tmp_path, steps=10, save_every=2, eval_every=2, keep_last=2)
    loop.make_evaluate = lambda engine: lambda model, step: {"loss": losses[step], "accuracy": 0.0}
    outcome = loop.run()
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-4", "step-8", "step-10"}
    assert outcome.evaluation == {"step": 10, "loss": 5.0, "accuracy": 0.0}


def test_the_best_can_be_another_number(tmp_path: Path) -> None:
    """As fine-tuning has it: a score, the higher the better."""
    loop = tiny_loop(tmp_path, steps=8, save_every=2, eval_every=2, keep_last=1)
    loop.make_evaluate = lambda engine: lambda model, step: {"exact_match": {2: 0.1, 4: 0.7, 6: 0.2, 8: 0.3}[step]}
    loop.score = lambda found: found["exact_match"]
    loop.run()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-4", "step-8"}


# By step: the best mean is at 6, the best of task "a" at 2, of "b" at 8; "c" is never a number but once.
SCORES = {
    2: {"score": 10.0, "a": 90.0, "b": 1.0, "c": float("nan")},
    4: {"score": 11.0, "a": 80.0, "b": 2.0, "c": float("nan")},
    6: {"score": 30.0, "a": 90.0, "b": 3.0, "c": 0.0},
    8: {"score": 20.0, "a": 10.0, "b": 9.0, "c": float("nan")},
    10: {"score": 0.0, "a": 0.0, "b": 0.0, "c": float("nan")},
    12: {"score": 0.0, "a": 0.0, "b": 0.0, "c": float("nan")},
}


def kept(out: Path, steps: int, resume: bool = False, **settings: object) -> set[int]:
    loop = tiny_loop(out, steps=steps, eval_every=2, save_every=2, keep_last=1, **settings)
    loop.make_evaluate = lambda engine: lambda model, step: dict(SCORES[step])
    loop.score = lambda values: values["score"]
    loop.also_best = ["a", "b", "c"]
    loop.run(resume)
    return {int(path.name.removeprefix("step-")) for path in (out / "checkpoints").iterdir()}


def test_the_best_of_every_score_is_kept(tmp_path: Path) -> None:
    assert kept(tmp_path / "run", 12, decay_fraction=0.0) == {2, 6, 8, 12}
    state = read_state(tmp_path / "run" / "checkpoints" / "step-12")
    assert state.best == {"step": 6, "score": 30.0}
    assert {name: best["step"] for name, best in state.best_of.items() if best} == {"a": 2, "b": 8, "c": 6}


def test_bests_are_remembered_when_a_run_goes_on(tmp_path: Path) -> None:
    kept(tmp_path / "run", 4, decay_fraction=0.0)
    assert kept(tmp_path / "run", 12, resume=True, decay_fraction=0.0) == {2, 6, 8, 12}


def test_nothing_but_the_last_is_kept_if_so_told(tmp_path: Path) -> None:
    assert kept(tmp_path / "run", 12, keep_best=False, decay_fraction=0.0) == {12}


def test_a_checkpoint_is_a_hugging_face_model(tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    import altup.models  # noqa: F401

    run(tmp_path, steps=5)
    for folder in (tmp_path / "checkpoints" / "step-5", tmp_path / "final"):
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        assert_same_bits(dict(model.state_dict()), weights(tmp_path))
    pickles = [p for p in tmp_path.rglob("*") if p.suffix in (".bin", ".pt", ".pkl", ".pth")]
    assert not pickles


def test_bf16_trains_float32_masters(tmp_path: Path) -> None:
    run(tmp_path, steps=20, precision="bf16", log_every=10)
    losses = [r["loss"] for r in records(tmp_path) if r["split"] == "train"]
    assert losses[-1] < losses[0]
    assert {t.dtype for t in weights(tmp_path).values()} == {torch.float32}


@pytest.mark.parametrize("batch_size", [1, 5, 8, 13, 20])
def test_held_out_numbers_do_not_depend_on_the_batch(batch_size: int) -> None:
    """Against all thirteen examples at once; the last batch is filled up."""
    model = build(dropout_rate=0.3).eval()
    arrays = {n: torch.from_numpy(a).long() for n, a in Fixed().examples(0, 13).items()}
    whole = model(**arrays)
    found = held_out_loss(Fixed(), batch_size, ALONE, nullcontext)(model.train(), 0)
    assert model.training
    tokens = (arrays["labels"] != -100).sum()
    assert found["loss"] == pytest.approx(float(whole.nll_sum / tokens), rel=1e-6)
    assert found["accuracy"] == pytest.approx(float(whole.num_correct / tokens), rel=1e-6)


@pytest.mark.parametrize("micro_batch", [8, 2])
def test_prefetched_batches_are_those_of_the_data(micro_batch: int) -> None:
    data = MadeUp()
    for step, batch in enumerate(prefetch(data, range(3, 9), micro_batch, ALONE), start=3):
        expected = data.examples(step, 0, 8)
        for name, array in expected.items():
            np.testing.assert_array_equal(torch.cat([micro[name] for micro in batch.micro]).numpy(), array)
        assert batch.tokens == (expected["labels"] != -100).sum()


def test_an_error_in_the_data_reaches_the_caller() -> None:
    class Broken(MadeUp):
        def examples(self, step: int, start: int, stop: int) -> dict[str, np.ndarray]:
            if step == 2:
                raise UserError("shard 7 is damaged")
            return super().examples(step, start, stop)

    with pytest.raises(UserError, match="shard 7"):
        list(prefetch(Broken(), range(5), 8, ALONE))

"""The estimate of a step's memory, beside what tensors of a real step take."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from altup import AltUpDecoderConfig, AltUpDecoderForCausalLM, AltUpT5Config, account
from altup.core.errors import UserError
from altup.models.accounting import Accounting
from altup.training.step_memory import GIB, STATE_BYTES, Plan, gpu_bytes, settings_that_fit, step_memory
from tests.training.tiny import optimizer_of

# As small as Adafactor keeps sums of rows and columns for.
SHAPE: dict[str, Any] = {
    "d_model": 128,
    "d_ff": 256,
    "d_kv": 32,
    "num_heads": 4,
    "num_layers": 3,
    "vocab_size": 256,
}


@pytest.mark.parametrize("name", STATE_BYTES)
def test_the_optimizers_state_is_counted(name: str) -> None:
    model = AltUpDecoderForCausalLM(AltUpDecoderConfig.from_preset("tiny", "altup", **SHAPE))
    optimizer = optimizer_of(name, model, lr=0.01)
    ids = torch.zeros(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step(skip=torch.tensor(False))  # type: ignore[call-arg]
    state = [
        value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)
    ]
    real = sum(value.numel() * value.element_size() for value in state)
    memory = step_memory(account(model.config, 4), Plan(1, name))
    small = 0.12 if name == "adafactor" else 0.02  # its sums count as nothing, which they are in larger models
    assert memory.optimizer == pytest.approx(real, abs=small * memory.weights)
    assert memory.weights == memory.gradients == 4 * sum(p.numel() for p in model.parameters())


LARGE = AltUpT5Config.from_preset("large", "altup")


@pytest.mark.parametrize(
    ("config", "batch", "gpu"),
    [(LARGE, 64, 24), (LARGE, 64, 12), (AltUpT5Config.from_preset("xl"), 8, 24), (LlamaConfig(), 4, 80)],
)
def test_settings_that_are_named_fit_and_no_larger_batch_does(config: Any, batch: int, gpu: int) -> None:
    cost = account(config, 512)
    plan = Plan(batch)
    assert not step_memory(cost, plan).fits(gpu * GIB)
    found = settings_that_fit(cost, batch, plan, gpu * GIB)
    assert found
    for options in found:
        words = options.split()
        named = {word: words[i + 1] for i, word in enumerate(words[:-1])}
        gpus = int(named.get("on", 1))
        rows = int(named.get("--micro-batch", batch)) // gpus
        optimizer, again = named.get("--optimizer", "muon"), "--activation-checkpointing" in words
        assert step_memory(cost, Plan(rows, optimizer, "bf16", again, gpus)).fits(gpu * GIB), options
        if rows * gpus < batch:
            assert not step_memory(cost, Plan(2 * rows, optimizer, "bf16", again, gpus)).fits(gpu * GIB), options


def test_recomputing_and_sharding_save_memory() -> None:
    cost = account(LARGE)
    plain = step_memory(cost, Plan(8))
    again = step_memory(cost, Plan(8, activation_checkpointing=True))
    shared = step_memory(cost, Plan(8, gpus=8))
    assert again.activations < plain.activations / 3
    assert (again.weights, again.optimizer) == (plain.weights, plain.optimizer)
    assert shared.weights * 8 == pytest.approx(plain.weights, abs=8)
    assert shared.activations == plain.activations
    assert step_memory(cost, Plan(8, precision="fp32")).activations > 1.8 * plain.activations


def test_sizes_of_gpus() -> None:
    assert gpu_bytes("24GB") == gpu_bytes("24") == gpu_bytes("24 GiB") == 24 * GIB
    for text in ("", "0GB", "24TB", "-1", "1e9"):
        with pytest.raises(UserError, match="no size of a GPU's memory"):
            gpu_bytes(text)


CASES = [("t5", "base", 64, "bf16"), ("t5", "base", 64, "fp8"), ("decoder", "large", 8, "bf16")]


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "size", "batch", "precision"), CASES)
def test_the_estimate_is_within_a_tenth_of_a_run(
    family: str, size: str, batch: int, precision: str, tmp_path
) -> None:
    """The peak of a run of five steps, of recorded ones too."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    from altup.training.pretraining import PretrainConfig, pretrain
    from tests.processes import prepare_text

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    data = prepare_text(tmp_path, 4000)
    length = 2048 if family == "decoder" else 512
    settings: dict[str, Any] = {"steps": 5, "inputs_length": length, "eval_sequences": 1, "trackers": ["none"]}
    vocabulary = {"vocab_size": 32128}
    run = PretrainConfig(
        data=str(data), model=family, size=size, batch_size=batch, precision=precision,
        model_overrides=vocabulary, **settings,
    )  # fmt: skip
    pretrain(run, tmp_path / "run")
    peak = torch.cuda.max_memory_allocated()
    configs = {"t5": AltUpT5Config, "decoder": AltUpDecoderConfig}
    cost: Accounting = account(configs[family].from_preset(size, **vocabulary), length)
    estimate = step_memory(cost, Plan(batch, "muon", precision))
    print(f"{family} {size} {precision}: {peak / GIB:.2f} GiB measured, {estimate}")
    assert estimate.total == pytest.approx(peak, rel=0.1)

"""The examples run as a reader would run them, and show what they say they show."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(name, *arguments):
    """What it prints. In this process, which has imported PyTorch already."""
    before, sys.argv = sys.argv, [str(EXAMPLES / name), *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()


def numbers(words, text):
    return [float(number) for number in re.findall(rf"{words} ([\d.]+)", text)]


def test_all_examples_are_tested():
    tested = set(re.findall(r"run\(\"(\w+\.py)\"", Path(__file__).read_text()))
    assert tested == {path.name for path in EXAMPLES.glob("*.py")}


def test_own_transformer():
    losses = numbers("loss", run("own_transformer.py"))
    assert len(losses) == 2
    assert max(losses) < 1.0


def test_own_transformer_is_short():
    """The promise of forty lines: the two classes."""
    text = (EXAMPLES / "own_transformer.py").read_text()
    assert len(re.search(r"class Layer.*?(?=\n\ndef train)", text, re.DOTALL)[0].splitlines()) <= 42


@pytest.mark.parametrize("method", ["recycled", pytest.param("altup", marks=pytest.mark.slow)])
def test_widen_and_finetune(method, tmp_path):
    pytest.importorskip("accelerate")
    text = run("widen_and_finetune.py", "--method", method, "--steps", "20", "--output", str(tmp_path))
    original, start, end = re.search(r"original ([\d.]+), widened ([\d.]+), trained ([\d.]+)", text).groups()
    assert float(start) == pytest.approx(float(original), abs=1e-3)
    assert float(end) < float(start) - 1
    assert (tmp_path / "widened" / "model.safetensors").exists()


def test_gemma3n_lora(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    text = run("gemma3n_lora.py", "--steps", "20", "--output", str(tmp_path))
    before, after = (float(number) for number in re.search(r"before ([\d.]+), after ([\d.]+)", text).groups())
    assert after < before - 0.05  # adapters alone, on random weights
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    source = (EXAMPLES / "gemma3n_lora.py").read_text()
    assert sum(line.endswith("# altup") for line in source.splitlines()) == 3


def test_gemma3n_trl(tmp_path):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    text = run("gemma3n_trl.py", "--steps", "10", "--length", "64", "--packing", "--output", str(tmp_path))
    first, last = (
        float(number) for number in re.search(r"loss ([\d.]+) at first, ([\d.]+) at last", text).groups()
    )
    assert 1 < last < first - 0.1
    assert "padded and packed rows" in text
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_vision():
    """Better than chance (0.10), and hard enough that no model gets everything right."""
    text = run("vision.py", "--seeds", "2", "--steps", "60")
    accuracies = numbers("accuracy", text)
    assert len(accuracies) == 3
    assert min(accuracies) > 0.2
    assert max(accuracies) < 0.99
    assert len(re.findall(r"over dense [+-][\d.]+ ± [\d.]+", text)) == 2

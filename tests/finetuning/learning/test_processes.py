"""Models of others, fine-tuned by two processes with sharded weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from altup.cli.main import app
from tests.evaluation.tiny import made_up_words
from tests.evaluation.tiny_models import save_bert, save_llama, save_wide
from tests.torchrun import train_together
from tests.training.compare import records, weights


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_two_processes_make_the_same_run(tmp_path: Path, kind: str) -> None:
    """Widened, so that what is gathered to be scored is wide too."""
    original = (save_llama if kind == "llama" else save_bert)(tmp_path / "model")
    model = save_wide(tmp_path / "wide", original)
    (tmp_path / "glue/sst2").mkdir(parents=True)
    lines = [{"sentence": " ".join(made_up_words()[i : i + 3]), "label": i % 2} for i in range(8)]
    for split in ("train", "validation"):
        (tmp_path / f"glue/sst2/{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["finetune", str(model), "--task", "sst2", "--data", str(tmp_path), "--batch-size", "8",
             "--steps", "6", "--lr", "0.02", "--dropout", "0", "--eval-every", "3", "--eval-batch-size", "2",
             "--track", "none", "--inputs-length", "48", "--targets-length", "8", "--log-every", "1"]  # fmt: skip
    alone, together = (tmp_path / name for name in ("alone", "together"))
    assert CliRunner().invoke(app, [*flags, "--out", str(alone)]).exit_code == 0
    train_together("-m", "altup", *flags, "--out", together, "--parallel", "fsdp", out=together)
    for ours, theirs in zip(records(alone), records(together), strict=True):
        assert theirs.pop("split") == ours.pop("split")
        assert theirs == pytest.approx(ours, rel=1e-3)
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(together)[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    said = [(out / "evaluation/step-6/glue/sst2.validation.jsonl").read_text() for out in (alone, together)]
    assert said[0] == said[1]

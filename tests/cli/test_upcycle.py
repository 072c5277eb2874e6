from __future__ import annotations

import subprocess
import sys

import torch
from transformers import AutoModelForSeq2SeqLM

from tests.models.helpers import batch, hugging_face_t5


def run_altup(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "altup", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_folder_to_folder(tmp_path):
    original = hugging_face_t5()
    original.save_pretrained(tmp_path / "t5")
    done = run_altup("upcycle", tmp_path / "t5", "--method", "altup", "--k", 2, "--out", tmp_path / "wide")
    assert done.returncode == 0, done.stderr
    assert "largest difference" in done.stdout
    assert "no tokenizer found" in done.stdout.replace("\n", " ")
    assert not (tmp_path / "wide" / "tokenizer.json").exists()
    wide = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "wide")
    assert wide.config.num_blocks == 2
    with torch.no_grad():
        torch.testing.assert_close(wide(**batch()).logits, original(**batch()).logits, rtol=0, atol=1e-5)
    again = run_altup("upcycle", tmp_path / "t5", "--out", tmp_path / "wide")
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_bad_input_is_one_clear_line(tmp_path):
    done = run_altup("upcycle", tmp_path / "missing", "--out", tmp_path / "wide")
    assert done.returncode == 2
    assert "missing" in done.stderr
    assert "Traceback" not in done.stderr

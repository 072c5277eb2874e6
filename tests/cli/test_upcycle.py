from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from tests.models.helpers import batch, hugging_face_bert, hugging_face_llama, hugging_face_t5
from tests.processes import altup, run


def test_folder_to_folder(tmp_path):
    original = hugging_face_t5()
    original.save_pretrained(tmp_path / "t5")
    original.save_pretrained(tmp_path / "run" / "final")
    done = run("upcycle", tmp_path / "run", "--method", "altup", "--k", 2, "--out", tmp_path / "wide")
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())  # lines break where the path happens to end
    assert "relative difference" in words
    assert "no tokenizer found" in words
    assert not (tmp_path / "wide" / "tokenizer.json").exists()
    wide = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "wide")
    assert wide.config.num_blocks == 2
    with torch.no_grad():
        torch.testing.assert_close(wide(**batch()).logits, original(**batch()).logits, rtol=0, atol=1e-5)
    again = run("upcycle", tmp_path / "t5", "--out", tmp_path / "wide")
    assert again.returncode == 2
    assert "is not empty" in again.stderr


@pytest.mark.parametrize(
    ("original", "auto_class"),
    [(hugging_face_bert(), AutoModelForMaskedLM), (hugging_face_llama(), AutoModelForCausalLM)],
)
def test_the_other_families(original, auto_class, tmp_path):
    original.save_pretrained(tmp_path / "theirs")
    code, text = altup(
        tmp_path / "log", "upcycle", tmp_path / "theirs", "--method", "altup", "--out", tmp_path / "w"
    )
    assert code == 0, text
    words = " ".join(text.split())  # lines break where the path happens to end
    assert float(words.split("logits ")[1].split(";")[0]) < 1e-4
    data = {"input_ids": batch("bert")["input_ids"]}
    with torch.no_grad():
        wide = auto_class.from_pretrained(tmp_path / "w")(**data).logits
        torch.testing.assert_close(wide, original(**data).logits, rtol=0, atol=1e-5)


def test_with_fixed_coefficients(tmp_path):
    original = hugging_face_llama()
    original.save_pretrained(tmp_path / "theirs")
    options = ("--method", "altup", "--coefficients", "fixed", "--out", tmp_path / "w")
    code, text = altup(tmp_path / "log", "upcycle", tmp_path / "theirs", *options)
    assert code == 0, text
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "w").config.coefficients == "fixed"
    code, text = altup(tmp_path / "log", "upcycle", tmp_path / "theirs", "--coefficients", "fixed", "--out", "x")
    assert code == 2
    assert "--coefficients fixed does not fit method='recycled'" in " ".join(text.split())


def test_bad_input_is_one_clear_line(tmp_path):
    done = run("upcycle", tmp_path / "missing", "--out", tmp_path / "wide")
    assert done.returncode == 2
    assert "missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refusal_leaves_no_folder_of_its_own(tmp_path):
    hugging_face_t5().save_pretrained(tmp_path / "t5")
    (tmp_path / "mine").mkdir()
    for out in ("wide", "mine"):
        done = run("upcycle", tmp_path / "t5", "--out", tmp_path / out, "--method", "sum")
        assert done.returncode == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "t5"]

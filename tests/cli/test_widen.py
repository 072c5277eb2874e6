"""`altup widen` and `altup narrow`, from folder to folder."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from altup import load_widened
from altup.cli.main import app
from altup.core.errors import UserError
from tests.models.widening.families import build, inputs
from tests.processes import prepare_text


def altup(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def llama(tmp_path):
    build("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def tokenizer():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


@pytest.mark.parametrize(("method", "k"), [("recycled", 2), ("altup", 3)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "bert", "vit"])
def test_there_and_back(family, method, k, tmp_path):
    """The wide folder computes what the original does, and narrowed it holds the very same weights."""
    original = build(family)
    there, wide, back = tmp_path / "there", tmp_path / "wide", tmp_path / "back"
    original.save_pretrained(there)
    if family == "vit":
        (there / "preprocessor_config.json").write_text("{}")
    else:
        tokenizer().save_pretrained(there)
    told = altup("widen", there, "--method", method, "--k", k, "--out", wide)
    assert f"{type(original).__name__}, widened by {method}, K = {k}" in told
    assert ("no tokenizer found" if family == "vit" else "tokenizer copied") in told
    assert (wide / ("preprocessor_config.json" if family == "vit" else "tokenizer.json")).exists()
    batch = inputs(original)
    with torch.no_grad():
        ours, theirs = load_widened(wide)(**batch).logits, original(**batch).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert "not widened" in altup("narrow", wide, "--out", back)
    before, after = load_file(there / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert json.loads((back / "config.json").read_text()) == json.loads((there / "config.json").read_text())


def test_some_layers(llama, tmp_path):
    assert "layers 1 to 2 of 4" in altup("widen", llama, "--layers", "1:3", "--out", tmp_path / "wide")
    assert [hasattr(layer, "altup") for layer in load_widened(tmp_path / "wide").model.layers] == [0, 1, 1, 0]


def test_what_cannot_be_done_is_told_and_leaves_nothing_behind(llama, tmp_path):
    taken, out = tmp_path / "taken", tmp_path / "out"
    taken.mkdir()
    (taken / "mine").touch()
    altup("widen", llama, "--out", tmp_path / "wide")
    for words, message in (
        (("widen", llama, "--out", taken), "is not empty"),
        (("widen", llama, "--out", taken / "mine"), "cannot be made"),
        (("widen", tmp_path / "missing", "--out", out), "no such folder"),
        (("widen", llama, "--out", out, "--k", 1), "--k 1"),
        (("widen", llama, "--out", out, "--method", "sum"), "--method sum"),
        (("widen", llama, "--out", out, "--layers", "2-3"), "--layers 2-3 is no run"),
        (("widen", llama, "--out", out, "--layers", "4:"), "--layers 4: holds none of the 4 layers"),
        (("widen", tmp_path / "wide", "--out", out), "widened already"),
        (("narrow", llama, "--out", out), "was not widened"),
        (("narrow", tmp_path / "wide", "--out", taken), "is not empty"),
    ):
        with pytest.raises(UserError, match=message):
            altup(*words)
    assert not out.exists()
    assert [path.name for path in taken.iterdir()] == ["mine"]


def test_no_foreign_code_and_no_pickle_is_read(llama, tmp_path):
    config = json.loads((llama / "config.json").read_text())
    for fields, message in (
        ({"architectures": ["Trainer"]}, "holds a Trainer, which transformers does not have"),
        ({"model_type": "theirs", "auto_map": {"AutoConfig": "evil.Config"}}, "altup runs none"),
    ):
        (llama / "config.json").write_text(json.dumps(config | fields))
        with pytest.raises(UserError, match=message):
            altup("widen", llama, "--out", tmp_path / "out")
    (llama / "config.json").write_text(json.dumps(config))
    weights = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    torch.save(weights, llama / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        altup("widen", llama, "--out", tmp_path / "out")
    shutil.rmtree(llama)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["widen", "upcycle"])
def test_a_changed_bit_of_a_converted_model_is_noticed(verb, llama, tmp_path):
    tokenizer().save_pretrained(llama)
    altup(verb, llama, "--method", "altup", "--out", tmp_path / "wide")
    weights = tmp_path / "wide/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    data = str(prepare_text(tmp_path, sentences=300))
    for call in (
        ["generate", tmp_path / "wide", "--prompt", "a"],
        ["pretrain", "--from", tmp_path / "wide", "--data", data, "--out", tmp_path / "run"],
        ["narrow" if verb == "widen" else "upcycle", tmp_path / "wide", "--out", tmp_path / "back"],
    ):
        with pytest.raises(UserError, match=r"wide is damaged: the contents of model.safetensors have changed"):
            altup(*call)

"""After `import altup`, transformers itself loads a folder of a widened model wide, or refuses; never narrow."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from altup import WideTrainerMixin, narrow, widen
from altup.core.errors import UserError
from altup.transformers_hooks import AfterImport
from tests.models.widening.families import build, inputs
from tests.models.widening.test_training import train


def trained(family, method, folder):
    wide = widen(build(family), method)
    train(wide, 2)
    wide.save_pretrained(folder)
    return wide


def logits(model):
    with torch.no_grad():
        return model(**inputs(model)).logits


@pytest.mark.parametrize("method", ["recycled", "altup"])
@pytest.mark.parametrize(
    ("family", "loader"),
    [
        ("llama", AutoModelForCausalLM),
        ("llama", LlamaForCausalLM),
        ("qwen3", AutoModelForCausalLM),
        ("bert", AutoModelForMaskedLM),
        ("t5", AutoModelForSeq2SeqLM),
    ],
)
def test_plain_loading_is_wide(family, loader, method, tmp_path):
    wide = trained(family, method, tmp_path)
    loaded = loader.from_pretrained(tmp_path)
    assert type(loaded) is type(wide)
    assert torch.equal(logits(loaded), logits(wide))


def test_options_of_loading_and_fields_of_the_config(tmp_path):
    trained("llama", "recycled", tmp_path)
    for loader in (AutoModelForCausalLM, LlamaForCausalLM):
        loaded = loader.from_pretrained(
            tmp_path, dtype=torch.bfloat16, attention_dropout=0.25, attn_implementation="eager"
        )
        assert loaded.dtype == torch.bfloat16
        assert loaded.model.layers[0].altup.P.dtype == torch.float32
        assert loaded.config.attention_dropout == 0.25
        assert loaded.config._attn_implementation == "eager"


def test_adapters_through_peft(tmp_path):
    peft = pytest.importorskip("peft")
    trained("llama", "recycled", tmp_path / "wide")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path / "adapter")
    batch = inputs(base)
    with torch.no_grad():
        expected = model.eval()(**batch).logits
        for loader in (peft.AutoPeftModelForCausalLM, AutoModelForCausalLM):
            loaded = loader.from_pretrained(tmp_path / "adapter").eval()
            assert torch.equal(loaded(**batch).logits, expected)
    with pytest.raises(UserError, match=r"adapters of another folder; use altup.load_widened"):
        LlamaForCausalLM.from_pretrained(tmp_path / "adapter")


def test_refusals(tmp_path):
    trained("llama", "recycled", tmp_path)
    with pytest.raises(UserError, match="output_loading_info"):
        LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["altup"]["later"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="not of this altup version"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


WITHOUT_ALTUP = """
import sys, transformers
for folder in sys.argv[1:]:
    kind = transformers.PreTrainedConfig.get_config_dict(folder)[0]["architectures"][0]
    for load in (transformers.AutoConfig, transformers.AutoModel, getattr(transformers, kind)):
        try:
            load.from_pretrained(folder)
        except Exception as error:
            assert "widened by altup" in str(error), error
            assert "import altup" in str(error), error
        else:
            raise SystemExit(f"{load.__name__} loads {folder}")
assert "altup" not in sys.modules
"""


def test_without_altup_every_loader_refuses(tmp_path):
    """Auto classes and the concrete one, whether sizes have changed (altup) or not (recycled)."""
    folders = []
    for family in ("llama", "bert", "t5", "gpt2"):
        for method in ("recycled", "altup"):
            folders.append(tmp_path / f"{family}-{method}")
            widen(build(family), method).save_pretrained(folders[-1])
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    outside["PYTHONPATH"] = str(Path(transformers.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ALTUP, *map(str, folders)], env=outside, cwd=tmp_path, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for folder in folders:  # with altup the sizes are numbers again
        config = AutoConfig.from_pretrained(folder)
        assert type(config.vocab_size) is int
        assert type(config.hidden_size) is int


def test_a_narrowed_model_loads_without_altup(tmp_path):
    narrow(widen(build("llama"), "recycled")).save_pretrained(tmp_path)
    assert "altup" not in (tmp_path / "config.json").read_text()


def test_other_models_load_as_ever(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(logits(loaded), logits(model))
    assert not (tmp_path / "README.md").exists()


def test_the_card_says_how_and_is_right(tmp_path, monkeypatch):
    """Saved, pushed over the card that transformers makes, and written by Trainer."""
    wide = trained("llama", "recycled", tmp_path / "saved")
    wide.save_pretrained(tmp_path / "saved")
    card = (tmp_path / "saved" / "README.md").read_text()
    assert card.count("## How to load this widened model") == 1
    code = card.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(code, found)
    assert torch.equal(logits(found["model"]), logits(wide))

    (tmp_path / "pushed").mkdir()
    (tmp_path / "pushed" / "README.md").write_text("---\ntags: [mine]\n---\n\n# Mine\n")
    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", lambda *_, **__: None)
    wide._upload_modified_files(tmp_path / "pushed", "me/wide", files_timestamps={})
    pushed = (tmp_path / "pushed" / "README.md").read_text()
    assert pushed.startswith("---\ntags: [mine]\n---\n\n# Mine\n")
    assert 'AutoModelForCausalLM.from_pretrained("me/wide")' in pushed

    class WideTrainer(WideTrainerMixin, Trainer): ...

    settings = TrainingArguments(str(tmp_path / "trainer"), report_to=[], use_cpu=True)
    WideTrainer(wide, settings).create_model_card()
    written = (tmp_path / "trainer" / "README.md").read_text()
    assert "## How to load this widened model" in written
    assert "library_name: transformers" in written


def test_the_hook_waits_for_an_import(tmp_path, monkeypatch):
    """`import altup` comes before that of transformers, or after it."""
    assert PreTrainedModel.from_pretrained.knows_altup
    (tmp_path / "comes_later.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(tmp_path)
    hook = AfterImport("comes_later", lambda module: setattr(module, "VALUE", module.VALUE + 1))
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    assert importlib.import_module("comes_later").VALUE == 2
    assert hook not in sys.meta_path
    del sys.modules["comes_later"]

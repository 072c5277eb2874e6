"""Model folders from anyone: none of their Python is run, no pickle is read, and nothing is made up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import altup
from altup import load_widened
from altup.cli.main import app
from altup.core.errors import UserError
from altup.core.pretrained import load_config, load_model, load_tokenizer
from altup.data.tokenizer import take
from altup.evaluation.answering import answering_of
from altup.evaluation.loading import load_any, load_to_answer
from altup.models.t5.model import AltUpT5ForConditionalGeneration
from altup.models.upcycling import load_pretrained, upcycle_to_folder
from tests.evaluation.tiny import save_tiny

SOURCE = Path(altup.__file__).parent


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), method="dense")


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A folder of one's own to damage."""
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle that is read fails the test."""

    def read(*_: Any, **__: Any) -> None:
        pytest.fail("a pickle was read")

    monkeypatch.setattr(torch, "load", read)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


LOADERS: dict[str, Callable[[Path], Any]] = {
    "generate": load_any,
    "evaluate": lambda folder: load_to_answer(answering_of(str(folder))),
    "upcycle": lambda folder: load_pretrained(str(folder)),
    "resume": lambda folder: load_model(AltUpT5ForConditionalGeneration, folder, dtype=torch.float32),
}


# --- foreign code ---


@pytest.fixture
def foreign(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose config and tokenizer want its Python to be run, and a user who says yes to everything."""
    code = f"open({str(tmp_path / 'was-run')!r}, 'w')\nclass Config: pass\nclass Tokens: pass\n"
    (model / "foreign.py").write_text(code)
    tokens = ["foreign.Tokens", "foreign.Tokens"]
    change(model / "tokenizer_config.json", tokenizer_class="Tokens", auto_map={"AutoTokenizer": tokens})
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return model


@pytest.mark.parametrize("verb", ["generate", "evaluate", "prepare"])
def test_no_code_of_a_tokenizer_is_run(foreign: Path, tmp_path: Path, verb: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"input": "a", "target": "b"}\n')
    (tmp_path / "a.txt").write_text("Some text.\n")
    arguments = {
        "generate": [foreign, "--prompt", "x"],
        "evaluate": [foreign, "--task", tmp_path / "a.jsonl"],
        "prepare": [tmp_path / "a.txt", "--out", tmp_path / "data", "--tokenizer", foreign],
    }
    done = CliRunner().invoke(app, [verb, *map(str, arguments[verb])], input="y\n")
    assert isinstance(done.exception, UserError)
    assert "Python code that comes with it, and altup runs none" in str(done.exception)
    assert "trust_remote_code" not in str(done.exception)
    assert not (tmp_path / "was-run").exists()


def test_upcycling_leaves_such_a_tokenizer_behind(foreign: Path, tmp_path: Path) -> None:
    told = upcycle_to_folder(str(foreign), tmp_path / "wide", "recycled", 2, 0, lambda text: None)
    assert "needs Python code that comes with it, and altup runs none" in told.no_tokenizer
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("load", [load_config, load_widened, lambda folder: take(str(folder), folder / "copy")])
def test_no_code_of_a_config_is_run(foreign: Path, tmp_path: Path, load: Callable[[Path], Any]) -> None:
    change(foreign / "config.json", model_type="foreign", auto_map={"AutoConfig": "foreign.Config"})
    with pytest.raises(UserError, match="altup runs none"):
        load(foreign)
    assert not (tmp_path / "was-run").exists()


def test_no_kernel_of_the_hub_is_fetched(model: Path) -> None:
    change(model / "config.json", attn_implementation="someone/attention")
    with pytest.raises(UserError, match="'someone/attention' is code on the hub"):
        load_any(model)


@pytest.mark.filterwarnings("ignore:Cannot enable progress bars")  # which the tests' environment turns off
def test_a_log_gets_no_bar_of_the_weights(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed without a terminal had one in its log."""
    from transformers.utils import logging

    monkeypatch.setattr(logging, "_tqdm_active", True)
    load_model(AltUpT5ForConditionalGeneration, model)
    assert capsys.readouterr().err == ""
    assert logging.is_progress_bar_enabled()  # for what a user loads


def test_nothing_goes_around_the_loader() -> None:
    """Cards and an example show what to type, our models extend Hugging Face's function, and hooks stand around
    the one that a user calls; what they load themselves they load by `load_widened`."""
    shown = {"training/model_card.py", "models/widening/card.py", "training/loop.py"}
    allowed = {"core/pretrained.py", "models/base.py", "transformers_hooks.py"} | shown
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(word in path.read_text() for word in ("from_pretrained(", "torch.load(", "trust_remote_code"))
    }
    assert found == allowed
    assert (SOURCE / "models" / "base.py").read_text().count(".from_pretrained(") == 1  # super()


# --- pickles ---


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("kind", ["alone", "index", "config", "adapter"])
def test_no_pickle_is_read(model: Path, unread: None, load: Callable[[Path], Any], kind: str) -> None:
    weights = model / "model.safetensors"
    tensors = load_file(weights)
    torch.save(tensors, model / "pytorch_model.bin")
    if kind == "adapter":
        (model / "pytorch_model.bin").rename(model / "adapter_model.bin")
        (model / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x"}')
        expected = "holds an adapter"
    else:
        weights.unlink()
        expected = "safetensors"
    if kind == "index":
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "pytorch_model.bin")}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    if kind == "config":
        (model / "pytorch_model.bin").rename(model / "adapter_model.bin")
        change(model / "config.json", transformers_weights="adapter_model.bin")
    with pytest.raises(UserError, match=expected):
        load(model)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {"a": "../../x.safetensors"}}', "[" * 100_000, "{"])
def test_an_index_that_is_none(model: Path, index: str) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=r"index\.json"):
        load_any(model)


def test_a_model_in_several_files_is_read(model: Path) -> None:
    whole = load_model(AltUpT5ForConditionalGeneration, model)
    (model / "model.safetensors").unlink()
    whole.save_pretrained(model, max_shard_size="20KB")
    assert len(list(model.glob("*.safetensors"))) > 1
    again = load_model(AltUpT5ForConditionalGeneration, model).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.state_dict().items())


# --- folders that are not whole ---


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_missing_weights_are_not_made_up(model: Path, load: Callable[[Path], Any]) -> None:
    tensors = load_file(model / "model.safetensors")
    lost = next(name for name in tensors if "encoder" in name and "norm" not in name)
    del tensors[lost]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="not whole: 1 weights are missing or misshapen"):
        load(model)


@pytest.mark.parametrize("config", ["[]", "{}", "null", "[" * 100_000, '{"model_type": 3}', "\x00"])
def test_a_config_that_is_none(model: Path, config: str) -> None:
    (model / "config.json").write_text(config)
    with pytest.raises(UserError, match="holds no model that can be read"):
        load_any(model)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_list_in_the_place_of_a_mapping_is_named(model: Path, file: str) -> None:
    (model / file).write_text("[]")
    with pytest.raises(UserError, match=rf": {file}: it holds a list where a mapping belongs"):
        load_any(model)


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "{", '{"model": 3}'])
def test_a_tokenizer_that_is_none(model: Path, text: str) -> None:
    (model / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match="holds no tokenizer that can be read"):
        load_tokenizer(model)


def test_a_tokenizer_whose_damage_shows_in_use(model: Path) -> None:
    """The library panics: not an Exception, and nothing that a user could read."""
    path = model / "tokenizer.json"
    damaged = json.loads(path.read_text())
    template = [{"SpecialToken": {"id": "</gone>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    damaged["post_processor"] = {
        **{"type": "TemplateProcessing", "single": template, "pair": template},
        "special_tokens": {"</gone>": {"id": "</gone>", "ids": [1], "tokens": ["</s>"]}},
    }
    path.write_text(json.dumps(damaged))
    load_tokenizer(model)
    damaged["post_processor"]["special_tokens"] = {}
    path.write_text(json.dumps(damaged))
    with pytest.raises(UserError, match="holds no tokenizer that can be read"):
        load_tokenizer(model)


@pytest.mark.parametrize("kind", ["altup_t5", "t5"])
def test_layers_without_end(model: Path, kind: str) -> None:
    change(model / "config.json", model_type=kind, num_layers=10**9)
    with pytest.raises(UserError, match=r"num_\w*layers=1000000000 makes no sense"):
        load_any(model)


# --- the hub ---


def test_a_downloaded_model_is_read_and_checked_alike(
    model: Path, unread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    repository, commit = tmp_path / "cache" / "models--someone--t5", "0" * 40
    snapshot = Path(shutil.copytree(model, repository / "snapshots" / commit))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    whole = load_pretrained("someone/t5")
    assert isinstance(whole, AltUpT5ForConditionalGeneration)
    (snapshot / "model.safetensors").unlink()
    names = dict.fromkeys(whole.state_dict(), "pytorch_model.bin")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    torch.save(whole.state_dict(), snapshot / "pytorch_model.bin")
    with pytest.raises(UserError, match="only safetensors are read"):
        load_pretrained("someone/t5")


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        ("generation_config.json", {"pad_token_id": [[]]}, "no model that can be built"),
        ("generation_config.json", {"decoder_start_token_id": ""}, "decoder_start_token_id='' of its"),
        ("generation_config.json", {"eos_token_id": [1, "x"]}, "is no token's number"),
        ("tokenizer_config.json", {"model_max_length": "x"}, "no tokenizer that can be read"),
    ],
)
def test_values_of_another_kind_are_sentences(model: Path, file: str, values: dict[str, Any], words: str) -> None:
    change(model / file, **values)
    with pytest.raises(UserError, match=words):
        load_any(model)


def test_where_decoding_starts_is_known_from_the_config(model: Path) -> None:
    change(model / "generation_config.json", decoder_start_token_id=None)
    loaded = load_any(model).model
    assert loaded.generation_config.decoder_start_token_id == loaded.config.decoder_start_token_id is not None


@pytest.mark.parametrize(
    "size", [{"hidden_size": 1 << 36}, {"vocab_size": 1 << 40}, {"intermediate_size": 1 << 38}]
)
def test_a_model_of_transformers_that_fits_no_memory_is_not_built(tmp_path: Path, size: dict[str, int]) -> None:
    """A config of a few bytes, and weights that are as small: nothing that is there would stop it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**small, vocab_size=32)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **size}))
    with pytest.raises(UserError, match=r"asks for [\d,]+ GiB of weights, where this machine has"):
        load_model(LlamaForCausalLM, tmp_path)


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS.keys())
@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.complex64, torch.int8])
def test_weights_of_another_kind_are_refused(model: Path, load: Callable[[Path], Any], kind: torch.dtype) -> None:
    """Converted to floating-point numbers they would load without a word, and answer with garbage."""
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if name.endswith("attention.q.weight"))
    save_file({**weights, name: weights[name].to(kind)}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=rf"{name} in model.safetensors is stored as"):
        load(model)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layer_norm_epsilon": float("-inf")}, "epsilon"),
        ({"layer_norm_epsilon": float("nan")}, "epsilon"),
        ({"num_decoder_layers": {}}, "num_decoder_layers"),
        ({"expert_jitter": ""}, "expert_jitter"),
        ({"expert_balance": []}, "expert_balance"),
        ({"expert_top_k": -1}, "expert_top_k"),
        ({"bos_token_id": 2**63}, "bos_token_id=9223372036854775808 of its config.json is no token's number"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_values_that_no_model_has_are_named(model: Path, values: dict[str, Any], words: str) -> None:
    change(model / "config.json", **values)
    with pytest.raises(UserError, match=words):
        load_config(model)


def test_an_epsilon_of_a_foreign_config_is_a_number(tmp_path: Path) -> None:
    for value in (float("-inf"), float("nan"), -1.0, 3.0):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": value}))
        with pytest.raises(UserError, match="rms_norm_eps"):
            load_config(tmp_path)


def test_an_index_without_files(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')
    with pytest.raises(UserError, match=r"index.json is no index of weights \(it names no file\)"):
        load_any(model)


def test_a_tokenizer_of_another_model_is_refused(model: Path) -> None:
    """Larger than the model's table: its last tokens have no row."""
    content = json.loads((model / "tokenizer.json").read_text())
    rows = load_config(model).vocab_size
    content["model"]["vocab"] += [[f"word-{number}", -9.0] for number in range(rows)]
    (model / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"the tokenizer has .* tokens, the model's tables .* rows"):
        load_any(model)


def test_a_tokenizer_without_padding_is_refused(model: Path) -> None:
    change(model / "tokenizer_config.json", pad_token=None)
    with pytest.raises(UserError, match="has no pad_token"):
        answering_of(str(model))

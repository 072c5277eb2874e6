"""`pretrain` from a model: ours, Transformers' own and widened ones go through one loop and resume exactly."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from transformers import AutoTokenizer

from altup import load_widened, upcycle, widen
from altup.core.errors import UserError
from altup.data.batches import HeldOut
from altup.data.objectives import build_objective
from altup.data.prepare import Recipe, prepare
from altup.data.shards import TokenStream
from altup.data.text_files import LocalFiles
from altup.models.families import family
from altup.models.foreign import kind_of
from altup.training.from_model import find_start, seal_of
from altup.training.parallel import ProcessGroup, leave
from altup.training.prefetch import label_name
from altup.training.pretraining import PretrainConfig, pretrain
from altup.training.run_folder import RunFolder
from tests.processes import fork_two, prepare_text, server
from tests.torchrun import train_together
from tests.training.compare import assert_same_run, records
from tests.training.tiny import ALONE

STEPS = 4
SMALL: dict[str, Any] = {
    "inputs_length": 32, "batch_size": 4, "steps": STEPS, "log_every": 1, "eval_every": 2, "eval_sequences": 6,
    "save_every": 2, "keep_last": 9, "deterministic": True, "precision": "fp32",
}  # fmt: skip
WIDTHS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("data"))


def tokenizer_of(data: Path) -> Any:
    return AutoTokenizer.from_pretrained(data / "tokenizer")


def save(model: Any, folder: Path, data: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer_of(data).save_pretrained(folder)
    return folder


def make(name: str, folder: Path, data: Path) -> Path:
    """A tiny model of a kind, in a folder or as a run."""
    torch.manual_seed(0)
    rows = {"vocab_size": 768, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    shape = {**WIDTHS, **rows, "max_position_embeddings": 64}
    if name == "run":
        fields = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 1}
        config = PretrainConfig(
            data=str(data), **{**SMALL, "steps": 2}, model="decoder", size="tiny", method="altup", k=2,
            model_overrides=fields,
        )  # fmt: skip
        assert pretrain(config, folder).finished
        return folder
    if name in ("upcycled", "t5"):
        config = transformers.T5Config(
            **rows, d_model=16, d_ff=32, d_kv=8, num_heads=2, num_layers=2, decoder_start_token_id=0,
            feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.1,
        )  # fmt: skip
        model = transformers.T5ForConditionalGeneration(config)
        return save(model if name == "t5" else upcycle(model, "recycled", 2), folder, data)
    if name == "bert":
        return save(transformers.BertForMaskedLM(transformers.BertConfig(**shape)), folder, data)
    if name == "gpt2":
        config = transformers.GPT2Config(**rows, n_embd=16, n_layer=2, n_head=2, n_positions=64)
        return save(transformers.GPT2LMHeadModel(config), folder, data)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, tie_word_embeddings=True))
    if name.startswith("widened"):
        model = widen(model, name.removeprefix("widened-"), 2)
    return save(model, folder, data)


def go_on(place: Path, data: Path, out: Path, resume: bool = False, **settings: Any):
    config = PretrainConfig(data=str(data), from_model=str(place), **{**SMALL, **settings})
    return pretrain(config, out, resume)


def own_loss(place: Path, data: Path, **settings: Any) -> float:
    """A model's held-out loss, from its logits and nothing else of ours but the examples."""
    config = transformers.AutoConfig.from_pretrained(place)
    kind = kind_of(config, place)
    auto = {"t5": "Seq2SeqLM", "bert": "MaskedLM", "decoder": "CausalLM"}[kind]
    loader: Any = getattr(transformers, f"AutoModelFor{auto}").from_pretrained
    model: Any = (load_widened if hasattr(config, "altup") else loader)(place).eval()
    stream = TokenStream(data, "validation")
    held_out = HeldOut(stream, build_objective(family(kind).objective, stream.vocabulary, 32), 6)
    batch = {name: torch.from_numpy(a).long() for name, a in held_out.examples(0, 6).items()}
    labels = batch[label_name(batch)]
    given = {"labels": labels} if kind == "t5" else {}
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], **given).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), labels.flatten()).item()


@pytest.mark.parametrize("name", ["run", "upcycled", "widened-recycled", "widened-altup", "gpt2", "bert", "t5"])
def test_it_starts_as_the_model_it_is_given_and_resumes_exactly(name: str, data: Path, tmp_path: Path) -> None:
    model = make(name, tmp_path / "model", data)
    assert go_on(model, data, tmp_path / "run").finished
    held_out = [r for r in records(tmp_path / "run") if r["split"] == "validation"]
    assert [r["step"] for r in held_out] == [0, 2, 4]
    place = model / "final" if name == "run" else model
    assert held_out[0]["loss"] == pytest.approx(own_loss(place, data), rel=2e-6)
    assert held_out[-1]["loss"] < held_out[0]["loss"]
    final = tmp_path / "run" / "final"
    assert own_loss(final, data) == pytest.approx(held_out[-1]["loss"], rel=2e-6)

    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "run", cut)
    shutil.rmtree(cut / "final")
    shutil.rmtree(cut / "checkpoints" / f"step-{STEPS}")
    model.rename(tmp_path / "gone")  # the checkpoint holds all that is needed
    saved = PretrainConfig.resolve(RunFolder(cut).saved_settings(resume=True), None, {})
    assert pretrain(saved, cut, resume=True).finished
    assert_same_run(tmp_path / "run", cut, STEPS)


def test_text_is_prepared_with_the_tokenizer_of_a_run(data: Path, tmp_path: Path) -> None:
    run = make("run", tmp_path / "run", data)
    recipe = Recipe([LocalFiles(data.parent / "text.txt", "text")], validation_fraction=0.05, tokenizer=str(run))
    prepare(tmp_path / "data", recipe, workers=1)
    assert go_on(run, tmp_path / "data", tmp_path / "further", steps=1).finished


def test_with_a_rate_of_zero_nothing_changes(data: Path, tmp_path: Path) -> None:
    model = make("gpt2", tmp_path / "model", data)
    go_on(model, data, tmp_path / "run", lr=0.0, steps=2)
    losses = {r["loss"] for r in records(tmp_path / "run") if r["split"] == "validation"}
    assert len(losses) == 1


def test_the_run_says_where_it_came_from(data: Path, tmp_path: Path) -> None:
    model = make("widened-recycled", tmp_path / "model", data)
    go_on(model, data, tmp_path / "run", steps=2)
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["from_model"], config["model"], config["method"]) == (str(model), "decoder", None)
    card = (tmp_path / "run" / "README.md").read_text()
    assert "LlamaForCausalLM, widened: recycled, K=2" in card
    assert f"`{model}` (weights {config['from_seal'][:16]}…)" in card
    names: dict[str, Any] = {}
    exec(card.split("```python\n")[1].split("```")[0], names)
    assert names["model"].config.altup["method"] == "recycled"


def test_a_resumed_run_refuses_other_weights_in_the_same_folder(data: Path, tmp_path: Path) -> None:
    model = make("gpt2", tmp_path / "model", data)
    go_on(model, data, tmp_path / "run", steps=2)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(UserError, match="holds other weights than those"):
        go_on(model, data, tmp_path / "run", steps=2, resume=True)


def test_the_model_decides_what_it_is(data: Path, tmp_path: Path) -> None:
    model = make("gpt2", tmp_path / "model", data)
    for wrong in ({"size": "small"}, {"method": "altup"}, {"k": 2}, {"model_overrides": {"d_ff": 4}}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))}=.* decides; remove it"):
            go_on(model, data, tmp_path / "run", **wrong)
    with pytest.raises(UserError, match=r"model='t5': .* is of the kind 'decoder'"):
        go_on(model, data, tmp_path / "run", model="t5")
    assert not (tmp_path / "run").exists()


def test_dropout_is_the_model_s_own_unless_given(data: Path, tmp_path: Path) -> None:
    model = make("gpt2", tmp_path / "model", data)
    for dropout, expected in ((None, 0.1), (0.0, 0.0)):
        out = tmp_path / str(dropout)
        go_on(model, data, out, steps=1, dropout=dropout)
        config = transformers.AutoConfig.from_pretrained(out / "final")
        assert {config.resid_pdrop, config.embd_pdrop, config.attn_pdrop} == {expected}


def test_data_of_another_tokenizer_are_refused(data: Path, tmp_path: Path) -> None:
    model = make("gpt2", tmp_path / "model", data)
    other = tokenizer_of(data)
    other.add_tokens(["another"])
    other.save_pretrained(model)
    with pytest.raises(UserError, match=r"with a tokenizer trained for it \(700 .* --tokenizer .*model --out"):
        go_on(model, data, tmp_path / "run")
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        go_on(model, data, tmp_path / "run")


def test_ids_and_lengths_beyond_the_tables_are_refused(data: Path, tmp_path: Path) -> None:
    model = make("gpt2", tmp_path / "model", data)
    with pytest.raises(UserError, match="more than the 64 positions"):
        go_on(model, data, tmp_path / "run", inputs_length=65)
    small = transformers.GPT2LMHeadModel.from_pretrained(model)
    small.resize_token_embeddings(500)
    small.save_pretrained(model)
    with pytest.raises(UserError, match="only 500 rows; enlarge them"):
        go_on(model, data, tmp_path / "run")


def test_span_corruption_needs_sentinels(data: Path, tmp_path: Path) -> None:
    model = make("t5", tmp_path / "model", data)
    start = find_start(PretrainConfig(data=str(data), from_model=str(model)), RunFolder(tmp_path / "run"), ALONE)
    bare = replace(TokenStream(data).vocabulary, sentinels=())
    with pytest.raises(UserError, match=r"has no sentinels \(<extra_id_0>.* add them"):
        start.check_data(data, tokenizer_of(data), bare, 32)


def find_start_of_two(rank: int, address: str, config: PretrainConfig, out: Path, results: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    opened = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    start = find_start(config, RunFolder(out), ProcessGroup(rank, 2, torch.device("cpu")))
    read = {Path(name).suffix for name in opened}
    results.put((rank, start.seal, ".safetensors" in read, any(name.endswith("SUMS.json") for name in opened)))
    torch.distributed.barrier()
    leave()


def test_only_the_first_process_hashes_weights(data: Path, tmp_path: Path) -> None:
    model = make("run", tmp_path / "model", data)
    config = PretrainConfig(data=str(data), from_model=str(model), **SMALL)
    results = server.SimpleQueue()
    fork_two(find_start_of_two, f"file://{tmp_path}/meeting", config, model, results)
    first, second = sorted(results.get() for _ in range(2))
    assert first[1] == second[1] == seal_of(str(model / "final"))
    assert first[2:] == (True, True)
    assert second[2:] == (False, False)


def test_a_model_without_a_language_head_is_refused(data: Path, tmp_path: Path) -> None:
    save(transformers.BertModel(transformers.BertConfig(**WIDTHS, vocab_size=768)), tmp_path / "model", data)
    with pytest.raises(UserError, match="holds a BertModel, which is no causal, masked or"):
        go_on(tmp_path / "model", data, tmp_path / "run")


def test_the_highest_rate_is_a_tenth_of_a_fresh_model_s() -> None:
    for optimizer in ("muon", "adamw", "adamw-rms", "adafactor"):
        fresh = PretrainConfig(data="x", optimizer=optimizer)
        further = PretrainConfig(data="x", optimizer=optimizer, from_model="y")
        assert further.lr == pytest.approx(fresh.lr / 10)  # type: ignore[operator]
    assert PretrainConfig(data="x", from_model="y", lr=0.06).lr == 0.06


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Qwen3ForCausalLM", "MambaForCausalLM", "RobertaForMaskedLM", "AlbertForMaskedLM"]
)
def test_other_models_of_transformers(name: str, data: Path, tmp_path: Path) -> None:
    """Caches of another kind, positions that are counted from the padding's, layers that share their weights."""
    cls: Any = getattr(transformers, name)
    rows = {"vocab_size": 768, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    heads = {"num_key_value_heads": 1, "head_dim": 8} if name.startswith("Qwen3") else {}
    config = cls.config_class(**WIDTHS, **rows, **heads, max_position_embeddings=64)
    place = save(cls(config), tmp_path / "model", data)
    assert go_on(place, data, tmp_path / "run").finished
    losses = [r["loss"] for r in records(tmp_path / "run") if r["split"] == "validation"]
    assert losses[0] == pytest.approx(own_loss(place, data), rel=2e-6)
    assert losses[-1] < losses[0]
    assert own_loss(tmp_path / "run" / "final", data) == pytest.approx(losses[-1], rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["widened-recycled", "gpt2", "bert"])
def test_two_processes_train_as_one(name: str, parallel: str, data: Path, tmp_path: Path) -> None:
    model = make(name, tmp_path / "model", data)
    go_on(model, data, tmp_path / "one", dropout=0.0)
    command = ["pretrain", "--from", model, "--data", data, "--out", tmp_path / "two", "--parallel", parallel]
    for setting, value in {**SMALL, "dropout": 0.0, "deterministic": ""}.items():
        command += [f"--{setting.replace('_', '-')}", *([value] if value != "" else [])]
    train_together("-m", "altup", *command, out=tmp_path / "two")
    for ours, theirs in zip(records(tmp_path / "one"), records(tmp_path / "two"), strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-4)
    assert own_loss(tmp_path / "two" / "final", data) == pytest.approx(own_loss(tmp_path / "one" / "final", data))

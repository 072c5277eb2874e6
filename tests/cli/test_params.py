from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from altup.cli.params import command
from altup.core.errors import UserError
from altup.models import AltUpBertConfig, AltUpDecoderConfig, AltUpT5Config
from altup.models.accounting import account
from altup.training.pretraining import PretrainConfig

app = typer.Typer()
app.command()(command)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def count(*arguments: str) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json"))


def test_one_model_as_json() -> None:
    object_ = count("--size", "base", "--method", "altup", "--k", "2")
    wanted = {"embedding", "non_embedding", "total", "flops_forward", "flops_train", "activation_bytes"}
    assert wanted <= object_.keys()
    assert object_["total"] == object_["embedding"] + object_["non_embedding"]
    for whole, parts in (
        ("total", "parameter_parts"),
        ("flops_forward", "flops_forward_parts"),
        ("activation_bytes", "activation_bytes_parts"),
    ):
        assert object_[whole] == sum(object_[parts].values())


def test_xl_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        raise AssertionError("a module is built")

    monkeypatch.setattr("torch.nn.Module.__init__", build)
    assert count("--size", "xl", "--method", "altup+moe")["total"] > 3e9


def test_the_papers_tables_fit_a_terminal_and_agree() -> None:
    text = run()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    rows = [
        line.split() for line in text.splitlines() if line.split()[:1] in (["small"], ["base"], ["large"], ["xl"])
    ]
    assert len(rows) == 13
    for row in rows:
        paper_embedding, embedding, paper_other, other = row[-6:-2]
        assert embedding == paper_embedding
        assert other == paper_other or (paper_other, other) == ("3.97e8", "3.965e8*")
    assert "* base dense-wide 2: 396,457,728" in text


def test_the_papers_tables_as_json() -> None:
    rows = count()["rows"]
    assert len(rows) == 13
    base = next(row for row in rows if (row["model"], row["method"], row["k"]) == ("base", "altup", 2))
    assert round(base["flops_to_dense"], 3) == 1.142
    assert round(base["paper_time_to_dense"], 2) == 1.24
    assert base["total"] == account(AltUpT5Config.from_preset("base", "altup", k=2)).total


def test_itemised_table() -> None:
    text = run("--size", "small", "--method", "sequence-altup+moe", "--experts", "3")
    for part in ("input table", "experts", "coefficients", "update rule", "norm inputs", "paper's formula"):
        assert part in text


def test_lengths() -> None:
    long, short = count("--size", "tiny"), count("--size", "tiny", "--inputs", "64", "--targets", "8")
    assert long["total"] == short["total"]
    assert short["flops_forward"] < long["flops_forward"] / 5
    with pytest.raises(UserError, match="inputs=0"):
        count("--size", "tiny", "--inputs", "0")


def test_a_saved_model_counts_as_the_flags_that_made_it(tmp_path: Path) -> None:
    made = AltUpT5Config.from_preset("small", "altup+sequence-altup", k=3, vocab_size=999, extra_layers=1)
    made.save_pretrained(tmp_path)
    assert count("--config", str(tmp_path)) == account(made).to_json()
    assert count("--config", str(tmp_path / "config.json"))["total"] == account(made).total
    made.save_pretrained(tmp_path / "run" / "final")
    (tmp_path / "run" / "config.yaml").write_text("size: small\n")
    assert count("--config", str(tmp_path / "run")) == account(made).to_json()

    fixed = AltUpT5Config.from_preset("tiny", "altup", coefficients="fixed")
    fixed.save_pretrained(tmp_path / "fixed")
    assert count("--config", str(tmp_path / "fixed"))["config"]["coefficients"] == "fixed"
    assert count("--config", str(tmp_path / "fixed"), "--method", "recycled")["config"]["coefficients"] == "static"

    wider = count("--config", str(tmp_path), "--k", "4")["config"]
    assert (wider["num_blocks"], wider["sequence"], wider["vocab_size"]) == (4, "altup", 999)
    other = count("--config", str(tmp_path), "--method", "dense", "--size", "tiny", "--extra-layers", "2")[
        "config"
    ]
    assert (other["widening"], other["num_blocks"], other["sequence"], other["stride"]) == ("none", 1, "none", 1)
    assert (other["d_model"], other["num_layers"], other["num_decoder_layers"]) == (128, 6, 6)


def test_a_run_file_and_flags_over_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("size: tiny\nmethod: altup\nk: 4\nmodel_overrides: {vocab_size: 700}\n")
    assert count("--config", str(file))["config"]["num_blocks"] == 4
    assert count("--config", str(file), "--k", "2")["config"]["num_blocks"] == 2
    dense = count("--config", str(file), "--method", "dense", "--size", "small")["config"]
    assert (dense["widening"], dense["d_model"], dense["vocab_size"]) == ("none", 512, 700)


def test_the_config_of_a_pretraining_run(tmp_path: Path) -> None:
    run = PretrainConfig(
        data="corpus", size="tiny", method="recycled", k=3, model_overrides={"d_ff": 96}, dropout=0.1
    )
    file = tmp_path / "config.yaml"
    file.write_text(run.to_yaml())
    expected = account(AltUpT5Config.from_preset("tiny", "recycled", k=3, d_ff=96)).to_json()
    assert count("--config", str(file)) == expected


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.yaml", "sizes: tiny", ["run.yaml", "'sizes'", "did you mean 'size'"]),
        ("run.yaml", "size: [tiny", ["run.yaml", "not valid YAML"]),
        ("run.yaml", "- tiny", ["run.yaml", "list"]),
        ("config.json", '{"model_type": "t5", "d_model": 512}', ["config.json", "'t5'", "altup upcycle"]),
        ("config.json", '{"model_type": "altup_t5", "d_modle": 1}', ["'d_modle'", "did you mean 'd_model'"]),
        ("config.json", "{", ["config.json", "not valid JSON"]),
        ("run.yaml", "size: huge", ["size='huge'", "xl"]),
        ("run.yaml", "from_model: gpt2", ["starts from gpt2", "give its folder"]),
    ],
)
def test_bad_files_are_named_with_what_is_wrong(tmp_path: Path, name: str, content: str, words: list[str]) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        count("--config", str(tmp_path / name))
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml: no such file"):
        count("--config", "nowhere.yaml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "big"], "size='big'"),
        (["--method", "altdown"], "'altdown'"),
        (["--method", "altup", "--k", "0"], "k=0"),
        (["--method", "dense", "--k", "2"], "k=2 does not fit"),
        (["--method", "sequence-altup", "--stride", "0"], "stride=0"),
        (["--extra-layers", "-1"], "extra_layers=-1"),
        (["--experts", "-3"], "experts=-3"),
    ],
)
def test_choices_that_make_no_sense(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        count(*arguments)


@pytest.mark.parametrize(
    ("file", "flags", "field", "value"),
    [
        ("size: tiny\nmethod: altup\nk: 3", [], "num_blocks", 3),
        ("size: tiny\nmethod: altup\nk: 3", ["--k", "4"], "num_blocks", 4),
        ("size: tiny\nmodel_overrides: {d_model: 64, num_layers: 3}", [], "d_model", 64),
        ("size: tiny\nmodel_overrides: {num_layers: 3}", ["--size", "base"], "num_layers", 3),
        ("size: tiny\nmethod: sequence-altup\nstride: 4", [], "stride", 4),
        ("size: large\nextra_layers: 2", ["--extra-layers", "4"], "num_layers", 28),
        ("method: altup\nmodel_overrides: {coefficients: dynamic}", ["--k", "3"], "num_blocks", 3),
        ("method: altup\nk: 3", ["--method", "sum"], "num_blocks", 2),
        ("model: decoder", ["--vocab-size", "99"], "vocab_size", 99),
    ],
)
def test_flags_win_over_a_run_file(tmp_path: Path, file: str, flags: list[str], field: str, value: int) -> None:
    (tmp_path / "run.yaml").write_text(file)
    assert count("--config", str(tmp_path / "run.yaml"), *flags)["config"][field] == value


def test_overrides_that_are_no_mapping_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model_overrides: hello")
    with pytest.raises(UserError, match="name: value"):
        run("--config", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    ("model", "config_class"), [("bert", AltUpBertConfig), ("decoder", AltUpDecoderConfig), ("t5", AltUpT5Config)]
)
def test_every_family(tmp_path: Path, model: str, config_class: Any) -> None:
    """By flags, by a saved model's folder and by a run's file, which all mean the same model."""
    config = config_class.from_preset("base", "altup", vocab_size=32128)
    by_flags = count("--model", model, "--method", "altup", "--k", "2", *_vocabulary(tmp_path))
    assert by_flags["total"] == account(config).total
    config.save_pretrained(tmp_path / "saved")
    assert count("--config", str(tmp_path / "saved")) == by_flags
    (tmp_path / "run.yaml").write_text(
        f"model: {model}\nsize: base\nmethod: altup\nk: 2\nmodel_overrides: {{vocab_size: 32128}}\n"
    )
    assert count("--config", str(tmp_path / "run.yaml")) == by_flags
    assert "input table" in run("--model", model)
    other = "t5" if model == "bert" else "bert"
    with pytest.raises(UserError, match=f"describes a '{model}' model"):
        run("--config", str(tmp_path / "saved"), "--model", other)


def _vocabulary(folder: Path) -> list[str]:
    file = folder / "vocabulary.yaml"
    file.write_text("size: base\nmodel_overrides: {vocab_size: 32128}\n")
    return ["--config", str(file)]


def test_the_paper_s_bert_and_what_is_asked_of_it() -> None:
    light = count("--model", "bert", "--size", "light")
    assert (light["inputs"], light["targets"]) == (512, 77)
    assert light["config"] == light["config"] | {"d_model": 256, "num_layers": 12, "num_heads": 4}
    assert "77 of them masked" in run("--model", "bert", "--size", "light")
    with pytest.raises(UserError, match="a decoder answers for all of its inputs"):
        run("--model", "decoder", "--targets", "5")


def test_a_step_on_a_gpu() -> None:
    names = ("--size", "base", "--method", "altup", "--batch-size", "64")
    for gpu, fits in (("80GB", True), ("8GB", False)):
        found = count(*names, "--gpu", gpu)
        assert found["fits"] is fits
        assert bool(found["settings"]) is not fits
        assert found["step_total"] == sum(found["step_bytes"].values())
    text = run(*names, "--gpu", "8GB")
    assert "It does not fit a GPU of 8GB" in text
    assert "--micro-batch" in text
    less = count(*names, "--activation-checkpointing", "--optimizer", "adafactor")
    assert less["step_total"] < found["step_total"] / 2
    assert "fits" not in less


def test_the_vocabulary_is_set() -> None:
    assert count("--size", "tiny", "--vocab-size", "1000")["config"]["vocab_size"] == 1000


def test_a_model_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(vocab_size=100, **shape).save_pretrained(tmp_path)
    found = count("--model", str(tmp_path), "--length", "64", "--batch", "2")
    assert found["embedding"] == 2 * 100 * 32
    assert "llama of transformers" in run("--model", str(tmp_path), "--length", "64")
    with pytest.raises(UserError, match=r"--k: the model of .* is described by its own config"):
        run("--model", str(tmp_path), "--k", "2")


def test_a_saved_model_of_altup(tmp_path: Path) -> None:
    AltUpBertConfig.from_preset("tiny", "altup").save_pretrained(tmp_path)
    assert count("--model", str(tmp_path)) == count("--config", str(tmp_path))

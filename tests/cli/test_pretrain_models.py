"""`altup pretrain --model bert` and `--model decoder`, from text to an answer, as a user meets them."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from altup import AltUpBertForMaskedLM, AltUpDecoderForCausalLM
from altup.core.runs import list_checkpoints
from tests.processes import altup, prepare_text, signal_in_pass, start, with_options
from tests.torchrun import train_together
from tests.training.compare import assert_same_run, records

STEPS = 24
SMALL = [
    *("--size", "tiny", "--method", "altup", "--inputs-length", "32", "--dropout", "0.1", "--set", "d_model=16"),
    *("--set", "d_ff=32", "--set", "d_kv=8", "--set", "num_layers=2", "--batch-size", "8", "--micro-batch", "4"),
    *("--steps", str(STEPS), "--log-every", "4", "--eval-every", "12", "--eval-sequences", "9", "--deterministic"),
    *("--optimizer", "adamw", "--lr", "0.01", "--save-every", "4", "--keep-last", "9", "--track", "none"),
]
OBJECTIVES = {"bert": "masked", "decoder": "causal"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", params=["bert", "decoder"])
def trained(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory):
    """The family, and a run of it that was never stopped."""
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    command = ["pretrain", "--model", family, "--data", data, "--out", folder / "run", *SMALL]
    code, text = altup(folder / "log", *command)
    assert code == 0, text
    assert f"finished {STEPS} steps" in text
    return family, folder / "run"


def test_it_learns_what_its_objective_asks(trained) -> None:
    family, run = trained
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"] == family
    assert config["batches"]["objective"] == OBJECTIVES[family]
    losses = [record["loss"] for record in records(run) if record["split"] == "validation"]
    assert len(losses) == 2
    assert losses[-1] < losses[0] < 6.7  # ln 700 = 6.55


def test_the_card_loads_the_model(trained) -> None:
    family, run = trained
    card = (run / "README.md").read_text()
    assert f"tags: [altup, {family}]" in card
    assert f"{OBJECTIVES[family]} language modelling" in card
    names: dict[str, Any] = {}
    exec(card.split("```python\n")[1].split("```")[0], names)
    assert type(names["model"]) is {"bert": AltUpBertForMaskedLM, "decoder": AltUpDecoderForCausalLM}[family]
    assert len(names["tokenizer"]) <= names["model"].config.vocab_size


def test_stopped_and_resumed_it_is_the_same_run(trained, data: Path, tmp_path: Path) -> None:
    family, run = trained
    out = tmp_path / "run"
    command = ["pretrain", "--model", family, "--data", data, "--out", out, *SMALL]
    running = start(tmp_path / "log", *command, before=functools.partial(signal_in_pass, 11, signal.SIGTERM))
    assert running.wait() == 75, running.text
    assert list_checkpoints(out / "checkpoints")
    code, text = altup(tmp_path / "log2", "pretrain", "--out", out, "--resume")
    assert code == 0, text
    assert_same_run(run, out, STEPS)


def test_generate_answers_in_the_family_s_way(trained, tmp_path: Path) -> None:
    family, run = trained
    prompts = ["--prompt", "dun <extra_id_0> mor <extra_id_1>.", "--prompt", "ab"]
    code, text = altup(tmp_path / "log", "generate", run, *prompts, "--max-new-tokens", 6)
    assert code == 0, text
    remark, *_, first, second = text.splitlines()
    assert second.startswith("ab")
    if family == "bert":
        assert remark.startswith("'ab' has no gap")
        assert first.startswith("dun ")
        assert first.endswith(".")
        assert "extra_id" not in first + second
        code, text = altup(tmp_path / "log2", "generate", run, "--prompt", "a", "--beams", 2)
        assert code == 2
        assert "a BERT names the likeliest token" in text
    else:
        assert "this model is a decoder" in remark
        assert len(second) > 2
        one = ("generate", run, "--prompt", "ab", "--max-new-tokens", 6)
        (_, waited), (_, streamed) = (altup(tmp_path / way, *one, f"--{way}") for way in ("no-stream", "stream"))
        assert streamed.rstrip() == waited.rstrip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt"], "--model gpt is not known; choose one of 't5', 'bert', 'decoder'"),
        (["--model", "bert", "--size", "small"], "--size small is not known; choose one of 'tiny', 'light'"),
        (["--model", "bert", "--method", "average-pooling"], "a masked-language model answers for every token"),
        (["--model", "decoder", "--method", "sequence-altup"], "leave sequence at 'none'"),
        (["--model", "decoder", "--set", "type_vocab_size=2"], "--set type_vocab_size is not known"),
        (["--model", "decoder", "--set", "bos_token_id=2"], "--set bos_token_id is not known"),
        (["--from", "./nowhere"], "'nowhere': no such folder; give a run or a model folder"),
        (["--from", "x", "--method", "altup"], "--method altup: the model of --from x decides; remove it"),
    ],
)
def test_mistakes_get_one_clear_line(data: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    code, text = altup(tmp_path / "log", "pretrain", "--data", data, "--out", tmp_path / "run", *arguments)
    assert code == 2
    assert message in text
    assert "Traceback" not in text
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "decoder"])
def test_two_processes_train_as_one(family: str, data: Path, tmp_path: Path) -> None:
    """Sharded, tied tables included."""
    command = ["pretrain", "--model", family, "--data", data, *with_options(SMALL, "--dropout", "0")]
    code, text = altup(tmp_path / "log", *command, "--out", tmp_path / "one")
    assert code == 0, text
    train_together("-m", "altup", *command, "--out", tmp_path / "two", "--parallel", "fsdp", out=tmp_path / "two")
    for ours, theirs in zip(records(tmp_path / "one"), records(tmp_path / "two"), strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-4)

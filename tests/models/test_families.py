"""A family is registered in one place: this one is here alone, and is counted, trained, fine-tuned and asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import altup
from altup.cli.main import app
from altup.core.errors import UserError
from altup.models import AltUpDecoderModel
from altup.models.decoder.family import Decoder
from altup.models.families import FAMILIES, family_of, learner, register_family
from tests.processes import prepare_text


class MiniConfig(altup.AltUpDecoderConfig):
    model_type = "altup_mini"


class MiniModel(AltUpDecoderModel):
    config_class = MiniConfig


class MiniForCausalLM(altup.AltUpDecoderForCausalLM):
    config_class = MiniConfig


class Mini(Decoder):
    name = "mini"
    title = "mini decoder"
    default_size = "tiny"
    config_class = MiniConfig
    model_class = MiniForCausalLM
    headless_class = MiniModel
    hugging_face = None
    convert = None
    prompt = "It's a start"


@pytest.fixture(autouse=True)
def _mini() -> Iterator[None]:
    register_family(Mini)
    yield
    FAMILIES.pop("mini")


def altup_command(*arguments: object) -> str:
    done = CliRunner(env={"COLUMNS": "300", "TERM": "dumb"}).invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_it_is_named_and_counted() -> None:
    assert "t5, bert, decoder or mini" in altup_command("pretrain", "--help")
    found = json.loads(altup_command("params", "--model", "mini", "--size", "tiny", "--json"))
    model = MiniForCausalLM(MiniConfig.from_preset("tiny"))
    assert found["total"] == sum(p.numel() for p in model.parameters())
    assert isinstance(family_of(model.config), Mini)
    assert learner("causal") == "decoder"  # what transformers' models learn as stays as it was


def test_what_it_cannot_be_made_from_is_said() -> None:
    with pytest.raises(UserError, match="did you mean 'mini'"):
        altup.PretrainConfig(data="x", model="mimi")
    model = altup.upcycle(MiniForCausalLM(MiniConfig.from_preset("tiny", vocab_size=20)), "recycled")
    assert type(model) is MiniForCausalLM


def test_it_trains_is_tuned_and_answers(tmp_path: Path) -> None:
    data, run, task = prepare_text(tmp_path), tmp_path / "run", tmp_path / "own.jsonl"
    shape = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2}
    every = {"batch_size": 4, "precision": "fp32", "trackers": ["none"], "steps": 2, "eval_every": 2}
    config = altup.PretrainConfig(
        data=str(data), model="mini", model_overrides=shape, inputs_length=64, eval_sequences=4, **every
    )
    assert config.size == "tiny"
    altup.pretrain(config, run)
    card = (run / "README.md").read_text()
    assert "mini decoder of size tiny" in card
    assert """--prompt 'It'"'"'s a start'""" in card
    assert "It's a start" in altup_command("generate", run, "--prompt", "It's a start", "--max-new-tokens", 2)

    task.write_text("".join(json.dumps({"input": f"say {i}", "target": "a"}) + "\n" for i in range(8)))
    lengths = {"inputs_length": 32, "targets_length": 8}
    altup.finetune(altup.FinetuneConfig(model=str(run), tasks=[str(task)], **lengths, **every), tmp_path / "tuned")
    scores = altup.evaluate(str(tmp_path / "tuned"), [str(task)], out=tmp_path / "scores").scores
    assert [score.task for score in scores] == ["own"]

"""Fine-tuning runs as users make them: from every kind of model, stopped and gone on, scored along the way."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from altup.cli.main import app
from altup.core.errors import UserError
from altup.core.runs import find_model
from altup.evaluation.decoding import round_weights
from altup.evaluation.metrics import METRICS
from altup.finetuning.config import FinetuneConfig
from altup.finetuning.finetune import finetune
from altup.finetuning.learning.seq2seq import build_model, choose_packing
from altup.finetuning.scoring import copy_to_score
from altup.training.metrics import read_records
from tests.evaluation.tiny import made_up_words, save_tiny
from tests.models.helpers import tiny_t5
from tests.torchrun import train_together
from tests.training.compare import assert_same_bits, assert_same_run, records, weights

SMALL: dict[str, Any] = {
    "steps": 30, "batch_size": 16, "lr": 0.05, "log_every": 10, "eval_every": 10, "save_every": 10,
    "deterministic": True, "keep_last": 1, "targets_length": 16,
}  # fmt: skip


def lines(draw: random.Random, count: int) -> str:
    words = made_up_words()
    made = [{"sentence": " ".join(draw.choices(words, k=5)), "label": i % 2} for i in range(count)]
    return "".join(json.dumps(line) + "\n" for line in made)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CoLA and SST-2 of made-up sentences; CB without training examples."""
    root, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    for name in ("cola", "sst2"):
        (root / "glue" / name).mkdir(parents=True)
        for split, count in (("train", 40), ("validation", 10)):
            (root / "glue" / name / f"{split}.jsonl").write_text(lines(draw, count))
    (root / "super_glue" / "cb").mkdir(parents=True)
    (root / "super_glue/cb/validation.jsonl").write_text('{"premise": "a", "hypothesis": "b", "label": 0}\n')
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def config(model: Path, data: Path, **fields: Any) -> FinetuneConfig:
    return FinetuneConfig(**{"model": str(model), "tasks": ["cola", "sst2"], "data": str(data), **SMALL, **fields})


def test_a_t5s_defaults_are_the_papers_recipe(model: Path) -> None:
    recipe = FinetuneConfig(model=str(model), tasks=["glue"]).for_model(str(model))
    assert (recipe.optimizer, recipe.schedule, recipe.lr, recipe.decay_fraction) == (
        "adafactor",
        "constant",
        1e-3,
        0,
    )
    assert (recipe.dropout, recipe.batch_size, recipe.steps, recipe.inputs_length) == (0.1, 256, 50_000, 512)


@pytest.fixture(scope="module")
def trained(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert finetune(config(model, data), out).finished
    return out


def test_a_run_records_scores_and_keeps_predictions(trained: Path) -> None:
    measured = [r for r in records(trained) if r["split"] == "validation"]
    assert [r["step"] for r in measured] == [10, 20, 30]
    assert max(r["score"] for r in measured) > 0
    for record in measured:
        assert record["score"] == record["glue"] == pytest.approx((record["glue/cola"] + record["glue/sst2"]) / 2)
        folder = trained / "evaluation" / f"step-{record['step']}"
        said = [json.loads(line) for line in (folder / "glue/sst2.validation.jsonl").read_text().splitlines()]
        right = sum(line["prediction"] == line["target"] for line in said)
        assert record["glue/sst2"] == pytest.approx(100 * right / 10)
        assert json.loads((folder / "scores.json").read_text())["model"] == f"step-{record['step']}"
    card = (trained / "README.md").read_text()
    assert "| glue/sst2 |" in card
    assert f"altup finetune --out {trained} --resume" in card


def test_speed_counts_tokens_and_no_padding(trained: Path, model: Path, data: Path) -> None:
    """Ten steps of 16 are two epochs of the 80 examples, however they are laid out in rows."""
    from transformers import AutoTokenizer

    tokenizer, words = AutoTokenizer.from_pretrained(model), {"cola": ["unacceptable", "acceptable"]}
    tokens = 0
    for name in ("cola", "sst2"):
        for line in (data / f"glue/{name}/train.jsonl").read_text().splitlines():
            record = json.loads(line)
            target = words.get(name, ["negative", "positive"])[record["label"]]
            for text in (f"{name} sentence: {record['sentence']}", target):
                tokens += len(tokenizer(text)["input_ids"])
    for record in read_records(trained / "metrics.jsonl"):
        if record["split"] == "train":
            assert record["tokens_per_s"] * record["seconds"] == pytest.approx(2 * tokens)
            assert record["seq_per_s"] * record["seconds"] == pytest.approx(160)


def test_a_run_stopped_and_gone_on_is_the_same(model: Path, data: Path, trained: Path, tmp_path: Path) -> None:
    finetune(config(model, data, steps=20), tmp_path / "run")
    finetune(config(model, data), tmp_path / "run", resume=True)
    assert_same_run(trained, tmp_path / "run", 30)


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_processes_make_the_same_run(model: Path, data: Path, tmp_path: Path, kind: str) -> None:
    """The same data in the same order and every prediction on both, so losses and weights agree up to rounding."""
    alone, together = (tmp_path / name for name in ("alone", "together"))
    flags = ["finetune", str(model), "--task", "sst2", "--data", str(data), "--batch-size", "8",
             "--steps", "16", "--lr", "0.05", "--dropout", "0", "--eval-every", "8", "--eval-batch-size", "4",
             "--targets-length", "16", "--log-every", "1", "--track", "none"]  # fmt: skip
    assert CliRunner().invoke(app, [*flags, "--out", str(alone)]).exit_code == 0
    train_together("-m", "altup", *flags, "--out", together, "--parallel", kind, out=together)
    for ours, theirs in zip(records(alone), records(together), strict=True):
        assert theirs.pop("split") == ours.pop("split")
        assert theirs == pytest.approx(ours, rel=1e-4)
    assert records(together)[-1]["score"] > 0
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(together)[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    for place in ("step-8/glue/sst2", "step-16/glue/sst2"):
        said = [(out / f"evaluation/{place}.validation.jsonl").read_text() for out in (alone, together)]
        assert said[0] == said[1]


def test_other_data_or_another_task_is_refused(trained: Path, model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tasks"):
        finetune(config(model, data, tasks=["sst2"]), trained, resume=True)
    for name in ("cola", "sst2"):
        (tmp_path / "glue" / name).mkdir(parents=True)
        for split in ("train", "validation"):
            (tmp_path / "glue" / name / f"{split}.jsonl").write_text(lines(random.Random(7), 40))
    with pytest.raises(UserError, match="batches"):
        finetune(config(model, tmp_path), trained, resume=True)


def same_function(ours: Any, theirs: Any) -> bool:
    ids = torch.arange(5, 25).view(2, 10)
    with torch.no_grad():
        a, b = (m.eval()(input_ids=ids, decoder_input_ids=ids[:, :4]).logits for m in (ours, theirs))
    return torch.allclose(a, b, atol=1e-4 * float(b.std()))


def test_it_begins_with_a_hugging_face_t5(model: Path, data: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    shape = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 1, "decoder_start_token_id": 0}
    theirs = T5ForConditionalGeneration(T5Config(vocab_size=640, feed_forward_proj="gated-gelu", **shape))
    theirs.save_pretrained(tmp_path / "t5")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "t5")
    start = config(tmp_path / "t5", data, dropout=0.25, steps=2)
    ours = build_model(start, start.model)
    assert same_function(ours, theirs)
    assert {m.dropout for m in ours.modules() if isinstance(getattr(m, "dropout", None), float)} == {0.25}
    assert ours.config.z_loss == 1e-4  # type: ignore[union-attr]
    assert finetune(start, tmp_path / "run").finished


def test_it_begins_with_a_run_or_an_upcycled_model(trained: Path, data: Path, tmp_path: Path) -> None:
    from altup.models.t5.model import AltUpT5ForConditionalGeneration
    from altup.models.upcycling import upcycle

    final = AltUpT5ForConditionalGeneration.from_pretrained(trained / "final")
    again = build_model(config(trained, data), find_model(str(trained)))
    assert same_function(again, final)
    dense = AltUpT5ForConditionalGeneration(
        type(final.config).from_preset("tiny", "dense", d_model=16, vocab_size=640)
    )
    wide = upcycle(dense, "recycled", 2)
    wide.save_pretrained(tmp_path / "wide")
    assert same_function(build_model(config(tmp_path / "wide", data), str(tmp_path / "wide")), dense)


def test_a_tokenizer_of_another_model_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="550 tokens, the model's tables 200 rows"):
        finetune(config(save_tiny(tmp_path / "model", vocab_size=450, rows=200), data), tmp_path / "run")


def test_without_the_kernels_rows_are_narrow(model: Path) -> None:
    for fields in ({"precision": "bf16"}, {"precision": "fp32"}):
        config = FinetuneConfig(model=str(model), tasks=["squad"], **fields)
        assert choose_packing(str(model), config, torch.device("cpu")) == "narrow"


def test_examples_that_would_lose_the_same_do_not_share_a_row(data: Path, tmp_path: Path) -> None:
    shared = save_tiny(tmp_path / "model", sequence_dropout=True)
    for dropout, layout in ((0.1, None), (0.0, "narrow")):
        settings = FinetuneConfig(model=str(shared), tasks=["squad"], dropout=dropout)
        assert choose_packing(str(shared), settings, torch.device("cpu")) == layout
    assert finetune(config(shared, data, steps=1, eval_limit=1), tmp_path / "run").finished
    assert "pack: false" in (tmp_path / "run/config.yaml").read_text()


def test_a_model_that_mixes_neighbours_is_padded(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strided = save_tiny(tmp_path / "model", method="altup+sequence-altup", num_layers=3)
    assert finetune(config(strided, data, steps=1, eval_limit=1), tmp_path / "run").finished
    assert "padded, not packed" in capsys.readouterr().err
    assert "pack: false" in (tmp_path / "run/config.yaml").read_text()


def test_a_folder_without_a_model_is_refused(data: Path, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(UserError, match="model"):
        finetune(config(folder, data), tmp_path / "run")


def test_a_checkpoint_is_enough_to_go_on(data: Path, tmp_path: Path) -> None:
    """The model a run began with may be gone by then."""
    model = save_tiny(tmp_path / "model")
    finetune(config(model, data, steps=10), tmp_path / "run")
    for path in sorted(model.iterdir()):
        path.unlink()
    assert finetune(config(model, data, steps=11), tmp_path / "run", resume=True).step == 11


def test_missing_parts_of_a_suite_are_told_and_of_a_task_refused(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(config(model, data, tasks=["glue", "sst2", "glue"], steps=1, eval_limit=1), tmp_path / "run")
    told = capsys.readouterr().err
    assert "glue/mnli: no training examples" in told
    assert "glue/cola 50.0%, glue/sst2 50.0%" in told
    with pytest.raises(UserError, match=r"super_glue/cb: no training .* into .*super_glue/cb"):
        finetune(config(model, data, tasks=["cb"]), tmp_path / "other")
    with pytest.raises(UserError, match="none of the tasks"):
        finetune(config(model, data, tasks=["super_glue"]), tmp_path / "other")


def test_long_targets_and_bad_records_are_counted(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = made_up_words()
    made = [{"input": word, "target": word} for word in words[:20]]
    made += [{"input": "x", "target": " ".join(words)}, {"input": "y"}]
    (tmp_path / "own").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "own" / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    settings: dict[str, Any] = {"tasks": [str(tmp_path / "own")], "steps": 1, "targets_length": 128}
    own = config(model, tmp_path, **settings)
    with pytest.raises(UserError, match=r"own/train\.jsonl, line 22: no label"):
        finetune(own, tmp_path / "run")
    skipping = config(model, tmp_path, **settings, on_error="skip")
    outcome = finetune(skipping, tmp_path / "run")
    told = capsys.readouterr().err
    assert "own: 1 of 21 targets exceed 128 tokens" in told
    assert "2 × no label" in told
    assert outcome.evaluation is not None
    assert "own" in outcome.evaluation


def test_a_task_without_a_network_can_be_had_from_files(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"give the folder that holds squad/v1\.1/train\.jsonl with --data DIR"):
        finetune(FinetuneConfig(model=str(model), tasks=["squad"], steps=1), tmp_path / "run")


def test_thousands_of_epochs_are_warned_of(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.jsonl").write_text('{"input": "a", "target": "b"}\n')
    finetune(
        config(model, tmp_path, tasks=[str(tmp_path / "one.jsonl")], steps=2, batch_size=600), tmp_path / "run"
    )
    assert "warning: each example is seen 1,200 times" in capsys.readouterr().err


def test_one_file_holds_nothing_out(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sums.jsonl").write_text('{"input": "a", "target": "b"}\n' * 9)
    outcome = finetune(config(model, tmp_path, tasks=[str(tmp_path / "sums.jsonl")], steps=1), tmp_path / "run")
    assert outcome.evaluation is None
    said = capsys.readouterr().err
    assert "nothing is held out" in said
    assert "warning" not in said


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": ""}, "model is not set; .*the first argument: altup finetune MODEL --task"),
        ({"tasks": []}, "--task"),
        ({"tasks": ["cola=0"]}, "above 0"),
        ({"tasks": ["cola=inf"]}, "not infinite"),
        ({"dropout": 1.0}, "dropout"),
        ({"on_error": "cry"}, "on_error"),
        ({"eval_limit": 0}, "eval_limit"),
    ],
)
def test_mistakes_in_a_config(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        FinetuneConfig(**{"model": "m", "tasks": ["cola"], **fields})


def test_the_verb_trains_goes_on_and_is_evaluated(model: Path, data: Path, tmp_path: Path) -> None:
    run, out = CliRunner(), tmp_path / "run"
    flags = ["--batch-size", "8", "--eval-every", "2", "--save-every", "2", "--track", "none"]
    first = run.invoke(app, ["finetune", str(model), "--task", "sst2=3", "--task", "cola=1", "--data", str(data),
                             "--out", str(out), "--steps", "2", *flags])  # fmt: skip
    assert first.exit_code == 0, first.output
    assert "finished 2 steps" in first.output
    again = run.invoke(app, ["finetune", "--out", str(out), "--resume", "--steps", "4"])
    assert again.exit_code == 0, again.output
    assert "finished 4 steps" in again.output
    scored = run.invoke(app, ["evaluate", str(out), "--suite", "glue", "--data", str(data), "--json"])
    found = json.loads(scored.stdout)
    last = [r for r in records(out) if r["split"] == "validation"][-1]
    assert [t["score"] for t in found["tasks"]] == pytest.approx([last["glue/cola"], last["glue/sst2"]])
    assert found["suites"][0]["score"] == pytest.approx(last["glue"])
    assert found["suites"][0]["partial"] is True


def test_one_example_is_one_example(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"input": "a", "target": "b"}\n')
    arguments = ["finetune", str(model), "--task", str(tmp_path / "own.jsonl"), "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [*arguments, "--steps", "1", "--batch-size", "1", "--track", "none"])
    assert done.exit_code == 0, done.output
    assert "1 step of 1 example, 1.00 epochs of 1" in done.output
    assert "finished 1 step;" in done.output
    card = (tmp_path / "run" / "README.md").read_text()
    assert "fine-tuned for 1 step at batch 1" in card
    assert "(1 example)" in card


def say(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and what is decoded, under bf16 autocast."""
    ids = torch.arange(6, 46).view(4, 10)
    model.eval()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        return model(input_ids=ids, decoder_input_ids=ids).logits, model.generate(input_ids=ids, max_new_tokens=9)


@pytest.mark.parametrize("method", ["dense", "altup", "recycled", "sum", "moe", "sequence-altup"])
def test_rounding_once_gives_the_same_bits(method: str) -> None:
    """Autocast rounds the weights of linear maps in every call: to round them before changes nothing."""
    model = tiny_t5(method, vocab_size=100).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copy = copy_to_score(model, low_precision=True)
    assert not copy.training
    assert {m.weight.dtype for m in copy.modules() if isinstance(m, nn.Linear)} == {torch.bfloat16}
    assert {m.weight.dtype for m in model.modules() if isinstance(m, nn.Linear)} == {torch.float32}
    for ours, theirs in zip(say(copy), say(model), strict=True):
        assert torch.equal(ours, theirs)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_tied_table_keeps_its_precision() -> None:
    model = tiny_t5("dense", vocab_size=100, tie_word_embeddings=True)
    want = say(model)
    copy = copy_to_score(model, low_precision=True)
    assert copy.get_input_embeddings().weight.dtype == torch.float32
    for ours, theirs in zip(say(copy), want, strict=True):
        assert torch.equal(ours, theirs)


def test_a_hugging_face_t5_says_the_same_when_rounded() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    shape: dict[str, Any] = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "decoder_start_token_id": 0}
    theirs = T5ForConditionalGeneration(T5Config(vocab_size=100, feed_forward_proj="gated-gelu", **shape))
    want = say(theirs)
    round_weights(theirs, torch.bfloat16)
    for ours, before in zip(say(theirs), want, strict=True):
        assert torch.equal(ours, before)


def test_in_float32_the_model_scores_itself() -> None:
    model = tiny_t5("altup")
    assert copy_to_score(model, low_precision=False) is model


def test_an_edited_rate_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    """The checkpoint says what it was trained with, also where config.yaml was edited."""
    out = tmp_path / "run"
    short = {"steps": 2, "save_every": 1, "eval_every": 2, "eval_limit": 2}
    assert finetune(config(model, data, **short), out).finished
    edited = out / "config.yaml"
    edited.write_text(edited.read_text().replace("lr: 0.05", "lr: 0.01"))
    result = CliRunner().invoke(app, ["finetune", "--out", str(out), "--resume"])
    assert "step-2 was trained with other settings" in str(result.exception)
    assert "lr: 0.05 there, 0.01 now" in str(result.exception)


def test_a_package_that_scores_will_need_is_asked_for_first(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"task glue/cola: matthews needs .*: pip install scikit-learn"):
        finetune(config(model, data), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert finetune(config(model, data, tasks=["sst2"], steps=2), tmp_path / "run").finished


def test_a_metric_that_fails_costs_a_score_alone(
    model: Path, data: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> float:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setitem(METRICS, "accuracy", broken)
    flags = ["finetune", "--config", str(trained / "config.yaml"), "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0, result.output
    assert "3 evaluations failed, the last with: ZeroDivisionError: division by zero" in result.output
    assert "nothing was scored" in result.output
    assert_same_bits(weights(trained), weights(tmp_path / "run"))


def test_an_evaluation_does_not_bring_a_removed_folder_back(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is removed while examples are decoded, which may take long."""
    from altup.evaluation import evaluate

    out, decode = tmp_path / "run", evaluate.decode_task

    def remove_and_decode(*arguments: Any, **options: Any) -> Any:
        shutil.rmtree(out, ignore_errors=True)
        return decode(*arguments, **options)

    monkeypatch.setattr(evaluate, "decode_task", remove_and_decode)
    with pytest.raises(UserError, match="the folder or its lock"):
        finetune(config(model, data, steps=4, eval_every=2, save_every=2, eval_limit=2), out)
    assert not out.exists()

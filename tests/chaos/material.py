"""What the fuzzer spoils: one of every kind of input that `altup` reads, small and valid."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

from tests.evaluation.tiny import made_up_words

SHAPE = ["d_model=16", "d_ff=16", "d_kv=8", "num_heads=2", "num_layers=1"]
TINY = [
    *("--size", "tiny", "--inputs-length", "16", "--batch-size", "4", "--precision", "fp32", "--track", "none"),
    *("--eval-sequences", "4", *(word for one in SHAPE for word in ("--set", one))),
]
STUDY = (
    "title: Two\nquestion: Which?\nrows:\n  Dense: {method: dense}\n  AltUp K=2: {method: altup, k: 2}\n"
    "measures: [accuracy, loss]\nexpect: [{better: AltUp K=2, than: Dense}]\n"
)
SCALE = """\
like: smoke
about: a few steps
sizes: [tiny]
seeds: [0]
shapes:
  tiny: {d_model: 16, d_ff: 16, d_kv: 8, num_heads: 2, num_layers: 1}
pretrain: {steps: 2, batch_size: 4, inputs_length: 16, eval_every: 2, eval_sequences: 4, save_every: 2}
"""
TASK = {"sentence": "a b", "label": 1, "idx": 0}


def make_material(folder: Path) -> Path:
    """Text, prepared data, models, a run, task files, results of a study and of a benchmark, and YAML files."""
    from tests.processes import prepare_text

    _write_text(folder / "text")
    prepare_text(folder, sentences=4000)
    vocabulary = folder / "data" / "tokenizer"
    _save_models(folder, vocabulary)
    _write_tasks(folder / "tasks")
    (folder / "study.yaml").write_text(STUDY)
    (folder / "scale.yaml").write_text(SCALE)
    (folder / "pretrain.yaml").write_text("data: data\nsteps: 1\nsize: tiny\nbatch_size: 4\ninputs_length: 16\n")
    (folder / "finetune.yaml").write_text("model: t5\ntasks: [cola]\ndata: tasks\nsteps: 1\nbatch_size: 4\n")
    with contextlib.redirect_stderr(io.StringIO()):
        _train(folder)
        _study(folder)
    _bench(folder / "bench.csv")
    return folder


def _write_text(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    draw, words = random.Random(0), made_up_words()
    lines = [" ".join(draw.choices(words, k=8)) + "." for _ in range(300)]
    records = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("\n\n".join(lines))
    (folder / "a.jsonl").write_text(records)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(records.encode()))
    parquet.write_table(pa.table({"text": lines}), folder / "a.parquet")


def _save_models(folder: Path, vocabulary: Path) -> None:
    """Ours (`t5`, `decoder`) and Hugging Face's (`hf`, `llama`, `widened`), with the data's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    from altup.data import tokenizer as vocabularies
    from altup.models.widening.folders import widen_folder
    from altup.training.pretraining import PretrainConfig, build_model

    size = vocabularies.vocabulary(vocabulary)
    overrides = {name: int(value) for name, value in (one.split("=") for one in SHAPE)}
    for kind in ("t5", "decoder"):
        config = PretrainConfig(
            data="data", model=kind, size="tiny", method="altup", k=2, model_overrides=overrides
        )
        torch.manual_seed(0)
        build_model(kind, config.model_config(size), None).save_pretrained(folder / kind)  # type: ignore[operator]
    shape = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1}
    hugging = T5Config(
        vocab_size=size.padded_size, **shape, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(hugging).save_pretrained(folder / "hf")
    llama = LlamaConfig(
        vocab_size=size.padded_size, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    for model in ("t5", "decoder", "hf", "llama"):
        shutil.copytree(vocabulary, folder / model, dirs_exist_ok=True)
    widen_folder(str(folder / "llama"), folder / "widened", "altup", 2, 0)


def _write_tasks(folder: Path) -> None:
    (folder / "glue" / "cola").mkdir(parents=True)
    draw, words = random.Random(1), made_up_words()
    for split, count in (("train", 8), ("validation", 4), ("test", 4)):
        lines = [{"sentence": " ".join(draw.choices(words, k=4)), "label": i % 2} for i in range(count)]
        (folder / "glue" / "cola" / f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def _train(folder: Path) -> None:
    """`run`: stopped after its first checkpoint of two steps."""
    from altup.training.pretraining import PretrainConfig, pretrain

    overrides = {name: int(value) for name, value in (one.split("=") for one in SHAPE)}
    config = PretrainConfig(
        data=str(folder / "data"), size="tiny", method="altup", k=2, model_overrides=overrides, steps=2,
        batch_size=4, inputs_length=16, eval_sequences=4, save_every=1, log_every=1, eval_every=1,
    )  # fmt: skip
    assert pretrain(config, folder / "run").finished
    shutil.copytree(folder / "run", folder / "run2")


def _study(folder: Path) -> None:
    from altup.studies.run import StudyRun
    from altup.studies.scale import find_scale
    from altup.studies.study import find_study

    scale = replace(find_scale(str(folder / "scale.yaml")), data=None)
    out = folder / "studies"
    run = StudyRun(
        [find_study(str(folder / "study.yaml"))],
        scale,
        out,
        out / "results",
        [0],
        str(folder / "data"),
        speed=False,
    )
    outcome = run.run(lambda text: None)
    assert outcome.finished == 2
    assert not outcome.failed


def _bench(path: Path) -> None:
    from altup.bench.rows import BenchRow, Machine, Sheet

    names = ("device", "dtype", "torch", "triton", "transformers", "python", "altup", "commit", "command", "date")
    sheet = Sheet(path, Machine(**dict.fromkeys(names, "x")))
    for provider, kind in (("altup", "ours"), ("plain", "plain")):
        sheet.add(BenchRow("rule", provider, kind, "forward", "ms", 1.0, 2.0, 3.0, 5, tokens=64, d=16, k=2))

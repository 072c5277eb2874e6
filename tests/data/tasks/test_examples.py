"""Records from folders, files and Hugging Face datasets; damage; the real files; tokens."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from altup.core.errors import UserError
from altup.data import tokenizer as vocabularies
from altup.data.bad_input import BadInput
from altup.data.tasks import Task, find_task
from altup.data.tasks.examples import (
    TaskFolder,
    TaskHub,
    load_examples,
    open_tasks,
    pad,
    read_examples,
    read_inputs,
    tokenise,
)
from altup.data.tasks.published import classification

RECORDS = [{"sentence": f"Sentence {i}.", "label": i % 2, "idx": i} for i in range(5)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def write_cola(root: Path, content: bytes, name: str = "train.jsonl") -> Path:
    folder = root / "glue" / "cola"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return root


def read(root: Path, on_error: str = "stop", split: str = "train") -> tuple[list[str], BadInput]:
    bad_input = BadInput(on_error)
    return [e.input for e in read_examples(find_task("cola"), split, TaskFolder(root), bad_input)], bad_input


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("train.jsonl", bytes),
        ("train.jsonl.gz", gzip.compress),
        ("train.jsonl.zst", lambda data: pa.Codec("zstd").compress(data, asbytes=True)),
    ],
)
def test_plain_and_packed_files_read_alike(tmp_path: Path, name: str, pack: Any) -> None:
    texts, _ = read(write_cola(tmp_path, pack(LINES), name))
    assert texts == [f"cola sentence: Sentence {i}." for i in range(5)]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (b'{"sentence": "A", "lab\n', "broken JSON"),
        (b'["A", 1]\n', "broken JSON"),
        (b'{"label": 1}\n', "missing field"),
        (b'{"sentence": "A", "label": 7}\n', "label outside its set"),
        (b'{"sentence": "\xff", "label": 1}\n', "bad UTF-8"),
    ],
)
def test_damage_stops_with_its_place_or_is_counted(tmp_path: Path, damage: bytes, reason: str) -> None:
    root = write_cola(tmp_path, LINES + damage + LINES)
    with pytest.raises(UserError, match=rf"train\.jsonl, line 6: {reason}"):
        read(root)
    texts, bad_input = read(root, "skip")
    assert len(texts) == 10
    assert bad_input.state()[reason]["count"] == 1
    assert f"1 × {reason} (first: " in bad_input.summary()


UNLABELLED = b'{"sentence": "Is it?", "label": -1, "idx": 7}\n{"sentence": "It is!"}\n'


def test_records_without_labels_are_told_how_to_use(tmp_path: Path) -> None:
    root = write_cola(tmp_path, LINES + UNLABELLED)
    with pytest.raises(UserError, match=r"line 6: no label .*--predict-only"):
        read(root)
    texts, bad_input = read(root, "skip")
    assert (len(texts), bad_input.state()["no label"]["count"]) == (5, 2)
    alone = TaskFolder(write_cola(tmp_path / "alone", UNLABELLED))
    with pytest.raises(UserError, match=r"no usable example; .*--predict-only"):
        load_examples(find_task("cola"), "train", alone, BadInput("skip"))


def test_what_is_asked_is_read_with_and_without_labels(tmp_path: Path) -> None:
    task = find_task("cola")

    def ask(content: bytes) -> list[tuple[dict[str, Any], str]]:
        source = TaskFolder(write_cola(tmp_path, content, "test.jsonl"))
        return [(place, example.input) for place, example in read_inputs(task, "test", source, BadInput("stop"))]

    assert ask(LINES) == [({"idx": i}, f"cola sentence: Sentence {i}.") for i in range(5)]
    assert ask(UNLABELLED) == [({"idx": 7}, "cola sentence: Is it?"), ({"idx": 1}, "cola sentence: It is!")]
    for both, place in ((LINES + UNLABELLED, "line 6 has no label"), (UNLABELLED + LINES, "line 3 has a label")):
        with pytest.raises(UserError, match=f"{place}, and .*line 1 has"):
            ask(both)
    task = Task(name="x", write=task.write, metrics=(), folder="glue/cola")
    with pytest.raises(UserError, match="task x does not say which fields hold its answers"):
        ask(UNLABELLED)


def test_a_torn_archive_is_told(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 1 << 60, 20_000)
    lines = "".join(json.dumps({"sentence": str(n), "label": 0}) + "\n" for n in noise).encode()
    packed = pa.Codec("zstd").compress(lines, asbytes=True)
    root = write_cola(tmp_path, packed[: len(packed) // 2], "train.jsonl.zst")
    with pytest.raises(UserError, match=r"train\.jsonl\.zst"):
        read(root)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    root = write_cola(tmp_path, LINES)
    with pytest.raises(UserError, match=r"glue/cola has no validation\.jsonl"):
        read(root, split="validation")
    with pytest.raises(UserError, match="no folder"):
        open_tasks(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="no usable example"):
        load_examples(find_task("cola"), "train", TaskFolder(write_cola(tmp_path / "b", b"\n")), BadInput("stop"))


def test_one_validation_file_counts_as_mnli_matched(tmp_path: Path) -> None:
    folder = tmp_path / "glue" / "mnli"
    folder.mkdir(parents=True)
    (folder / "validation.jsonl").write_text("{}\n")
    source, mnli = TaskFolder(tmp_path), find_task("mnli")
    assert [source.has(mnli, split) for split in mnli.held_out] == [True, False]
    (folder / "validation.jsonl").rename(folder / "test.jsonl")
    assert mnli.test_splits() == ("test_matched", "test_mismatched")
    assert [source.has(mnli, split) for split in mnli.test_splits()] == [True, False]
    assert find_task("cola").test_splits() == ("test",)


def test_a_hugging_face_dataset_reads_as_the_folder_does(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(RECORDS)}).save_to_disk(tmp_path / "saved")
    write = classification("cola", ("sentence",), ("unacceptable", "acceptable"))
    task = Task(
        name="x", write=write, metrics=("accuracy",), folder="glue/cola", hub=(str(tmp_path / "saved"), None)
    )
    from_hub = list(read_examples(task, "train", TaskHub(), BadInput("stop")))
    from_folder = list(read_examples(task, "train", TaskFolder(write_cola(tmp_path, LINES)), BadInput("stop")))
    assert from_hub == from_folder
    assert len(from_hub) == 5


def test_a_dataset_that_cannot_be_had_is_explained(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    task = Task(name="x", write=find_task("cola").write, metrics=("accuracy",), hub=(str(tmp_path / "none"), None))
    with pytest.raises(UserError, match="cannot be opened"):
        list(read_examples(task, "train", TaskHub(), BadInput("skip")))
    with pytest.raises(UserError, match="not on the hub"):
        list(read_examples(Task(name="x", write=task.write, metrics=()), "train", TaskHub(), BadInput("skip")))


def published(shared: Path) -> dict[str, int]:
    """Task files that the manifest says are complete, with their sizes."""
    rows = re.findall(
        r"\| tasks/(\S+)\.jsonl\.zst \| ([\d,]+) \| ([\d,]+) \|", (shared / "data/MANIFEST.md").read_text()
    )
    return {name: int(n.replace(",", "")) for name, n, of in rows if n == of}


SPLITS = [
    *(("cola", s) for s in ("train", "validation")),
    *(("stsb", s) for s in ("train", "validation")),
    *(("mrpc", s) for s in ("train", "validation")),
    *(
        (name, s)
        for name in ("cb", "copa", "wic", "wsc", "glue/rte", "super_glue/rte")
        for s in ("train", "validation")
    ),
    *((name, "validation") for name in ("sst2", "qnli", "boolq", "wnli", "multirc", "squad", "trivia_qa")),
]


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_complete_real_splits_have_their_published_size(shared: Path, name: str, split: str) -> None:
    task = find_task(name)
    complete = published(shared)[f"{task.folder}/{split}"]
    assert task.published[split] == complete
    bad_input = BadInput("stop")
    examples = load_examples(task, split, TaskFolder(shared / "data/tasks"), bad_input, training=False)
    assert len(examples) == complete
    if task.labels:
        assert {example.target for example in examples} == set(task.labels)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sst2", "squad", "multirc", "mnli", "qqp", "trivia_qa", "boolq"])
def test_the_large_training_files_load(shared: Path, name: str) -> None:
    task = find_task(name)
    count = sum(1 for _ in read_examples(task, "train", TaskFolder(shared / "data/tasks"), BadInput("stop")))
    complete = published(shared).get(f"{task.folder}/train")
    assert count == complete if complete else 0 < count < task.published["train"]


def test_real_wsc_marks_every_pronoun_and_trains_on_the_true_cases(shared: Path) -> None:
    source, task = TaskFolder(shared / "data/tasks"), find_task("wsc")
    assert len(load_examples(task, "train", source, BadInput("stop"))) == 259
    for split in ("train", "validation"):
        for example in load_examples(task, split, source, BadInput("stop"), training=False):
            assert re.search(r"\*\w+\*(?= |$)", example.input)


def test_real_wsc_is_the_fixed_version(shared: Path) -> None:
    """`wsc.fixed`: every referent is a part of its text; no other referent has changed."""
    source, task = TaskFolder(shared / "data/tasks"), find_task("wsc")
    changed = {}
    for split in ("train", "validation"):
        records = [record for _, record in source.records(task, split, BadInput("stop"))]
        examples = load_examples(task, split, source, BadInput("stop"), training=False)
        pairs = list(zip(records, examples, strict=True))
        assert all(example.target in record["text"] for record, example in pairs)
        assert all(
            example.target == record["span1_text"]
            for record, example in pairs
            if record["span1_text"] in record["text"]
        )
        changed[split] = sum(example.target != record["span1_text"] for record, example in pairs)
    assert changed == {"train": 88, "validation": 8}


def made_up_text() -> list[str]:
    draw = random.Random(0)
    words = ["".join(draw.choices("abdeiklmnorstu", k=draw.randint(2, 6))) for _ in range(200)]
    return [" ".join(draw.choices(words, k=8)) + "." for _ in range(500)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    vocabularies.save(vocabularies.train(made_up_text(), 450), folder)
    return AutoTokenizer.from_pretrained(folder)


def test_texts_become_tokens_that_end_and_fit(tokenizer: Any) -> None:
    texts = ["a joy", "not_entailment", "Röntgen ½ 日本", "a </s> <extra_id_0> bore", "a bore " * 50]
    tokens = tokenise(tokenizer, texts, 40)
    assert tokens.cut == 1
    assert tokens.lengths.tolist() == [len(tokens[i]) for i in range(5)]
    assert tokens.lengths[4] == 40
    for i, text in enumerate(texts):
        assert tokens[i][-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in tokens[i][:-1]
        if i != 4 and i != 2:
            assert tokenizer.decode(tokens[i][:-1]) == text


def test_exactly_the_limit_is_not_cut(tokenizer: Any) -> None:
    length = int(tokenise(tokenizer, ["a joy and a bore"], 100).lengths[0])
    assert tokenise(tokenizer, ["a joy and a bore"], length).cut == 0
    assert tokenise(tokenizer, ["a joy and a bore"], length - 1).cut == 1


def test_padding_is_on_the_right() -> None:
    padded = pad([np.array([5, 6]), np.array([7])], 3, -100)
    assert padded.tolist() == [[5, 6, -100], [7, -100, -100]]


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_small_file_of_millions_of_lines(tmp_path: Path, on_error: str) -> None:
    """The limits are those of `prepare`, and are found before its lines are read."""
    line = json.dumps({"input": "a", "target": "b"}) + "\n"
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(line.encode() * 3_000_000))
    assert path.stat().st_size < 300_000
    bad_input = BadInput(on_error)
    with pytest.raises(UserError, match="unpacks without end" if on_error == "stop" else "no usable example"):
        load_examples(find_task(str(path)), "train", open_tasks(None), bad_input)
    assert on_error == "stop" or "1 × unpacks without end" in bad_input.summary()


def test_a_task_from_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    task = find_task(str(tmp_path / "pipe.jsonl"))
    with pytest.raises(UserError, match="a pipe, a socket or a device"):
        load_examples(task, "train", open_tasks(None), BadInput("skip"))


def test_a_null_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"input": null, "target": "b"}\n')
    with pytest.raises(UserError, match="'input' is null"):
        load_examples(find_task(str(tmp_path / "mine.jsonl")), "train", open_tasks(None), BadInput("stop"))

"""What the host must keep up with: corrupted sequences from token shards, and tokenising text. On the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from altup.bench.problem import Problem, Provider, Setup, Work
from altup.data import tokenizer
from altup.data.batches import ShardBatches
from altup.data.objectives import SpanCorruption
from altup.data.shards import TOKENIZER, Manifest, TokenStream, hashes, token_type, write_shard


def problems(setup: Setup) -> Iterator[Problem]:
    batch, inputs, tokens = (8, 64, 20_000) if setup.quick else (256, 512, 50_000_000)
    pieces, characters = (400, 30_000) if setup.quick else (8000, 10**9)
    with tempfile.TemporaryDirectory(prefix="altup-bench-") as created:
        folder = Path(created)
        words = tokenizer.train(_text(characters), pieces)
        tokenizer.save(words, folder / TOKENIZER)
        _write_tokens(folder, tokens)
        batches = _batches(folder, batch, inputs)
        yield Problem(
            "data",
            {"batch": batch, "inputs": inputs, "targets": batches.objective.target_length},  # type: ignore[attr-defined]
            [Provider("span corruption", partial(corruption, batches))],
            baseline="span corruption",
        )
        yield Problem(
            "data",
            {"vocabulary": pieces},
            [Provider("tokenising", partial(tokenising, words, _text(characters)))],
            baseline="tokenising",
        )


def corruption(batches: ShardBatches) -> Work:
    def errors() -> dict[str, float]:
        return {"text that does not come back": _lost(batches)}

    return Work(
        lambda i: batches.examples(i, 0, batches.batch_size),
        errors=errors,
        mode="produce",
        on_host=True,
        per_repetition=batches.batch_size,
    )


def tokenising(words: Any, texts: list[str]) -> Work:
    megabytes = sum(len(text.encode()) for text in texts) / 1e6

    def errors() -> dict[str, float]:
        sample = texts[:50]
        back = words.decode_batch([found.ids for found in words.encode_batch(sample)])
        lost = sum(a != words.normalizer.normalize_str(b) for a, b in zip(back, sample, strict=True))
        return {"text that does not come back": lost / len(sample)}

    return Work(
        lambda i: words.encode_batch(texts, add_special_tokens=False),
        errors=errors,
        mode="produce",
        on_host=True,
        per_repetition=megabytes,
        unit="MB/s",
    )


def _text(characters: int) -> list[str]:
    """The start of the English that every Python carries: its help topics, a paragraph each."""
    taken: list[str] = []
    for text in "\n\n".join(topics.values()).split("\n\n"):
        if characters <= 0:
            break
        taken.append(text)
        characters -= len(text)
    return taken


def _write_tokens(folder: Path, count: int) -> None:
    """A prepared folder with one shard of random tokens."""
    vocabulary = tokenizer.vocabulary(folder / TOKENIZER)
    words = vocabulary.size - len(vocabulary.sentinels)
    ids = np.random.default_rng(0).integers(3, words, count).astype(token_type(vocabulary.size))
    shard = write_shard(folder / "train-00000.bin", [ids], documents=1, characters=count)
    segment = {"pass": "train", "cursor": None, "end": True, "skipped": {}, "shards": {"train": shard}}
    Manifest({}, vocabulary, [segment], True, hashes(folder / TOKENIZER)).save(folder)


def _batches(folder: Path, batch: int, inputs: int) -> ShardBatches:
    stream = TokenStream(folder)
    return ShardBatches(stream, SpanCorruption(stream.vocabulary.sentinels, stream.vocabulary.eos, inputs), batch)


def _lost(batches: ShardBatches) -> float:
    """The share of sequences whose inputs and targets, put together again, are not the raw text."""
    objective: Any = batches.objective
    vocabulary = batches.stream.vocabulary
    examples = batches.examples(0, 0, batches.batch_size)
    _, positions = batches.order(0, 0, batches.batch_size)
    raws = batches.stream.windows(positions * objective.raw_length, objective.raw_length)
    lost = 0
    for inputs, labels, raw in zip(examples["input_ids"], examples["labels"], raws, strict=True):
        hidden: dict[int, list[int]] = {}
        for token in labels[:-1].tolist():
            if token in vocabulary.sentinels:
                span = hidden.setdefault(token, [])
            else:
                span.append(token)
        text = [t for token in inputs.tolist() for t in hidden.get(token, [token]) if t != vocabulary.eos]
        lost += text != raw.tolist()
    return lost / len(raws)

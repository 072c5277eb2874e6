from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from altup.core.errors import UserError
from altup.data import HELD_OUT_PARTS
from altup.data.batches import Batches, HeldOut, ShardBatches, read_ahead
from altup.data.objectives import OBJECTIVES, Causal, SpanCorruption, build_objective
from altup.data.shards import TokenStream

LENGTH = 64


@pytest.fixture(scope="module")
def stream(prepared: Path) -> TokenStream:
    return TokenStream(prepared)


def make(stream: TokenStream, batch_size: int = 32, seed: int = 0, name: str = "span-corruption") -> ShardBatches:
    return ShardBatches(stream, build_objective(name, stream.vocabulary, LENGTH), batch_size, seed)


def restore(inputs: list[int], targets: list[int], sentinels: tuple[int, ...]) -> list[int]:
    spans: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token in sentinels:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    return [t for token in inputs[:-1] for t in spans.get(token, [token])]


def test_every_token_is_seen_exactly_once_an_epoch(stream: TokenStream) -> None:
    batches = make(stream, batch_size=1)
    raw_length, n = batches.objective.raw_length, batches.sequences_per_epoch
    assert n * raw_length + batches.tail_tokens == len(stream)
    assert batches.tail_tokens < raw_length
    whole = stream.read(0, n * raw_length).reshape(n, raw_length)
    expected = Counter(map(tuple, whole.tolist()))
    orders = []
    for epoch in range(2):
        batches = ShardBatches(stream, batches.objective, n, seed=0)
        made = batches.examples(epoch, 0, n)
        rows = [
            tuple(restore(i, t, stream.vocabulary.sentinels))
            for i, t in zip(made["input_ids"].tolist(), made["labels"].tolist(), strict=True)
        ]
        assert Counter(rows) == expected
        orders.append(rows)
    assert orders[0] != orders[1]
    assert orders[0] != list(map(tuple, whole.tolist()))


def test_the_order_differs_between_seeds_and_epochs(stream: TokenStream) -> None:
    """Of the sequences themselves, as a decoder reads them: nothing is masked there that could differ instead."""
    n = make(stream, name="causal").sequences_per_epoch
    orders = [make(stream, n, seed, "causal").order(epoch, 0, n)[1] for seed in (0, 1, 2**40) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert all(np.array_equal(np.sort(order), np.arange(n)) for order in orders)
    again = make(stream, n, 1, "causal").order(0, 0, n)[1]
    assert np.array_equal(again, orders[2])


def test_masks_of_a_sequence_differ_between_epochs_and_seeds(stream: TokenStream) -> None:
    n = make(stream).sequences_per_epoch

    def labels(seed: int, epoch: int) -> dict[int, bytes]:
        batches = make(stream, n, seed)
        _, sequence = batches.order(epoch, 0, n)
        rows = batches.examples(epoch, 0, n)["labels"]
        return {int(s): row.tobytes() for s, row in zip(sequence, rows, strict=True)}

    first = labels(0, 0)
    for other in (labels(0, 1), labels(1, 0)):
        assert first.keys() == other.keys()
        assert sum(first[s] == other[s] for s in first) < 0.01 * n + 2


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_same_examples_on_1_2_and_4_processes_with_and_without_accumulation(
    stream: TokenStream, name: str
) -> None:
    """Process r of W takes a contiguous range of every micro-batch; together they are always the same batch."""
    batches = make(stream, 32, name=name)
    for step in (0, 5, 1000):
        whole = batches.examples(step, 0, 32)
        for world in (1, 2, 4):
            for micro in (1, 2):
                size = 32 // micro
                share = size // world
                pieces = [
                    make(stream, 32, name=name).examples(step, m * size + r * share, m * size + (r + 1) * share)
                    for m in range(micro)
                    for r in range(world)
                ]
                for key in whole:
                    assert np.array_equal(np.concatenate([piece[key] for piece in pieces]), whole[key])


def test_a_batch_may_span_epochs(stream: TokenStream) -> None:
    objective = make(stream).objective
    n = len(stream) // objective.raw_length
    large = ShardBatches(stream, objective, 3 * n + 5, seed=4)
    small = ShardBatches(stream, objective, 1, seed=4)
    made = large.examples(1, 0, 3 * n + 5)
    for position in (0, n - 6, n - 5, n, 2 * n, 3 * n + 4):
        alone = small.examples(3 * n + 5 + position, 0, 1)
        assert all(np.array_equal(made[key][position], alone[key][0]) for key in made)


def test_far_steps_cost_no_more_than_near_ones(stream: TokenStream) -> None:
    batches = make(stream)
    batches.examples(0, 0, 32)

    def seconds(step: int) -> float:
        began = time.thread_time()
        for i in range(20):
            batches.examples(step + i, 0, 32)
        return time.thread_time() - began

    near = min(seconds(0) for _ in range(5))
    far = min(seconds(10**9) for _ in range(5))
    assert far < 3 * near


def test_describe_names_what_decides_the_examples(stream: TokenStream) -> None:
    described = make(stream, 32, 7).describe()
    assert described["data"] == stream.sha256
    assert (described["batch_size"], described["seed"], described["objective"]) == (32, 7, "span-corruption")
    assert described != make(stream, 32, 8).describe()
    assert described != make(stream, 32, 7, "causal").describe()
    batches: Batches = make(stream)
    assert batches.sequences_per_epoch > 100


def test_held_out_examples_are_always_the_same_and_spread(prepared: Path) -> None:
    stream = TokenStream(prepared, "validation")
    objective = SpanCorruption(stream.vocabulary.sentinels, stream.vocabulary.eos, LENGTH)
    whole = HeldOut(stream, objective)
    assert len(whole) == len(stream) // objective.raw_length
    once, again = whole.examples(0, len(whole)), HeldOut(stream, objective).examples(0, len(whole))
    assert all(np.array_equal(once[key], again[key]) for key in once)
    raw = stream.read(0, len(whole) * objective.raw_length).reshape(len(whole), -1)
    for row in (0, 3, len(whole) - 1):
        inputs, targets = once["input_ids"][row].tolist(), once["labels"][row].tolist()
        assert restore(inputs, targets, stream.vocabulary.sentinels) == raw[row].tolist()
    few = HeldOut(stream, objective, limit=5)
    assert len(few) == 5
    spread = [i * len(whole) // 5 for i in range(5)]
    assert np.array_equal(few.examples(0, 5)["labels"], once["labels"][spread])
    assert len(few.examples(3, 8)["labels"]) == 2
    assert len(HeldOut(stream, objective, limit=10**6)) == len(whole)


def test_the_parts_of_held_out_text_share_nothing(prepared: Path) -> None:
    stream = TokenStream(prepared, "validation")
    objective = SpanCorruption(stream.vocabulary.sentinels, stream.vocabulary.eos, LENGTH)
    whole, tuning, reporting = (HeldOut(stream, objective, 9, part=part) for part in HELD_OUT_PARTS)
    assert (len(tuning), len(reporting)) == (5, 4)
    labels = whole.examples(0, 9)["labels"]
    assert np.array_equal(tuning.examples(0, 9)["labels"], labels[::2])
    assert np.array_equal(reporting.examples(0, 9)["labels"], labels[1::2])
    described = [part.describe() for part in (whole, tuning, reporting)]
    assert all(one != other for one in described for other in described if one is not other)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_behind_the_last_held_out_example_there_are_none(prepared: Path, name: str) -> None:
    """Of several processes the later ones may have no share of the last batch."""
    stream = TokenStream(prepared, "validation")
    held_out = HeldOut(stream, build_objective(name, stream.vocabulary, LENGTH), limit=5)
    some, none = held_out.examples(4, 8), held_out.examples(8, 12)
    assert {key: array.shape for key, array in none.items()} == {k: (0, *a.shape[1:]) for k, a in some.items()}


def test_too_little_text_is_an_error(stream: TokenStream) -> None:
    with pytest.raises(UserError, match="fewer than one sequence"):
        ShardBatches(stream, Causal(1, 10**7), 4)
    with pytest.raises(UserError, match="batch_size=0"):
        make(stream, 0)
    with pytest.raises(UserError, match="seed=-1"):
        make(stream, 4, -1)


def test_read_ahead_keeps_the_order_and_passes_errors_on(stream: TokenStream) -> None:
    batches = make(stream)
    for step, made in enumerate(read_ahead(lambda s: batches.examples(s, 0, 32), range(12), threads=3)):
        assert np.array_equal(made["input_ids"], batches.examples(step, 0, 32)["input_ids"])
    assert step == 11

    def fail(step: int) -> int:
        if step == 3:
            raise UserError("no")
        return step

    results = read_ahead(fail, range(100))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UserError, match="no"):
        next(results)


@pytest.mark.slow  # for a quiet machine
def test_it_is_fast(stream: TokenStream) -> None:
    """568-token sequences from shards a second of CPU time; a quarter of what 2 cores must give together."""
    batches = ShardBatches(stream, build_objective("span-corruption", stream.vocabulary), 256)
    batches.examples(0, 0, 256)
    best = 0.0
    for _ in range(5):
        began = time.thread_time()
        for step in range(10):
            batches.examples(step, 0, 256)
        best = max(best, 2560 / (time.thread_time() - began))
    assert best > 5_000, "sequences a second"

"""What a mixture contains: every example in its turn, in a pure order, padded rightly."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from altup.core.errors import UserError
from altup.data.tasks.examples import Tokens
from altup.finetuning.mixture import Mixture, TrainingTask, shares_of


def made_up(name: str, size: int, first: int, longest: int = 20) -> TrainingTask:
    """Row r of a task begins with `first + r`, and has a length of its own."""
    draw = np.random.default_rng(first)

    def rows(most: int) -> Tokens:
        lengths = draw.integers(2, most + 1, size)
        parts = [np.array([first + r] * (n - 1) + [1], np.int32) for r, n in enumerate(lengths)]
        return Tokens(np.concatenate(parts), np.cumsum(lengths), 0)

    return TrainingTask(name, rows(longest), rows(6))


TASKS = [made_up("a", 50, 1000), made_up("b", 20, 2000), made_up("c", 3, 3000)]


def drawn(mixture: Mixture, examples: int) -> list[tuple[int, int]]:
    """Task and row of the first `examples` of a mixture."""
    assert examples % mixture.batch_size == 0
    steps = [mixture.order(step, 0, mixture.batch_size) for step in range(examples // mixture.batch_size)]
    return [(int(t), int(r)) for tasks, rows in steps for t, r in zip(tasks, rows, strict=True)]


def test_in_proportion_an_epoch_holds_everything_once() -> None:
    mixture = Mixture(TASKS, shares_of([(None, [50, 20, 3])]), 73, 0)
    everything = {(t, r) for t, task in enumerate(TASKS) for r in range(len(task))}
    orders = [drawn(mixture, 73 * n)[-73:] for n in (1, 2, 3)]
    for order in orders:
        assert set(order) == everything
    assert orders[0] != orders[1] != orders[2]
    assert drawn(Mixture(TASKS, [50, 20, 3], 73, 0, seed=1), 73) != orders[0]


def test_weights_decide_how_often_a_task_comes() -> None:
    shares = shares_of([(1.0, [50]), (2.0, [20]), (1.0, [3])])
    assert shares == [2500, 5000, 2500]
    counts = Counter(drawn(Mixture(TASKS, shares, 100, 0), 10_000))
    assert [sum(n for (t, _), n in counts.items() if t == task) for task in range(3)] == shares
    for task, size in enumerate((50, 20, 3)):
        times = {counts[task, row] for row in range(size)}
        assert max(times) - min(times) <= 1  # every example as often as any other


def test_weights_hold_in_short_stretches_too() -> None:
    mixture = Mixture(TASKS, shares_of([(1.0, [50]), (1.0, [20]), (2.0, [3])]), 100, 0)
    share = sum(t == 2 for t, _ in drawn(mixture, 2_000)) / 2_000
    assert share == pytest.approx(0.5, abs=0.05)


def test_a_weighted_suite_is_divided_by_its_examples() -> None:
    assert shares_of([(3.0, [300, 100]), (1.0, [7])]) == [5625, 1875, 2500]
    assert shares_of([(None, [300, 100]), (None, [7])]) == [300, 100, 7]
    assert min(shares_of([(1e-9, [5]), (1.0, [5])])) == 1
    with pytest.raises(UserError, match="some have none"):
        shares_of([(3.0, [300]), (None, [7])])


def test_any_part_of_a_step_is_the_same_as_the_whole() -> None:
    mixture = Mixture(TASKS, [50, 20, 3], 16, 0, seed=3)
    for step in (0, 4, 1_000_000):
        whole = mixture.examples(step, 0, 16)
        for start, stop in ((0, 5), (5, 6), (6, 16)):
            part = mixture.examples(step, start, stop)
            assert np.array_equal(part["labels"], whole["labels"][start:stop])
            width = part["input_ids"].shape[1]
            assert np.array_equal(part["input_ids"], whole["input_ids"][start:stop, :width])


def test_rows_are_padded_and_masked() -> None:
    tasks = [made_up("a", 40, 1000, longest=300), made_up("b", 40, 2000, longest=20)]
    mixture = Mixture(tasks, [40, 40], 8, 0)
    widths = set()
    for step in range(10):
        batch = mixture.examples(step, 0, 8)
        widths.add(batch["input_ids"].shape[1])
        for (task, row), ids, mask, labels in zip(
            drawn(mixture, 8 * (step + 1))[-8:],
            *(batch[k] for k in ("input_ids", "attention_mask", "labels")),
            strict=True,
        ):
            assert ids[mask == 1].tolist() == tasks[task].inputs[row].tolist()
            assert mask.sum() == len(tasks[task].inputs[row])
            assert (ids[mask == 0] == 0).all()
            assert labels[labels != -100].tolist() == tasks[task].targets[row].tolist()
        assert batch["labels"].shape == (8, 8)
    alone = [mixture.examples(step, i, i + 1)["input_ids"].shape[1] for step in range(10) for i in range(8)]
    longest = -(-max(int(t.inputs.lengths.max()) for t in tasks) // 8) * 8
    assert set(alone) == {32, 64, 128, 192, 256, longest}


def test_the_examples_of_a_step_come_in_the_order_of_their_lengths() -> None:
    mixture = Mixture([made_up("a", 300, 1000, longest=300)], [300], 32, 0)
    for step in range(3):
        lengths = mixture.examples(step, 0, 32)["attention_mask"].sum(1)
        assert (np.diff(lengths) >= 0).all()
        assert (
            mixture.examples(step, 0, 8)["input_ids"].shape[1]
            < mixture.examples(step, 24, 32)["input_ids"].shape[1]
        )


def test_identity_follows_the_tokens() -> None:
    def describe(*tasks: TrainingTask) -> dict:
        return Mixture(tasks, [len(t) for t in tasks], 8, 0).describe()

    assert describe(made_up("a", 9, 1000)) == describe(made_up("a", 9, 1000))
    assert describe(made_up("a", 9, 1000)) != describe(made_up("a", 9, 1001))

"""The data of a fine-tuning run: examples of several tasks, mixed in an order that is a pure function of the seed.

The mixture goes in rounds of C = Σ share examples. The global counter g = step · batch_size + position gives the
round g // C and the place g % C; a permutation keyed by (seed, round) turns the place into a number p, and p falls
to the task whose range of `share` numbers it lies in. So a round holds exactly `share` examples of each task, and
the n-th of them is example n % size of the task, in an order keyed by (seed, task, epoch n // size).

Mixed in proportion, share = size: a round is an epoch that holds every example once.

How examples are laid out changes no update, because a step adds them up. They are packed, several to a row; or,
where a model would mix them, sorted by length within a step, so that each micro-batch pads to its own width.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from altup.core.errors import UserError, check_whole
from altup.data.bad_input import BadInput
from altup.data.randomness import keys, permute
from altup.data.tasks import SUITES, Task, find_task
from altup.data.tasks.examples import TaskSource, Tokens, load_examples, open_tasks, source_of
from altup.data.tasks.registry import add_task
from altup.evaluation.evaluate import HeldOutTask, has_held_out, load_held_out
from altup.evaluation.metrics import check_metrics
from altup.finetuning.config import FinetuneConfig
from altup.finetuning.learning import Learning
from altup.finetuning.learning.seq2seq import Seq2SeqRows
from altup.finetuning.packing import MakeRows, Sizes, Usual

MIX, ROWS = 4, 5  # first coordinates of keys, beside those of altup.data.batches
TOGETHER = 32  # steps whose examples are drawn at once: hashing few numbers costs as much as hashing many
ROUND = 10_000  # examples of a round of weighted tasks: weights are kept to 1/10,000


@dataclass(frozen=True)
class TrainingTask:
    """A task's training examples as tokens."""

    name: str
    inputs: Tokens
    targets: Tokens

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for tokens in (self.inputs, self.targets):
            digest.update(tokens.ends.tobytes())
            digest.update(tokens.flat.tobytes())
        return digest.hexdigest()


class Mixture:
    """`Batches` of examples, as rows of tokens, which `rows` lays out as a kind of model reads them.

    Padded, a row is an example. With `packing`, one of `packing.LAYOUTS`, rows hold several examples, so that
    there are fewer rows than examples.
    """

    def __init__(
        self,
        tasks: Sequence[TrainingTask],
        shares: Sequence[int],
        batch_size: int,
        pad_id: int,
        seed: int = 0,
        packing: str | None = None,
        rows: MakeRows = Seq2SeqRows,
    ):
        check_whole("batch_size", batch_size, 1)
        check_whole("seed", seed, 0)
        self.tasks, self.shares, self.batch_size, self.seed = list(tasks), list(shares), batch_size, seed
        self.sequences_per_epoch = sum(len(task) for task in tasks)
        self._draw_steps = functools.lru_cache(maxsize=2)(self._draw)
        self._ends = np.cumsum(shares)
        self._sizes = np.array([len(task) for task in tasks])
        self.packs = packing is not None
        self._arrange = rows(Usual(self._sizes_of("inputs"), self._sizes_of("targets")), pad_id, packing)

    def _sizes_of(self, part: str) -> Sizes:
        """Of the mixture's inputs or targets."""
        lengths = [getattr(task, part).lengths.astype(np.float64) for task in self.tasks]
        mean, square = (np.average([(x**n).mean() for x in lengths], weights=self.shares) for n in (1, 2))
        most = max(int(x.max()) for x in lengths)
        return Sizes(float(mean), float(np.sqrt(max(square - mean**2, 0.0))), most)

    def order(self, step: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Task and row of the examples start..stop-1 of a step, which is sorted by length if it is not packed."""
        task, row = self._drawn(step)
        if self.packs:
            return task[start:stop], row[start:stop]
        lengths = np.array([len(self.tasks[t].inputs[r]) for t, r in zip(task, row, strict=True)])
        chosen = np.argsort(lengths, kind="stable")[start:stop]
        return task[chosen], row[chosen]

    def _drawn(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Task and row of a step's examples, as they are drawn."""
        block, number = divmod(step, TOGETHER)
        chosen = slice(number * self.batch_size, (number + 1) * self.batch_size)
        task, row = self._draw_steps(block)
        return task[chosen], row[chosen]

    def _draw(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The same of `TOGETHER` steps."""
        examples = TOGETHER * self.batch_size
        turn, place = np.divmod(block * examples + np.arange(examples), self._ends[-1])
        number = permute(place, int(self._ends[-1]), keys(self.seed, MIX, turn))
        task = np.searchsorted(self._ends, number, side="right")
        shares = np.array(self.shares)[task]
        count = turn * shares + number - (self._ends[task] - shares)
        epoch, place = np.divmod(count, self._sizes[task])
        row = np.empty_like(place)
        for t in np.unique(task):
            chosen = task == t
            row[chosen] = permute(place[chosen], int(self._sizes[t]), keys(self.seed, ROWS, int(t), epoch[chosen]))
        return task, row

    def examples(self, step: int, start: int, stop: int) -> dict[str, np.ndarray]:
        chosen = list(zip(*self.order(step, start, stop), strict=True))
        inputs = [self.tasks[task].inputs[row] for task, row in chosen]
        targets = [self.tasks[task].targets[row] for task, row in chosen]
        return self._arrange(inputs, targets)

    def describe(self) -> dict[str, Any]:
        parts = {
            task.name: {"sha256": task.sha256, "examples": len(task), "share": share}
            for task, share in zip(self.tasks, self.shares, strict=True)
        }
        return {"tasks": parts, "batch_size": self.batch_size, "seed": self.seed}


def shares_of(groups: Sequence[tuple[float | None, Sequence[int]]]) -> list[int]:
    """How many examples of each task a round holds, for groups of (weight, sizes of its tasks).

    Without weights every task has its size: in proportion to its examples. With them a group has its part of a
    round of 10,000, divided in proportion to the examples of its tasks, and no task has none.
    """
    weights = [weight for weight, _ in groups]
    if all(weight is None for weight in weights):
        return [size for _, sizes in groups for size in sizes]
    if any(weight is None for weight in weights):
        raise UserError("some tasks have a weight (NAME=WEIGHT) and some have none; give all of them one, or none")
    total = sum(weight or 0.0 for weight in weights)
    exact = [ROUND * (weight or 0.0) / total * size / sum(sizes) for weight, sizes in groups for size in sizes]
    return [max(1, round(share)) for share in exact]


@dataclass(frozen=True)
class FinetuneData:
    mixture: Mixture
    held_out: list[HeldOutTask]


def load_data(
    config: FinetuneConfig,
    learning: Learning,
    bad_input: BadInput,
    say: Callable[[str], None],
    packing: Callable[[], str | None] | None = None,
) -> FinetuneData:
    """Tokenise the training examples and read the held-out ones; `say` reports what is missing or was cut.

    `packing` chooses the layout, once the tasks are known to be there: it may have to load the model.
    """
    source = open_tasks(config.data)
    chosen: list[tuple[float | None, list[Task]]] = []
    scored: list[Task] = []
    known: dict[str, Task] = {}
    for name, weight in config.weighted_names():
        members = [find_task(member) for member in SUITES.get(name, (name,))]
        found = [task for task in members if add_task(task, known)]
        if weight is not None and len(found) < len(members):
            twice = next(task.name for task in members if task not in found)
            raise UserError(f"task {twice} is named twice, so that its weight is not clear; name it once")
        present = [t for t in found if source_of(t, source).has(t, "train")]
        for task in found:
            if task not in present:
                if name not in SUITES:
                    place = Path(config.data, task.folder or task.name) if config.data else "its folder"
                    raise UserError(
                        f"task {task.name}: no training examples; put train.jsonl into {place}, or remove the task"
                    )
                say(f"{task.name}: no training examples in the data; it is not trained")
        chosen.append((weight, present))
        scored += [task for task in found if _can_be_scored(task, source, say)]
    for task in scored:  # before anything is loaded, which may take long
        check_metrics(task)
    trained = [task for _, present in chosen for task in present]
    learning.prepare([task for task in known.values() if task in trained or task in scored])
    groups: list[tuple[float | None, list[int]]] = []
    training: list[TrainingTask] = []
    for weight, present in chosen:
        loaded = [_load_training(task, source, learning, bad_input, say) for task in present]
        training += loaded
        groups.append((weight, [len(task) for task in loaded]))
    if not training:
        raise UserError("none of the tasks has training examples; check --data")
    shares = shares_of([group for group in groups if group[1]])
    mixture = Mixture(
        training, shares, config.batch_size, learning.pad, config.seed, packing and packing(), learning.rows
    )
    return FinetuneData(mixture, load_held_out(scored, source, bad_input, config.eval_limit))


def describe_held_out(held_out: list[HeldOutTask], config: FinetuneConfig) -> str:
    """A hash of what scores are measured on, and how: others cannot be compared with them."""
    digest = hashlib.sha256(repr((config.eval_limit, config.inputs_length, config.targets_length)).encode())
    for held in held_out:
        digest.update(repr((held.task.name, held.splits)).encode())
    return digest.hexdigest()[:16]


def _load_training(
    task: Task, source: TaskSource, learning: Learning, bad_input: BadInput, say: Callable[[str], None]
) -> TrainingTask:
    inputs, targets, cut = learning.tokenise(task, load_examples(task, "train", source, bad_input))
    lengths = task.lengths(learning.config.inputs_length, learning.config.targets_length)
    for (what, number), length in zip(cut.items(), lengths, strict=True):
        if number:
            say(f"{task.name}: {number:,} of {len(inputs):,} {what} exceed {length} tokens and were cut")
    return TrainingTask(task.name, inputs, targets)


def _can_be_scored(task: Task, source: TaskSource, say: Callable[[str], None]) -> bool:
    if task.files and task.files.get("train") == task.files.get("validation"):
        say(f"{task.name}: one file is all there is, so nothing is held out; give a folder with validation.jsonl")
        return False
    if not has_held_out(task, source):
        say(f"{task.name}: no held-out examples in the data; it is not scored")
        return False
    return True

"""What studies are run on, and what tells it from other text and tasks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from altup.data.tokenizer import Vocabulary

IMAGINED = "imagined"  # identity of text that is not there


@dataclass(frozen=True)
class Inputs:
    """Where text and tasks lie, its vocabulary, and what identifies the text, and each task that was asked for."""

    data: str
    tasks: str | None
    identity: str
    vocabulary: Vocabulary
    known: dict[tuple[Any, ...], str] = field(default_factory=dict, repr=False, compare=False)

    def identify_tasks(self, names: Iterable[str]) -> dict[str, str]:
        """Task → a hash of its files. Nothing of those on the hub, which are known by their names.

        The files are read once: what a task is does not change while studies run.
        """
        from altup.data.tasks import find_tasks
        from altup.data.tasks.examples import open_tasks, source_of

        found = {}
        for task in find_tasks(names):
            if not task.files and self.tasks is None:
                continue
            place = (task.name, *task.files.values())
            if place not in self.known:
                source = source_of(task, open_tasks(self.tasks))
                splits = [split for split in ("train", *task.held_out) if source.has(task, split)]
                self.known[place] = key_of([source.describe(task, split) for split in splits])
            found[task.name] = self.known[place]
        return found


def identify(data: str, tasks: str | None) -> Inputs:
    """The prepared folder `data`; runs on other text, or on the same text cut otherwise, are other runs."""
    from altup.data.shards import TokenStream

    text, unseen = TokenStream(data, "train"), TokenStream(data, "validation")
    parts = (text.sha256, unseen.sha256, text.vocabulary.sha256)
    identity = hashlib.sha256("".join(parts).encode()).hexdigest()[:8]
    return Inputs(data, tasks, identity, text.vocabulary)


def imagine(tasks: str | None) -> Inputs:
    """Text that is not prepared yet, in T5's vocabulary: enough to say what studies would cost."""
    from altup.data.tokenizer import SENTINELS, Vocabulary

    pieces = 32_000
    sentinels = tuple(range(pieces + len(SENTINELS) - 1, pieces - 1, -1))
    vocabulary = Vocabulary("", pieces + len(SENTINELS), 0, 1, None, sentinels[0], sentinels)
    return Inputs("DATA", tasks, IMAGINED, vocabulary)


def key_of(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

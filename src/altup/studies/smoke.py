"""What the smoke scale brings along: the English that comes with Python, and two made-up tasks cut from it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

EXAMPLES = {"train": 24, "validation": 8}
HELD_OUT = 0.05


def prepare_text(out: Path, vocab_size: int) -> Path:
    from altup.data.embedded import Embedded
    from altup.data.prepare import Recipe, prepare

    recipe = Recipe([Embedded()], validation_fraction=HELD_OUT, vocab_size=vocab_size, sample_bytes=400_000)
    prepare(out / "text", recipe, workers=1)
    return out / "text"


def prepare_tasks(out: Path) -> Path:
    """SST-2, CoLA and SQuAD in name and format: a sentence is long or not, mentions a file or not, and a question
    asks for its second word. They show that fine-tuning works, and nothing about language."""
    folder = out / "tasks"
    if (folder / "done").exists():
        return folder
    from altup.data.embedded import documents

    draw = random.Random(0)
    sentences = [line for text in documents() for line in text.splitlines() if 6 <= len(line.split()) <= 12]
    for split, count in EXAMPLES.items():
        chosen = draw.sample(sentences, count)
        rows: dict[str, list[dict[str, Any]]] = {
            "glue/sst2": [{"sentence": s, "label": int(len(s) > 60), "idx": i} for i, s in enumerate(chosen)],
            "glue/cola": [{"sentence": s, "label": int("file" in s), "idx": i} for i, s in enumerate(chosen)],
            "squad/v1.1": [
                {"id": str(i), "title": "", "context": s, "question": f"What comes after {s.split()[0]}?",
                 "answers": {"text": [s.split()[1]], "answer_start": [len(s.split()[0]) + 1]}}
                for i, s in enumerate(chosen)
            ],
        }  # fmt: skip
        for task, records in rows.items():
            path = folder / task / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (folder / "done").touch()
    return folder

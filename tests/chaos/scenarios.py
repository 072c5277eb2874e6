"""What the chaos script kills: commands that end in a folder, and what must be the same in it at the end."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.material import SCALE, SHAPE, STUDY
from tests.training.compare import records

WATCHED = ["--log-every", "2", "--eval-every", "3", "--save-every", "1", "--keep-last", "2", "--track", "none"]
MODEL = [
    *("--size", "tiny", "--method", "altup", "--k", "2", "--dropout", "0.1", "--inputs-length", "16"),
    *(
        "--batch-size",
        "4",
        "--micro-batch",
        "2",
        "--precision",
        "fp32",
        "--deterministic",
        "--eval-sequences",
        "4",
    ),
    *(word for one in SHAPE for word in ("--set", one)),
]
# Files that say when, how fast or in how many attempts something was done.
NOT_COMPARED = {".lock"}
CLOCKS = {"date", "train_seconds", "seconds"}


@dataclass(frozen=True)
class Scenario:
    """Commands to be run one after the other, which write to `out`. `share` is how often it is chosen."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    ranks: int = 1
    share: int = 1


def make_scenarios(material: Path) -> dict[str, Scenario]:
    """Over prepared text, a model, tasks and YAML files (`material.make_material`)."""
    text = _write_text(material / "chaos-text")
    (material / "chaos-study.yaml").write_text(STUDY + "finetune: [glue]\nfinetune_at: [smoke]\n")
    (material / "chaos-scale.yaml").write_text(
        SCALE
        + "finetune:\n  settings: {steps: 2, batch_size: 4, inputs_length: 16, eval_every: 2, save_every: 1}\n"
        "  columns:\n    glue: {tasks: [glue/cola]}\n"
    )
    data, tasks = str(material / "data"), str(material / "tasks")
    pretrain = ("pretrain", "--data", data, "--out", "out", "--resume", "--steps", "8", *MODEL, *WATCHED)
    finetune = (
        *("finetune", str(material / "t5"), "--task", "cola", "--data", tasks, "--out", "out", "--resume"),
        *(
            "--steps",
            "6",
            "--batch-size",
            "4",
            "--inputs-length",
            "16",
            "--targets-length",
            "4",
            "--deterministic",
        ),
        *WATCHED,
    )
    prepare = (
        *("prepare", text, "--out", "out", "--workers", "1", "--vocab-size", "400", "--shard-tokens", "1500"),
        *("--validation-fraction", "0.1"),
    )
    study = (
        *("study", "run", str(material / "chaos-study.yaml"), "--scale", str(material / "chaos-scale.yaml")),
        *("--data", data, "--tasks", tasks, "--out", "out", "--no-speed", "--set", "deterministic=true"),
    )
    parts = [(*prepare, "--part", f"{number}/3") for number in (2, 1, 3)]
    found = [
        Scenario("pretrain", (pretrain,), share=4),
        Scenario("finetune", (finetune,), share=3),
        Scenario("prepare", (prepare,), share=2),
        Scenario("prepare in parts", (*parts, ("prepare", "--merge", "--out", "out")), share=2),
        Scenario("study run", (study, ("study", "merge", "out/results", "--into", "out/merged")), share=2),
        Scenario("study run, processes", ((*study, "--jobs", "2"),)),
        Scenario("pretrain, two ranks", (pretrain,), ranks=2, share=2),
        Scenario("pretrain, two ranks, fsdp", ((*pretrain, "--parallel", "fsdp"),), ranks=2, share=2),
        Scenario("finetune, two ranks", (finetune,), ranks=2),
    ]
    return {one.name: one for one in found}


def _write_text(folder: Path) -> str:
    """Six files of text."""
    import random

    from tests.evaluation.tiny import made_up_words

    folder.mkdir()
    draw, words = random.Random(0), made_up_words()
    for number in range(6):
        lines = [json.dumps({"text": " ".join(draw.choices(words, k=12))}) for _ in range(120)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return str(folder)


def picture(folder: Path) -> dict[str, Any]:
    """What must be the same: every file's hash; of records what no clock says."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.name not in NOT_COMPARED and not name.startswith("logs/"):
            found[name] = READERS.get(path.name, READERS.get(path.suffix, _hash))(path)
    return found


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _json(path: Path) -> Any:
    return _without_clocks(json.loads(path.read_text()))


def _without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_clocks(one) for name, one in value.items() if name not in CLOCKS}
    return [_without_clocks(one) for one in value] if isinstance(value, list) else value


def _csv(path: Path) -> list[dict[str, Any]]:
    rows = csv.DictReader(io.StringIO(path.read_text()))
    return [{n: v for n, v in row.items() if n != "date"} for row in rows if row.get("metric") not in CLOCKS]


def _png(path: Path) -> str:
    return "whole" if path.read_bytes().endswith(b"IEND\xaeB`\x82") else "torn"


READERS: dict[str, Callable[[Path], Any]] = {
    "README.md": lambda path: "there",
    "curves.png": _png,
    "metrics.jsonl": lambda path: records(path.parent),
    ".json": _json,
    ".csv": _csv,
}

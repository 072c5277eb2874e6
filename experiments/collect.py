"""What `altup study run` stored, as the tables of a question: `python -m experiments.collect RESULTS QUESTION`.

RESULTS has a line a run and measure in `<study>.csv`, and `runs/<key>.json` with each run's config and curves.
They are added to `experiments/QUESTION/runs.csv` (a line a run) and `curves.csv.gz` (losses on the way, thinned);
what stands there of the same run is replaced. Runs that no study shows are those of its sweeps.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FACTORS = {
    "embeddings": "embeddings",
    "vectors": "norms",
    "coefficients": "coefficients",
    "positions": "positions",
}
MEASURES = {
    "diverged": "diverged",
    "loss": "loss",
    "accuracy": "accuracy",
    "run_flops": "flops",
    "relative_speed": "speed",
}
FIRST = ["run", "use", "study", "row", "size", "seed", "text", "method", "k", "steps", "tokens", "lr"]
FIRST += [*FACTORS.values(), "other", *MEASURES.values()]
NAMED = {"steps", "seed", "lr", "lr_factors", "method", "k", "data", "out", "eval_part", "eval_sequences"}
POINTS = 30  # of a run's training loss that are kept
IDENTITY = ("run", "study", "row", "size")
Row = dict[str, str]
Records = dict[str, dict[str, Any]]  # by key


def read_shown(folder: Path, records: Records) -> list[Row]:
    """A row for each model, seed and study that shows it, with its measures; speeds are those of its model."""
    found: dict[tuple[str, ...], Row] = {}
    speeds: dict[tuple[str, ...], str] = {}
    finetuned: list[tuple[tuple[str, ...], Row]] = []
    for path in sorted(folder.glob("*.csv")):
        for line in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            model, key = (line["study"], line["label"], line["size"]), line["run"]
            measure = {MEASURES.get(line["metric"], line["metric"]): line["value"]}
            if not line["seed"]:
                speeds[model] = measure.get("speed", speeds.get(model, ""))
            elif key not in records:
                raise SystemExit(f"{path} names the run {key}, of which {folder}/runs has no record")
            elif records[key]["kind"] == "finetune":
                finetuned.append(((*model, line["seed"]), measure))
            else:
                row = found.setdefault((*model, line["seed"], key), {"run": key, "use": "report"})
                row |= dict(zip(("study", "row", "size"), model, strict=True)) | {"seed": line["seed"]} | measure
    for place, row in found.items():
        row.setdefault("speed", speeds.get(place[:3], ""))
        for model, measure in finetuned:
            row |= measure if model == place[:4] else {}
    return list(found.values())


def describe(record: dict[str, Any]) -> Row:
    """What a run's record says of its settings."""
    config = record["config"]
    factors = {FACTORS.get(name, name): f"{value:g}" for name, value in config.get("lr_factors", {}).items()}
    tokens = int(record["step"]) * config.get("batch_size", 0) * config.get("inputs_length", 0)
    others = {name: value for name, value in config.items() if name not in NAMED}
    others |= {f"start.{name}": value for name, value in record.get("start", {}).items()}
    return {
        **{name: str(config.get(name, "")) for name in ("method", "k", "lr", "seed")},
        **factors,
        "text": str(record.get("data", "")),
        "steps": str(record["step"]),
        "tokens": str(tokens or ""),
        "other": "; ".join(f"{name}={json.dumps(value)}" for name, value in sorted(others.items())),
        "diverged": str(record["step"]) if "diverged" in record else "",
        "hardware": record["hardware"],
        "date": record["date"][:10],
    }


def read_rows(folder: Path, records: Records) -> list[Row]:
    shown = read_shown(folder, records)
    trained = {key for key, record in records.items() if record["kind"] == "pretrain"}
    sweeps = sorted(trained - {row["run"] for row in shown})
    rest = [{"run": key, "use": "tuning", "study": "", "row": records[key]["title"], "size": ""} for key in sweeps]
    for row in rest:
        measures = records[row["run"]]["measures"]
        row |= {column: str(measures[name]) for name, column in MEASURES.items() if name in measures}
    return [describe(records[row["run"]]) | row for row in [*shown, *rest]]


def curve(record: dict[str, Any]) -> Iterable[list[Any]]:
    curves = record.get("curves", {})
    for step, loss, accuracy in curves.get("held_out", ()):
        yield [record["key"], "held_out", step, f"{loss:.4f}", f"{accuracy:.2f}"]
    points = curves.get("train", ())
    every = max(1, len(points) // POINTS)
    for i, (step, loss) in enumerate(points):
        if i % every == 0 or i == len(points) - 1:
            yield [record["key"], "train", step, f"{loss:.3f}", ""]


def add(folder: Path, question: Path) -> int:
    """How many runs were added or replaced."""
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / "runs").glob("*.json"))]
    records = {record["key"]: record for record in kept}
    rows = read_rows(folder, records)
    table, curves = question / "runs.csv", question / "curves.csv.gz"
    old = list(csv.DictReader(table.open(encoding="utf-8", newline=""))) if table.exists() else []
    by_identity = {tuple(row.get(name, "") for name in IDENTITY): row for row in [*old, *rows]}
    used = dict.fromkeys(name for row in by_identity.values() for name, value in row.items() if value)
    columns = [name for name in FIRST if name in used] + [name for name in used if name not in FIRST]
    question.mkdir(exist_ok=True)
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(by_identity.values(), key=lambda row: (row["use"] != "report", row["study"])))
    lines = gzip.decompress(curves.read_bytes()).decode().splitlines() if curves.exists() else []
    lines = [line for line in csv.reader(lines) if line[0] not in {"run", *records}]
    text = io.StringIO()
    writing = csv.writer(text, lineterminator="\n")
    writing.writerow(["run", "split", "step", "loss", "accuracy"])
    writing.writerows([*lines, *(line for record in records.values() for line in curve(record))])
    curves.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    return len({row["run"] for row in rows})


if __name__ == "__main__":
    results, name = sys.argv[1:]
    print(f"{add(Path(results), HERE / name)} runs in experiments/{name}")

"""The fuzzer's cases, continued: results of studies and benchmarks, and jobs, spoilt."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.chaos import spoil
from tests.chaos.cases import COMMANDS, OUT, fill
from tests.chaos.spoilt_inputs import Made, take_command


def bad_results(draw: random.Random, box: Path, material: Path) -> Made:
    name, arguments = take_command(draw, box, material, ("study report", "study table", "study merge"))
    results = box / "results"
    table = results / "study.csv"
    kind = draw.choice(("cell", "cell", "table", "record", "scale"))
    if kind == "cell":
        lines = [line.split(",") for line in table.read_text().splitlines()]
        header, row = lines[0], draw.randrange(1, len(lines))
        column = draw.choice(("value", "metric", "study", "run"))
        value = draw.choice(("../../owned", "/tmp/owned", "", "x" * 300, "a/b", "\x00", "💥 .", "..", ".x"))
        lines[row][header.index(column)] = value
        table.write_text("\n".join(",".join(line) for line in lines))
        return arguments, f"{name}: {column}={value[:30]!r}", True
    if kind == "table":
        change = draw.choice((spoil.noise, spoil.pipe_instead, spoil.delete, spoil.empty, spoil.folder_instead))
        return arguments, f"{name}: {change(draw, table)}", change is not spoil.folder_instead
    if kind == "record":
        path = draw.choice(sorted((results / "runs").glob("*.json")))
        change = draw.choice((spoil.truncate, spoil.noise, spoil.empty, spoil.other_json, spoil.pipe_instead))
        return arguments, f"{name}: {change(draw, path)}", True
    change = draw.choice((spoil.noise, spoil.empty, spoil.other_json, spoil.pipe_instead))
    return arguments, f"{name}: {change(draw, next((results / 'scales').glob('*.json')))}", True


def odd_results(draw: random.Random, box: Path, material: Path) -> Made:
    """A value of a record or a scale is of another kind, which may matter or not."""
    name, arguments = take_command(draw, box, material, ("study report", "study table", "study merge"))
    path = draw.choice(sorted((box / "results").glob("*/*.json")))
    return arguments, f"{name}: {spoil.wrong_value(draw, path)}", False


def bad_rows(draw: random.Random, box: Path, material: Path) -> Made:
    arguments = COMMANDS["bench show"]
    fill(box, material, arguments)
    path = box / "bench.csv"
    if draw.random() < 0.5:
        return (
            arguments,
            draw.choice((spoil.noise, spoil.empty, spoil.delete, *spoil.UNREADABLE[3:]))(draw, path),
            True,
        )
    lines = path.read_text().splitlines()
    cells = lines[1].split(",")
    at = draw.choice((2, 5, 6, 7, 8))  # kind, numbers, samples
    cells[at] = draw.choice(("x", "1e", "--", "\x00"))
    path.write_text("\n".join([lines[0], ",".join(cells), *lines[2:]]))
    return arguments, f"bench.csv: cell {at} is {cells[at]!r}", True


def bad_job(draw: random.Random, box: Path, material: Path) -> Made:
    """What `study run` gives to its own processes."""
    job = {"kind": "pretrain", "key": "k", "title": "t", "settings": {}, "needs": []}
    kind = draw.choice(("file", "value", "missing"))
    path = box / "job.json"
    arguments = ["study", "work", "job.json", "--out", OUT]
    path.write_text(json.dumps(job))
    if kind == "file":
        about = draw.choice((*spoil.UNREADABLE, spoil.delete, spoil.other_json))(draw, path)
    elif kind == "value":
        about = spoil.set_values(path, **{draw.choice(sorted(job)): draw.choice([3, None, [], {}, "x"])})
    else:
        del job[draw.choice(sorted(job))]
        path.write_text(json.dumps(job))
        about = f"job.json has {sorted(job)}"
    return arguments, about, True

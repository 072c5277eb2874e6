"""Runs side by side: what their folders and records say, what differs, and what a reader must know."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from altup.core.errors import UserError
from altup.studies.comparison import ACCURACY, LOSS, TRAINING_LOSS, RunComparison, distinct_names, read_run
from altup.studies.jobs import identify_text
from altup.studies.results import write_record
from tests.studies.samples import record

HELD_OUT = {"validation": {"data": "a" * 64, "examples": 9}}


def make_run(folder: Path, losses: list[float], finished: bool = True, **config: Any) -> Path:
    """A run that logged every step for two seconds, and was evaluated at every other one."""
    folder.mkdir(parents=True)
    settings = {"steps": len(losses), "seed": 0, "model": "t5", "method": "dense", "batches": HELD_OUT, **config}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    lines: list[dict[str, Any]] = []
    for step, loss in enumerate(losses, start=1):
        lines.append({"step": step, "split": "train", "loss": loss + 1, "seconds": 2.0, "seq_per_s": 10.0 * step})
        if step % 2 == 0:
            lines.append({"step": step, "split": "validation", "loss": loss, "accuracy": 1 / loss})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (folder / "final").mkdir()
    return folder


def test_a_run_is_what_its_records_say(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", [5.0, 4.0, 3.0, 2.0]))
    assert run.curves[LOSS] == [(2, 4.0), (4, 2.0)]
    assert run.curves[TRAINING_LOSS] == [(1, 6.0), (2, 5.0), (3, 4.0), (4, 3.0)]
    assert run.finals[ACCURACY] == 50.0
    assert (run.step, run.finished, run.seconds) == (4, True, 8.0)
    assert run.speed == 25.0  # the median
    assert run.in_time(LOSS) == [(4.0, 4.0), (8.0, 2.0)]


def test_differences_are_to_the_first_and_settings_that_differ_are_told(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / "a", [5.0, 4.0]),
        make_run(tmp_path / "b", [5.0, 3.75], method="altup", k=2, model_overrides={"d_ff": 8}),
        make_run(tmp_path / "c", [5.0, 4.5, 4.4], finished=False, steps=9, seed=1),
    ]
    found = RunComparison.of(paths)
    rows = {row[0]: dict(zip(found.figures.lines[0], row, strict=True)) for row in found.figures.lines[1:]}
    assert [rows[name][LOSS] for name in "abc"] == ["4.0000", "3.7500 (−0.2500)", "4.5000 (+0.5000)"]
    assert [rows[name]["step"] for name in "abc"] == ["2", "2", "3 of 9"]
    assert found.config_differences == {
        "steps": ["2", "2", "9"],
        "seed": ["0", "0", "1"],
        "method": ["dense", "altup", "dense"],
        "k": ["–", "2", "–"],
        "model_overrides.d_ff": ["–", "8", "–"],
    }
    assert [remark.split(";")[0] for remark in found.remarks()] == ["The runs have different numbers of steps"]


def test_seeds_tell_how_large_chance_is(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / f"s{seed}", [5.0, 4.0 + 0.1 * seed], seed=seed) for seed in (0, 1)]
    (remark,) = RunComparison.of([*paths, make_run(tmp_path / "b", [5.0, 3.9], method="altup")]).remarks()
    assert remark.startswith("s0, s1 differ in the seed alone, and lie 0.1000 apart in held-out loss")


def test_other_held_out_examples_are_told(tmp_path: Path) -> None:
    other = {"validation": {"data": "b" * 64, "examples": 9}}
    paths = [make_run(tmp_path / "a", [5.0, 4.0]), make_run(tmp_path / "b", [5.0, 4.0], batches=other)]
    found = RunComparison.of(paths)
    assert found.remarks() == [
        "The held-out examples or the objective differ: losses and accuracies do not compare."
    ]
    assert found.config_differences == {"batches.validation.data": ["aaaaaaaaaaaa…", "bbbbbbbbbbbb…"]}
    assert found.figures.lines[1:][1][2] == "4.0000"  # no difference


def test_settings_that_decide_nothing_are_one_line(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / "a", [5.0, 4.0], log_every=5, trackers=["wandb"], keep_last=2, data="here"),
        make_run(tmp_path / "b", [5.0, 4.0], log_every=6, trackers=[], keep_last=2, data="there"),
    ]
    found = RunComparison.of(paths)
    assert found.config_differences == {"data": ["here", "there"]}
    assert found.describe_free_differences().endswith(": log_every, trackers.")
    alike = [make_run(tmp_path / n, [5.0, 4.0]) for n in ("c", "d")]
    assert RunComparison.of(alike).describe_free_differences() == ""


def make_record(folder: Path, key: str, data: str | None, **config: Any) -> Path:
    """A pretraining record of a study, which leaves out settings that have their usual value."""
    kept = record(
        key, title=f"record {key}", config={"steps": 2, "model": "t5", "method": "dense", **config}, step=2
    )
    kept["measures"] = {"loss": 3.5, "accuracy": 30.0}
    write_record(folder, kept | ({} if data is None else {"data": data}))
    return folder / "runs" / f"{key}.json"


def test_a_record_and_a_run_compare_where_the_text_is_known_to_be_the_same(tmp_path: Path) -> None:
    batches = {"data": "c" * 64, "tokenizer": "d" * 64, **HELD_OUT}
    run = make_run(tmp_path / "a", [5.0, 4.0], batches=batches, z_loss=1e-4, log_every=3, eval_part="all")
    text = identify_text("c" * 64, "a" * 64, "d" * 64)
    unknown = "It is not known whether the held-out examples of a are those of "

    same = RunComparison.of([make_record(tmp_path, "same", text), run])
    assert same.figures.lines[1:][1][2] == "4.0000 (+0.5000)"
    assert same.remarks() == []
    assert same.config_differences == {}  # what the record leaves out is what is usual

    for key, data in (("other", "12345678"), ("untold", None)):
        found = RunComparison.of([make_record(tmp_path, key, data), run])
        assert found.figures.lines[1:][1][2] == "4.0000"
        assert [remark.startswith(f"{unknown}record {key};") for remark in found.remarks()] == [True]

    decoder = RunComparison.of([make_record(tmp_path, "decoder", text, model="decoder"), run])
    assert decoder.figures.lines[1:][1][2] == "4.0000"
    assert decoder.remarks()[0].startswith("The held-out examples or the objective differ")
    assert decoder.config_differences == {"model": ["decoder", "t5"]}


def test_records_of_studies_stand_beside_folders(tmp_path: Path) -> None:
    kept = record("k1", title="small dense seed 0", config={"method": "dense"}, step=4)
    kept["measures"] = {"loss": 3.5, "accuracy": 30.0, "train_seconds": 12.0, "flops_train": 1e9}
    kept["curves"] = {"held_out": [[2, 4.5, 20.0], [4, 3.5, 30.0]], "train": [[4, 3.9]]}
    write_record(tmp_path, kept)
    found = RunComparison.of([tmp_path / "runs" / "k1.json", make_run(tmp_path / "a", [5.0, 4.0, 3.9, 3.0])])
    assert found.figures.lines[1:][0][:4] == ["small dense seed 0", "4", "3.5000", "30.00"]
    assert found.figures.lines[1:][1][2] == "3.0000"  # on which examples, the record does not say
    assert "glue" not in found.figures.lines[0]
    tuned = record("k2", kind="finetune", column="glue", measures={"glue": 43.0}, tasks={}, missing=[])
    write_record(tmp_path, tuned)
    both = RunComparison.of([tmp_path / "runs" / "k1.json", tmp_path / "runs" / "k2.json"])
    assert "GLUE" in both.figures.lines[0]
    kept["curves"]["held_out"] = [["x", None, {}]]
    write_record(tmp_path, kept)
    with pytest.raises(UserError, match=r"k1\.json is not a whole record"):
        read_run(tmp_path / "runs" / "k1.json")


def test_names_are_short_and_told_apart(tmp_path: Path) -> None:
    def names(*given: str) -> list[str]:
        return distinct_names(given)

    assert names("a", "b") == ["a", "b"]
    assert names("a", "a") == ["1 a", "2 a"]
    assert names("small altup K=2 2000 steps seed 0", "small dense 2000 steps seed 0") == ["altup K=2", "dense"]
    long = names("x" * 40 + "a", "x" * 40 + "b")
    assert len(set(long)) == 2
    assert max(map(len, long)) <= 24


def test_curves_are_drawn_on_one_scale(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / "a", [5.0, 5.0, 5.0, 3.0]), make_run(tmp_path / "b", [5.0, 4.0])]
    found = RunComparison.of(paths)
    sparks = found.sparks()
    assert sparks["a"].strip()[0] == "█"
    assert sparks["a"][-1] == "▁"
    assert sparks["b"].strip() == "▅"  # half-way, and over after two of four steps
    titles = [figure.title for figure in found.charts()]
    assert titles == [LOSS, ACCURACY, TRAINING_LOSS]
    more = RunComparison.of([make_run(tmp_path / n, [5.0, 4.0, 3.0, 2.0]) for n in ("c", "d")]).charts()
    assert more[-1].title == "held-out loss against time"


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda run: (run / "config.yaml").unlink(), "it has no config.yaml"),
        (lambda run: (run / "metrics.jsonl").unlink(), "it has no metrics.jsonl"),
        (lambda run: (run / "metrics.jsonl").write_text("no records\n[1]\n"), "has no records yet"),
        (lambda run: (run / "config.yaml").write_text("- a\n- b\n"), "expected `name: value` lines"),
        (lambda run: (run / "config.yaml").write_bytes(b"\xff\xfe\x00"), "not valid YAML"),
    ],
)
def test_what_is_no_run_is_a_sentence(tmp_path: Path, break_it: Any, words: str) -> None:
    run = make_run(tmp_path / "a", [5.0, 4.0])
    break_it(run)
    with pytest.raises(UserError, match=re.escape(words)):
        read_run(run)


def test_numbers_that_are_none_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", [5.0, 4.0])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "split": "validation", "loss": "<b>", "accuracy": true}\n{"step": 3, "spl')
    found = read_run(run)
    assert found.curves[LOSS] == [(2, 4.0)]
    assert found.step == 3

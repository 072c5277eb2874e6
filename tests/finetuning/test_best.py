"""Which checkpoints the loop keeps when several scores each have a best one."""

from __future__ import annotations

from pathlib import Path

from altup.training.run import read_state
from tests.training.tiny import tiny_loop

# By step: the best mean is at 6, the best of task "a" at 2, of "b" at 8; "c" is never a number but once.
SCORES = {
    2: {"score": 10.0, "a": 90.0, "b": 1.0, "c": float("nan")},
    4: {"score": 11.0, "a": 80.0, "b": 2.0, "c": float("nan")},
    6: {"score": 30.0, "a": 90.0, "b": 3.0, "c": 0.0},
    8: {"score": 20.0, "a": 10.0, "b": 9.0, "c": float("nan")},
    10: {"score": 0.0, "a": 0.0, "b": 0.0, "c": float("nan")},
    12: {"score": 0.0, "a": 0.0, "b": 0.0, "c": float("nan")},
}


def kept(out: Path, steps: int, resume: bool = False, **settings: object) -> set[int]:
    loop = tiny_loop(out, steps=steps, eval_every=2, save_every=2, keep_last=1, **settings)
    loop.make_evaluate = lambda engine: lambda model, step: dict(SCORES[step])
    loop.score = lambda values: values["score"]
    loop.also_best = ["a", "b", "c"]
    loop.run(resume)
    return {int(path.name.removeprefix("step-")) for path in (out / "checkpoints").iterdir()}


def test_the_best_of_every_score_is_kept(tmp_path: Path) -> None:
    assert kept(tmp_path / "run", 12, decay_fraction=0.0) == {2, 6, 8, 12}
    state = read_state(tmp_path / "run" / "checkpoints" / "step-12")
    assert state["best"] == {"step": 6, "score": 30.0}
    assert {name: best["step"] for name, best in state["best_of"].items()} == {"a": 2, "b": 8, "c": 6}


def test_bests_are_remembered_when_a_run_goes_on(tmp_path: Path) -> None:
    kept(tmp_path / "run", 4, decay_fraction=0.0)
    assert kept(tmp_path / "run", 12, resume=True, decay_fraction=0.0) == {2, 6, 8, 12}


def test_nothing_but_the_last_is_kept_if_so_told(tmp_path: Path) -> None:
    assert kept(tmp_path / "run", 12, keep_best=False, decay_fraction=0.0) == {12}

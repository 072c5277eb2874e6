"""An evaluation that fails costs its scores and nothing else; a checkpoint lies before the first."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from altup.core.runs import list_checkpoints
from altup.training import checkpoints
from altup.training.metrics import EvaluationError, all_or_none
from altup.training.parallel import ProcessGroup
from tests.processes import fork_two, server
from tests.training.compare import assert_same_bits, assert_same_run, records, weights
from tests.training.tiny import run, tiny_loop


def failing(loop: Any, steps: set[int], error: BaseException) -> None:
    """The loop's evaluation raises `error` at some steps, after it has changed the model's mode."""
    make = loop.make_evaluate

    def make_failing(engine: Any) -> Any:
        evaluate = make(engine)

        def fail(model: torch.nn.Module, step: int) -> dict[str, float]:
            if step in steps:
                model.eval()
                raise error
            return evaluate(model, step)

        return fail

    loop.make_evaluate = make_failing


def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """With dropout, which a model that was left in another mode would not have."""
    run(tmp_path / "whole")
    loop = tiny_loop(tmp_path / "failing")
    failing(loop, {4}, ModuleNotFoundError("No module named 'sklearn'"))
    outcome = loop.run()
    assert outcome.finished
    assert_same_bits(weights(tmp_path / "whole"), weights(tmp_path / "failing"))
    expected = [
        {"step": 4, "split": "failed evaluation", "error": "ModuleNotFoundError: No module named 'sklearn'"}
        if (record["step"], record["split"]) == (4, "validation")
        else record
        for record in records(tmp_path / "whole")
    ]
    assert records(tmp_path / "failing") == expected


def test_a_crash_in_the_first_evaluation_loses_no_step(tmp_path: Path) -> None:
    whole, cut = tiny_loop(tmp_path / "whole"), tiny_loop(tmp_path / "cut")
    whole.saves_first = cut.saves_first = True
    whole.run()
    failing(cut, {4}, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    (saved,) = list_checkpoints(tmp_path / "cut" / "checkpoints")
    assert saved.name == "step-4"
    assert checkpoints.read_state(saved).evaluation_due
    again = tiny_loop(tmp_path / "cut")
    again.saves_first = True
    again.run(resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 12)


def test_an_evaluation_that_is_repeated_is_recorded_once(tmp_path: Path) -> None:
    """The kill came behind its record and before the next checkpoint."""
    whole, cut = tiny_loop(tmp_path / "whole"), tiny_loop(tmp_path / "cut")
    whole.saves_first = cut.saves_first = True
    whole.run()

    class Kill:
        def record(self, values: dict[str, Any]) -> None:
            if values["split"] == "validation":
                raise KeyboardInterrupt

        def close(self) -> None: ...

    cut.sinks = [Kill()]
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    assert records(tmp_path / "cut")[-1]["split"] == "validation"
    again = tiny_loop(tmp_path / "cut")
    again.run(resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 12)


def fail_on_one(rank: int, meeting: str, results: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=600)
    )
    group = ProcessGroup(rank, 2, torch.device("cpu"))
    told = []
    for broken in (True, False):
        try:
            with all_or_none(group):
                if broken and rank == 1:
                    raise ZeroDivisionError("division by zero")
            told.append("whole")
        except EvaluationError as error:
            told.append(str(error))
    results.put((rank, told))


def test_ranks_fail_together(tmp_path: Path) -> None:
    results = server.SimpleQueue()
    fork_two(fail_on_one, f"file://{tmp_path}/meeting", results)
    assert dict(results.get() for _ in range(2)) == {
        0: ["another process could not go on; its message says why", "whole"],
        1: ["ZeroDivisionError: division by zero", "whole"],
    }

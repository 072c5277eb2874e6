"""A tiny run in which something takes long: `hanging.py '{"out": …, "what": "data", "settings": {…}}'`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from altup.training.loop import Loop
from altup.training.parallel import join_process_group, leave
from tests.training.tiny import MadeUp, build, tiny_loop

COMPILER = "/lib/torch/_dynamo/convert_frame.py"
AT = 8  # the step (from 0) that hangs


class StuckDisk(MadeUp):
    def examples(self, step: int, start: int, stop: int) -> dict[str, np.ndarray]:
        if step == AT:
            time.sleep(3600)
        return super().examples(step, start, stop)


def slow_evaluation(loop: Loop, seconds: float) -> None:
    make: Any = loop.make_evaluate

    def make_slow(engine: Any) -> Any:
        evaluate = make(engine)

        def slow(model: torch.nn.Module, step: int) -> dict[str, float]:
            time.sleep(seconds if step == 4 else 0)
            return evaluate(model, step)

        return slow

    loop.make_evaluate = make_slow


def slow_forward(loop: Loop, seconds: float, file: str = __file__, rank: int = 0) -> None:
    """The model sleeps in a function of `file`, at step `AT` on one rank."""
    space: dict[str, Any] = {"sleep": time.sleep}
    exec(compile("def work(seconds):\n    sleep(seconds)\n", file, "exec"), space)

    def make(checkpoint: Path | None) -> torch.nn.Module:
        model, passes = build(checkpoint), iter(range(1000))

        def hook(module: torch.nn.Module, _: Any) -> None:
            if module.training and next(passes) == AT and int(os.environ.get("RANK", 0)) == rank:
                space["work"](seconds)

        model.register_forward_pre_hook(hook)
        return model

    loop.build_model = make


def main(case: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with join_process_group() as group:
        loop = tiny_loop(Path(case["out"]), group, **case["settings"])
        seconds = case.get("seconds", 3600)
        if case["what"] == "data":
            loop.batches = StuckDisk()
        elif case["what"] == "evaluation":
            slow_evaluation(loop, seconds)
        elif case["what"] == "compiling":
            slow_forward(loop, seconds, COMPILER)
        elif case["what"] == "rank 1":
            slow_forward(loop, seconds, rank=1)
        elif case["what"] == "rank 1 compiling":
            slow_forward(loop, seconds, COMPILER, rank=1)
        loop.run(resume=True)
    leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

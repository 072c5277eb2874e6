"""Forward + backward of two source trees in turns: what a change of the stack costs or saves.

    python benchmarks/stack_turns.py OLD/src NEW/src --out stack_turns.csv

T5-base (64 × 512 inputs, 114 targets; bf16 and fp8) and the decoder `large` (8 × 2,048), each dense, AltUp and
Recycled, in bf16 through `altup.accelerate`. Every tree × group is a process; all build at once, then trees take
turns: in each turn every model makes STEPS steps in either tree, the first tree first in even turns. The result is
the median of the turns' ratios (second tree to first) with a 95 % interval of their mean. Without a GPU all runs
at toy size, to see that it works.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEPS = 8  # of a model in a turn, after one that is not timed
METHODS = ("dense", "altup", "recycled")
GROUPS = {"t5 bf16": ("t5", False), "t5 fp8": ("t5", True), "decoder bf16": ("decoder", False)}
# Student's t for 95 % by the number of turns; beyond it 2.
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 12: 2.20, 15: 2.14}


# A process: one tree, one group.


def build(group: str, method: str) -> Any:
    """A step of this tree: forward and backward."""
    import torch

    import altup
    from altup.nn.linear import use_fp8

    on_gpu = torch.cuda.is_available()
    device, (family, fp8) = torch.device("cuda" if on_gpu else "cpu"), GROUPS[group]
    config, model_class = {
        "t5": (altup.AltUpT5Config, altup.AltUpT5ForConditionalGeneration),
        "decoder": (altup.AltUpDecoderConfig, altup.AltUpDecoderForCausalLM),
    }[family]
    size = {"t5": "base", "decoder": "large"}[family] if on_gpu else "tiny"
    rows, length = ((64, 512) if family == "t5" else (8, 2048)) if on_gpu else (2, 32)
    k = None if method == "dense" else 2
    torch.manual_seed(0)
    model = model_class(config.from_preset(size, method, k=k, vocab_size=32_128 if on_gpu else 256))
    model = model.to(device, torch.bfloat16).train()
    if fp8 and on_gpu:
        use_fp8(model)
    altup.accelerate(model)
    ids = torch.randint(3, 256, (rows, length), device=device)
    labels = ids[:, : 114 if on_gpu else 8].contiguous() if family == "t5" else ids

    def step() -> None:
        model(input_ids=ids, labels=labels).loss.backward()
        model.zero_grad()

    for _ in range(5 if on_gpu else 1):  # compiles, and is recorded
        step()
    return step


def serve(group: str) -> None:
    """`build METHOD` and `time METHOD` on lines of stdin, answers as JSON."""
    import torch

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    steps: dict[str, Any] = {}
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for line in sys.stdin:
        word, method = line.split()
        answer: dict[str, Any] = {}
        try:
            if word == "build":
                steps[method] = build(group, method)
            else:
                steps[method]()
                wait()
                begun = time.perf_counter()
                for _ in range(STEPS):
                    steps[method]()
                wait()
                answer["ms"] = (time.perf_counter() - begun) / STEPS * 1e3
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        answers.write(json.dumps(answer) + "\n")


# The parent.


class Process:
    def __init__(self, tree: str, group: str, log: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": tree, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        with log.open("w") as file:
            self._process: Any = subprocess.Popen(
                [sys.executable, __file__, "--serve", group],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=environment, text=True,
            )  # fmt: skip

    def ask(self, line: str) -> None:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "its process has ended; see the log"}

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, and the ends of a 95 % interval of the mean."""
    n = len(values)
    if n < 2:
        return values[0], math.nan, math.nan
    student = STUDENT.get(n, STUDENT[max(m for m in STUDENT if m <= n)])
    half = student * statistics.stdev(values) / math.sqrt(n)
    mean = statistics.fmean(values)
    return statistics.median(values), mean - half, mean + half


def report(times: dict[tuple[str, str], list[tuple[float, float]]], out: Path | None) -> None:
    rows = []
    for (group, method), pairs in times.items():
        if pairs:
            median, low, high = spread([b / a for a, b in pairs])
            old, new = (statistics.median(side) for side in zip(*pairs, strict=True))
            rows.append([group, method, f"{old:.2f}", f"{new:.2f}", f"{median:.4f}", f"{low:.4f}", f"{high:.4f}"])
            rows[-1].append(str(len(pairs)))
    head = ["group", "method", "old ms", "new ms", "new/old", "low", "high", "turns"]
    for row in (head, *rows):
        print("".join(cell.rjust(14) for cell in row))
    if out is not None:
        with out.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", help="two folders for PYTHONPATH: the old tree's src, the new one's")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--out", type=Path, help="CSV of the results; logs of the processes lie beside it")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return
    if len(given.trees) != 2:
        parser.error("give two trees")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    logs = given.out.parent if given.out else Path.cwd()
    names = [(tree, group) for group in given.groups for tree in (0, 1)]
    workers = {
        (tree, group): Process(
            given.trees[tree], group, logs / f"stack_turns_{tree}_{group.replace(' ', '_')}.log"
        )
        for tree, group in names
    }
    times: dict[tuple[str, str], list[tuple[float, float]]] = {(g, m): [] for g in given.groups for m in METHODS}
    begun = time.monotonic()
    try:
        for method in METHODS:  # of all processes at once
            for worker in workers.values():
                worker.ask(f"build {method}")
            for (tree, group), worker in workers.items():
                if error := worker.answer().get("error"):
                    print(f"{group} {method}, tree {tree}: {error}", flush=True)
                    times.pop((group, method), None)
        print(f"built in {time.monotonic() - begun:.0f} s", flush=True)
        for turn in range(given.turns):
            for (group, method), pairs in times.items():
                taken: dict[int, float] = {}
                for tree in (0, 1) if turn % 2 == 0 else (1, 0):
                    workers[tree, group].ask(f"time {method}")
                    taken[tree] = workers[tree, group].answer().get("ms", math.nan)
                if not any(map(math.isnan, taken.values())):
                    pairs.append((taken[0], taken[1]))
    except KeyboardInterrupt:
        print("stopped; what was timed is kept")
    finally:
        for worker in workers.values():
            with contextlib.suppress(OSError):
                worker.end()
    report(times, given.out)


if __name__ == "__main__":
    main()

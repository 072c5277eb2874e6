"""Forward + backward of T5 1.1 in turns: our models and Hugging Face's compiled one.

    python benchmarks/step_turns.py --warm --build-s 180                   # fills the compiler's caches
    python benchmarks/step_turns.py --go FILE --out step_turns.csv         # builds beside other work, times on GO
    python benchmarks/step_turns.py --groups large xl --out step_turns.csv # builds, then times

`altup bench step` builds all models in one process, one after the other, and times them at the end. Here each
group of them (step_variants.py) is a process of its own, so that groups are built at the same time, and what
matters is timed first:

1. Every process builds its important variants. (With `--go` the others too, until FILE exists.)
2. Rounds begin. In each, every variant that is built has one burst: a pause, then four steps. A GPU that has
   rested is faster for a moment, so `first`, a burst's first step, is a row beside `both`, all of them.
3. After two rounds the other variants are built, for a third of the time that is left, and so on.

After every round the file of rows is written anew: whatever ends the run, what was timed is kept. Without a GPU
all runs at toy size, to see that it works.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from step_variants import BURST, COMPARED, GROUPS, PAUSE, SETUP, USUAL, Builder, Variant, sizes_of
from turns import Gate, in_words, open_sheet, ratio, say

from altup.bench.rows import BenchRow
from altup.bench.runner import TimeIsUp, fast_math
from altup.bench.timing import Spread

FIRST = 2  # rounds before anything else is built
STUBBORN = 5.0  # seconds until a process that does not end its building is left out of a round
HANGS = 30.0  # seconds for a burst


def serve(name: str) -> None:
    """Answer lines `build NAME` and `burst NAME` with one line of JSON each. SIGUSR1 ends a building."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    builds = False

    def stop(*_: object) -> None:
        if builds:
            raise TimeIsUp

    signal.signal(signal.SIGUSR1, stop)
    torch.set_num_threads(1)
    variants = {variant.name: variant for variant in GROUPS[name].variants}
    builder: Builder | None = None
    with fast_math():
        for line in sys.stdin:
            word, wanted = line.strip().split(" ", 1)
            answer: dict[str, Any] = {}
            try:
                try:
                    builds = word == "build"
                    builder = builder or Builder(GROUPS[name].size)
                    answer = getattr(builder, word)(variants[wanted])
                finally:
                    builds = False
            except TimeIsUp:
                answer = {"stopped": True}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": in_words(error)}
                del error
                if builder is not None:
                    builder.free()
            answers.write(json.dumps({word: wanted, **answer}) + "\n")


class Process:
    """A group's process, seen from here."""

    def __init__(self, group: str, log: Path) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", group],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout, self._rest = self._process.stdin, self._process.stdout, b""
        os.set_blocking(self._stdout.fileno(), False)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: str) -> None:
        try:
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            pass

    def answers(self) -> list[dict[str, Any]]:
        *lines, self._rest = (self._rest + (self._stdout.read() or b"")).split(b"\n")
        return [json.loads(line) for line in lines]

    def send(self, number: signal.Signals) -> None:
        if self.is_alive:
            self._process.send_signal(number)

    def end(self) -> None:
        self.send(signal.SIGCONT)
        self.send(signal.SIGKILL)
        self._process.wait()
        self._log.close()


# The parent: who builds, and whose turn it is.


class Worker:
    """What a group has built, what it has yet to build, and what it does now."""

    def __init__(self, name: str, process: Any) -> None:
        self.name, self.process = name, process
        self.size = GROUPS[name].size
        self.todo = list(GROUPS[name].variants)
        self.ready: list[str] = []
        self.busy: Variant | None = None  # with building
        self.burst: list[float] | None = None  # that was asked for last
        self._failed: set[str] = set()

    @property
    def misses_important(self) -> bool:
        left = [*self.todo, *([self.busy] if self.busy else [])]
        return self.process.is_alive and any(variant.important for variant in left)

    @property
    def has_more(self) -> bool:
        return self.process.is_alive and bool(self.todo or self.busy)

    def build_next(self) -> None:
        if self.process.is_alive and self.todo and self.busy is None:
            self.busy = self.todo.pop(0)
            self.process.ask(f"build {self.busy.name}")

    def time_burst(self, name: str) -> list[float]:
        self.burst = None
        self.process.ask(f"burst {name}")
        until = time.monotonic() + HANGS
        while self.burst is None:
            self.listen()
            time.sleep(0.002)
            if time.monotonic() > until:
                say(f"{self.name}: FAILED {name}: no answer in {HANGS:.0f} s")
                self.process.end()
        return self.burst

    def listen(self) -> None:
        for answer in self.process.answers():
            if "burst" in answer:
                self.burst = answer.get("ms", [])
                if "error" in answer:
                    say(f"{self.name}: FAILED {answer['burst']}: {answer['error']}")
                    self.ready.remove(answer["burst"])
                continue
            variant, self.busy = self.busy, None
            assert variant is not None
            if "s" in answer:
                loss = "" if answer["loss"] is None else f", loss {answer['loss']:.5f}"
                say(f"{self.name}: {variant.name} built in {answer['s']:.1f} s, {answer['GiB']:.1f} GiB{loss}")
                self.ready.append(variant.name)
            elif "stopped" in answer:
                say(f"{self.name}: {variant.name} was not built in time")
                self.todo.insert(0, variant)
            else:
                say(f"{self.name}: FAILED {variant.name}: {answer['error']}")
                if "out of memory" in answer["error"].lower() and variant.name not in self._failed:
                    self._failed.add(variant.name)  # others give back what only their building needs
                    self.todo.append(variant)
        if not self.process.is_alive:
            if self.ready or self.todo or self.busy:
                say(f"{self.name}: FAILED: its process has ended")
            self.ready, self.todo, self.busy, self.burst = [], [], None, self.burst or []


class Turns:
    """`samples[size, variant][round]` are the milliseconds of a burst."""

    def __init__(self, workers: list[Worker], gate: Gate, rounds: int, keep: Callable[[Turns], None]) -> None:
        self.workers, self.gate, self.rounds, self.keep = workers, gate, rounds, keep
        self.samples: dict[tuple[str, str], dict[int, list[float]]] = {}
        self.round_s = 0.0

    def build(self, everything: bool = False) -> None:
        """What is important; where GO is waited for, or `everything` is wanted, the others too."""
        while self.gate.may_build:
            is_ready = not any(worker.misses_important for worker in self.workers)
            if is_ready and not everything:
                if self.gate.go is None:
                    break
                self.gate.say_ready()
            if everything and not self._has_more():
                break
            for worker in self.workers:
                worker.build_next()
            self._listen()

    def run(self) -> None:
        self.gate.wait()
        while not any(worker.ready for worker in self.workers) and self._has_more() and self.gate.left > 0:
            for worker in self.workers:  # GO came early: the first that is built makes a beginning
                worker.build_next()
            self._listen()
        self._stop_building()
        number = 0
        while self.gate.left > self.round_s and self._is_wanted(number):
            self._round(number)
            self.keep(self)
            number += 1
            if number >= FIRST:
                self._build_more()

    def _is_wanted(self, number: int) -> bool:
        rivals = [(worker.size, name) for worker in self.workers for name in worker.ready]
        short = any(len(self.samples.get(rival, {})) < self.rounds for rival in rivals)
        return number == 0 or short or self._has_more()

    def _has_more(self) -> bool:
        return any(worker.has_more for worker in self.workers)

    def _round(self, number: int) -> None:
        """Everyone that is built once; another one begins each time."""
        begun = time.monotonic()
        rivals = [(worker, name) for worker in self.workers if worker.busy is None for name in worker.ready]
        builds = [worker for worker in self.workers if worker.busy is not None]
        for worker in builds:
            worker.process.send(signal.SIGSTOP)
        first = number % max(1, len(rivals))
        for worker, name in rivals[first:] + rivals[:first]:
            if number and self.gate.left < 0:
                break
            if burst := worker.time_burst(name):
                self.samples.setdefault((worker.size, name), {})[number] = burst
        for worker in builds:
            worker.process.send(signal.SIGCONT)
        self.round_s = time.monotonic() - begun
        say(f"round {number}: {len(rivals)} bursts in {self.round_s:.1f} s")

    def _build_more(self) -> None:
        """Further variants for a third of the time that is left, as long as a round can follow."""
        enough = self.gate.left * 2 / 3
        while self.gate.left > 2 * self.round_s:
            for worker in self.workers if self.gate.left > enough else ():
                worker.build_next()
            if not any(worker.busy for worker in self.workers):
                break
            self._listen()
        self._stop_building()

    def _stop_building(self) -> None:
        for worker in self.workers:
            if worker.busy is not None:
                worker.process.send(signal.SIGUSR1)
        until = time.monotonic() + STUBBORN
        while any(worker.busy for worker in self.workers) and time.monotonic() < until:
            self._listen()

    def _listen(self) -> None:
        for worker in self.workers:
            worker.listen()
        time.sleep(0.02)

    def medians(self, size: str, name: str) -> tuple[float, float]:
        """Of first steps, and of all."""
        bursts = self.samples[size, name].values()
        return statistics.median(b[0] for b in bursts), statistics.median(ms for b in bursts for ms in b)

    def tell(self) -> None:
        for size in dict.fromkeys(size for size, _ in self.samples):
            say(f"{size}: ms, median of bursts' first steps, of all steps, and rounds")
            found = {name: bursts for (s, name), bursts in self.samples.items() if s == size}
            for name, bursts in found.items():
                first, every = self.medians(size, name)
                print(f"    {name:28} {first:9.3f} {every:9.3f} {len(bursts):3d}", flush=True)
            for above, below in COMPARED:
                if above in found and below in found:
                    self._compare(found, above, below)

    def _compare(self, found: dict[str, dict[int, list[float]]], above: str, below: str) -> None:
        pairs = common_rounds(found, above, below)
        if pairs["both"]:
            told = [ratio(*zip(*pairs[mode], strict=True)) for mode in ("first", "both")]
            texts = ", ".join(f"{middle:.4f} ± {error:.4f}" for middle, error in told)
            print(f"    {above} / {below}: {texts} in {len(pairs['both'])} rounds", flush=True)


def common_rounds(found: Any, above: str, below: str) -> dict[str, list[tuple[float, float]]]:
    """What both took in each round that both took part in: first steps, and medians of all."""
    common = sorted(found[above].keys() & found[below].keys())
    return {
        "first": [(found[above][i][0], found[below][i][0]) for i in common],
        "both": [(statistics.median(found[above][i]), statistics.median(found[below][i])) for i in common],
    }


def write_rows(path: Path, turns: Turns) -> None:
    """The file is made anew."""
    path.unlink(missing_ok=True)
    sheet = open_sheet(path, SETUP.device, SETUP.dtype)
    note = f"in turns, bursts of {BURST} after a pause of {PAUSE} s"
    for (size, name), bursts in turns.samples.items():
        kind = "peer" if name.startswith("hf") else "ours"
        for mode, values in {
            "both": [ms for burst in bursts.values() for ms in burst],
            "first": [burst[0] for burst in bursts.values()],
        }.items():
            fields: dict[str, Any] = {**sizes_of(size), **vars(Spread.of(values))}
            case = "attention" if size == "attention" else "step"
            sheet.add(BenchRow(case, name, kind, mode, "ms", note=note, **fields))
    write_ratios(path.with_name(f"{path.stem}_ratios.csv"), turns)


def write_ratios(path: Path, turns: Turns) -> None:
    """Medians of the ratios in each round, which the medians of all steps do not give."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("size", "above", "below", "steps", "median of rounds", "standard error", "rounds"))
        for size in dict.fromkeys(size for size, _ in turns.samples):
            found = {name: bursts for (s, name), bursts in turns.samples.items() if s == size}
            for above, below in COMPARED:
                if above in found and below in found:
                    for mode, pairs in common_rounds(found, above, below).items():
                        if pairs:
                            middle, error = ratio(*zip(*pairs, strict=True))
                            rows.writerow((size, above, below, mode, f"{middle:.4f}", f"{error:.4f}", len(pairs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=tuple(GROUPS), default=USUAL, help=" ".join(USUAL))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="CSV of the rows, made anew; logs of the processes lie beside it")
    parser.add_argument("--warm", action="store_true", help="build everything, time nothing")
    parser.add_argument("--serve", choices=tuple(GROUPS), help=argparse.SUPPRESS)
    Gate.add_flags(parser, build_s=120, time_s=60)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `timeout` sends it
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # so do processes that have not come to `serve` yet
    logs = given.out.parent if given.out else Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    say(f"logs of the processes: {logs}/step_turns_*.log")
    keep = partial(write_rows, given.out) if given.out else lambda turns: None
    workers = [Worker(name, Process(name, logs / f"step_turns_{name}.log")) for name in given.groups]
    turns = Turns(workers, Gate.of(given), given.rounds, keep)
    keep(turns)  # a file without rows: what takes a second of it is done
    try:
        turns.build(everything=given.warm)
        if not given.warm:
            turns.run()
    except KeyboardInterrupt:
        say("stopped; what was timed is kept")
    finally:
        for worker in workers:
            worker.process.end()
    turns.tell()


if __name__ == "__main__":
    main()

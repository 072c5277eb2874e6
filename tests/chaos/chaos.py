"""Commands are killed with SIGKILL, at random instants and inside every kind of write, and started again until
they are done; then everything in their folder must be what it is without a kill, to the last bit.

    python -m tests.chaos.chaos --kills 1000 --seed 3
    python -m tests.chaos.chaos --kills 20 --only 'prepare in parts' --keep /tmp/chaos
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.chaos.kills import KILLED, arm, arm_rank
from tests.chaos.material import make_material
from tests.chaos.scenarios import Scenario, make_scenarios, picture
from tests.processes import start
from tests.torchrun import start_ranks

OUT = "out"
LONGEST = 600.0  # seconds of a life
TOO_LONG = "too long"
MOST_KILLS = 12  # of one run
INSTANTS = 0.35  # part of the kills that come at an instant, and not in a write
ORPHAN_SECONDS = 120.0  # they may be importing torch, and save before they end


@dataclass
class Life:
    """How a command's processes ended."""

    killed: str | None  # where; None if it ended by itself
    code: int
    text: str


@dataclass
class Reference:
    """A run that was not disturbed."""

    picture: dict[str, Any]
    seconds: list[float]  # of each command
    kinds: list[list[tuple[int, str, int]]]  # of writes: of each command (rank, kind, how often)


@dataclass
class Chaos:
    """Kills runs of the scenarios until `wanted` have died; several threads may do so at once."""

    material: Path
    folder: Path
    scenarios: list[Scenario]
    wanted: int
    seed: int = 0
    references: dict[str, Reference] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    torn: int = 0
    decks: dict[tuple[str, int], list[tuple[int, str]]] = field(default_factory=dict)
    missed: dict[tuple[str, int], list[tuple[int, str]]] = field(default_factory=dict)
    _guard: Any = field(default_factory=threading.Lock)
    _number: int = 0

    def run(self, lanes: int = 2) -> None:
        start(self.folder / "version", "--version").wait()  # now the server has imported what is slow
        with ThreadPoolExecutor(lanes) as pool:
            list(pool.map(self._make_reference, self.scenarios))
            list(pool.map(self._lane, range(lanes)))

    def _make_reference(self, scenario: Scenario) -> None:
        out = self.folder / f"reference-{scenario.name.replace(' ', '-')}" / OUT
        out.parent.mkdir()
        seconds, kinds = [], []
        for command in scenario.commands:
            began = time.monotonic()
            traces = [out.with_name(f"trace{rank}") for rank in range(scenario.ranks)]
            life = self._live(scenario, command, out, traces, None, 1, random.Random(0))
            if life.code or life.killed:
                raise RuntimeError(f"{scenario.name} fails without a kill: {life.killed} {life.text[-3000:]}")
            seconds.append(time.monotonic() - began)
            noted = [Counter(trace.read_text().splitlines()) for trace in traces]
            kinds.append([(rank, kind, n) for rank, found in enumerate(noted) for kind, n in found.items()])
            for trace in traces:
                trace.unlink()
        self.references[scenario.name] = Reference(picture(out), seconds, kinds)

    def _lane(self, lane: int) -> None:
        """One run after the other."""
        draw = random.Random(f"{self.seed}/{lane}")
        names = [one for one in self.scenarios for _ in range(one.share)]
        draw.shuffle(names)
        while sum(self.kills.values()) < self.wanted and len(self.problems) < 20:
            scenario = names[self._next() % len(names)]
            self._run_once(scenario, draw)

    def _next(self) -> int:
        with self._guard:
            self._number += 1
            return self._number

    def _run_once(self, scenario: Scenario, draw: random.Random) -> None:
        """Kill a run some times, let it end, and compare it."""
        number = self._next()
        out = self.folder / f"{number}" / OUT
        out.parent.mkdir()
        left = draw.randint(2, MOST_KILLS)
        story: list[str] = []
        for index, command in enumerate(scenario.commands):
            while True:
                traces = [out.with_name(f"trace{rank}") for rank in range(scenario.ranks)]
                last = self._choose(scenario, index, draw, fresh=not any(out.glob("*"))) if left > 0 else None
                seconds = self.references[scenario.name].seconds[index] if left > 0 and last is None else 0.0
                life = self._live(scenario, command, out, traces, last, draw.choice((1, 1, 1, 2)), draw, seconds)
                for trace in traces:
                    trace.unlink(missing_ok=True)
                if life.killed == TOO_LONG:
                    self._tell(f"{scenario.name}: did not end after {story}: {life.text[-1500:]}", out)
                    return
                if life.killed is None:
                    if last:
                        self.missed.setdefault((scenario.name, index), []).append(last)
                    break
                left -= 1
                story.append(life.killed)
                with self._guard:
                    self.kills[scenario.name] += 1
                    self.places[life.killed.split(" torn: ")[0]] += 1
                    self.torn += " torn: " in life.killed
            if life.code:
                self._tell(f"{scenario.name}: exit code {life.code} after {story}: {life.text[-1500:]}", out)
                return
        if orphans := self._orphans(f"{os.getpid()}-{out.parent.name}"):
            self._tell(f"{scenario.name}: processes {orphans} outlived it", out)
        wanted, found = self.references[scenario.name].picture, picture(out)
        different = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
        with self._guard:
            self.compared[scenario.name] += 1
        if different:
            self._tell(f"{scenario.name}: {different[:8]} differ after {story}", out)
        else:
            shutil.rmtree(out.parent)

    def _tell(self, problem: str, out: Path) -> None:
        with self._guard:
            self.problems.append(f"{problem}\n  in {out}")
            print(f"! {self.problems[-1]}", flush=True)

    def _choose(self, scenario: Scenario, index: int, draw: random.Random, fresh: bool) -> tuple[int, str] | None:
        """A rank and the kind of its last write, rare ones first; None for an instant.

        Some writes come only in the first life of a run: those that were waited for in vain are tried there.
        """
        if draw.random() < INSTANTS:
            return None
        with self._guard:
            if fresh and self.missed.get((scenario.name, index)):
                return self.missed[scenario.name, index].pop(0)
            deck = self.decks.setdefault((scenario.name, index), [])
            if not deck:
                deck += [(rank, kind) for rank, kind, _ in self.references[scenario.name].kinds[index]]
                random.Random(f"{self.seed}/{scenario.name}/{index}").shuffle(deck)
            chosen = min(deck, key=lambda one: self.places[one[1]], default=None)
            if chosen:
                deck.remove(chosen)
            return chosen

    def _live(
        self,
        scenario: Scenario,
        command: Sequence[str],
        out: Path,
        traces: list[Path],
        last: tuple[int, str] | None,
        count: int,
        draw: random.Random,
        seconds: float = 0.0,
    ) -> Life:
        """One life of a command: it dies at a write, after a part of `seconds`, or ends by itself."""
        name = f"{os.getpid()}-{out.parent.name}"
        lasts = [last[1] if last and last[0] == rank else None for rank in range(scenario.ranks)]
        seed = draw.randrange(2**32)
        outputs = [out.with_name(f"output{rank}") for rank in range(scenario.ranks)]
        store: Any = None
        processes: list[BaseProcess]
        if scenario.ranks == 1:
            before = functools.partial(arm, out, traces[0], lasts[0], count, seed, name)
            processes = [start(outputs[0], *command, before=before).process]
        else:
            ready = functools.partial(
                arm_rank, folder=out, traces=traces, lasts=lasts, count=count, seed=seed, life=name
            )
            store, processes = start_ranks(["-m", "altup", *command], outputs, ready)
        instant = time.monotonic() + draw.uniform(0, 1.1 * seconds) if seconds else None
        at = self._wait(processes, instant, draw)
        del store
        codes = [process.exitcode or 0 for process in processes]
        text = "\n".join(path.read_text(errors="replace") for path in outputs if path.exists())
        for path in outputs:
            path.unlink(missing_ok=True)
        if -signal.SIGKILL in codes:
            noted = [trace.read_text().splitlines() for trace in traces if trace.exists()]
            where = [
                lines[-1].removeprefix(f"{KILLED} ") for lines in noted if lines and lines[-1].startswith(KILLED)
            ]
            return Life(where[0] if where else at, 0, text)
        return Life(None, next((code for code in codes if code), 0), text)

    def _wait(self, processes: list[BaseProcess], instant: float | None, draw: random.Random) -> str:
        """Until all have ended. As torchrun does, those that are left when one has failed are ended too."""
        end = time.monotonic() + LONGEST
        while any(process.is_alive() for process in processes):
            now = time.monotonic()
            if now > end or any(process.exitcode for process in processes):
                time.sleep(draw.choice((0.0, 0.1, 0.3)))
                for process in processes:
                    process.kill()
                break
            if instant is not None and now >= instant:
                draw.choice(processes).kill()
                instant = None
            time.sleep(0.005)
        for process in processes:
            process.join()
        return "an instant" if time.monotonic() < end else TOO_LONG

    def _orphans(self, life: str) -> list[str]:
        """Processes of a run's lives that did not end with them, which are then ended here."""
        end = time.monotonic() + ORPHAN_SECONDS
        while found := [pid for pid in _pids() if f"ALTUP_CHAOS={life}\0".encode() in _environment(pid)]:
            if time.monotonic() > end:
                for pid in found:
                    os.kill(int(pid), signal.SIGKILL)
                return found
            time.sleep(0.1)
        return []

    def report(self) -> str:
        kinds = {kind for one in self.references.values() for command in one.kinds for _, kind, _ in command}
        missed = kinds - self.places.keys()
        by_scenario = ", ".join(f"{name} {n}" for name, n in sorted(self.kills.items()))
        instants = self.places["an instant"]
        return (
            f"{sum(self.kills.values())} kills ({by_scenario}), {instants} at an instant and the others in "
            f"{len(kinds) - len(missed)} of {len(kinds)} kinds of writes, {self.torn} of them with a torn file; "
            f"{sum(self.compared.values())} runs compared, {len(self.problems)} with a problem"
        )


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def _environment(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def chaos(
    folder: Path, kills: int, seed: int = 0, lanes: int = 2, choose: Callable[[str], bool] = lambda name: True
) -> Chaos:
    (folder / "material").mkdir(parents=True)
    material = make_material(folder / "material")
    (folder / "runs").mkdir()
    chosen = [one for name, one in make_scenarios(material).items() if choose(name)]
    made = Chaos(material, folder / "runs", chosen, kills, seed)
    made.run(lanes)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=2, help="runs at a time")
    parser.add_argument("--only", action="append", help="a scenario; repeat it")
    parser.add_argument("--keep", type=Path, help="a new folder, where runs with a problem stay")
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        began = time.monotonic()
        choose = (lambda name: name in options.only) if options.only else (lambda name: True)
        made = chaos(folder, options.kills, options.seed, options.lanes, choose)
        print(made.report())
        print(f"{time.monotonic() - began:.0f} s; load {os.getloadavg()}")
        raise SystemExit(bool(made.problems))


if __name__ == "__main__":
    main()

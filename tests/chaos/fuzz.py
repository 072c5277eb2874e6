"""Bad inputs for every verb, by number: no traceback, no hang, no success, nothing written but to `--out`.

All of them, or some; the same number is the same case wherever it is run:

    python -m tests.chaos.fuzz
    python -m tests.chaos.fuzz 137 --keep /tmp/case
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import resource
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from altup.core.sealed_folders import UNFINISHED
from tests.chaos import cases, spoil
from tests.chaos import spoilt_hostile as hostile
from tests.chaos import spoilt_inputs as inputs
from tests.chaos import spoilt_results as results
from tests.chaos.cases import OUT
from tests.chaos.material import make_material
from tests.processes import start

BAD = 750  # cases that are certain to be bad
ODD = 250  # and more, that may be harmless
CPU_SECONDS = 60  # more of it is a hang, however busy the machine is
SECONDS = 600.0  # and so is this, if it does not even compute
MEMORY = 6 << 30
LONGEST = 8_000  # characters that anyone would read
SPOILT = [
    *(inputs.bad_yaml, inputs.bad_setting, inputs.bad_model, inputs.bad_model, inputs.bad_data, inputs.bad_run),
    *(inputs.bad_text, inputs.bad_task_file, inputs.bad_own_task, results.bad_results, results.bad_rows),
    *(results.bad_job, inputs.too_large),
    *(hostile.bad_tokenizer, hostile.bad_roles, hostile.bad_numbers, hostile.bad_state, hostile.bad_seal),
    hostile.bad_link,
]
PERHAPS = [
    *(inputs.odd_model, inputs.odd_model, inputs.odd_model, results.odd_results, results.odd_results),
    *(inputs.bad_tree, inputs.bad_prompt, hostile.bad_record, hostile.odd_text),
]


@dataclass
class Fuzzed:
    """What came of a case."""

    number: int
    about: str
    arguments: list[str]
    certain: bool
    code: int
    text: str
    seconds: float
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        told = self.text.strip().splitlines()[-1:] or [""]
        return (
            f"{self.number}: {self.about}\n  altup {shlex.join(self.arguments)[:300]}\n"
            f"  {self.code} after {self.seconds:.1f} s: {told[0][:300]}"
            + "".join(f"\n  ! {p}" for p in self.problems)
        )


def make_case(number: int, box: Path, material: Path, seed: int = 0) -> tuple[list[str], str, bool]:
    """The command of a case, with what it reads in the folder `box`."""
    draw = random.Random(f"{seed}/{number}")
    box.mkdir()
    spoil.add_oddities(box)
    if number >= BAD:
        return draw.choice(PERHAPS)(draw, box, material)
    if draw.random() < 0.4:
        arguments, about = draw.choice(cases.COMMAND_LINES)(draw)
        cases.fill(box, material, [*arguments, "text", "t5"])
        return arguments, about, True
    return draw.choice(SPOILT)(draw, box, material)


def run_case(number: int, folder: Path, material: Path, seed: int = 0) -> Fuzzed:
    box = folder / f"{number}"
    arguments, about, certain = make_case(number, box, material, seed)
    return run_in(box, number, arguments, about, certain)


def run_in(box: Path, number: int, arguments: list[str], about: str, certain: bool) -> Fuzzed:
    """Run a command in its folder, with limits, and watch what it writes."""
    own = box.with_name(f"{box.name}.own")  # what belongs to the process and not to the case
    for name in ("home", "tmp"):
        (own / name).mkdir(parents=True)
    allowed = [*(box / place for place in _places(arguments)), own]
    before = _picture(box, allowed)
    began = time.monotonic()
    limits = functools.partial(_confine, box, own, [str(path) for path in allowed])
    (own / "stdin").touch()
    running = start(own / "output", *arguments, stdin=own / "stdin", before=limits)
    running.process.join(SECONDS)
    hangs = running.process.is_alive()
    if hangs:
        running.signal(signal.SIGKILL)
        running.process.join()
    text = running.output.read_text(errors="replace") if running.output.exists() else ""
    fuzzed = Fuzzed(
        number, about, arguments, certain, running.process.exitcode or 0, text, time.monotonic() - began
    )
    fuzzed.problems = list(_problems(fuzzed, hangs))
    if (own / "outside").exists():
        fuzzed.problems.append(f"wrote elsewhere: {(own / 'outside').read_text()[:500]}")
    if changed := [name for name, what in _picture(box, allowed).items() if before.pop(name, None) != what] + list(
        before
    ):
        fuzzed.problems.append(f"changed {changed[:5]}")
    return fuzzed


def _places(arguments: list[str]) -> list[str]:
    """Where a command may write: what follows `--out`, `--into` or `--plot`, and folders made on the way there."""
    found = [OUT]
    for flag, value in itertools.pairwise(arguments):
        if flag in ("--out", "--into", "--plot") and 0 < len(value) < 1000:
            found.append(value)
    return found


def _picture(box: Path, allowed: list[Path]) -> dict[str, Any]:
    """Every file of a case but those that it may write."""
    found = {}
    for folder, folders, files in os.walk(box):
        folders[:] = [name for name in folders if Path(folder) / name not in allowed]
        for name in [*folders, *files]:
            path = Path(folder) / name
            if path not in allowed:
                stat = path.lstat()
                found[str(path.relative_to(box))] = (
                    stat.st_mode,
                    stat.st_size if path.is_file() else 0,
                    stat.st_mtime_ns if name in files else 0,
                )
    return found


def _problems(fuzzed: Fuzzed, hangs: bool) -> Iterator[str]:
    if "Traceback (most recent call last)" in fuzzed.text or "Fatal Python error" in fuzzed.text:
        yield "a traceback"
    if hangs or fuzzed.code in (-signal.SIGXCPU, -signal.SIGKILL):
        yield "a hang"
    elif fuzzed.code < 0:
        yield f"died of signal {-fuzzed.code}"
    if fuzzed.certain and fuzzed.code == 0:
        yield "took it for good"
    if len(fuzzed.text) > LONGEST:
        yield f"{len(fuzzed.text):,} characters were printed"
    if fuzzed.code and not fuzzed.text.strip():
        yield "said nothing"


def _confine(box: Path, own: Path, allowed: list[str]) -> None:
    """In the process of a case: limits of time and memory, and a note of every file that is written elsewhere."""
    os.chdir(box)
    sys.dont_write_bytecode = True
    os.environ.update(HOME=str(own / "home"), TMPDIR=str(own / "tmp"), COLUMNS="100")
    tempfile.tempdir = None
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    report = own / "outside"
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    changes = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate"}

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            if not isinstance(arguments[2], int) or not arguments[2] & writes:
                return
            paths: Iterable[Any] = arguments[:1]
        elif event in changes:
            inside = [one for one in arguments[1:] if isinstance(one, int) and one >= 0]
            base = (
                str(Path(f"/proc/self/fd/{inside[-1]}").readlink())
                if inside and event in ("os.remove", "os.rmdir")
                else ""
            )
            names = [one for one in arguments[:2] if isinstance(one, str | bytes | os.PathLike)]
            paths = [os.path.join(base, os.fsdecode(one)) for one in names]  # noqa: PTH118
        else:
            return
        for path in paths:
            if isinstance(path, int):
                continue
            name = os.path.realpath(os.fsdecode(path))
            if name.startswith(("/dev/", "/proc/")) or any(_within(name, place) for place in allowed):
                continue
            with os.fdopen(os.open(f"{report}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), "w") as file:
                file.write(f"{event} {name}\n")

    allowed = [os.path.realpath(place) for place in allowed]
    sys.addaudithook(watch)


def _within(name: str, place: str) -> bool:
    """Whether `name` is `place`, in it, beside it as temporary, its plots, or on the way to it."""
    beside = place.removesuffix(".html") + "-plots"
    unfinished = str(Path(place).with_name(f"{UNFINISHED}{Path(place).name}"))
    return (
        name in (place, f"{place}.tmp", beside, unfinished)
        or name.startswith((place + "/", beside + "/", unfinished + "/"))
        or place.startswith(name + "/")
    )


def _warm_up(folder: Path) -> None:
    """Let the server import what is slow, which is no time of a case."""
    assert start(folder / "version", "--version").wait() == 0


def run_good(folder: Path, material: Path) -> list[Fuzzed]:
    """The commands that the cases spoil, as they are: they must work."""
    _warm_up(folder)
    found = []
    for number, name in enumerate(cases.GOOD):
        arguments = cases.COMMANDS[name]
        box = folder / f"good-{number}"
        box.mkdir()
        cases.fill(box, material, arguments)
        one = run_in(box, -number, arguments, name, False)
        if one.code:
            one.problems.append("does not work")
        found.append(one)
    return found


def fuzz(numbers: Iterable[int], folder: Path, material: Path, seed: int = 0, jobs: int = 2) -> Iterator[Fuzzed]:
    """Run cases, `jobs` at a time, in order."""
    _warm_up(folder)
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda number: run_case(number, folder, material, seed), numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", help="cases, such as 17 or 100-199")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a new folder, where the inputs stay")
    parser.add_argument("--good", action="store_true", help="the commands that work, instead")
    parser.add_argument("--all", action="store_true", help="show those without a problem too")
    options = parser.parse_args()
    numbers = [n for word in options.numbers for n in _range(word)] or list(range(BAD + ODD))
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary) / "cases"
        folder.mkdir()
        material = Path(os.environ.get("ALTUP_FUZZ_MATERIAL") or make_material(Path(temporary)))
        began, bad, slowest = time.monotonic(), 0, 0.0
        found = (
            run_good(folder, material)
            if options.good
            else fuzz(numbers, folder, material, options.seed, options.jobs)
        )
        for one in found:
            bad += bool(one.problems)
            slowest = max(slowest, one.seconds)
            if one.problems or options.all or len(numbers) == 1:
                print(one, flush=True)
            if len(numbers) == 1:
                print(one.text)
        print(
            f"{len(numbers)} cases in {time.monotonic() - began:.0f} s, {bad} with problems; "
            f"the slowest took {slowest:.1f} s"
        )


def _range(word: str) -> range:
    first, _, last = word.partition("-")
    return range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    main()

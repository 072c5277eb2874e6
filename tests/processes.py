"""`altup …` as real processes that can be killed, forked from a server that has already imported what is slow."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import altup as package

ROOT = Path(package.__file__).parent
PATIENCE = 300.0  # seconds for what takes one: only something that hangs takes them, however busy the machine is
# All of the package, whatever its modules are called, and what it imports late.
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(
    [
        *("matplotlib.figure", "matplotlib.backends.backend_agg", "torch.distributed.fsdp"),
        *(
            ".".join(("altup", *path.relative_to(ROOT).with_suffix("").parts))
            for path in sorted(ROOT.rglob("*.py"))
            if path.stem not in ("__init__", "__main__")
        ),
        "tests.frozen",
    ]
)


def _altup(
    arguments: list[str],
    files: tuple[Path | None, Path, Path],
    environment: dict[str, str],
    before: Callable[[], None] | None = None,
) -> None:
    os.environ.update(environment)
    for number, file in enumerate(files):
        if file is not None:
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(file, flags), number)
    sys.stdin = os.fdopen(0)  # multiprocessing has closed it
    import torch

    from altup.cli.main import main

    torch.set_num_threads(1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    sys.argv = ["altup", *arguments]
    if before is not None:
        before()
    main()


@dataclass
class Running:
    """A started command; its stdout and stderr go to `output`."""

    process: BaseProcess
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(self.process.pid, number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Exit code; minus the signal's number if it died of one."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running after {seconds} s:\n{self.text[-2000:]}"
        return self.process.exitcode

    def wait_for(self, words: str) -> None:
        """Until `words` are in the output."""
        self.wait_until(lambda: words in self.text, repr(words))

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Until `condition()` is true; the process must not end before."""

        def looked() -> bool:
            ended = not self.process.is_alive()  # asked first: it may do it and end at once
            found = bool(condition())
            assert found or not ended, f"ended before {what}:\n{self.text[-2000:]}"
            return found

        wait_until(looked, lambda: f"{what}:\n{self.text[-2000:]}")


def wait_until(condition: Callable[[], object], what: Callable[[], str] = lambda: "") -> None:
    """Until `condition()` is true, with an end: an AssertionError says `what` did not come."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not in {PATIENCE:.0f} s: {what()}"
        time.sleep(0.01)


def start(
    output: Path,
    *arguments: object,
    environment: dict[str, str] | None = None,
    stdin: Path | None = None,
    before: Callable[[], None] | None = None,
) -> Running:
    """Start `altup arguments…`, once its process has called `before`."""
    return _start((stdin, output, output), arguments, environment or {}, before)


def _start(
    files: tuple[Path | None, Path, Path],
    arguments: tuple[object, ...],
    environment: dict[str, str],
    before: Callable[[], None] | None = None,
) -> Running:
    process = server.Process(target=_altup, args=([str(a) for a in arguments], files, environment, before))
    process.start()
    return Running(process, files[1])


def signal_in_pass(number: int, sent: signal.Signals) -> None:
    """To be called in a process, as `before` of `start`: it sends itself the signal in its `number`-th training
    pass. A signal from outside comes at any step, or when all are done, as the machine has it."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    passes = itertools.count(1)

    def hook(module: Any, inputs: Any) -> None:
        whole = type(module).__name__.endswith(("ForConditionalGeneration", "ForMaskedLM", "ForCausalLM"))
        if whole and module.training and next(passes) == number:
            os.kill(os.getpid(), sent)

    register_module_forward_pre_hook(hook)


def altup(output: Path, *arguments: object) -> tuple[int, str]:
    """Run `altup arguments…` to its end: exit code and everything it printed."""
    running = start(output, *arguments)
    return running.wait(), running.text


def run(*arguments: object, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `altup arguments…` to its end, with what it wrote to stdout and stderr apart."""
    with tempfile.TemporaryDirectory() as folder:
        given, out, errors = (Path(folder) / name for name in ("stdin", "stdout", "stderr"))
        given.write_text(stdin)
        code = _start((given, out, errors), arguments, environment).wait()
        return subprocess.CompletedProcess([*map(str, arguments)], code, out.read_text(), errors.read_text())


def with_options(defaults: Iterable[object], *given: object) -> list[object]:
    """`defaults` less the options that `given` names, and `given`: an option may be given once."""
    kept: list[object] = []
    dropping = False
    for word in defaults:
        if str(word).startswith("--"):
            dropping = word in given
        if not dropping:
            kept.append(word)
    return [*kept, *given]


def fork_two(function: Callable[..., None], *arguments: object) -> None:
    """`function(rank, *arguments)` in two processes, which must succeed."""
    from torch.multiprocessing import start_processes

    start_processes(function, arguments, nprocs=2, start_method="forkserver")


def prepare_text(folder: Path, sentences: int = 4000) -> Path:
    """A prepared data folder of made-up sentences: about 40,000 tokens of a 700-token vocabulary."""
    from altup.data.prepare import Recipe, prepare
    from altup.data.text_files import LocalFiles

    draw = random.Random(0)
    words = ["".join(draw.choices("abdeiklmnorstu", k=draw.randint(2, 6))) for _ in range(300)]
    lines = [" ".join(draw.choices(words, k=8)) + "." for _ in range(sentences)]
    source = folder / "text.txt"
    source.write_text("\n\n".join(lines))
    recipe = Recipe([LocalFiles(source, "text")], validation_fraction=0.05, vocab_size=600)
    prepare(folder / "data", recipe, workers=1)
    return folder / "data"

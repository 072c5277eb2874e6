"""Progress of a run: a live line in a terminal, plain lines in a log; and trackers such as TensorBoard."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from altup.core.errors import UserError, named
from altup.core.text import duration
from altup.training.config import TrainConfig
from altup.training.metrics import JsonLines, cut_after
from altup.training.run_folder import RunFolder

# The most important first: a narrow terminal leaves out the rest.
FORMS = {
    "loss": ".4f",
    "accuracy": ".2%",
    "left": "s",
    "seq_per_s": ",.0f",
    "tokens_per_s": ",.0f",
    "mfu": ".1%",
    "lr": ".2e",
    "grad_norm": ".3g",
}


class Sink(Protocol):
    """Something that is given every record of a run."""

    def record(self, values: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Reporter:
    """All reports of a run: metrics.jsonl, the console, trackers and `more`. Other ranks are silent.

    Records after `step`, from where the run continues, are cut off: they will be written again. With
    `measures_again` so are those of an evaluation at `step`.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: TrainConfig,
        step: int,
        more: Sequence[Sink] = (),
        speaks: bool = True,
        measures_again: bool = False,
    ) -> None:
        self._sinks: list[Sink] = []
        self._console: Console | None = None
        self._records: JsonLines | None = None
        if not speaks:
            return
        trackers = [tracker(name, folder.path, step, asdict(config)) for name in config.trackers if name != "none"]
        # From step 0 all of them: a run that begins again may have measured its start.
        cut_after(folder.metrics, step or -1, measures_again)
        self._records = JsonLines(folder.metrics)
        self._console = Console(config.steps, step)
        self._sinks += [self._records, self._console, *more, *trackers]

    def record(self, values: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.record(values)

    def tick(self, step: int) -> None:
        if self._console:
            self._console.tick(step)

    def say(self, text: str) -> None:
        if self._console:
            self._console.say(text)

    def sync(self) -> int:
        """All records on disk, before a checkpoint says that their steps are done; their number."""
        return self._records.sync() if self._records else 0

    def close(self) -> None:
        """All sinks, the last one first, even if one of them fails."""
        with contextlib.ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)


def describe(values: dict[str, Any], total: int) -> str:
    """A record as people read it."""
    parts = [f"step {values['step']:,}/{total:,}"]
    if values["split"] != "train":
        parts.append(values["split"])
    shown = FORMS if values["split"] == "train" else {**dict.fromkeys(numbers(values), ".4g"), **FORMS}
    parts += [f"{name} {value}" for name, value in figures(values, total, shown)]
    if values.get("error"):
        parts.append(f"{values['error']} · training continues")
    if values.get("skipped"):
        parts.append(f"skipped {values['skipped']}")
    return " · ".join(parts)


def figures(values: dict[str, Any], total: int, shown: dict[str, str] = FORMS) -> Iterator[tuple[str, str]]:
    """Names and values of a record, the most important first."""
    if values.get("steps_per_s"):
        values = {**values, "left": duration((total - values["step"]) / values["steps_per_s"])}
    for name, form in shown.items():
        if values.get(name) is not None:
            yield name.replace("_per_s", "/s"), f"{values[name]:{form}}"


class Clock:
    """Seconds of training: evaluations and saves are taken out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # steps still in the queue belong to training
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - begun

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return max(seconds, 1e-9)


class Console:
    """In a terminal, a line whose bar moves with every step, and its figures with every record; else a line a
    record."""

    def __init__(self, total: int, done: int) -> None:
        self.total = total
        self._live: Any = None
        if sys.stderr.isatty():
            from altup.training.live_line import LiveLine

            self._live = LiveLine(total, done)

    def record(self, values: dict[str, Any]) -> None:
        if self._live is None:
            line = describe(values, self.total)
            print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
        elif values["split"] == "train":
            skipped = [("skipped", f"{values['skipped']:,}")] if values.get("skipped") else []
            self._live.figures = [*skipped, *figures(values, self.total)]
        else:
            self._live.say(describe(values, self.total))

    def tick(self, step: int) -> None:
        """Move the bar between records."""
        if self._live is not None:
            self._live.done = step

    def say(self, text: str) -> None:
        if self._live is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._live.say(text)

    def close(self) -> None:
        if self._live is not None:
            self._live.close()


class TensorBoard:
    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events of steps that a resumed run repeats are hidden.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def record(self, values: dict[str, Any]) -> None:
        for name, value in numbers(values).items():
            self._writer.add_scalar(f"{values['split']}/{name}", value, values["step"])

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """Weights & Biases or trackio, which share `init`, `log` and `finish`."""

    def __init__(self, library: str, folder: Path, config: dict[str, Any]) -> None:
        import importlib

        self._library = importlib.import_module(library)
        more = {"dir": str(folder), "id": folder.name, "resume": "allow"} if library == "wandb" else {}
        self._library.init(project="altup", name=folder.name, config=config, **more)

    def record(self, values: dict[str, Any]) -> None:
        split = values["split"]
        self._library.log({f"{split}/{n}": v for n, v in numbers(values).items()}, step=values["step"])

    def close(self) -> None:
        self._library.finish()


def numbers(values: dict[str, Any]) -> dict[str, float]:
    return {n: v for n, v in values.items() if n != "step" and isinstance(v, int | float)}


def tracker(name: str, folder: Path, first_step: int, config: dict[str, Any]) -> Sink:
    """A tracker by name; a missing library is an error before anything is trained."""
    try:
        return TensorBoard(folder, first_step) if name == "tensorboard" else Tracker(name, folder, config)
    except ImportError as error:
        raise UserError(f"{named('trackers', name)} needs the package {name!r}: pip install {name}") from error

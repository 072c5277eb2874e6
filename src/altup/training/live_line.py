"""The line of a run in a terminal: a bar, and as many whole figures as there is room for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from altup.core.terminal import Console

BAR = 10  # columns
SPARE = 3  # columns that stay free: `^C`, which a terminal writes behind the line, must not begin a new one
SEPARATOR = " · "
STYLES = {
    "step": "cyan",
    "loss": "bold",
    "accuracy": "bold",
    "left": "green",
    "skipped": "bold yellow",
}


class LiveLine:
    """A line at the bottom of the terminal that is written again ten times a second; messages go above it."""

    def __init__(self, total: int, done: int, console: Console | None = None) -> None:
        self.total, self.done = total, done
        self.figures: Sequence[tuple[str, str]] = ()  # name and value, the most important first
        self.console = console or Console(file=sys.stderr, highlight=False)
        self._live = Live(self, console=self.console, refresh_per_second=10, redirect_stdout=False)
        self._live.start()

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        line = Table.grid(padding=(0, 1))
        figures = [("step", f"{self.done:,}/{self.total:,}"), *self.figures]
        line.add_row(
            ProgressBar(self.total, self.done, width=BAR),
            fitting_figures(figures, options.max_width - BAR - 1 - SPARE),
        )
        yield line

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def close(self) -> None:
        self._live.stop()


def fitting_figures(figures: Sequence[tuple[str, str]], width: int) -> Text:
    """The first figures that fit in `width` columns, each of them whole."""
    line: Any = Text(no_wrap=True)
    for name, value in figures:
        figure = Text.assemble((f"{name} ", "dim"), (value, STYLES.get(name, "")))
        if line.cell_len + len(SEPARATOR) * bool(line) + figure.cell_len > width:
            break
        line.append(Text(SEPARATOR if line else "", "dim")).append(figure)
    return line

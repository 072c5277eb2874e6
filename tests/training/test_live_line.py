"""What a person sees of a run in a terminal."""

from __future__ import annotations

import os
import pty
import re
import sys
import time

import pytest

from altup.training.preemption import CLEAR_LINE, PLEASE_WAIT
from altup.training.progress import Console

RECORD = {
    "split": "train",
    "loss": 2.5,
    "accuracy": 0.41,
    "seq_per_s": 1234.5,
    "tokens_per_s": 99999.0,
    "mfu": 0.33,
}
RECORD |= {"steps_per_s": 2.0, "lr": 1e-3, "grad_norm": 0.5}
WORDS = re.compile(r"\r|\n|\x1b\[(?:\?25[lh]|[\d;]*m|2K|\d*A)|[^\r\n\x1b]")


def screen(written: str, width: int) -> list[str]:
    """The lines of a terminal that has got `written`."""
    lines, row, column = [""], 0, 0
    for word in WORDS.findall(written):
        if word == "\r":
            column = 0
        elif word == "\n":
            row += 1
        elif word.endswith("2K"):
            lines[row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", word):
            row -= int(word[2:-1] or 1)
        elif not word.startswith("\x1b"):
            if column == width:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row].ljust(column)[:column] + word + lines[row][column + 1 :]
            column += 1
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]


class Terminal:
    """A pseudo-terminal in the place of stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
        self.width = width
        self._ours, theirs = pty.openpty()
        self._stream = os.fdopen(theirs, "w")
        monkeypatch.setattr(sys, "stderr", self._stream)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)

    def write(self, text: str) -> None:
        time.sleep(
            0.12
        )  # for the line to be written again, before and after; what it shows in the end is the same
        self._stream.write(text)
        self._stream.flush()
        time.sleep(0.12)

    def read(self) -> str:
        self._stream.close()
        written = b""
        while True:
            try:
                piece = os.read(self._ours, 65536)
            except OSError:
                piece = b""
            if not piece:
                return written.decode()
            written += piece


def train(terminal: Terminal, interrupt: str = "") -> str:
    """What a short run writes."""
    console = Console(10_000, 0)
    console.say("dense small t5")
    for step in (10, 2_500):
        console.tick(step)
        console.record({"step": step, **RECORD})
        if interrupt:
            terminal.write(interrupt)
    console.record({"step": 2_500, "split": "validation", "loss": 2.75, "accuracy": 0.4})
    console.close()
    return terminal.read()


@pytest.mark.parametrize(
    ("width", "last"),
    [
        (40, "step 2,500/10,000"),
        (80, "step 2,500/10,000 · loss 2.5000 · accuracy 41.00% · left 62 min"),
        (
            160,
            "step 2,500/10,000 · loss 2.5000 · accuracy 41.00% · left 62 min · seq/s 1,234 · tokens/s 99,999 · "
            "mfu 33.0% · lr 1.00e-03 · grad_norm 0.5",
        ),
    ],
)
def test_the_line_keeps_its_bar_and_whole_figures(width: int, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = train(Terminal(monkeypatch, width))
    lines = screen(written, width)
    bar, _, figures = lines[-2].partition(" ")
    assert re.fullmatch("[━╸╺]{10}", bar)
    assert figures == last
    assert "\x1b[36m" in written  # colour
    assert "…" not in written
    assert lines[0] == "dense small t5"


@pytest.mark.parametrize("interrupt", ["^C", CLEAR_LINE + PLEASE_WAIT])
@pytest.mark.parametrize("width", [72, 74])
def test_ctrl_c_leaves_one_line(interrupt: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what a terminal writes for Ctrl-C nor our answer to it leaves an older line behind.

    At these widths there is room for the figures of one of the two records, and for no more.
    """
    terminal = Terminal(monkeypatch, width)
    lines = screen(train(terminal, interrupt), width)
    assert sum("━" in line for line in lines) == 1
    assert not any("^C" in line for line in lines)
    if "wait" in interrupt:
        assert lines.count("saving; please wait") == 2

"""Text from anyone in a terminal and on a model card: it is shown, and neither obeyed nor rendered."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from altup.core.terminal import Console
from altup.core.text import fenced, markdown, printable

EVIL = "a\x1b]0;title\x07\x1b[2Jb\x9b31m\r\u202ec"
SHOWN = r"a\x1b]0;title\x07\x1b[2Jb\x9b31m\r\u202ec"
BY_RICH = r"a\x1b]0;title\x1b[2Jb\x9b31m\u202ec"  # which leaves bells and the like out
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def in_a_terminal(*arguments: object) -> tuple[int, str]:
    """A command's exit code and what a terminal of 300 columns gets from it, but for colours."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)], stdin=its, stdout=its, stderr=its,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "300"},
    )  # fmt: skip
    os.close(its)
    found = b""
    while True:
        try:
            found += os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not found:
            break
    os.close(ours)
    return process.wait(), re.sub(r"\x1b\[[0-9;]*m", "", found.decode()).replace("\r\n", "\n")


def test_a_task_file_is_shown(tmp_path: Path) -> None:
    lines = [{"input": f"{EVIL} {number}", "target": EVIL} for number in range(4)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, text = in_a_terminal("-m", "altup", "tasks", "show", tmp_path / "own.jsonl")
    assert code == 0, text
    assert BY_RICH in text
    assert not OBEYED.search(text)


def test_an_option_is_shown() -> None:
    code, text = in_a_terminal("-m", "altup", "params", "--method", EVIL)
    assert code == 2
    assert "is not known" in text
    assert not OBEYED.search(text)


def test_what_libraries_print_is_shown_and_bars_work() -> None:
    """A bar may go back to the beginning of its line, and colours stay."""
    script = (
        "import sys, click, rich.console\n"
        "from altup.core.console import guard_stdout, outlive_stderr\n"
        "outlive_stderr()\nguard_stdout()\n"
        f"for stream in (sys.stdout, sys.stderr):\n    print({EVIL!r}, file=stream)\n"
        f"click.secho({EVIL!r}, fg='red')\n"
        "with rich.console.Console().status('Loading'):\n    pass\n"
    )
    code, text = in_a_terminal("-c", script)
    assert code == 0, text
    assert text.count(SHOWN.replace(r"\r", "\r")) == 3
    assert "\x1b[?25l" in text
    assert "]0;title\x07" not in text


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_and_answers(terminal: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, color_system=None, width=200, soft_wrap=True)
    table = Table("name")
    table.add_row(Text(EVIL))
    console.print(table)
    console.print(Text.assemble((EVIL, "bold")))
    assert (BY_RICH in stream.getvalue()) == terminal
    assert bool(OBEYED.search(stream.getvalue())) == (not terminal)


def test_text_for_people() -> None:
    assert printable("ä\n\t💥 文") == "ä\n\t💥 文"
    assert printable(EVIL) == SHOWN
    assert markdown("<img src=x onerror=alert(1)>\n# a [b](c) | `d`") == (
        r"&lt;img src=x onerror=alert(1)&gt; \# a \[b\](c) \| \`d\`"
    )
    assert fenced("a\n```\n<img>", "yaml") == "````yaml\na\n```\n<img>\n````\n"
    assert fenced("plain", "sh") == "```sh\nplain\n```\n"

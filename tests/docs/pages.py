"""The fenced blocks of a page of docs/, run as a reader would run them, at toy size."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# Numbers that decide how long a command takes, and what they are here.
TOY = {
    "--steps": "3",
    "--batch-size": "4",
    "--inputs-length": "32",
    "--eval-every": "3",
    "--eval-sequences": "4",
    "--vocab-size": "400",
    "--max-new-tokens": "4",
}
TOY_PYTHON = {r"\bsteps=\d+": "steps=2"}
TINY = "--set d_model=16 --set d_ff=32 --set num_layers=2 --log-every 1 --track none"
ELSEWHERE = ("make ", "source ", "pip ")  # what sets up, which tests/test_release.py does


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None  # of a file that the block is the text of
    text: str

    @property
    def runs(self) -> bool:
        return self.language in ("sh", "python") or self.title is not None

    def commands(self) -> list[str]:
        """The lines of a shell block, continued ones joined, comments left out."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [words for line in lines if (words := re.sub(r"(^|\s)#.*", "", line).strip())]


def blocks(page: str) -> list[Block]:
    return [Block(*match.groups()) for match in BLOCK.finditer((DOCS / page).read_text())]


def shrink(command: str, folder: Path | None = None) -> str:
    """The command at toy size, to be run in `folder` (here, unless given)."""
    folder = folder or Path()
    for option, value in TOY.items():
        command = re.sub(rf"{option} \d+", f"{option} {value}", command)
    if "--embedded" in command:  # two megabytes: enough of them for a vocabulary of 400
        from pydoc_data.topics import topics

        (folder / "embedded.txt").write_text("\n\n".join(topics.values())[:200_000])
        command = command.replace("--embedded", "embedded.txt --validation-fraction 0.1")
    if "pretrain --data" in command:
        command += f" {TINY}" + ("" if "--eval-sequences" in command else " --eval-sequences 4")
    if "study run" in command and (folder / "data/mine").exists():  # instead of preparing the scale's own text
        command += " --data data/mine"
    return command + " --sample-mb 1" if " prepare " in command else command


def run_page(page: str, folder: Path) -> str:
    """Everything that the page prints; a command or a block that fails is an AssertionError."""
    printed = io.StringIO()
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(folder):
        for number, block in enumerate(blocks(page)):
            if block.title:
                Path(block.title).write_text(block.text)
            elif block.language == "python":
                text = block.text
                for pattern, value in TOY_PYTHON.items():
                    text = re.sub(pattern, value, text)
                with contextlib.redirect_stdout(printed):
                    exec(compile(text, f"{page}, block {number}", "exec"), names)
            elif block.language == "sh":
                for command in block.commands():
                    printed.write(run_command(shrink(command)))
    return printed.getvalue()


def run_command(command: str) -> str:
    if command.startswith(ELSEWHERE):
        return ""
    program, *arguments = shlex.split(command)
    if program == "torchrun":
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr
    assert program == "altup", f"{command}: what is this?"
    from altup.cli.main import app

    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})
    assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception!r}"
    return result.output

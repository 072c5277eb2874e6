"""Streams to which writing never fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from altup.core.console import lasting_stream


def test_what_is_lost_is_lost_and_what_comes_later_is_written(tmp_path: Path) -> None:
    """As a log on a disk that was full for a while."""
    (tmp_path / "log").touch()
    descriptor = os.open("/dev/full", os.O_WRONLY)
    stream = lasting_stream(descriptor)
    print("lost", file=stream, flush=True)
    room = os.open(tmp_path / "log", os.O_WRONLY)
    os.dup2(room, descriptor)
    print("kept \N{SNOWMAN} \udcff", file=stream, flush=True)
    os.close(descriptor)
    os.close(room)
    assert (tmp_path / "log").read_text() == "kept \N{SNOWMAN} \\udcff\n"
    print("lost again", file=stream, flush=True)


def test_messages_never_go_into_a_file_that_took_the_place_of_a_closed_console(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom altup.core.console import outlive_stderr, outlive_stdout\n"
        "outlive_stderr()\noutlive_stdout()\n"
        "file = open(sys.argv[1], 'w')\nprint('words')\nprint('words', file=sys.stderr)\n"
        "os.write(1, b'words')\nos.write(2, b'words')\nfile.close()\n"
    )
    place = tmp_path / "file"
    done = subprocess.run(
        [sys.executable, "-c", script, place], preexec_fn=lambda: [os.close(n) for n in (0, 1, 2)]
    )
    assert done.returncode == 0
    assert place.read_text() == ""

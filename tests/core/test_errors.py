"""What is said of errors that the operating system or a library raises."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from altup.cli.main import _explain, _tell_of_thread
from altup.core.errors import UserError, disk_remedy, is_out_of_memory, is_system_error


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "free space"),
        (errno.EACCES, "give a folder that you may write to"),
        (errno.EROFS, "give a folder that you may write to"),
        (errno.EMFILE, "allow more open files"),
        (errno.ELOOP, "repair the link"),
        (errno.EIO, "repair the disk"),
    ],
)
def test_a_remedy_for_each_kind(number: int, remedy: str) -> None:
    """Libraries in Rust say the number in words."""
    for error in (OSError(number, os.strerror(number)), Exception(f"{os.strerror(number)} (os error {number})")):
        assert is_system_error(error)
        assert remedy in disk_remedy(error)
    assert not is_system_error(ValueError("no"))


def test_a_library_that_does_not_fit_into_memory() -> None:
    assert is_out_of_memory(ImportError("libtorch_cpu.so: failed to map segment from shared object"))
    assert not is_out_of_memory(ImportError("no module named torch"))
    assert "give a smaller batch" in _explain(MemoryError())


def test_what_is_said_instead_of_a_traceback() -> None:
    class PanicException(BaseException):
        """As pyo3 names it; it is no Exception."""

    assert "a library gave up" in _explain(PanicException("index out of bounds"))
    assert _explain(UserError("a sentence")) == "a sentence"
    assert _explain(OSError(errno.EMFILE, "Too many open files", "x.json")).startswith(
        "x.json: Too many open files; allow"
    )
    assert _explain(KeyError("x")) == ""


def test_a_thread_that_ends_is_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As TensorBoard's on a full disk."""

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(threading, "excepthook", _tell_of_thread)
    thread = threading.Thread(target=fail, name="events")
    thread.start()
    thread.join()
    assert capsys.readouterr().err == "altup: events ended: [Errno 28] No space left on device\n"

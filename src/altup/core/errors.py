"""Errors that are the user's to fix: the command line prints their text alone, without a traceback."""

from __future__ import annotations

import difflib
import errno
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

MOST_SEED = 2**63 - 1  # what every generator of random numbers takes
MOST_TOKENS = 2**20  # of a sequence: beyond this, its attention fits no machine
MOST_EXAMPLES = 10**6  # of a batch
MOST_STEPS = 10**12


class UserError(ValueError):
    """Bad input, with a message that names what is wrong and what to do.

    Everything that `altup` refuses raises it; the command line prints its text.

    Examples:
        >>> import altup
        >>> try:
        ...     altup.PretrainConfig(data="data/mine", steps=0)
        ... except altup.UserError as error:
        ...     print(error)
        steps=0 makes no sense; give a whole number of at least 1 and up to 1000000000000
    """


# Name of a setting → the values that a user has typed for it, each with what was typed: [(0, "--k 0")].
Typed = Mapping[str, Sequence[tuple[Any, str]]]
_TYPED: ContextVar[Typed] = ContextVar("typed", default=MappingProxyType({}))


@contextmanager
def settings_typed(typed: Typed) -> Iterator[None]:
    """Within it, `named` names these settings as they were typed."""
    token = _TYPED.set(typed)
    try:
        yield
    finally:
        _TYPED.reset(token)


def named(setting: str, value: object) -> str:
    """How an error names a setting with its value: `steps=0`, or as it was typed, `--steps 0`."""
    for one, typed in _TYPED.get().get(setting, ()):
        if type(one) is type(value) and one == value:
            return typed
    return f"{setting}={value!r}"


class DivergedError(UserError):
    """A run that ended before its last step: gradients that are not finite, a loss spike or a high loss."""


WARNED: set[str] = set()  # messages of `warn_once`


def warn_once(message: str) -> None:
    """A warning, once a process."""
    if message not in WARNED:
        WARNED.add(message)
        warnings.warn(message, stacklevel=3)


def is_system_error(error: BaseException) -> bool:
    """Whether the operating system refused something; libraries in Rust raise a bare Exception for that."""
    return isinstance(error, OSError) or bool(RUST_ERROR.search(str(error)))


def disk_remedy(error: BaseException) -> str:
    """What to do where the operating system did not let a file be written."""
    found = RUST_ERROR.search(str(error))
    number = int(found[1]) if found else getattr(error, "errno", None)
    return next((remedy for numbers, remedy in REMEDIES.items() if number in numbers), "repair the disk")


RUST_ERROR = re.compile(r"\(os error (\d+)\)")
REMEDIES = {
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG): "free space",
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        "give a folder that you may write to (--out), or make this one writable",
    (errno.EMFILE, errno.ENFILE): "allow more open files (ulimit -n)",
    (errno.ELOOP, errno.ENOENT, errno.EEXIST): "repair the link or folder, or give another",
    (errno.ENAMETOOLONG,): "give a shorter name",
}  # fmt: skip


# What libraries say who have no memory, whatever their exceptions are called.
NO_MEMORY = (
    "DefaultCPUAllocator",
    "out of memory",
    "_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    "Cannot allocate memory",
    "failed to map segment",  # of a library that is imported
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of a GPU or of the machine has run out; torch need not be loaded."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError | ImportError) and any(
        words in str(error) for words in NO_MEMORY
    )


def did_you_mean(name: object, known: Iterable[object], alike: float = 0.6) -> str:
    """`did you mean 'steps'?`, or nothing where no known name is like it."""
    near = difflib.get_close_matches(str(name), [str(one) for one in known], n=1, cutoff=alike)
    return f"did you mean {near[0]!r}?" if near else ""


def choose_one(value: object, choices: Iterable[object]) -> str:
    """`did you mean 'altup'? Choose one of 'dense', 'altup'`: the remedy for a value that is none of them."""
    choices = list(choices)
    hint = did_you_mean(value, choices)
    return f"{f'{hint} Choose' if hint else 'choose'} one of {', '.join(map(repr, choices))}"


def check_choice(field: str, value: object, choices: Iterable[object]) -> None:
    choices = list(choices)
    if value not in choices:
        raise UserError(f"{named(field, value)} is not known; {choose_one(value, choices)}")


def check_whole(field: str, value: object, least: int, most: int | None = None) -> None:
    """`value` must be a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{named(field, value)} makes no sense; give a whole number of at least {least}")
    if most is not None and value > most:
        raise UserError(f"{named(field, value)} makes no sense; the most is {most:,}")


def check_range(field: str, value: object, low: float, high: float) -> None:
    """`value` must be a number in [low, high)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < high:
        raise UserError(f"{named(field, value)} makes no sense; give a number from {low} to below {high}")

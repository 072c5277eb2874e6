"""Numbers and words for people."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

# What a terminal obeys instead of showing it: all control characters but line ends and tabs, and those that turn
# the direction of text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
BACKTICKS = re.compile("`{3,}")
MINUS = "−"  # as wide as a plus, unlike the hyphen


def number_of(count: int, thing: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def any_of(choices: Iterable[str], mark: str | None = None) -> str:
    """`ddp (default) or fsdp`, `rsqrt, constant or cosine`: what to choose from, the default marked."""
    *first, last = (f"{one} (default)" if one == mark else one for one in choices)
    return f"{', '.join(first)} or {last}" if first else last


def duration(seconds: float) -> str:
    """`38 s`, `12 min`, `5.2 h`, `3.1 days`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def signed(value: float, digits: int) -> str:
    """`+1.25`, `−0.30`: a difference with its sign."""
    return f"{value:+,.{digits}f}".replace("-", MINUS)


def shorten(text: str, length: int) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1].rstrip()}…"


def is_unicode(text: str) -> bool:
    """JSON and command lines can hold half of a surrogate pair, which has no UTF-8 encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """Text that no terminal obeys: control characters are written out, as `\\x1b`."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def markdown(text: str) -> str:
    """A text from anyone as one line of a Markdown page: none of it is a tag, a link or a heading."""
    return re.sub(r"([\\`\[\]|#!])", r"\\\1", html.escape(" ".join(printable(text).split()), quote=False))


def fenced(text: str, language: str = "") -> str:
    """A block of code in a Markdown page, whatever stands in it."""
    longest = max(map(len, BACKTICKS.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"

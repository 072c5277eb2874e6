"""Words for people."""

from __future__ import annotations

from collections.abc import Iterable


def number_of(count: int, thing: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def any_of(choices: Iterable[str], mark: str | None = None) -> str:
    """`ddp (default) or fsdp`, `rsqrt, constant or cosine`: what to choose from, the default marked."""
    *first, last = (f"{one} (default)" if one == mark else one for one in choices)
    return f"{', '.join(first)} or {last}" if first else last

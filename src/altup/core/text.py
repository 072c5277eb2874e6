"""Words for people."""

from __future__ import annotations


def number_of(count: int, thing: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"

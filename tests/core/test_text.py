"""Numbers and words as people read them."""

from __future__ import annotations

import pytest

from altup.core.text import any_of, duration, number_of, shorten, signed


def test_number_of() -> None:
    assert (number_of(1, "step"), number_of(2000, "step"), number_of(0, "job")) == (
        "1 step",
        "2,000 steps",
        "0 jobs",
    )


def test_any_of() -> None:
    assert any_of(["ddp", "fsdp"], mark="ddp") == "ddp (default) or fsdp"
    assert any_of(["a", "b", "c"]) == "a, b or c"
    assert any_of(["alone"]) == "alone"


@pytest.mark.parametrize(
    ("seconds", "text"), [(38.4, "38 s"), (720, "12 min"), (5.2 * 3600, "5.2 h"), (3.1 * 86400, "3.1 days")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_signed() -> None:
    assert (signed(1.254, 2), signed(-0.3, 2), signed(-1234.0, 0)) == ("+1.25", "−0.30", "−1,234")


def test_shorten() -> None:
    assert shorten("one\n two", 20) == "one two"
    assert shorten("a long sentence", 7) == "a long…"

"""Bad input is skipped and counted by reason, or it is an error, as the user chose (`--on-error`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from altup.core.errors import UserError, check_choice, check_whole
from altup.core.text import is_unicode

MEBIBYTE = 1 << 20
PLACES_KEPT = 3  # the first of each reason are listed, so that the user can look at them


@dataclass(frozen=True)
class Limits:
    """Bounds on memory and disk for input of any size.

    A compressed file may unpack to `max(64 MiB, unpack_ratio × its size)`, and to at most `unpacked_bytes`.
    """

    document_bytes: int = 16 * MEBIBYTE
    unpack_ratio: int = 200
    unpacked_bytes: int = 1 << 40

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            check_whole(field, value, 1)

    def allowed(self, packed_bytes: int) -> int:
        return min(self.unpacked_bytes, max(64 * MEBIBYTE, self.unpack_ratio * packed_bytes))


class BadInput:
    """Counts bad input by reason (`on_error="skip"`) or raises at the first one (`"stop"`)."""

    def __init__(self, on_error: str = "skip", limits: Limits | None = None, state: dict[str, Any] | None = None):
        check_choice("on_error", on_error, ("skip", "stop"))
        self.on_error = on_error
        self.limits = limits or Limits()
        self._reasons: dict[str, dict[str, Any]] = {
            reason: {"count": seen["count"], "first": list(seen["first"])}
            for reason, seen in (state or {}).items()
        }

    def report(self, reason: str, where: str, detail: str = "") -> None:
        if self.on_error == "stop":
            raise UserError(
                f"{where}: {reason}{f' ({detail})' if detail else ''}; repair or remove it, "
                "or skip and count such input with --on-error skip"
            )
        seen = self._reasons.setdefault(reason, {"count": 0, "first": []})
        seen["count"] += 1
        if len(seen["first"]) < PLACES_KEPT:
            seen["first"].append(where)

    def accept(self, text: str, where: str) -> bool:
        """Whether a document can be used; if not, the reason is reported."""
        if not text or text.isspace():
            self.report("empty document", where)
        elif len(text) > self.limits.document_bytes:
            self.report("too long", where, f"more than {self.limits.document_bytes} bytes")
        elif not is_unicode(text):
            self.report("bad UTF-8", where, "half of a surrogate pair")
        else:
            return True
        return False

    def add(self, state: dict[str, Any]) -> None:
        """Add the counts of another `BadInput`, given its `state`."""
        for reason, seen in state.items():
            total = self._reasons.setdefault(reason, {"count": 0, "first": []})
            total["count"] += seen["count"]
            total["first"] = [*total["first"], *seen["first"]][:PLACES_KEPT]

    def state(self) -> dict[str, Any]:
        """A JSON-able copy: `{reason: {"count", "first"}}`."""
        return {
            reason: {"count": seen["count"], "first": list(seen["first"])}
            for reason, seen in sorted(self._reasons.items())
        }

    def summary(self) -> str:
        """For people: `3 × missing field (first: FILE, line 7)`; empty if there was no bad input."""
        return "; ".join(
            f"{seen['count']:,} × {reason} (first: {seen['first'][0]})" for reason, seen in self.state().items()
        )

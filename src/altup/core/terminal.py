"""Rich's console for text that may come from anyone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from altup.core.text import printable


class Console(rich.console.Console):
    """In a terminal, control characters of what is printed are written out."""

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        for segment in super().render(*args, **kwargs):
            shown = self.is_terminal and not segment.control
            yield segment._replace(text=printable(segment.text)) if shown else segment

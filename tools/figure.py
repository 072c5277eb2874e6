"""What the figures of the docs share: an SVG of their size, readable on light and dark ground."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
GREY = "#8a93a6"


@contextmanager
def drawn(name: str, height: float) -> Iterator[Any]:
    """Axes; at the end docs/images/NAME.svg is written, the same bytes for the same drawing."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11})
    figure, axes = pyplot.subplots(figsize=(7.5, height))
    yield axes
    axes.spines[["top", "right"]].set_visible(False)
    for part in (axes.xaxis, axes.yaxis):
        part.label.set_color(GREY)
    axes.tick_params(colors=GREY)
    for spine in axes.spines.values():
        spine.set_color(GREY)
    figure.tight_layout()
    figure.savefig(ROOT / f"docs/images/{name}.svg", transparent=True, metadata={"Date": None})

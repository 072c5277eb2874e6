"""docs/images/plateau.svg, from stored rows: `python tools/plateau_figure.py`."""

from __future__ import annotations

import csv

from figure import GREY, ROOT, drawn

ROWS = ROOT / "benchmarks/results/pretraining_small_recipes.csv"
# Two recipes for the same dense model, and a colour that is readable on light and dark ground.
CURVES = {"adamw-rms": ("AdamW-RMS, 0.02", "#e08a2b"), "adafactor": ("Adafactor, 0.015", "#4b7bd1")}


def main() -> None:
    with ROWS.open() as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "validation" and row["run"] == "long"]
    with drawn("plateau", 3.4) as axes:
        axes.axhspan(24, 28, color=GREY, alpha=0.15, linewidth=0)
        axes.text(60, 28.6, "the plateau", color=GREY)
        for optimizer, (label, colour) in CURVES.items():
            curve = [(int(r["step"]), float(r["accuracy_percent"])) for r in rows if r["optimizer"] == optimizer]
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=2.2)
            axes.text(curve[-1][0] + 25, curve[-1][1], label, color=colour, va="center")
        axes.set(xlim=(0, 3150), ylim=(18, 43), xlabel="step", ylabel="held-out accuracy, %")
        axes.set_xticks(range(0, 2501, 500))


if __name__ == "__main__":
    main()

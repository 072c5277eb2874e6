"""docs/images/results.svg, from stored results: `PYTHONPATH=src python tools/results_figure.py`."""

from __future__ import annotations

from typing import Any

from figure import GREY, ROOT, drawn

from altup.studies.report import StudyReport
from altup.studies.statistics import Difference

BENCHMARKS = ROOT / "benchmarks"
# A folder of results, its scale, its study; what the figure calls it and where; a colour readable on light and
# dark ground.
SERIES = [
    ("desk_longer", "desk_longer", "desk_decoder_longer.yaml", "decoder, 64 wide", (10_500, -0.05), "#e08a2b"),
    ("decoder", "decoder", "decoder_lengths.yaml", "decoder, 256 wide", (820, 0.016), "#4b7bd1"),
    ("long", "long", "equal-time", "T5, 256 wide", (5400, 0.011), "#5a9e6f"),
]
HIGHEST, LOWEST = 0.045, -0.085  # differences that are drawn


def differences(folder: str, scale: str, name: str, than: str = "Dense") -> tuple[dict[int, Difference], set[int]]:
    """By AltUp's steps: how far its loss is above that of `than`, dense in the same time; and where some runs
    collapsed."""
    given = str(BENCHMARKS / name) if name.endswith(".yaml") else name
    report = StudyReport([BENCHMARKS / "results" / folder], scale, [given])
    (study,), stats = report.studies, report.stats
    found, lost = {}, set()
    for size in stats.sizes_of(study):
        steps = stats.mean(study.name, "AltUp K=2", size, "steps")
        difference = stats.difference(study, size, "loss", "AltUp K=2", than)
        if steps and difference and difference.low is not None:
            found[round(steps.mean)] = difference
            if stats.collapsed(study.name, "AltUp K=2", size):
                lost.add(round(steps.mean))
    return found, lost


def draw(axes: Any, found: dict[int, Difference], lost: set[int], colour: str) -> None:
    """Means with their intervals; where runs collapsed, a dotted line that leaves the figure."""
    sound = {steps: d for steps, d in found.items() if steps not in lost}
    ends = [[d.mean - (d.low or 0.0) for d in sound.values()], [(d.high or 0.0) - d.mean for d in sound.values()]]
    means = [d.mean for d in sound.values()]
    axes.errorbar(list(sound), means, yerr=ends, color=colour, linewidth=2, marker="o", capsize=3)
    for steps in lost:
        before = max(n for n in sound if n < steps)
        line = [sound[before].mean, found[steps].mean]
        axes.plot([before, steps], line, color=colour, linewidth=2, linestyle=":")
        axes.text(0.57 * steps, HIGHEST - 0.006, f"{steps:,} steps: runs jumped", color=colour, va="center")


def draw_below(axes: Any, found: dict[int, Difference], label: str, colour: str) -> None:
    """An arrow to what lies below the figure."""
    for steps, difference in found.items():
        told = f"{label}: {difference.mean:+.3f}".replace("-", "−")
        arrow = {"arrowstyle": "->", "color": colour, "linewidth": 2}
        axes.annotate("", (steps, LOWEST), (steps, LOWEST + 0.014), arrowprops=arrow)
        axes.text(0.92 * steps, LOWEST + 0.007, told, color=colour, va="center", ha="right")


def main() -> None:
    with drawn("results", 3.8) as axes:
        axes.axhline(0, color=GREY, linewidth=1)
        axes.text(39_000, -0.002, "dense, in the same time", color=GREY, va="top", ha="right")
        for folder, scale, name, label, place, colour in SERIES:
            draw(axes, *differences(folder, scale, name), colour)
            axes.text(*place, label, color=colour, va="center")
        bert, _ = differences("bert", "bert", "bert_models.yaml", "Dense, AltUp's time")
        draw_below(axes, bert, "BERT, 256 wide", "#a06cc9")
        axes.set(xscale="log", xlim=(600, 40_000), ylim=(LOWEST, HIGHEST))
        axes.set(xlabel="steps of AltUp K = 2", ylabel="loss, AltUp − dense")
        axes.set_xticks([1000, 3000, 10_000], ["1,000", "3,000", "10,000"])
        axes.set_xticks([], minor=True)


if __name__ == "__main__":
    main()

"""docs/images/results.svg, from stored results: `PYTHONPATH=src python tools/results_figure.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from altup.studies.report import StudyReport
from altup.studies.statistics import Difference

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
GREY = "#8a93a6"
# A folder of results, its scale, its study; what the figure calls it; a colour readable on light and dark ground.
SERIES = [
    ("desk_longer", "desk_longer", "desk_decoder_longer.yaml", "decoder, 64 wide", "#e08a2b"),
    ("decoder", "decoder", "decoder_lengths.yaml", "decoder, 256 wide", "#4b7bd1"),
    ("long", "long", "equal-time", "T5, 256 wide", "#5a9e6f"),
]


def differences(folder: str, scale: str, name: str) -> dict[int, Difference]:
    """By AltUp's steps: how far its loss is above that of dense in the same time."""
    given = str(BENCHMARKS / name) if name.endswith(".yaml") else name
    report = StudyReport([BENCHMARKS / "results" / folder], scale, [given])
    (study,) = report.studies
    found = {}
    for size in report.stats.sizes_of(study):
        steps = report.stats.mean(study.name, "AltUp K=2", size, "steps")
        difference = report.stats.difference(study, size, "loss", "AltUp K=2", "Dense")
        if steps and difference and difference.low is not None:
            found[round(steps.mean)] = difference
    return found


def main() -> None:
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "results", "font.size": 11})
    figure, axes = pyplot.subplots(figsize=(7.5, 3.8))
    axes.axhline(0, color=GREY, linewidth=1)
    axes.text(640, 0.002, "dense, in the same time", color=GREY, va="bottom")
    for folder, scale, name, label, colour in SERIES:
        found = differences(folder, scale, name)
        steps, means = list(found), [d.mean for d in found.values()]
        ends = [[d.mean - d.low for d in found.values()], [d.high - d.mean for d in found.values()]]  # type: ignore[operator]
        axes.errorbar(steps, means, yerr=ends, color=colour, linewidth=2, marker="o", capsize=3)
        axes.text(steps[-1] * 1.12, means[-1], label, color=colour, va="center")
    axes.set(xscale="log", xlim=(600, 40_000), ylim=(-0.1, 0.06))
    axes.set(xlabel="steps of AltUp K = 2", ylabel="loss, AltUp − dense")
    axes.set_xticks([1000, 3000, 10_000], ["1,000", "3,000", "10,000"])
    axes.set_xticks([], minor=True)
    axes.spines[["top", "right"]].set_visible(False)
    for part in (axes.xaxis, axes.yaxis):
        part.label.set_color(GREY)
    axes.tick_params(colors=GREY)
    for spine in axes.spines.values():
        spine.set_color(GREY)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/images/results.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()

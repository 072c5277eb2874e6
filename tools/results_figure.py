"""docs/images/results.svg, from stored results: `PYTHONPATH=src python tools/results_figure.py`."""

from __future__ import annotations

from typing import Any

from figure import GREY, ROOT, drawn

from altup.studies.report import StudyReport
from altup.studies.statistics import Difference, compare_means

BENCHMARKS = ROOT / "benchmarks"
# A folder of results, called like its scale, and its study; what the figure calls it and where; how far it is
# moved aside, so that points do not lie on each other; a colour readable on light and dark ground.
SERIES = [
    ("desk_once", "desk_once_lengths.yaml", "decoder, 64 wide", (5_900, -0.035), 0.96, "#e08a2b"),
    ("decoder", "decoder_lengths.yaml", "decoder, 256 wide", (820, 0.016), 1.0, "#4b7bd1"),
    (
        "decoder_once",
        "decoder_once_lengths.yaml",
        "decoder, 256 wide,\ntext read once",
        (640, -0.028),
        1.0,
        "#2f9aa0",
    ),
    ("t5", "t5_lengths.yaml", "T5, 256 wide", (2_660, 0.024), 0.94, "#5a9e6f"),
    ("long", "equal-time", "T5, 256 wide,\nslow positions", (5_800, 0.033), 1.06, "#5a9e6f"),
]
HIGHEST, LOWEST = 0.06, -0.095  # differences that are drawn


def differences(folder: str, name: str, than: str = "Dense") -> dict[int, Difference]:
    """By AltUp's steps: how far its loss is above that of `than`, dense in as much time, if no run collapsed."""
    given = str(BENCHMARKS / name) if name.endswith(".yaml") else name
    report = StudyReport([BENCHMARKS / "results" / folder], folder, [given])
    (study,), stats = report.studies, report.stats
    found = {}
    for size in stats.sizes_of(study):
        steps = stats.mean(study.name, "AltUp K=2", size, "steps")
        difference = stats.difference(study, size, "loss", "AltUp K=2", than)
        lost = stats.collapsed(study.name, "AltUp K=2", size)
        if steps and difference and difference.low is not None and not lost:
            found[round(steps.mean)] = difference
    return found


def at_better_norms() -> Difference:
    """For AltUp's 12,000 steps at width 256: AltUp with slow norms, dense with fast ones."""

    def losses(folder: str, study: str, label: str) -> list[float]:
        report = StudyReport([BENCHMARKS / "results" / folder], folder, [str(BENCHMARKS / f"{study}.yaml")])
        return report.stats.values(study, label, "small, 12,000 steps", "loss")

    ours = losses("decoder_steady", "decoder_steady_lengths", "AltUp K=2")
    return compare_means(ours, losses("decoder", "decoder_lengths", "Dense"))


def draw(axes: Any, found: dict[float, Difference], colour: str, **style: Any) -> None:
    """Means with their intervals."""
    ends = [[d.mean - (d.low or 0.0) for d in found.values()], [(d.high or 0.0) - d.mean for d in found.values()]]
    means = [d.mean for d in found.values()]
    axes.errorbar(list(found), means, yerr=ends, color=colour, linewidth=2, marker="o", capsize=3, **style)


def draw_beyond(axes: Any, steps: int, told: str, colour: str, edge: float, inwards: float, align: str) -> None:
    """An arrow to what lies beyond an edge of the figure, and beside it what that is."""
    arrow = {"arrowstyle": "->", "color": colour, "linewidth": 2}
    axes.annotate("", (steps, edge), (steps, edge + inwards), arrowprops=arrow)
    place = (0.94 if align == "right" else 1.06) * steps
    axes.text(place, edge + inwards / 2, told, color=colour, va="center", ha=align)


def told_difference(difference: Difference) -> str:
    return f"{difference.mean:+.3f}".replace("-", "−")


def draw_berts(axes: Any, colour: str) -> None:
    """Their differences are far larger than the others'."""
    names = ("bert", "bert_norms", "desk_bert")
    found = [differences(name, f"{name}_models.yaml", "Dense, AltUp's time") for name in names]
    ((steps, fast),), ((_, tuned),), ((small, narrow),) = (each.items() for each in found)
    wide = f"BERT, 256 wide: {told_difference(fast)},\nnorms tuned: {told_difference(tuned)}"
    draw_beyond(axes, steps, wide, colour, LOWEST, 0.02, "left")
    draw_beyond(axes, small, f"BERT, 64 wide: {told_difference(narrow)}", colour, HIGHEST, -0.014, "right")


def main() -> None:
    with drawn("results", 4.0) as axes:
        axes.axhline(0, color=GREY, linewidth=1)
        axes.text(39_000, -0.002, "dense, in the\nsame time", color=GREY, va="top", ha="right")
        for folder, name, label, place, aside, colour in SERIES:
            draw(axes, {steps * aside: d for steps, d in differences(folder, name).items()}, colour)
            axes.text(*place, label, color=colour, va="center")
        colour = next(series[-1] for series in SERIES if series[0] == "decoder")
        draw(axes, {12_000: at_better_norms()}, colour, markerfacecolor="none")
        axes.text(11_600, 0.003, "slow norms, text\nread nine times", color=colour, va="bottom")
        draw_berts(axes, "#a06cc9")
        axes.set(xscale="log", xlim=(550, 40_000), ylim=(LOWEST, HIGHEST))
        axes.set(xlabel="steps of AltUp K = 2", ylabel="loss, AltUp − dense")
        axes.set_xticks([1000, 3000, 10_000], ["1,000", "3,000", "10,000"])
        axes.set_xticks([], minor=True)


if __name__ == "__main__":
    main()

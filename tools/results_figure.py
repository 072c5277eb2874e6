"""docs/images/results.svg, from stored results: `PYTHONPATH=src python tools/results_figure.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from figure import GREY, ROOT, drawn

from altup.studies.report import StudyReport
from altup.studies.statistics import Difference, compare_means

BENCHMARKS = ROOT / "benchmarks"
HIGHEST, LOWEST = 0.06, -0.095  # differences that are drawn


@dataclass(frozen=True)
class Runs:
    """Runs of one length, in AltUp's steps: a folder of results, called like its scale, and a study's file. Models
    were `tuned` at that length, or at another."""

    steps: int
    folder: str
    study: str
    tuned: bool = True
    than: str = "Dense"

    def difference(self) -> Difference:
        """How far AltUp's loss is above that of `than`, dense in as much time."""
        given = str(BENCHMARKS / self.study) if self.study.endswith(".yaml") else self.study
        report = StudyReport([BENCHMARKS / "results" / self.folder], self.folder, [given])
        (study,), stats = report.studies, report.stats
        for size in stats.sizes_of(study):
            steps = stats.mean(study.name, "AltUp K=2", size, "steps")
            difference = stats.difference(study, size, "loss", "AltUp K=2", self.than)
            if steps and difference and round(steps.mean) == self.steps:
                return difference
        raise SystemExit(f"{self.folder}: {self.study} has no runs of {self.steps:,} steps")


@dataclass(frozen=True)
class Line:
    """A model's runs; what the figure calls it and where; a colour readable on light and dark ground; how far it
    is moved aside, so that points do not lie on each other."""

    label: str
    place: tuple[float, float]
    colour: str
    runs: tuple[Runs, ...]
    aside: float = 1.0


LINES = [
    Line(
        "decoder, 64 wide",
        (13_300, -0.074),
        "#e08a2b",
        (
            Runs(1_200, "desk_once_1200", "desk_once_1200_runs.yaml"),
            Runs(4_800, "desk_once", "desk_once_short.yaml"),
            Runs(19_200, "desk_once", "desk_once_lengths.yaml"),
            Runs(38_400, "desk_once", "desk_once_longer.yaml", tuned=False),
        ),
        aside=0.96,
    ),
    Line("decoder, 256 wide", (1_480, -0.033), "#4b7bd1", (Runs(3_000, "decoder", "decoder_lengths.yaml"),)),
    Line(
        "decoder, 256 wide,\ntext read once",
        (700, 0.051),
        "#2f9aa0",
        (
            Runs(625, "decoder_once_short", "decoder_once_short_runs.yaml"),
            Runs(5_000, "decoder_once", "decoder_once_lengths.yaml"),
        ),
        aside=1.03,
    ),
    Line(
        "T5, 256 wide",
        (1_240, 0.03),
        "#5a9e6f",
        (Runs(2_725, "t5", "t5_lengths.yaml", tuned=False),),
        aside=0.94,
    ),
    Line(
        "T5, 256 wide,\nslow positions",
        (5_800, 0.036),
        "#5a9e6f",
        (Runs(5_000, "long", "equal-time"),),
        aside=1.06,
    ),
]
BERT = "#a06cc9"
# Their differences are far larger than the others'.
BERTS = {
    "BERT, 256 wide": Runs(4_000, "bert", "bert_models.yaml", than="Dense, AltUp's time"),
    "norms tuned": Runs(4_000, "bert_norms", "bert_norms_models.yaml", than="Dense, AltUp's time"),
    "BERT, 64 wide": Runs(3_000, "desk_bert", "desk_bert_models.yaml", than="Dense, AltUp's time"),
}
LONG_BERT = Runs(12_000, "bert_longer", "bert_longer_runs.yaml", tuned=False)


def at_better_norms() -> Difference:
    """For AltUp's 12,000 steps at width 256: AltUp with slow norms, dense with fast ones."""

    def losses(folder: str, study: str, label: str) -> list[float]:
        report = StudyReport([BENCHMARKS / "results" / folder], folder, [str(BENCHMARKS / f"{study}.yaml")])
        return report.stats.values(study, label, "small, 12,000 steps", "loss")

    ours = losses("decoder_steady", "decoder_steady_lengths", "AltUp K=2")
    return compare_means(ours, losses("decoder", "decoder_lengths", "Dense"))


def draw(axes: Any, steps: float, found: Difference, colour: str, tuned: bool = True) -> None:
    """A mean with its interval, whose ends beyond the figure are arrows; hollow if the models were tuned at
    another length."""
    low, high = found.low or 0.0, found.high or 0.0
    shown = max(low, LOWEST), min(high, HIGHEST)
    face = {} if tuned else {"markerfacecolor": "none"}
    axes.plot([steps, steps], shown, color=colour, linewidth=2)
    for end, at in zip((low, high), shown, strict=True):
        beyond = "v" if at > end else "^"
        axes.plot([steps], [at], color=colour, marker="_" if at == end else beyond, markersize=7, clip_on=False)
    axes.plot([steps], [found.mean], color=colour, marker="o", linestyle="none", zorder=3, **face)


def draw_line(axes: Any, line: Line) -> None:
    found = [(line.aside * runs.steps, runs.difference(), runs.tuned) for runs in line.runs]
    axes.plot([steps for steps, _, _ in found], [d.mean for _, d, _ in found], color=line.colour, linewidth=2)
    for steps, difference, tuned in found:
        draw(axes, steps, difference, line.colour, tuned)
    axes.text(*line.place, line.label, color=line.colour, va="center")


def draw_beyond(axes: Any, steps: int, told: str, edge: float, inwards: float, align: str) -> None:
    """An arrow to what lies beyond an edge of the figure, and beside it what that is."""
    arrow = {"arrowstyle": "->", "color": BERT, "linewidth": 2}
    axes.annotate("", (steps, edge), (steps, edge + inwards), arrowprops=arrow)
    place = (0.94 if align == "right" else 1.06) * steps
    axes.text(place, edge + inwards / 2, told, color=BERT, va="center", ha=align)


def draw_berts(axes: Any) -> None:
    found = {name: f"{runs.difference().mean:+.3f}".replace("-", "−") for name, runs in BERTS.items()}
    told = [f"{name}: {difference}" for name, difference in found.items()]
    draw_beyond(axes, 4_000, ",\n".join(told[:2]), LOWEST, 0.02, "right")
    draw_beyond(axes, 3_000, told[2], HIGHEST, -0.014, "left")
    draw(axes, 12_300, LONG_BERT.difference(), BERT, tuned=False)
    axes.text(13_100, 0.045, "BERT, 256 wide", color=BERT, va="center")


def main() -> None:
    with drawn("results", 4.0) as axes:
        axes.axhline(0, color=GREY, linewidth=1)
        axes.text(49_000, -0.002, "dense, in the\nsame time", color=GREY, va="top", ha="right")
        for line in LINES:
            draw_line(axes, line)
        colour = next(line.colour for line in LINES if line.label == "decoder, 256 wide")
        draw(axes, 11_700, at_better_norms(), colour, tuned=False)
        axes.text(11_500, -0.05, "decoder, 256 wide,\nslow norms", color=colour, va="center", ha="right")
        draw_berts(axes)
        axes.set(xscale="log", xlim=(550, 50_000), ylim=(LOWEST, HIGHEST))
        axes.set(xlabel="steps of AltUp K = 2", ylabel="loss, AltUp − dense")
        axes.set_xticks([1000, 3000, 10_000], ["1,000", "3,000", "10,000"])
        axes.set_xticks([], minor=True)


if __name__ == "__main__":
    main()

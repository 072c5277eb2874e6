"""Tables and figures of docs/results.md and of the READMEs here, from runs.csv: `python -m experiments.tables`.

A page asks for a table by a comment, which the table follows; what stood there before is replaced:

    <!-- table: FOLDER | STUDY | SIZE | BASE -->    a study's rows, compared with the row BASE
    <!-- table: FOLDER | STUDY | SIZE | BASE | paired -->    the same, seed by seed
    <!-- table: contrasts -->    the comparisons in `CONTRASTS`
    <!-- table: where-the-gain-comes-from -->    those that were written down before, by the folder's own script

Intervals are Student's at 95 %, Welch's form unless paired. Runs that diverged are counted and are in no mean.
"""

from __future__ import annotations

import csv
import gzip
import re
import runpy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from scipy import stats
from tools.figure import GREY, ROOT, drawn

HERE = Path(__file__).resolve().parent
MARKER = re.compile(r"(<!-- table: (?P<asked>.+?) -->\n)(?:\|.*\n)*")
DIGITS = {"loss": 3, "accuracy": 2}


@dataclass(frozen=True)
class Difference:
    mean: float
    low: float
    high: float

    def show(self, digits: int) -> str:
        mean, low, high = (f"{x:+.{digits}f}".replace("-", "−") for x in (self.mean, self.low, self.high))
        return f"{mean} ({low} to {high})"

    def show_short(self, digits: int) -> str:
        """Student's intervals are symmetric."""
        return f"{self.mean:+.{digits}f} ± {self.high - self.mean:.{digits}f}".replace("-", "−")


@dataclass(frozen=True)
class Row:
    """The reported runs of one model of a study, by seed."""

    label: str
    runs: dict[str, dict[str, str]]
    diverged: int

    def values(self, column: str) -> dict[str, float]:
        return {seed: float(run[column]) for seed, run in self.runs.items() if run.get(column)}

    def mean(self, column: str) -> float | None:
        values = self.values(column)
        return fmean(values.values()) if values else None

    def difference(self, base: Row, column: str, paired: bool = False) -> Difference | None:
        ours, others = self.values(column), base.values(column)
        if paired:
            seeds = sorted(ours.keys() & others.keys())
            one, other = [ours[s] for s in seeds], [others[s] for s in seeds]
        else:
            one, other = list(ours.values()), list(others.values())
        if min(len(one), len(other)) < 2:
            return None
        test = stats.ttest_rel(one, other) if paired else stats.ttest_ind(one, other, equal_var=False)
        interval = test.confidence_interval(0.95)
        return Difference(fmean(one) - fmean(other), float(interval.low), float(interval.high))


@dataclass(frozen=True)
class Contrast:
    """One line of the table of docs/results.md: a model against another, in as many steps or in as much time."""

    shown: str
    equal: str
    folder: str
    study: str
    size: str
    label: str
    base: str = "Dense"
    paired: bool = False

    def rows(self) -> tuple[Row, Row]:
        rows = read_rows(self.folder, self.study, self.size)
        return rows[self.label], rows[self.base]

    def difference(self, column: str) -> Difference | None:
        row, base = self.rows()
        return row.difference(base, column, self.paired)


STEPS = ("steps", "decoder-frontier", "decoder_once_frontier", "small")
TIME = ("time", "decoder-frontier", "decoder_once_depth", "small, 5,000 steps")
ON = ("time", "continuing-from-dense", "decoder_once_continuing", "small, 2,500 steps")
T5S = ("time", "t5-methods", "t5_lengths", "tiny, 3,000 steps")
CONTRASTS = [
    Contrast("decoder, AltUp K=2", *STEPS, "AltUp K=2"),
    Contrast("decoder, Recycled K=2", *STEPS, "Recycled K=2"),
    Contrast("decoder, AltUp K=4", *STEPS, "AltUp K=4"),
    Contrast("T5, AltUp K=2", "steps", "t5-methods", "t5_models", "tiny", "AltUp K=2"),
    Contrast("decoder, AltUp K=2", *TIME, "AltUp K=2"),
    Contrast("decoder, Recycled K=2", *TIME, "Recycled K=2"),
    Contrast("decoder, AltUp K=4", *TIME, "AltUp K=4"),
    Contrast("control: d_ff 1,024, not 768", *TIME, "Dense, d_ff 1024"),
    Contrast("control: 7 layers, not 6", *TIME, "Dense, 7 layers"),
    Contrast("control: dense, other rate", *TIME, "Dense, at 0.06"),
    Contrast("trained decoder, widened to AltUp", *ON, "AltUp K=2", "Dense, AltUp's time", paired=True),
    Contrast("T5, AltUp K=2", *T5S, "AltUp K=2"),
    Contrast("T5, Recycled K=2", *T5S, "Recycled K=2"),
    Contrast("T5, Sequence-AltUp", *T5S, "Sequence-AltUp"),
    Contrast("T5, stride-and-skip", *T5S, "Stride-and-skip"),
]
COLOURS = {"steps": "#e08a2b", "time": "#4b7bd1"}  # readable on light and dark ground


def read_rows(folder: str, study: str, size: str) -> dict[str, Row]:
    """The models of a study at one size, by label, in the order of the file."""
    found: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    diverged: dict[str, int] = defaultdict(int)
    with (HERE / folder / "runs.csv").open(newline="", encoding="utf-8") as file:
        for run in csv.DictReader(file):
            if run["use"] == "report" and (run["study"], run["size"]) == (study, size):
                runs = found[run["row"]]
                if run.get("diverged"):
                    diverged[run["row"]] += 1
                elif run["seed"] in runs:
                    raise SystemExit(f"{folder}, {study}, {run['row']}: two runs of seed {run['seed']}")
                else:
                    runs[run["seed"]] = run
    if not found:
        raise SystemExit(f"{folder}/runs.csv has no study {study!r} of size {size!r}")
    return {label: Row(label, runs, diverged[label]) for label, runs in found.items()}


def as_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown, without the columns that are empty."""
    kept = [i for i in range(len(head)) if i == 0 or any(line[i] for line in lines)]
    cells = [[line[i] for i in kept] for line in (head, *lines)]
    text = [f"| {' | '.join(line)} |\n" for line in cells]
    return "".join([text[0], f"|{'---|' * len(kept)}\n", *text[1:]])


def study_table(folder: str, study: str, size: str, base: str, paired: str = "") -> str:
    rows = read_rows(folder, study, size)
    to = base[0].lower() + base[1:]
    head = ["", "seeds", "speed", "steps", "loss", f"loss − {to} (95 %)"]
    head += ["accuracy, %", f"accuracy − {to} (95 %)"]
    lines = []
    for label, row in rows.items():
        seeds = f"{len(row.runs)}" + (f", {row.diverged} diverged" if row.diverged else "")
        speed, steps = row.mean("speed"), row.mean("steps")
        line = [label, seeds, f"{speed:.3f}" if speed else "", f"{steps:,.0f}" if steps else ""]
        for column, digits in DIGITS.items():
            mean = row.mean(column)
            found = row.difference(rows[base], column, bool(paired)) if label != base else None
            line += [
                "" if mean is None else f"{mean:.{digits}f}",
                found.show(digits + bool(paired)) if found else "",
            ]
        lines.append(line)
    return as_table(head, lines)


def contrast_table() -> str:
    head = [
        "against dense, width 256",
        "equal",
        "seeds",
        "steps",
        "FLOPs",
        "loss (95 %)",
        "accuracy, points (95 %)",
    ]
    lines = []
    for contrast in CONTRASTS:
        row, base = contrast.rows()
        line = [contrast.shown, contrast.equal, f"{len(row.runs)}"]
        line += [f"{(row.mean(c) or 0) / (base.mean(c) or 1):.2f}" for c in ("steps", "flops")]
        differences = {column: contrast.difference(column) for column in DIGITS}
        lines.append(
            [*line, *(d.show_short(DIGITS[c] + contrast.paired) if d else "" for c, d in differences.items())]
        )
    return as_table(head, lines)


def written_down_before() -> str:
    analyse = runpy.run_path(str(HERE / "where-the-gain-comes-from" / "analyse.py"))
    return str(analyse["contrasts"](analyse["finals"]())) + "\n"


OTHERS = {"contrasts": contrast_table, "where-the-gain-comes-from": written_down_before}


def fill(text: str) -> str:
    """A page with the tables that it asks for."""

    def table(match: re.Match[str]) -> str:
        asked = [part.strip() for part in match["asked"].split("|")]
        return match[1] + (OTHERS[asked[0]]() if len(asked) == 1 else study_table(*asked))

    return MARKER.sub(table, text)


def pages() -> Iterator[Path]:
    yield ROOT / "docs" / "results.md"
    yield from sorted(HERE.glob("**/*.md"))


def draw_contrasts() -> None:
    """Each difference in loss with its interval."""
    with drawn("results", 4.6) as axes:
        axes.axvline(0, color=GREY, linewidth=1)
        for line, contrast in enumerate(CONTRASTS):
            found = contrast.difference("loss")
            assert found
            colour = COLOURS[contrast.equal]
            axes.plot([found.low, found.high], [line, line], color=colour, linewidth=2.2)
            axes.plot([found.mean], [line], color=colour, marker="o")
        for equal, colour, line in (("equal steps", COLOURS["steps"], 1), ("equal time", COLOURS["time"], 6)):
            axes.text(0.088, line, equal, color=colour, ha="right", va="center")
        axes.set_yticks(range(len(CONTRASTS)), [contrast.shown for contrast in CONTRASTS])
        axes.invert_yaxis()
        axes.set_xticks([-0.08, -0.04, 0, 0.04, 0.08])
        axes.set(xlim=(-0.09, 0.09), xlabel="loss − dense's, nats a token; lines are 95 % intervals")


def draw_plateau() -> None:
    """Two optimizers, the same dense model."""
    curves = {
        "small-long-dense-adamw-rms-0.02": "AdamW-RMS, 0.02",
        "small-long-dense-adafactor-0.015": "Adafactor, 0.015",
    }
    with gzip.open(HERE / "t5-plateau" / "curves.csv.gz", "rt", newline="") as file:
        points = [row for row in csv.DictReader(file) if row["run"] in curves and row["split"] == "held_out"]
    with drawn("plateau", 3.4) as axes:
        axes.axhspan(24, 28, color=GREY, alpha=0.15, linewidth=0)
        axes.text(60, 28.6, "the plateau", color=GREY)
        for (run, label), colour in zip(curves.items(), COLOURS.values(), strict=True):
            curve = [(int(p["step"]), float(p["accuracy"])) for p in points if p["run"] == run]
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=2.2)
            axes.text(curve[-1][0] + 25, curve[-1][1], label, color=colour, va="center")
        axes.set(xlim=(0, 3150), ylim=(18, 43), xlabel="step", ylabel="held-out accuracy, %")
        axes.set_xticks(range(0, 2501, 500))


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (made := fill(text)) != text:
            page.write_text(made, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: tables made anew")
    draw_contrasts()
    draw_plateau()


if __name__ == "__main__":
    main()

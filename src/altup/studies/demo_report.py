"""What the demo found: a table, its conclusion whichever model is ahead, and the report."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

from markupsafe import Markup

from altup.core.files import atomic_write
from altup.core.hardware import processor, versions
from altup.core.text import number_of
from altup.studies.charts import Bar, Point, Series, bar_chart, line_chart, scatter_chart
from altup.studies.coefficients import block_figure
from altup.studies.demo import MODELS, TITLE, Continuation, Demo
from altup.studies.pages import Figure, render, table
from altup.studies.plots import mean_curve
from altup.studies.results import Record
from altup.studies.speed import Speed
from altup.studies.statistics import Difference, compare_means
from altup.studies.study import METRICS
from altup.studies.tables import show_difference, show_interval

SHORT = {"dense": "Dense", "altup": "AltUp", "recycled": "Recycled"}
COLOURS = {method: colour for colour, method in enumerate(MODELS)}
Records = dict[str, list[Record]]  # by method, one a seed
Speeds = dict[str, Speed]


def values(records: Records, method: str, metric: str) -> list[float]:
    """A measure of a model at the end, one number a seed."""
    return [record["measures"][metric] for record in records[method]]


def difference(records: Records, method: str, metric: str) -> Difference:
    """To dense, with what the seeds of both say about its noise."""
    return compare_means(values(records, method, metric), values(records, "dense", metric))


def scatter_of_seeds(records: Records, metric: str) -> float:
    """The furthest that two seeds of one model lie apart."""
    return max(max(found) - min(found) for method in records if (found := values(records, method, metric)))


def comparison(records: Records, speeds: Speeds) -> list[list[str]]:
    """The rows of the table, a column a model, as people read them. The first cell names the row."""
    loss, accuracy = METRICS["loss"], METRICS["accuracy"]
    others = [method for method in MODELS if method != "dense"]
    found = {metric: {m: difference(records, m, metric) for m in others} for metric in ("loss", "accuracy")}
    rows = [
        ["held-out loss", *(f"{statistics.fmean(values(records, m, 'loss')):.3f}" for m in MODELS)],
        ["  of each seed", *(" ".join(f"{v:.3f}" for v in values(records, m, "loss")) for m in MODELS)],
        ["  minus dense's", "", *(show_difference(d, loss) for d in found["loss"].values())],
        ["  95 % interval", "", *(show_interval(d, loss) for d in found["loss"].values())],
        ["held-out accuracy", *(f"{statistics.fmean(values(records, m, 'accuracy')):.2f} %" for m in MODELS)],
        ["  minus dense's", "", *(show_difference(d, accuracy) for d in found["accuracy"].values())],
        ["training speed", *("1" if m == "dense" else f"{speeds[m].relative:.2f}×" for m in MODELS)],
        ["sequences a second", *(f"{speeds[m].seq_per_s:,.0f}" for m in MODELS)],
        ["embedding parameters", *(f"{values(records, m, 'embedding_params')[0]:,}" for m in MODELS)],
        ["other parameters", *(f"{values(records, m, 'non_embedding_params')[0]:,}" for m in MODELS)],
    ]
    return [row for row in rows if any(row[1:])]  # one seed has no interval


def verdict(records: Records, speeds: Speeds) -> list[str]:
    """The conclusion in sentences, whichever model is ahead."""
    told = []
    for method in ("altup", "recycled"):
        d = difference(records, method, "loss")
        side = "lower" if d.mean <= 0 else "higher"
        begin = f"{MODELS[method]} ends with a held-out loss {abs(d.mean):.3f} {side} than dense's"
        told.append(f"{begin}, at {speeds[method].relative:.0%} of its speed: {_judge(d)}.")
    if len(records["dense"]) > 1:
        told.append(f"Two seeds of one model lie up to {scatter_of_seeds(records, 'loss'):.3f} apart.")
    if any(not _is_beyond_chance(difference(records, method, "loss")) for method in ("altup", "recycled")):
        told.append(f"More seeds tell more: --seeds {2 * len(records['dense'])} keeps these runs and adds others.")
    return told


def _is_beyond_chance(d: Difference) -> bool:
    return d.low is not None and d.high is not None and not d.low <= 0 <= d.high


def _judge(d: Difference) -> str:
    if d.low is None:
        return "one seed cannot tell it from chance"
    if not _is_beyond_chance(d):
        return f"{number_of(d.seeds[0], 'seed')} each cannot tell it from chance (zero is in the 95 % interval)"
    return f"more than chance, by {number_of(d.seeds[0], 'seed')} each (zero is outside the 95 % interval)"


def next_steps(demo: Demo) -> list[str]:
    """Commands to go on with; the last one is on a text of one's own."""
    begin = demo.sentences()[0][0]
    return [
        f'altup generate {demo.folder("altup", demo.seed)} --prompt "{begin}"',
        "altup prepare MY-TEXT.txt --out my-data",
        "altup pretrain --data my-data --method altup --k 2 --out my-run",
    ]


def write_report(demo: Demo, records: Records, speeds: Speeds, continued: list[Continuation]) -> Path:
    machine = [("processor", processor()), ("cores", str(os.cpu_count())), ("threads of a run", "1")]
    machine += [*versions().items(), ("written", time.strftime("%Y-%m-%d %H:%M %Z"))]
    blocks = {method: found[0]["coefficients"].get("blocks") for method, found in records.items()}
    first = demo.config("dense", demo.seed)
    page = render(
        "demo.html",
        title=TITLE,
        verdict=verdict(records, speeds),
        names=MODELS,
        colours=COLOURS,
        continued=continued,
        comparison=_comparison_table(demo, records, speeds),
        curves=_curves(demo, records, speeds),
        costs=_costs(records, speeds),
        coefficients=[block_figure(MODELS[method], found) for method, found in blocks.items() if found],
        facts=machine,
        demo=demo,
        next_steps=next_steps(demo),
        runs={method: demo.folder(method, demo.seed) for method in MODELS},
        config=first.to_yaml(),
    )
    atomic_write(demo.report, page)
    return demo.report


def _comparison_table(demo: Demo, records: Records, speeds: Speeds) -> Markup:
    config = demo.config("dense", demo.seed)
    head = [Markup('<span class="key c{}"></span>{}').format(COLOURS[m], name) for m, name in MODELS.items()]
    rows = [[name.replace("  ", "\u2003"), *cells] for name, *cells in comparison(records, speeds)]
    return table(
        ["", *head],
        rows,
        f"After {config.steps:,} steps of {number_of(config.batch_size, 'sequence')}; means over "
        f"{number_of(demo.runs, 'seed')}. Loss is cross-entropy in nats a token, accuracy the share of tokens "
        "predicted right from those before them. ± is the standard error over the seeds of both models, and the "
        "interval Student's.",
    )


def _curves(demo: Demo, records: Records, speeds: Speeds) -> list[Figure]:
    batch_size = demo.config("dense", demo.seed).batch_size

    def lines(place: int, seconds: bool = False) -> list[Series]:
        """A line a model, the mean of its seeds, over the steps or the seconds that they take."""
        found = []
        for method, of_seeds in records.items():
            a_step = batch_size / speeds[method].seq_per_s if seconds else 1
            mean = mean_curve([record["curves"]["held_out"] for record in of_seeds])
            found.append(
                Series(SHORT[method], [(point[0] * a_step, point[place]) for point in mean], COLOURS[method])
            )
        return found

    points = [
        Point(
            f"{SHORT[method]}, seed {seed}",
            demo.steps * batch_size / speeds[method].seq_per_s,
            record["measures"]["loss"],
            COLOURS[method],
        )
        for method, of_seeds in records.items()
        for seed, record in zip(demo.seeds, of_seeds, strict=True)
    ]
    unseen = "cross-entropy on unseen text (nats)"
    percent, many = "{:.1f} %".format, "the mean of the seeds" if demo.runs > 1 else "one seed"
    return [
        Figure(
            "Every run: its loss and its time",
            scatter_chart(points, x_label="seconds of training", y_label=unseen),
            "Down is better, left is faster. Points of one colour differ by chance alone: a difference between "
            "colours counts if it is larger than that.",
        ),
        Figure(
            "Held-out loss, step by step",
            line_chart(lines(1), x_label="step", y_label=unseen),
            f"Lower is better; {many}. The text and its order are the same for all three.",
        ),
        Figure(
            "Held-out accuracy, step by step",
            line_chart(lines(2), x_label="step", y_label="accuracy on unseen text (%)", y_format=percent),
            f"Higher is better; {many}. The loss is the steadier measure: it weighs every token by degrees.",
        ),
        Figure(
            "Held-out loss, second by second",
            line_chart(lines(1, seconds=True), x_label="seconds of training", y_label=unseen),
            "The same points over time: steps multiplied by each model's measured seconds a step. A line that "
            "ends further right belongs to a slower model; read it against dense at the same second.",
        ),
    ]


def _costs(records: Records, speeds: Speeds) -> list[Figure]:
    parameters, speed = [], []
    for method, name in MODELS.items():
        own, fast = records[method][0]["measures"], speeds[method]
        sizes = (own["non_embedding_params"], own["embedding_params"])
        parameters.append(Bar(name, sizes, f"{sum(sizes) / 1e6:.2f} M", COLOURS[method]))
        spread = "" if method == "dense" else f" ({fast.low:.2f} to {fast.high:.2f})"
        speed.append(Bar(name, (fast.relative,), f"{fast.relative:.2f}×{spread}", COLOURS[method]))
    return [
        Figure(
            "Parameters",
            bar_chart(parameters, ("layers and norms", "embedding table and output head")),
            "AltUp's extra parameters sit in the table, of which a token reads one row, and in the head. Recycled "
            "adds six numbers a layer.",
        ),
        Figure(
            "Training speed relative to dense",
            bar_chart(speed, reference=1.0),
            "Median over rounds in which the models took turns on this machine (in brackets the middle half of "
            "the rounds). At this tiny width the head weighs much; at real sizes it is a tenth for AltUp K=2.",
        ),
    ]

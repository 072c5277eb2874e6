"""The report of the demo."""

from __future__ import annotations

import os
import time
from pathlib import Path

from altup.core.files import atomic_write
from altup.studies.demo import MODELS, Demo, comparison, verdict
from altup.studies.machine import processor
from altup.studies.report import (
    Bar,
    HeatRow,
    Html,
    Series,
    bar_chart,
    code,
    facts,
    figure,
    grid,
    heat_map,
    line_chart,
    page,
    paragraph,
    section,
    table,
)
from altup.studies.runs import Run, coefficients
from altup.studies.speed import Speed

SHORT = {"dense": "Dense", "altup": "AltUp", "recycled": "Recycled"}
COLOURS = {method: colour for colour, method in enumerate(MODELS)}
STARTS = "P starts as the identity and g as ones"


def write_report(demo: Demo, runs: dict[str, Run], speeds: dict[str, Speed]) -> Path:
    html = page(
        "AltUp beside dense: the demo",
        paragraph(verdict(runs, speeds), "lead"),
        paragraph(
            "AltUp makes each token's representation twice as wide, while every layer still computes on one half "
            "of it; the other half is predicted and corrected with six learned numbers a layer. Recycled-AltUp "
            "does the same without wider embeddings. This is one seed at a very small scale: a look, not a proof. "
            "The vocabulary is the one of three tried at which AltUp gained most (docs/lab-log.md)."
        ),
        section("The comparison", _table(runs, speeds)),
        section("How they learned", _curves(runs, speeds)),
        section("What it costs", _costs(runs, speeds)),
        section("What the update rule learned", _coefficients(runs)),
        section("What was run", *_provenance(demo, runs)),
    )
    atomic_write(demo.report, html)
    return demo.report


def _table(runs: dict[str, Run], speeds: dict[str, Speed]) -> Html:
    rows = comparison(runs, speeds)
    keyed = [
        [Html(f'<span class="key c{COLOURS[method]}"></span>{row["model"]}'), *list(row.values())[1:]]
        for method, row in zip(runs, rows, strict=True)
    ]
    config = runs["dense"].config
    return table(
        [name.strip() for name in rows[0]],
        keyed,
        f"After {config.steps:,} steps of {config.batch_size} sequences. Accuracy is the share of masked tokens "
        "predicted right, given the true ones before them; loss is cross-entropy in nats a token.",
    )


def _curves(runs: dict[str, Run], speeds: dict[str, Speed]) -> Html:
    def lines(split: str, field: str, scale: float = 1.0) -> list[Series]:
        return [
            Series(SHORT[m], [(x, scale * y) for x, y in run.curve(split, field)], COLOURS[m])
            for m, run in runs.items()
        ]

    in_time = [
        Series(
            SHORT[m],
            [
                (x * run.config.batch_size / speeds[m].seq_per_s, 100 * y)
                for x, y in run.curve("validation", "accuracy")
            ],
            COLOURS[m],
        )
        for m, run in runs.items()
    ]
    percent = "{:.1f} %".format
    return grid(
        figure(
            "Held-out loss, step by step",
            line_chart(lines("validation", "loss"), x_label="step", y_label="cross-entropy on unseen text (nats)"),
            "Lower is better; the same text in the same order for all three. The loss is the steadier measure: it "
            "weighs every token by degrees.",
        ),
        figure(
            "Held-out accuracy, step by step",
            line_chart(
                lines("validation", "accuracy", 100), x_label="step", y_label="accuracy on unseen text (%)",
                y_format=percent,
            ),
            f"Higher is better. The markers between masked spans, {_markers(runs['dense']):.0%} of the targets, "
            "are learned first; what lies above that is words.",
        ),
        figure(
            "Training loss",
            line_chart(lines("train", "loss"), x_label="step", y_label="cross-entropy in training (nats)"),
            f"Each point is the mean of {runs['dense'].config.log_every} steps; lower is better.",
        ),
        figure(
            "Held-out accuracy, second by second",
            line_chart(
                in_time, x_label="seconds of training", y_label="accuracy on unseen text (%)", y_format=percent
            ),
            "The same points over time: steps multiplied by each model's measured seconds a step. A line that "
            "ends further right belongs to a slower model; read it against dense at the same second.",
        ),
    )  # fmt: skip


def _markers(run: Run) -> float:
    """The share of sentinels and eos among the targets of span corruption."""
    from altup.data.objectives import noise_counts

    objective = run.config.batches
    noise, _ = noise_counts(objective["raw_length"], objective["noise_density"], objective["mean_span"])
    return 1 - noise / objective["target_length"]


def _costs(runs: dict[str, Run], speeds: dict[str, Speed]) -> Html:
    parameters = [
        Bar(
            run.name,
            (run.non_embedding, run.embedding),
            f"{(run.embedding + run.non_embedding) / 1e6:.2f} M",
            COLOURS[m],
        )
        for m, run in runs.items()
    ]
    speed = [
        Bar(
            runs[m].name, (s.relative,),
            f"{s.relative:.2f}×" + ("" if m == "dense" else f" ({s.low:.2f} to {s.high:.2f})"), COLOURS[m],
        )
        for m, s in speeds.items()
    ]  # fmt: skip
    return grid(
        figure(
            "Parameters",
            bar_chart(parameters, ("layers and norms", "embedding table and output head")),
            "AltUp's extra parameters sit in the tables, of which a token reads one row, in the head, and in "
            "cross-attention, which reads the whole wide encoder output. Recycled adds six numbers a layer.",
        ),
        figure(
            "Training speed relative to dense",
            bar_chart(speed, reference=1.0),
            "Median over rounds in which the models took turns on this machine (in brackets the middle half of "
            "the rounds). At this tiny width small operations weigh much.",
        ),
    )


def _coefficients(runs: dict[str, Run]) -> Html:
    figures = []
    for run in runs.values():
        layers = coefficients(run)
        if not layers:
            continue
        blocks = range(len(layers[0].g))
        head = [
            "layer",
            *(f"P{_low(i)}{_low(j)}" for i in blocks for j in blocks),
            *(f"g{_low(i)}" for i in blocks),
        ]
        start = [float(i == j) for i in blocks for j in blocks] + [1.0 for _ in blocks]
        rows = [
            HeatRow(
                f"{layer.stack} {layer.layer + 1} · block {layer.active + 1}",
                [*(value for line in layer.P for value in line), *layer.g],
                start,
            )
            for layer in layers
        ]
        full = max(abs(v - n) for row in rows for v, n in zip(row.values, row.neutral, strict=True)) or 1.0
        figures.append(
            figure(
                run.name,
                heat_map(head, rows, full),
                f"{STARTS}; colour shows how far each went: blue up, orange down, deepest at {full:.2f}. "
                "“Block” is the half that the layer computed on.",
            )
        )
    formula = paragraph(
        "A layer computes y from one block, a. Every block i is predicted from all of them, x̂ᵢ = Σⱼ Pᵢⱼ xⱼ, and "
        "then corrected by what the layer found: x̂ᵢ + gᵢ (y − x̂ₐ)."
    )
    return Html(formula + "\n" + grid(*figures))


def _low(index: int) -> str:
    return "₁₂₃₄₅₆₇₈₉"[index]


def _provenance(demo: Demo, runs: dict[str, Run]) -> list[Html]:
    import torch

    from altup.training.model_card import versions

    machine = [("processor", processor()), ("cores, threads", f"{os.cpu_count()}, {torch.get_num_threads()}")]
    machine += versions().items()
    machine.append(("written", time.strftime("%Y-%m-%d %H:%M %Z")))
    dense = runs["dense"]
    again = "\n".join(
        f"altup pretrain --config {run.folder}/config.yaml --out again-{method}" for method, run in runs.items()
    )
    return [
        facts(machine),
        code(
            f"altup demo --out {demo.out} --steps {demo.steps} --seed {demo.seed}\n\n# one of them alone:\n{again}"
        ),
        paragraph("The config of the dense run; the others differ in `method` and `k` alone."),
        code(dense.config.to_yaml()),
    ]

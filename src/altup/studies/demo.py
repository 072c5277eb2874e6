"""The demo: dense, AltUp and Recycled-AltUp side by side on the English that comes with Python, and its report.

Everything goes through the code of `altup prepare` and `altup pretrain`; only the sizes are chosen here, so that
learning shows within minutes on two cores. docs/lab-log.md tells how they were chosen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from altup.core.errors import MOST_SEED, UserError, check_whole
from altup.core.files import atomic_write, check_regular, read_json
from altup.core.hardware import processor, versions
from altup.core.text import signed
from altup.studies.charts import Bar, Series, bar_chart, line_chart
from altup.studies.coefficients import block_figure
from altup.studies.jobs import objective_of
from altup.studies.pages import Figure, render, table
from altup.studies.records import describe_run
from altup.studies.results import Record, write_json
from altup.studies.speed import Speed, compare_training

if TYPE_CHECKING:
    from altup.data.prepare import Watch
    from altup.training.loop import TrainOutcome
    from altup.training.pretraining import PretrainConfig

# The models by method. The first is what the others are compared with.
MODELS = {"dense": "Dense", "altup": "AltUp K=2", "recycled": "Recycled K=2"}
SHORT = {"dense": "Dense", "altup": "AltUp", "recycled": "Recycled"}
COLOURS = {method: colour for colour, method in enumerate(MODELS)}
TITLE = "AltUp beside dense: the demo"  # by which its report is known
STEPS = 800
VOCABULARY = 2000
HELD_OUT = 0.08
MODEL = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2}
TRAINING: dict[str, Any] = {
    "batch_size": 16,
    "inputs_length": 128,
    "optimizer": "adafactor",
    "lr": 0.03,
    "schedule": "constant",
    "decay_fraction": 0.3,
    "precision": "fp32",
    "compile": False,
}
ROUNDS = 15  # of the comparison of speed, unless the training itself is shorter


@dataclass(frozen=True)
class Demo:
    """The demo in the folder `out`; what is already there with the same settings is not done again."""

    out: Path
    steps: int = STEPS
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1)
        check_whole("seed", self.seed, 0, MOST_SEED)

    def refuse_foreign(self) -> None:
        """UserError, before anything is changed, for a folder that holds something other than a demo."""
        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"{self.out} is a file; choose another folder for the demo")
        if self.report.exists() and TITLE not in check_regular(self.report).read_text(errors="replace"):
            raise UserError(f"{self.report} is not of a demo and would be written over; choose another --out")
        if self.out.exists() and not self.data.exists() and (others := sorted(self.out.iterdir())):
            raise UserError(f"{self.out} holds {others[0].name!r} and no demo; choose an empty or new folder")

    @property
    def data(self) -> Path:
        return self.out / "data"

    @property
    def report(self) -> Path:
        return self.out / "report.html"

    def folder(self, method: str) -> Path:
        return self.out / "runs" / f"{method}-{self.steps}-steps-seed-{self.seed}"

    def config(self, method: str) -> PretrainConfig:
        """The same for all, but for the method."""
        from altup.training.pretraining import PretrainConfig

        return PretrainConfig(
            data=str(self.data),
            size="tiny",
            method=method,
            k=None if method == "dense" else 2,
            model_overrides=MODEL,
            steps=self.steps,
            seed=self.seed,
            log_every=max(1, self.steps // 40),
            eval_every=max(1, self.steps // 5),
            save_every=max(1, self.steps // 3),
            keep_last=1,
            keep_best=False,
            **TRAINING,
        )

    def prepare(self, watch: Watch) -> None:
        from altup.data.embedded import Embedded
        from altup.data.prepare import Recipe, prepare

        recipe = Recipe([Embedded()], validation_fraction=HELD_OUT, vocab_size=VOCABULARY)
        prepare(self.data, recipe, watch=watch)

    def is_finished(self, method: str) -> bool:
        return (self.folder(method) / "final").is_dir()

    def train(self, method: str) -> TrainOutcome:
        """Train to the end or until a signal; resumes an earlier run."""
        from altup.training.pretraining import pretrain

        return pretrain(self.config(method), self.folder(method), resume=True)

    def compare_speed(self, say: Callable[[str], None]) -> dict[str, Speed]:
        """Speeds are measured once per folder, and kept in `speed.json`."""
        kept = self.out / "speed.json"
        rounds = min(ROUNDS, self.steps)
        settings = {"model": MODEL, "training": TRAINING, "rounds": rounds}
        if kept.exists():
            found = self._read_speeds(kept)
            if found["settings"] == settings:
                return {method: Speed(**found["speeds"][method]) for method in MODELS}
        say("comparing speed: the models take turns, so that other work on this machine slows all of them alike")
        speeds = compare_training({method: self.config(method) for method in MODELS}, rounds)
        content = {"settings": settings, "speeds": {method: asdict(speed) for method, speed in speeds.items()}}
        write_json(kept, content, indent=1)
        return speeds

    def _read_speeds(self, kept: Path) -> dict[str, Any]:
        try:
            found = read_json(kept)
            if found.keys() >= {"settings", "speeds"}:
                return dict(found)
        except (ValueError, AttributeError):
            pass
        raise UserError(f"{kept} is not of a demo; move it away, and the speeds are measured again")

    def records(self) -> dict[str, Record]:
        """The results of the finished runs."""
        return {method: describe_run(self.config(method), self.folder(method), alone=True) for method in MODELS}

    def write_report(self, records: dict[str, Record], speeds: dict[str, Speed]) -> Path:
        import torch

        dense = self.config("dense")
        machine = [("processor", processor()), ("cores, threads", f"{os.cpu_count()}, {torch.get_num_threads()}")]
        machine += [*versions().items(), ("written", time.strftime("%Y-%m-%d %H:%M %Z"))]
        blocks = {method: record["coefficients"].get("blocks") for method, record in records.items()}
        page = render(
            "demo.html",
            title=TITLE,
            verdict=verdict(records, speeds),
            comparison=_comparison_table(records, speeds, dense),
            curves=_curves(records, speeds, dense),
            costs=_costs(records, speeds),
            coefficients=[block_figure(MODELS[method], found) for method, found in blocks.items() if found],
            facts=machine,
            demo=self,
            runs={method: self.folder(method) for method in MODELS},
            config=(self.folder("dense") / "config.yaml").read_text(encoding="utf-8"),
        )
        atomic_write(self.report, page)
        return self.report


def verdict(records: dict[str, Record], speeds: dict[str, Speed]) -> str:
    """The conclusion, whichever model is ahead."""
    dense = records["dense"]["measures"]
    told = []
    for method in ("altup", "recycled"):
        own = records[method]["measures"]
        nats, points = own["loss"] - dense["loss"], own["accuracy"] - dense["accuracy"]
        told.append(
            f"{MODELS[method]} ends with a held-out loss {abs(nats):.3f} {'lower' if nats <= 0 else 'higher'} "
            f"than dense's and an accuracy {abs(points):.2f} points {'higher' if points >= 0 else 'lower'}, "
            f"at {speeds[method].relative:.0%} of its speed."
        )
    return " ".join(told)


def comparison(records: dict[str, Record], speeds: dict[str, Speed]) -> list[dict[str, str]]:
    """The rows of the table, as people read them."""
    dense = records["dense"]["measures"]
    rows = []
    for method, record in records.items():
        own, speed, base = record["measures"], speeds[method], method == "dense"
        points, nats = own["accuracy"] - dense["accuracy"], own["loss"] - dense["loss"]
        rows.append(
            {
                "model": MODELS[method],
                "held-out accuracy": f"{own['accuracy']:.2f}%",
                "vs dense": "" if base else f"{signed(points, 2)} points",
                "held-out loss": f"{own['loss']:.4f}",
                "vs dense ": "" if base else signed(nats, 4),
                "training speed": "1" if base else f"{speed.relative:.2f}×",
                "seq/s": f"{speed.seq_per_s:,.0f}",
                "embedding parameters": f"{own['embedding_params']:,}",
                "other parameters": f"{own['non_embedding_params']:,}",
            }
        )
    return rows


def _comparison_table(records: dict[str, Record], speeds: dict[str, Speed], config: PretrainConfig) -> Markup:
    rows = comparison(records, speeds)
    keyed = [
        [Markup('<span class="key c{}"></span>{}').format(COLOURS[method], row["model"]), *list(row.values())[1:]]
        for method, row in zip(records, rows, strict=True)
    ]
    return table(
        [name.strip() for name in rows[0]],
        keyed,
        f"After {config.steps:,} steps of {config.batch_size} sequences. Accuracy is the share of masked tokens "
        "predicted right, given the true ones before them; loss is cross-entropy in nats a token.",
    )


def _curves(records: dict[str, Record], speeds: dict[str, Speed], config: PretrainConfig) -> list[Figure]:
    def lines(curve: str, place: int, seconds: bool = False) -> list[Series]:
        """A line a model over the steps, or over the seconds that they take at the measured speed."""
        found = []
        for method, record in records.items():
            a_step = config.batch_size / speeds[method].seq_per_s if seconds else 1
            points = [(point[0] * a_step, point[place]) for point in record["curves"][curve]]
            found.append(Series(SHORT[method], points, COLOURS[method]))
        return found

    percent, unseen = "{:.1f} %".format, "accuracy on unseen text (%)"
    return [
        Figure(
            "Held-out loss, step by step",
            line_chart(lines("held_out", 1), x_label="step", y_label="cross-entropy on unseen text (nats)"),
            "Lower is better; the same text in the same order for all three. The loss is the steadier measure: it "
            "weighs every token by degrees.",
        ),
        Figure(
            "Held-out accuracy, step by step",
            line_chart(lines("held_out", 2), x_label="step", y_label=unseen, y_format=percent),
            f"Higher is better. The markers between masked spans, {_markers(config):.0%} of the targets, "
            "are learned first; what lies above that is words.",
        ),
        Figure(
            "Training loss",
            line_chart(lines("train", 1), x_label="step", y_label="cross-entropy in training (nats)"),
            f"Each point is the mean of {config.log_every} steps; lower is better.",
        ),
        Figure(
            "Held-out accuracy, second by second",
            line_chart(
                lines("held_out", 2, seconds=True), x_label="seconds of training", y_label=unseen, y_format=percent
            ),
            "The same points over time: steps multiplied by each model's measured seconds a step. A line that "
            "ends further right belongs to a slower model; read it against dense at the same second.",
        ),
    ]


def _markers(config: PretrainConfig) -> float:
    """The share of sentinels and eos among the targets of span corruption."""
    from altup.data.shards import TokenStream

    objective: Any = objective_of(config, TokenStream(config.data, "train").vocabulary)
    return 1 - objective.noise / objective.targets


def _costs(records: dict[str, Record], speeds: dict[str, Speed]) -> list[Figure]:
    parameters, speed = [], []
    for method, name in MODELS.items():
        own, fast = records[method]["measures"], speeds[method]
        sizes = (own["non_embedding_params"], own["embedding_params"])
        parameters.append(Bar(name, sizes, f"{sum(sizes) / 1e6:.2f} M", COLOURS[method]))
        spread = "" if method == "dense" else f" ({fast.low:.2f} to {fast.high:.2f})"
        speed.append(Bar(name, (fast.relative,), f"{fast.relative:.2f}×{spread}", COLOURS[method]))
    return [
        Figure(
            "Parameters",
            bar_chart(parameters, ("layers and norms", "embedding table and output head")),
            "AltUp's extra parameters sit in the tables, of which a token reads one row, in the head, and in "
            "cross-attention, which reads the whole wide encoder output. Recycled adds six numbers a layer.",
        ),
        Figure(
            "Training speed relative to dense",
            bar_chart(speed, reference=1.0),
            "Median over rounds in which the models took turns on this machine (in brackets the middle half of "
            "the rounds). At this tiny width small operations weigh much.",
        ),
    ]

"""The demo: dense, AltUp and Recycled-AltUp side by side on the English that comes with Python.

It is a study like any other, small enough to be learned within minutes on two cores, with a page of its own.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from altup.core.errors import MOST_SEED, UserError, check_whole
from altup.core.files import atomic_write, refuse_foreign
from altup.core.hardware import processor, versions
from altup.core.text import number_of
from altup.studies.charts import Bar, Point, Series, bar_chart, line_chart, scatter_chart
from altup.studies.figures import block_figure, mean_curve
from altup.studies.pages import Figure, macro, render, title_mark
from altup.studies.results import Record
from altup.studies.run import StudyRun
from altup.studies.scale import Scale
from altup.studies.statistics import Difference, compare_means
from altup.studies.study import METRICS, build_study
from altup.studies.tables import show_difference, show_interval

if TYPE_CHECKING:
    from altup.data.prepare import Recipe
    from altup.studies.jobs import Job

# The models by label. The first is what the others are compared with.
MODELS: dict[str, dict[str, Any]] = {
    "Dense": {"method": "dense"}, "AltUp K=2": {"method": "altup", "k": 2},
    "Recycled K=2": {"method": "recycled", "k": 2},
}  # fmt: skip
COLOURS = {label: colour for colour, label in enumerate(MODELS)}
SHORT = {label: label.removesuffix(" K=2") for label in MODELS}
TITLE = "AltUp beside dense: the demo"  # by which its report is known
STEPS = 1400
SEEDS = 2
VOCABULARY = 2000
HELD_OUT = 0.08
SHAPE = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_kv_heads": 4, "num_layers": 2}
TRAINING: dict[str, Any] = {
    "batch_size": 8,
    "inputs_length": 64,
    "optimizer": "muon",
    "lr": 0.06,
    "eval_part": "reporting",  # the recipe was chosen on the other half of the held-out text
    "precision": "fp32",
    "compile": False,
    "keep_last": 1,
    "keep_best": False,
}
SPEED = {"rounds": 15, "steps": 2, "generate_batch": 2, "generate_tokens": 4}
SENTENCES = 4
WORDS = range(10, 19)  # of a sentence
NEW_TOKENS = 20  # that a model may write to end a sentence


@dataclass(frozen=True)
class Continuation:
    """The first half of a sentence that no model has seen, how it ends, and how each model would end it."""

    begin: str
    truth: str
    by_model: dict[str, str]


@dataclass(frozen=True)
class Demo:
    """The demo in the folder `out`; what is already there with the same settings is not done again.

    Every model is trained with each of the seeds `seed`, `seed + 1`, …: what differs between seeds is noise.
    """

    out: Path
    steps: int = STEPS
    seed: int = 0
    runs: int = SEEDS

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1)
        check_whole("seeds", self.runs, 1, 100)
        check_whole("seed", self.seed, 0, MOST_SEED - self.runs)

    def refuse_foreign(self) -> None:
        """UserError, before anything is changed, for a folder that holds something other than a demo."""
        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"{self.out} is a file; choose another folder for the demo")
        refuse_foreign(self.report, [title_mark(TITLE)], "of a demo")
        if self.out.exists() and not self.data.exists() and (others := sorted(self.out.iterdir())):
            raise UserError(f"{self.out} holds {others[0].name!r} and no demo; choose an empty or new folder")

    @property
    def data(self) -> Path:
        return self.out / "data"

    @property
    def report(self) -> Path:
        return self.out / "report.html"

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.runs)

    @property
    def recipe(self) -> Recipe:
        from altup.data.embedded import Embedded
        from altup.data.prepare import Recipe

        return Recipe([Embedded()], validation_fraction=HELD_OUT, vocab_size=VOCABULARY)

    def prepare(self) -> None:
        from altup.data.prepare import prepare

        prepare(self.data, self.recipe)

    @cached_property
    def study(self) -> StudyRun:
        question = {"title": TITLE, "question": "Does AltUp beat dense?", "rows": {}}
        rows = {label: {"model": "decoder", **settings} for label, settings in MODELS.items()}
        watching = {"log_every": max(1, self.steps // 40), "save_every": -(-self.steps // 3)}
        pretrain = {**TRAINING, **watching, "steps": self.steps}
        scale = Scale(
            "demo", "smoke", sizes=["tiny"], shapes={"tiny": SHAPE}, pretrain=pretrain,
            speed={**SPEED, "rounds": min(SPEED["rounds"], self.steps)},
        )  # fmt: skip
        study = build_study("demo", {**question, "rows": rows}, "demo")
        return StudyRun([study], scale, self.out, self.out / "results", list(self.seeds), str(self.data))

    def job(self, label: str, seed: int) -> Job:
        """The run of a model."""
        trials = self.study.plan.trials
        return next(t for t in trials if t.model.row.label == label and t.seed == seed).jobs()[""]

    def folder(self, label: str, seed: int) -> Path:
        return self.job(label, seed).folder(self.out)

    @cached_property
    def records(self) -> dict[str, list[Record]]:
        """The results of the finished runs, a record a seed. UserError where one has diverged."""
        found: dict[str, list[Record]] = {}
        for label in MODELS:
            for seed in self.seeds:
                job = self.job(label, seed)
                record = self.study.known.record(job.key)
                if record is None or "diverged" in record:
                    reason = f" {record['diverged']}" if record else ""
                    raise UserError(f"{job.title} did not finish:{reason} see {self.out / 'logs'}")
                found.setdefault(label, []).append(record)
        return found

    @cached_property
    def speeds(self) -> dict[str, dict[str, float]]:
        keys = {trial.model.row.label: trial.model.speed_key for trial in self.study.plan.trials}
        return {label: (self.study.known.record(keys[label]) or {})["measures"] for label in MODELS}

    def values(self, label: str, metric: str) -> list[float]:
        """A measure of a model at the end, one number a seed."""
        return [record["measures"][metric] for record in self.records[label]]

    def difference(self, label: str, metric: str) -> Difference:
        """To dense, with what the seeds of both say about its noise."""
        return compare_means(self.values(label, metric), self.values("Dense", metric))

    def sentences(self) -> list[tuple[str, str]]:
        """First and second halves of sentences that no model has seen.

        Nobody picked them: they are the opening sentences of documents in the held-out text that have 10 to 18
        words of letters alone, taken at equal distances.
        """
        from altup.data.embedded import documents

        held_out = filter(self.recipe.held_out, documents())
        first = (re.match(r"[A-Z][A-Za-z,' -]+\.(?=\s|$)", text) for text in held_out)
        found = [words for match in first if match and len(words := match[0].split()) in WORDS]
        chosen = [found[i * len(found) // SENTENCES] for i in range(min(SENTENCES, len(found)))]
        return [(" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])) for words in chosen]

    @cached_property
    def continuations(self) -> list[Continuation]:
        """The same sentences ended by each model of the first seed, with the likeliest tokens."""
        from altup.evaluation.generate import answer_prompts

        sentences = self.sentences()
        prompts = [begin for begin, _ in sentences]
        answers = {
            label: answer_prompts(self.folder(label, self.seed), prompts, max_new_tokens=NEW_TOKENS)
            for label in MODELS
        }
        return [
            Continuation(begin, truth, {label: to_its_end(found[i][-1][0]) for label, found in answers.items()})
            for i, (begin, truth) in enumerate(sentences)
        ]

    # --- what it found ---

    def comparison(self) -> list[list[str]]:
        """The rows of the table, a column a model. The first cell names the row."""
        others = [label for label in MODELS if label != "Dense"]
        rows = []
        for metric, unit in (("loss", ""), ("accuracy", " %")):
            form, found = METRICS[metric], [self.difference(label, metric) for label in others]
            means = [f"{statistics.fmean(self.values(m, metric)):.{form.digits}f}{unit}" for m in MODELS]
            rows.append([form.title, *means])
            if metric == "loss":
                each = [" ".join(f"{v:.3f}" for v in self.values(m, metric)) for m in MODELS]
                rows.append(["  of each seed", *each])
            rows.append(["  minus dense's", "", *(show_difference(d, form) for d in found)])
            rows.append(["  95 % interval", "", *(show_interval(d, form) for d in found)])
        rows += [
            [
                "training speed",
                *("1" if m == "Dense" else f"{self.speeds[m]['relative_speed']:.2f}×" for m in MODELS),
            ],
            ["sequences a second", *(f"{self.speeds[m]['train_seq_per_s']:,.0f}" for m in MODELS)],
            ["embedding parameters", *(f"{self.values(m, 'embedding_params')[0]:,.0f}" for m in MODELS)],
            ["other parameters", *(f"{self.values(m, 'non_embedding_params')[0]:,.0f}" for m in MODELS)],
        ]
        return [row for row in rows if any(row[1:])]  # one seed has no interval

    def verdict(self) -> list[str]:
        """The conclusion in sentences, whichever model is ahead."""
        found = []
        differences = {label: self.difference(label, "loss") for label in MODELS if label != "Dense"}
        for label, d in differences.items():
            side = "lower" if d.mean <= 0 else "higher"
            speed = f"at {self.speeds[label]['relative_speed']:.0%} of its speed"
            if d.low is None:
                judged = "with one seed there is no interval"
            elif d.is_significant:
                judged = "the difference is significant (95 %)"
            else:
                judged = "the difference is not significant (95 %)"
            found.append(
                f"{label} ends with a held-out loss {abs(d.mean):.3f} {side} than dense's, {speed}: {judged}."
            )
        if self.runs > 1:
            spread = max(max(v) - min(v) for v in (self.values(label, "loss") for label in MODELS))
            found.append(f"Two seeds of one model lie up to {spread:.3f} apart.")
        if not all(d.is_significant for d in differences.values()):
            found.append(
                f"More seeds narrow the intervals: --seeds {2 * self.runs} keeps these runs and adds others."
            )
        return found

    def next_steps(self) -> list[str]:
        """Commands for someone who has seen the demo."""
        begin = self.sentences()[0][0]
        return [
            f'altup generate {self.folder("AltUp K=2", self.seed)} --prompt "{begin}"',
            "altup prepare YOUR-TEXT.txt --out my-data",
            "altup pretrain --data my-data --method altup --k 2 --out my-run",
        ]

    def write_report(self) -> None:
        blocks = {label: found[0]["coefficients"].get("blocks") for label, found in self.records.items()}
        machine = [("processor", processor()), ("cores", str(os.cpu_count())), ("threads of a run", "1")]
        page = render(
            "demo.html",
            title=TITLE,
            verdict=self.verdict(),
            colours=COLOURS,
            continued=self.continuations,
            comparison=self._comparison_table(),
            curves=self._curves(),
            costs=self._costs(),
            coefficients=[block_figure(label, found) for label, found in blocks.items() if found],
            facts=[*machine, *versions().items(), ("written", time.strftime("%Y-%m-%d %H:%M %Z"))],
            demo=self,
            next_steps=self.next_steps(),
            folders=[self.folder(label, self.seed) for label in MODELS],
        )
        atomic_write(self.report, page)

    def _comparison_table(self) -> Markup:
        head = [Markup('<span class="key c{}"></span>{}').format(COLOURS[label], label) for label in MODELS]
        rows = [[name.replace("  ", "\u2003"), *cells] for name, *cells in self.comparison()]
        caption = (
            f"After {self.steps:,} steps of {number_of(TRAINING['batch_size'], 'sequence')}; means over "
            f"{number_of(self.runs, 'seed')}. Loss is cross-entropy in nats a token, accuracy the share of tokens "
            "predicted right from those before them. ± is the standard error over the seeds of both models, and "
            "the "
            "interval Student's."
        )
        return macro("table", ["", *head], rows, caption)

    def _curves(self) -> list[Figure]:
        seconds = {label: TRAINING["batch_size"] / self.speeds[label]["train_seq_per_s"] for label in MODELS}

        def lines(place: int, unit: dict[str, float]) -> list[Series]:
            """A line a model, the mean of its seeds."""
            means = {m: mean_curve([r["curves"]["held_out"] for r in of]) for m, of in self.records.items()}
            return [
                Series(SHORT[m], [(point[0] * unit[m], point[place]) for point in mean], COLOURS[m])
                for m, mean in means.items()
            ]

        points = [
            Point(f"{SHORT[m]}, seed {seed}", self.steps * seconds[m], loss, COLOURS[m])
            for m in MODELS for seed, loss in zip(self.seeds, self.values(m, "loss"), strict=True)
        ]  # fmt: skip
        unseen, steps = "cross-entropy on unseen text (nats)", dict.fromkeys(MODELS, 1.0)
        accuracy = "accuracy on unseen text (%)"
        return [
            Figure(
                "Every run: its loss and its time",
                scatter_chart(points, x_label="seconds of training", y_label=unseen),
                "Down is better, left is faster. Points of one colour differ by chance alone.",
            ),
            Figure(
                "Held-out loss, step by step",
                line_chart(lines(1, steps), x_label="step", y_label=unseen),
                "Lower is better; means over seeds. The text and its order are the same for all three.",
            ),
            Figure(
                "Held-out accuracy, step by step",
                line_chart(lines(2, steps), x_label="step", y_label=accuracy, y_format="{:.1f} %".format),
                "Higher is better; means over seeds.",
            ),
            Figure(
                "Held-out loss, second by second",
                line_chart(lines(1, seconds), x_label="seconds of training", y_label=unseen),
                "The same points over time. A line that ends further right belongs to a slower model; compare "
                "it with "
                "dense at the same second.",
            ),
        ]

    def _costs(self) -> list[Figure]:
        parameters, speed = [], []
        for label in MODELS:
            sizes = [self.values(label, metric)[0] for metric in ("non_embedding_params", "embedding_params")]
            parameters.append(Bar(label, sizes, f"{sum(sizes) / 1e6:.2f} M", COLOURS[label]))
            own = self.speeds[label]
            spread = (
                f" ({own['relative_speed_low']:.2f} to {own['relative_speed_high']:.2f})"
                if label != "Dense"
                else ""
            )
            speed.append(
                Bar(label, [own["relative_speed"]], f"{own['relative_speed']:.2f}×{spread}", COLOURS[label])
            )
        return [
            Figure(
                "Parameters",
                bar_chart(parameters, ("layers and norms", "embedding table and output head")),
                "AltUp's extra parameters are in the table, of which a token reads one row, and in the head. "
                "Recycled "
                "adds six numbers a layer.",
            ),
            Figure(
                "Training speed relative to dense",
                bar_chart(speed, reference=1.0),
                "Median over rounds in which the models took turns on this machine (in brackets the middle half "
                "of "
                "the rounds). The smaller the model, the larger the share of the output head.",
            ),
        ]


def to_its_end(text: str) -> str:
    """A text up to the end of its first sentence, or with an ellipsis where there is none."""
    ended = re.match(r".*?[.!?](?=\s|$)", text.strip(), re.DOTALL)
    return ended[0] if ended else f"{text.strip()} …" if text.strip() else ""

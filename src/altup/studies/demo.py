"""The demo: dense, AltUp and Recycled-AltUp side by side on the English that comes with Python.

It is a study like any other, small enough to be learned within minutes on two cores, with a page of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.core.errors import MOST_SEED, UserError, check_whole
from altup.core.files import refuse_foreign
from altup.studies.pages import title_mark
from altup.studies.report import Continuation, StudyReport
from altup.studies.run import StudyRun
from altup.studies.scale import Scale
from altup.studies.study import build_study

if TYPE_CHECKING:
    from altup.data.prepare import Recipe

# The models by label. The first is what the others are compared with.
MODELS: dict[str, dict[str, Any]] = {
    "Dense": {"method": "dense"}, "AltUp K=2": {"method": "altup", "k": 2},
    "Recycled K=2": {"method": "recycled", "k": 2},
}  # fmt: skip
TITLE = "AltUp beside dense: the demo"  # by which its report is known
ABOUT = (
    "AltUp makes each token's representation twice as wide, while every layer still computes on one half of it; "
    "the "
    "other half is predicted and corrected with six learned numbers a layer. Recycled-AltUp does the same without "
    "wider embeddings. All this at a very small scale: a look, not a proof. The recipe was chosen with the "
    "dense model "
    "on one half of the held-out text; the numbers are from the other half. The vocabulary size is inherited "
    "from an "
    "earlier demo; larger ones favour AltUp."
)
MEASURES = ["loss", "accuracy", "relative_speed", "train_seq_per_s", "embedding_params", "non_embedding_params"]
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
        study = {
            "title": "Dense, AltUp and Recycled-AltUp",
            "question": "Does AltUp beat dense after the same number of steps?",
            "finding": ABOUT,
            "rows": {label: {"model": "decoder", **settings} for label, settings in MODELS.items()},
            "measures": MEASURES,
            "expect": [{"better": label, "than": "Dense", "metric": "loss"} for label in list(MODELS)[1:]],
        }
        watching = {"log_every": max(1, self.steps // 40), "save_every": -(-self.steps // 3)}
        pretrain = {**TRAINING, **watching, "steps": self.steps}
        scale = Scale(
            f"demo:steps={self.steps}", "smoke", sizes=["tiny"], shapes={"tiny": SHAPE}, pretrain=pretrain,
            speed={**SPEED, "rounds": min(SPEED["rounds"], self.steps)},
        )  # fmt: skip
        built = build_study("demo", study, "demo")
        command = f"altup demo --out {self.out} --steps {self.steps} --seed {self.seed} --seeds {self.runs}"
        results = self.out / "results"
        return StudyRun([built], scale, self.out, results, list(self.seeds), str(self.data), command=command)

    def folder(self, label: str, seed: int) -> Path:
        """Of the run of a model."""
        trials = self.study.plan.trials
        job = next(t for t in trials if t.model.row.label == label and t.seed == seed).jobs()[""]
        return job.folder(self.out)

    @cached_property
    def results(self) -> StudyReport:
        """What it found."""
        return StudyReport([self.study.results], self.study.scale.name, given=self.study.studies, title=TITLE)

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

    def next_steps(self) -> list[str]:
        """Commands for someone who has seen the demo."""
        begin = self.sentences()[0][0]
        return [
            f'altup generate {self.folder("AltUp K=2", self.seed)} --prompt "{begin}"',
            "altup prepare YOUR-TEXT.txt --out my-data",
            "altup pretrain --data my-data --method altup --k 2 --out my-run",
        ]


def to_its_end(text: str) -> str:
    """A text up to the end of its first sentence, or with an ellipsis where there is none."""
    ended = re.match(r".*?[.!?](?=\s|$)", text.strip(), re.DOTALL)
    return ended[0] if ended else f"{text.strip()} …" if text.strip() else ""

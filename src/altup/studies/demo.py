"""The demo: dense, AltUp and Recycled-AltUp side by side on the English that comes with Python.

Everything goes through the code of `altup prepare` and `altup pretrain`; only the sizes are chosen here, so that
learning shows within minutes on two cores.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.core.errors import MOST_SEED, UserError, check_whole
from altup.core.files import read_json, refuse_foreign
from altup.studies.records import describe_run
from altup.studies.results import Record, write_json
from altup.studies.speed import Speed, compare_training

if TYPE_CHECKING:
    from altup.data.prepare import Recipe, Watch
    from altup.training.loop import TrainOutcome
    from altup.training.pretraining import PretrainConfig

# The models by method. The first is what the others are compared with.
MODELS = {"dense": "Dense", "altup": "AltUp K=2", "recycled": "Recycled K=2"}
TITLE = "AltUp beside dense: the demo"  # by which its report is known
STEPS = 1400
SEEDS = 2
VOCABULARY = 2000
HELD_OUT = 0.08
MODEL = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_kv_heads": 4, "num_layers": 2}
TRAINING: dict[str, Any] = {
    "batch_size": 8,
    "inputs_length": 64,
    "optimizer": "muon",
    "lr": 0.06,
    "eval_part": "reporting",  # the recipe was chosen on the other half of the held-out text
    "precision": "fp32",
    "compile": False,
}
ROUNDS = 15  # of the comparison of speed, unless the training itself is shorter
SENTENCES = 4
WORDS = range(10, 19)  # of a sentence
NEW_TOKENS = 20  # that a model may write to end a sentence


@dataclass(frozen=True)
class Continuation:
    """The first half of a sentence that no model has seen, how it goes on, and how each model would have it."""

    begin: str
    truth: str
    by_method: dict[str, str]


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
        from altup.studies.pages import title_mark

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

    def folder(self, method: str, seed: int) -> Path:
        return self.out / "runs" / f"{method}-{self.steps}-steps-seed-{seed}"

    def config(self, method: str, seed: int) -> PretrainConfig:
        """The same for all, but for method and seed."""
        from altup.training.pretraining import PretrainConfig

        return PretrainConfig(
            data=str(self.data),
            model="decoder",
            size="tiny",
            method=method,
            k=None if method == "dense" else 2,
            model_overrides=MODEL,
            steps=self.steps,
            seed=seed,
            log_every=max(1, self.steps // 40),
            eval_every=-(-self.steps // 6),
            save_every=-(-self.steps // 3),
            keep_last=1,
            keep_best=False,
            **TRAINING,
        )

    @property
    def recipe(self) -> Recipe:
        from altup.data.embedded import Embedded
        from altup.data.prepare import Recipe

        return Recipe([Embedded()], validation_fraction=HELD_OUT, vocab_size=VOCABULARY)

    def prepare(self, watch: Watch) -> None:
        from altup.data.prepare import prepare

        prepare(self.data, self.recipe, watch=watch)

    def is_finished(self, method: str, seed: int) -> bool:
        return (self.folder(method, seed) / "final").is_dir()

    def train(self, method: str, seed: int) -> TrainOutcome:
        """Train to the end or until a signal; resumes an earlier run."""
        from altup.training.pretraining import pretrain

        return pretrain(self.config(method, seed), self.folder(method, seed), resume=True)

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
        speeds = compare_training({method: self.config(method, self.seed) for method in MODELS}, rounds)
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

    def records(self) -> dict[str, list[Record]]:
        """The results of the finished runs, a record a seed."""
        return {
            method: [
                describe_run(self.config(method, seed), self.folder(method, seed), alone=False)
                for seed in self.seeds
            ]
            for method in MODELS
        }

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

    def continuations(self) -> list[Continuation]:
        """The same sentences ended by each model of the first seed, with the likeliest tokens."""
        from altup.evaluation.generate import answer_prompts

        sentences = self.sentences()
        answers = {
            method: answer_prompts(
                self.folder(method, self.seed), [begin for begin, _ in sentences], max_new_tokens=NEW_TOKENS
            )
            for method in MODELS
        }
        return [
            Continuation(begin, truth, {method: to_its_end(found[i][-1][0]) for method, found in answers.items()})
            for i, (begin, truth) in enumerate(sentences)
        ]


def to_its_end(text: str) -> str:
    """A text up to the end of its first sentence, or with an ellipsis where there is none."""
    ended = re.match(r".*?[.!?](?=\s|$)", text.strip(), re.DOTALL)
    return ended[0] if ended else f"{text.strip()} …" if text.strip() else ""

"""The demo: dense, AltUp and Recycled-AltUp trained side by side on the English that comes with Python.

Everything goes through the code of `altup prepare` and `altup pretrain`; only the sizes are chosen here, so that
learning shows within minutes on two cores. docs/lab-log.md tells how they were chosen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.core.errors import check_whole
from altup.core.files import atomic_write
from altup.studies.runs import Run, read_run
from altup.studies.speed import Speed, compare_speed

if TYPE_CHECKING:
    from altup.data.prepare import Watch
    from altup.training.loop import TrainOutcome
    from altup.training.pretraining import PretrainConfig

# The models by method. The first is what the others are compared with.
MODELS = {"dense": "Dense", "altup": "AltUp K=2", "recycled": "Recycled K=2"}
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
        check_whole("seed", self.seed, 0)

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
        """To its end, or to where a signal stopped it; goes on from where an earlier one was stopped."""
        from altup.training.pretraining import pretrain

        return pretrain(self.config(method), self.folder(method), resume=True)

    def compare_speed(self, say: Callable[[str], None]) -> dict[str, Speed]:
        """Measured once in a folder, and then kept in `speed.json`."""
        kept = self.out / "speed.json"
        rounds = min(ROUNDS, self.steps)
        settings = {"model": MODEL, "training": TRAINING, "rounds": rounds}
        if kept.exists():
            found = json.loads(kept.read_text(encoding="utf-8"))
            if found["settings"] == settings:
                return {method: Speed(**found["speeds"][method]) for method in MODELS}
        say("comparing speed: the models take turns, so that other work on this machine slows all of them alike")
        speeds = compare_speed({method: self.config(method) for method in MODELS}, rounds)
        content = {"settings": settings, "speeds": {method: asdict(speed) for method, speed in speeds.items()}}
        atomic_write(kept, json.dumps(content, indent=1) + "\n")
        return speeds

    def runs(self) -> dict[str, Run]:
        return {method: read_run(name, self.folder(method)) for method, name in MODELS.items()}


def verdict(runs: dict[str, Run], speeds: dict[str, Speed]) -> str:
    """What to see, whichever way it went."""
    dense = runs["dense"].held_out
    told = []
    for method in ("altup", "recycled"):
        nats = runs[method].held_out["loss"] - dense["loss"]
        points = 100 * (runs[method].held_out["accuracy"] - dense["accuracy"])
        told.append(
            f"{runs[method].name} ends with a held-out loss {abs(nats):.3f} {'lower' if nats <= 0 else 'higher'} "
            f"than dense's and an accuracy {abs(points):.2f} points {'higher' if points >= 0 else 'lower'}, "
            f"at {speeds[method].relative:.0%} of its speed."
        )
    return " ".join(told)


def comparison(runs: dict[str, Run], speeds: dict[str, Speed]) -> list[dict[str, str]]:
    """The rows of the table, as people read them."""
    dense = runs["dense"].held_out
    rows = []
    for method, run in runs.items():
        last, speed, base = run.held_out, speeds[method], method == "dense"
        points, nats = 100 * (last["accuracy"] - dense["accuracy"]), last["loss"] - dense["loss"]
        rows.append(
            {
                "model": run.name,
                "held-out accuracy": f"{last['accuracy']:.2%}",
                "vs dense": "" if base else f"{points:+.2f} points".replace("-", "−"),
                "held-out loss": f"{last['loss']:.4f}",
                "vs dense ": "" if base else f"{nats:+.4f}".replace("-", "−"),
                "training speed": "1" if base else f"{speed.relative:.2f}×",
                "seq/s": f"{speed.seq_per_s:,.0f}",
                "embedding parameters": f"{run.embedding:,}",
                "other parameters": f"{run.non_embedding:,}",
            }
        )
    return rows

"""`altup finetune`: train a pretrained model on tasks, text to text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from altup.cli import run_options as run
from altup.cli.evaluate import Data, Suites

if TYPE_CHECKING:
    from altup.finetuning.config import FinetuneConfig


def command(
    out: run.Out,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A run, a model folder, or a T5 1.1 on the hub.")
    ] = None,
    task: Annotated[
        list[str] | None,
        run.option(
            "--task",
            panel="Run",
            text="A task, a suite, or your own .jsonl file or folder; with a weight: squad=2. Repeat it.",
        ),
    ] = None,
    suite: Suites = None,
    data: Data = None,
    on_error: Annotated[
        str | None,
        run.option("--on-error", panel="Run", text="Bad records: stop, or skip and count.", default="stop"),
    ] = None,
    resume: run.Resume = False,
    config: run.ConfigFile = None,
    seed: run.Seed = None,
    trackers: run.Track = None,
    push_to_hub: run.PushToHub = None,
    dropout: Annotated[
        float | None, run.option("--dropout", panel="Model", text="Dropout.", default="0.1")
    ] = None,
    steps: Annotated[int | None, run.option("--steps", panel="Training", text="Updates.", default="50000")] = None,
    batch_size: Annotated[
        int | None,
        run.option("--batch-size", panel="Training", text="Examples a step, of all processes.", default="256"),
    ] = None,
    micro_batch: run.MicroBatch = None,
    inputs_length: Annotated[
        int | None,
        run.option("--inputs-length", panel="Training", text="Most tokens of an input.", default="512"),
    ] = None,
    targets_length: Annotated[
        int | None,
        run.option("--targets-length", panel="Training", text="Most tokens of a target.", default="128"),
    ] = None,
    pack: Annotated[
        bool | None,
        run.option("--pack/--no-pack", panel="Speed", text="Several short examples in a row.", default="on"),
    ] = None,
    optimizer: run.Optimizer = None,
    lr: Annotated[
        float | None, run.option("--lr", panel="Training", text="Learning rate.", default="0.001")
    ] = None,
    schedule: Annotated[
        str | None,
        run.option("--schedule", panel="Training", text="rsqrt, constant, linear or cosine.", default="constant"),
    ] = None,
    warmup_steps: run.WarmupSteps = None,
    decay_fraction: Annotated[
        float | None,
        run.option("--decay-fraction", panel="Training", text="Last part with lr linear to 0.", default="0"),
    ] = None,
    weight_decay: run.WeightDecay = None,
    beta1: run.Beta1 = None,
    beta2: run.Beta2 = None,
    clip_norm: run.ClipNorm = None,
    precision: run.Precision = None,
    compile: run.Compile = None,
    activation_checkpointing: run.ActivationCheckpointing = None,
    deterministic: run.Deterministic = None,
    parallel: run.Parallel = None,
    log_every: run.LogEvery = None,
    eval_every: Annotated[
        int | None,
        run.option("--eval-every", panel="Watching", text="Steps between evaluations.", default="1000"),
    ] = None,
    eval_limit: Annotated[
        int | None, run.option("--eval-limit", panel="Watching", text="Held-out examples a split.", default="all")
    ] = None,
    eval_batch_size: Annotated[
        int | None,
        run.option("--eval-batch-size", panel="Watching", text="Examples decoded together.", default="128"),
    ] = None,
    save_every: Annotated[
        int | None,
        run.option("--save-every", panel="Watching", text="Steps between checkpoints.", default="as --eval-every"),
    ] = None,
    keep_last: run.KeepLast = None,
    keep_best: run.KeepBest = None,
) -> None:
    """Fine-tune a model. Stop it with Ctrl-C or SIGTERM: it saves (exit code 75) and goes on with --resume.

    The defaults are the paper's recipe: Adafactor at a constant 0.001, dropout 0.1, batch 256, 50,000 steps.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    for name in ("out", "resume", "config", "push_to_hub", "task", "suite"):
        given.pop(name, None)

    from altup.data.tasks.registry import check_suite
    from altup.finetuning.finetune import finetune

    if task or suite:
        given["tasks"] = [*map(check_suite, suite or ()), *(task or ())]
    outcome = finetune(merged_config(out, resume, config, given), out, resume, push_to_hub)
    scores = (
        f"scores are in {out / 'README.md'}" if (out / "evaluation").exists() else "nothing was held out to score"
    )
    run.tell(outcome, "finetune", out, f"the model is in {out / 'final'}, {scores}")


def merged_config(out: Path, resume: bool, file: Path | None, flags: dict[str, Any]) -> FinetuneConfig:
    """Later settings win."""
    from altup.finetuning.config import FinetuneConfig

    values: dict[str, Any] = {}
    for source in run.settings(out, resume, file, flags):
        values |= source
    return FinetuneConfig.from_dict(values, str(file or "config"))

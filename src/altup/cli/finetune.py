"""`altup finetune`: train a pretrained model on tasks, text to text."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from altup.cli.options import ConfigFile, Out, PushToHub, Resume, Suites, tell, with_settings
from altup.finetuning.config import FinetuneConfig


@with_settings(FinetuneConfig)
def command(
    out: Out,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A run, a model folder, or a name on the hub."),
    ] = None,
    suite: Suites = None,
    resume: Resume = False,
    config: ConfigFile = None,
    push_to_hub: PushToHub = None,
    **settings: Any,
) -> None:
    """Fine-tune a model. Stop it with Ctrl-C or SIGTERM: it saves (exit code 75) and continues with --resume.

    Takes T5s and other sequence-to-sequence models, causal models and encoders, altup's and Hugging Face's,
    widened or not. An encoder gets a head for the labels or the score of its tasks; the others learn text to text.

    The defaults are the paper's recipe: Adafactor at a constant 0.001, dropout 0.1, batch 256, 50,000 steps.
    Models that are no T5s have AdamW at a constant 0.0001 instead.
    """
    from altup.core.console import outlive_stdout
    from altup.data.tasks.registry import check_suite
    from altup.finetuning.finetune import finetune
    from altup.training.run_folder import RunFolder

    outlive_stdout()
    if model:
        settings["model"] = model
    if suite:
        settings["tasks"] = [*map(check_suite, suite), *settings.get("tasks", ())]
    resolved = FinetuneConfig.resolve(RunFolder(out).saved_settings(resume), config, settings)
    outcome = finetune(resolved, out, resume, push_to_hub)
    scores = f"scores are in {out / 'README.md'}" if outcome.evaluation else "nothing was scored"
    tell(outcome, "finetune", out, f"the model is in {out / 'final'}, {scores}")

"""The options of every verb that trains: each sets the field of the run's config that bears its name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from altup.core.errors import UserError
from altup.core.text import number_of
from altup.training.preemption import STOPPED

if TYPE_CHECKING:
    from altup.training.loop import TrainOutcome


def option(name: str, *, panel: str, text: str, default: str = "") -> Any:
    """An option that is None unless given; `default` says what the config then takes."""
    text = f"{text} Default: {default}." if default else text
    return typer.Option(name, help=text, rich_help_panel=panel, show_default=False)


Out = Annotated[Path, option("--out", panel="Run", text="Folder of the run.")]
Resume = Annotated[
    bool,
    option("--resume", panel="Run", text="Go on from the newest whole checkpoint in --out, if there is one."),
]
ConfigFile = Annotated[
    Path | None, option("--config", panel="Run", text="YAML with the names of a saved config.yaml; flags win.")
]
Seed = Annotated[
    int | None, option("--seed", panel="Run", text="Seed of weights, data order and dropout.", default="0")
]
PushToHub = Annotated[
    str | None,
    option("--push-to-hub", panel="Run", text="Upload the final model as this Hugging Face repository."),
]
Track = Annotated[
    list[str] | None,
    option("--track", panel="Run", text="tensorboard (default if installed), wandb, trackio or none. Repeat it."),
]
Overrides = Annotated[
    list[str] | None, option("--set", panel="Model", text="Any field of the model's config: --set d_ff=1024.")
]

Steps = Annotated[int | None, option("--steps", panel="Training", text="Updates.", default="10000")]
BatchSize = Annotated[
    int | None, option("--batch-size", panel="Training", text="Examples a step, of all processes.", default="128")
]
MicroBatch = Annotated[
    int | None,
    option(
        "--micro-batch", panel="Training", text="Examples a forward pass, of all processes.", default="the batch"
    ),
]
Optimizer = Annotated[
    str | None, option("--optimizer", panel="Training", text="adafactor (default), adamw, adamw-rms or muon.")
]
Lr = Annotated[
    float | None,
    option("--lr", panel="Training", text="Learning rate; for rsqrt its numerator.", default="by optimizer"),
]
Schedule = Annotated[
    str | None,
    option("--schedule", panel="Training", text="rsqrt, constant, linear or cosine.", default="by optimizer"),
]
WarmupSteps = Annotated[int | None, option("--warmup-steps", panel="Training", text="Steps before the decline.")]
DecayFraction = Annotated[
    float | None,
    option("--decay-fraction", panel="Training", text="Last part of the run with lr linear to 0. [0.3 for rsqrt]"),
]
WeightDecay = Annotated[
    float | None, option("--weight-decay", panel="Training", text="Decay of matrices (adamw).")
]
Beta1 = Annotated[
    float | None, option("--beta1", panel="Training", text="Fading of the mean gradient (adamw).", default="0.9")
]
Beta2 = Annotated[
    float | None,
    option("--beta2", panel="Training", text="Fading of the mean square gradient (adamw).", default="0.999"),
]
ClipNorm = Annotated[
    float | None, option("--clip-norm", panel="Training", text="Bound of the gradient's norm.", default="none")
]

Precision = Annotated[
    str | None,
    option(
        "--precision", panel="Speed", text="bf16 (float32 masters) or fp32.", default="bf16 on GPUs, else fp32"
    ),
]
Compile = Annotated[
    bool | None, option("--compile/--no-compile", panel="Speed", text="torch.compile on GPUs.", default="on")
]
ActivationCheckpointing = Annotated[
    bool | None,
    option(
        "--activation-checkpointing/--no-activation-checkpointing", panel="Speed", text="Trade time for memory."
    ),
]
Deterministic = Annotated[
    bool | None,
    option("--deterministic/--no-deterministic", panel="Speed", text="The same bits every time.", default="off"),
]
Parallel = Annotated[
    str | None,
    option("--parallel", panel="Speed", text="ddp or fsdp, for several processes (torchrun).", default="ddp"),
]

LogEvery = Annotated[
    int | None, option("--log-every", panel="Watching", text="Steps between records.", default="50")
]
EvalEvery = Annotated[
    int | None, option("--eval-every", panel="Watching", text="Steps between evaluations.", default="500")
]
SaveEvery = Annotated[
    int | None, option("--save-every", panel="Watching", text="Steps between checkpoints.", default="1000")
]
KeepLast = Annotated[
    int | None, option("--keep-last", panel="Watching", text="Newest checkpoints to keep.", default="2")
]
KeepBest = Annotated[
    bool | None,
    option("--keep-best/--no-keep-best", panel="Watching", text="Keep the best one too.", default="on"),
]


def read_overrides(pairs: list[str]) -> dict[str, Any]:
    """`["d_ff=1024"]` -> {"d_ff": 1024}."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--set {pair}: expected NAME=VALUE, for example --set d_ff=1024")
        try:
            found[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(f"--set {pair}: {value!r} is not a value; quote text that looks like YAML") from None
    return found


def read_trackers(names: list[str] | None) -> list[str]:
    """The trackers to use: TensorBoard where it is installed, unless others are named."""
    if names is None:
        from importlib.util import find_spec

        return ["tensorboard"] if find_spec("tensorboard") else []
    return names


def settings(out: Path, resume: bool, file: Path | None, flags: dict[str, Any]) -> list[dict[str, Any]]:
    """What a run is told, the weakest first: how it was started (when it goes on), the file, the flags."""
    from altup.training.config import read_yaml
    from altup.training.run_folder import RunFolder

    saved = RunFolder(out).config
    told = [read_yaml(saved) if resume and saved.exists() else {}, read_yaml(file) if file else {}, flags]
    if "trackers" in flags or not any("trackers" in source for source in told):
        told.append({"trackers": read_trackers(flags.get("trackers"))})
    for source in told:
        source.pop("batches", None)  # what the data says of itself, asked anew at every start
    return told


def tell(outcome: TrainOutcome, verb: str, out: Path, finished: str) -> None:
    """How the run ended, once, however many processes there are; one that was stopped exits with STOPPED."""
    from altup.training.model_card import resume_command

    skipped = f" ({outcome.skipped:,} skipped: gradients that are not finite)" if outcome.skipped else ""
    if outcome.finished:
        text = f"finished {number_of(outcome.step, 'step')}{skipped}; {finished}"
    else:
        again = f"Go on with:\n  {resume_command(verb, out)}"
        text = f"stopped after step {outcome.step:,}{skipped}; everything is saved. {again}"
    if os.environ.get("RANK", "0") == "0":
        typer.echo(text)
    if not outcome.finished:
        raise typer.Exit(STOPPED)

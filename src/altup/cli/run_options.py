"""The options of every verb that trains: each sets the field of the run's config that bears its name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from altup.errors import UserError


def _option(*names: str, panel: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


Out = Annotated[Path, _option("--out", panel="Run", text="Folder of the run.")]
Resume = Annotated[
    bool,
    _option("--resume", panel="Run", text="Go on from the newest whole checkpoint in --out, if there is one."),
]
ConfigFile = Annotated[
    Path | None, _option("--config", panel="Run", text="YAML with the names of a saved config.yaml; flags win.")
]
Seed = Annotated[int | None, _option("--seed", panel="Run", text="Seed of weights, data order and dropout. [0]")]
PushToHub = Annotated[
    str | None,
    _option("--push-to-hub", panel="Run", text="Upload the final model as this Hugging Face repository."),
]
Track = Annotated[
    list[str] | None,
    _option("--track", panel="Run", text="tensorboard (default if installed), wandb, trackio or none. Repeat it."),
]
Overrides = Annotated[
    list[str] | None, _option("--set", panel="Model", text="Any field of the model's config: --set d_ff=1024.")
]

Steps = Annotated[int | None, _option("--steps", panel="Training", text="Updates. [10000]")]
BatchSize = Annotated[
    int | None, _option("--batch-size", panel="Training", text="Examples a step, of all processes. [128]")
]
MicroBatch = Annotated[
    int | None,
    _option("--micro-batch", panel="Training", text="Examples a forward pass, of all processes. [the batch]"),
]
Optimizer = Annotated[
    str | None, _option("--optimizer", panel="Training", text="adafactor (default), adamw or adamw-rms.")
]
Lr = Annotated[
    float | None, _option("--lr", panel="Training", text="Learning rate; for rsqrt its numerator. [by optimizer]")
]
Schedule = Annotated[
    str | None, _option("--schedule", panel="Training", text="rsqrt, constant, linear or cosine. [by optimizer]")
]
WarmupSteps = Annotated[int | None, _option("--warmup-steps", panel="Training", text="Steps before the decline.")]
DecayFraction = Annotated[
    float | None,
    _option(
        "--decay-fraction", panel="Training", text="Last part of the run with lr linear to 0. [0.3 for rsqrt]"
    ),
]
WeightDecay = Annotated[
    float | None, _option("--weight-decay", panel="Training", text="Decay of matrices (adamw).")
]
ClipNorm = Annotated[
    float | None, _option("--clip-norm", panel="Training", text="Bound of the gradient's norm. [none]")
]

Precision = Annotated[
    str | None, _option("--precision", panel="Speed", text="bf16 (float32 masters) or fp32. [bf16]")
]
Compile = Annotated[
    bool | None, _option("--compile/--no-compile", panel="Speed", text="torch.compile on GPUs. [on]")
]
ActivationCheckpointing = Annotated[
    bool | None,
    _option(
        "--activation-checkpointing/--no-activation-checkpointing", panel="Speed", text="Trade time for memory."
    ),
]
Deterministic = Annotated[
    bool | None,
    _option("--deterministic/--no-deterministic", panel="Speed", text="The same bits every time. [off]"),
]
Parallel = Annotated[
    str | None, _option("--parallel", panel="Speed", text="ddp or fsdp, for several processes (torchrun). [ddp]")
]

LogEvery = Annotated[int | None, _option("--log-every", panel="Watching", text="Steps between records. [50]")]
EvalEvery = Annotated[
    int | None, _option("--eval-every", panel="Watching", text="Steps between evaluations. [500]")
]
SaveEvery = Annotated[
    int | None, _option("--save-every", panel="Watching", text="Steps between checkpoints. [1000]")
]
KeepLast = Annotated[int | None, _option("--keep-last", panel="Watching", text="Newest checkpoints to keep. [2]")]
KeepBest = Annotated[
    bool | None, _option("--keep-best/--no-keep-best", panel="Watching", text="Keep the best one too. [on]")
]


def read_overrides(pairs: list[str]) -> dict[str, Any]:
    """`["d_ff=1024"]` -> {"d_ff": 1024}."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--set {pair}: expected NAME=VALUE, for example --set d_ff=1024")
        found[name.strip()] = yaml.safe_load(value)
    return found


def read_trackers(names: list[str] | None) -> list[str]:
    """The trackers to use: TensorBoard where it is installed, unless others are named."""
    if names is None:
        from importlib.util import find_spec

        return ["tensorboard"] if find_spec("tensorboard") else []
    return [name for name in names if name != "none"]

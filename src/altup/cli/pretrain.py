"""`altup pretrain`: train a T5, BERT or decoder by its own objective on prepared data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from altup.cli import run_options as run
from altup.cli.options import Experts, ExtraLayers, K, Method, Model, Size, Stride
from altup.core.errors import UserError

if TYPE_CHECKING:
    from altup.training.pretraining import PretrainConfig


def command(
    out: run.Out,
    data: Annotated[str | None, run.option("--data", panel="Run", text="Folder made by `altup prepare`.")] = None,
    resume: run.Resume = False,
    config: run.ConfigFile = None,
    seed: run.Seed = None,
    trackers: run.Track = None,
    push_to_hub: run.PushToHub = None,
    model: Model = None,
    size: Size = None,
    method: Method = None,
    k: K = None,
    stride: Stride = None,
    experts: Experts = None,
    extra_layers: ExtraLayers = None,
    model_overrides: run.Overrides = None,
    dropout: Annotated[float | None, run.option("--dropout", panel="Model", text="Dropout.", default="0")] = None,
    steps: run.Steps = None,
    batch_size: run.BatchSize = None,
    micro_batch: run.MicroBatch = None,
    inputs_length: Annotated[
        int | None,
        run.option("--inputs-length", panel="Training", text="Input tokens of an example.", default="512"),
    ] = None,
    optimizer: run.Optimizer = None,
    lr: run.Lr = None,
    schedule: run.Schedule = None,
    warmup_steps: run.WarmupSteps = None,
    decay_fraction: run.DecayFraction = None,
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
    eval_every: run.EvalEvery = None,
    eval_sequences: Annotated[
        int | None, run.option("--eval-sequences", panel="Watching", text="Held-out sequences.", default="1024")
    ] = None,
    save_every: run.SaveEvery = None,
    keep_last: run.KeepLast = None,
    keep_best: run.KeepBest = None,
) -> None:
    """Pretrain a model: t5 by span corruption, bert by masked and decoder by causal language modelling.

    Stop it with Ctrl-C or SIGTERM: it saves (exit code 75) and goes on with --resume.

    Several processes: torchrun --nproc-per-node 8 -m altup pretrain …
    """
    given = {name: value for name, value in locals().items() if value is not None}
    for name in ("out", "resume", "config", "push_to_hub"):
        given.pop(name, None)
    if "model_overrides" in given:
        given["model_overrides"] = run.read_overrides(given["model_overrides"])

    from altup.training.pretraining import example_command, pretrain

    resolved = merged_config(out, resume, config, given)
    outcome = pretrain(resolved, out, resume, push_to_hub)
    example = example_command(resolved.model, out)
    run.tell(outcome, "pretrain", out, f"the model is in {out / 'final'}. Try it:\n  {example}")


def merged_config(out: Path, resume: bool, file: Path | None, flags: dict[str, Any]) -> PretrainConfig:
    """Later settings win; a method replaces the earlier one together with its k, stride and experts."""
    from altup.training.pretraining import PretrainConfig

    values: dict[str, Any] = {}
    for source in run.settings(out, resume, file, flags):
        if "method" in source:
            values = {name: value for name, value in values.items() if name not in ("k", "stride", "experts")}
        of_source = source.get("model_overrides") or {}
        if not isinstance(of_source, dict):
            raise UserError(f"model_overrides={of_source!r}: expected `name: value` pairs")
        overrides = {**(values.get("model_overrides") or {}), **of_source}
        values = {**values, **source, "model_overrides": overrides}
    return PretrainConfig.from_dict(values, str(file or "config"))

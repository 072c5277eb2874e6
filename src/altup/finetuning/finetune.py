"""Fine-tuning: a pretrained model, a mixture of tasks, the one training loop, and scores along the way."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.core.text import number_of
from altup.finetuning.config import FinetuneConfig
from altup.training.config import warn_of_epochs

if TYPE_CHECKING:
    import torch

    from altup.evaluation.evaluate import HeldOutTask
    from altup.evaluation.scores import TaskScore
    from altup.training.engine import Engine
    from altup.training.loop import TrainOutcome
    from altup.training.metrics import Evaluate
    from altup.training.parallel import ProcessGroup
    from altup.training.run_folder import RunFolder


def finetune(
    config: FinetuneConfig, out: str | Path, resume: bool = False, push_to_hub: str | None = None
) -> TrainOutcome:
    """Train as `config` says in the folder `out`, under `torchrun` with the other processes.

    Args:
        config: Model, tasks and how to train.
        out: The folder of the run.
        resume: Go on from the newest whole checkpoint in `out`, if there is one.
        push_to_hub: A Hugging Face repository to upload the final model to.

    Returns:
        How the run ended: `finished`, `step`, `evaluation` (the last scores) and `skipped`.

    Examples:
        >>> import altup
        >>> config = altup.FinetuneConfig(model="runs/altup", tasks=["desks"], steps=200)
        >>> outcome = altup.finetune(config, "runs/desks")  # doctest: +SKIP
    """
    from altup.core.pretrained import load_tokenizer
    from altup.core.runs import find_model
    from altup.data.bad_input import BadInput
    from altup.evaluation.loading import check_vocabulary
    from altup.evaluation.scores import suites_of
    from altup.finetuning.mixture import describe_held_out, load_data
    from altup.training.loop import Loop
    from altup.training.model_card import create_repository, upload, write_card
    from altup.training.parallel import join_process_group
    from altup.training.run_folder import RunFolder

    with join_process_group() as process_group:
        folder = RunFolder(Path(out))
        say = _say if process_group.is_first else lambda text: None
        if process_group.is_first and push_to_hub:
            create_repository(push_to_hub)
        checkpoint = folder.newest_checkpoint(process_group)
        place = str(checkpoint) if checkpoint else find_model(config.model)
        tokenizer = load_tokenizer(place)
        bad_input = BadInput(config.on_error)
        packing = choose_packing(place, config, process_group.device) if config.pack else None
        if config.pack and packing is None:
            say("strided and pooled layers would mix the examples of a row: they are padded, not packed")
            config = replace(config, pack=False)
        data = load_data(config, tokenizer, bad_input, say, packing)
        if left_out := bad_input.summary():
            say(f"left out: {left_out}")
        config = replace(config, batches=data.mixture.describe())
        names = [held.task.name for held in data.held_out]

        def afterwards(outcome: TrainOutcome) -> None:
            described = (
                f"{config.model} fine-tuned for {number_of(outcome.step, 'step')} at batch {config.batch_size} "
                f"on {', '.join(config.tasks)} ({number_of(data.mixture.sequences_per_epoch, 'example')})."
            )
            example = shlex.join(["altup", "evaluate", str(folder.path), "--task", (names or config.tasks)[0]])
            title = f"{Path(config.model).name} on {', '.join(config.tasks)}"
            write_card(folder, config, title=title, data=described, verb="finetune", example=example)

        # The loop is not kept: DDP must be gone before its process group is, or their ends wait for each other.
        outcome = Loop(
            config=config,
            folder=folder,
            process_group=process_group,
            batches=data.mixture,
            build_model=lambda checkpoint: check_vocabulary(build_model(config, place, checkpoint), tokenizer),
            make_evaluate=make_evaluate(config, data.held_out, tokenizer, folder, process_group)
            if names
            else None,
            tokenizer=tokenizer,
            introduction=_introduction(config, data.mixture),
            score=lambda values: values["score"],
            also_best=[*suites_of(names), *names],
            yardstick=describe_held_out(data.held_out, config),
            saves_first=True,
            afterwards=afterwards,
        ).run(resume)
        if process_group.is_first and push_to_hub and outcome.finished:
            upload(folder, push_to_hub)
    return outcome


def build_model(config: FinetuneConfig, place: str, checkpoint: Path | None = None) -> torch.nn.Module:
    """The model at `place`, ours or converted to ours, or that of a checkpoint; float32, with dropout."""
    import torch
    from transformers.utils import logging

    from altup.core.pretrained import load_model
    from altup.models.t5.config import AltUpT5Config
    from altup.models.t5.convert import from_hugging_face
    from altup.models.t5.model import AltUpT5ForConditionalGeneration
    from altup.models.upcycling import T5S, load_pretrained

    logging.disable_progress_bar()
    if checkpoint is not None:
        resumed: torch.nn.Module = load_model(AltUpT5ForConditionalGeneration, checkpoint, dtype=torch.float32)
        return resumed
    found: Any = load_pretrained(place, only=T5S)
    if not isinstance(found, AltUpT5ForConditionalGeneration):
        found = from_hugging_face(found)
    fields = {**found.config.to_dict(), "dropout_rate": config.dropout, "z_loss": config.z_loss}
    model = AltUpT5ForConditionalGeneration(AltUpT5Config(**{**fields, "dtype": "float32"}))
    model.load_state_dict(found.state_dict())
    model.generation_config = found.generation_config
    return model


def choose_packing(place: str, config: FinetuneConfig, device: torch.device) -> str | None:
    """The layout of packed rows for the model at `place`, or None for one that would mix their examples.

    Wide rows have more shapes, and a deterministic run compiles its layers for each.
    """
    import altup.models  # noqa: F401  registers our configs
    from altup.core.pretrained import load_config
    from altup.kernels.attention import WIDTHS
    from altup.kernels.launch import runs_triton

    model = load_config(place)
    if getattr(model, "sequence", "none") != "none":
        return None
    by_kernels = runs_triton(device) and config.precision == "bf16" and getattr(model, "d_kv", None) in WIDTHS
    return "wide" if by_kernels and not config.deterministic else "narrow"


def make_evaluate(
    config: FinetuneConfig,
    held_out: list[HeldOutTask],
    tokenizer: Any,
    folder: RunFolder,
    process_group: ProcessGroup,
) -> Callable[[Engine], Evaluate]:
    """The loop's callback: every task's score, the suites' means, and `score`, the mean of all tasks.

    Predictions and scores go to `evaluation/step-N` in the run's folder.
    """
    from altup.evaluation.evaluate import decode_task, score_decoded
    from altup.evaluation.scores import score_suites, summarise, write_scores
    from altup.training.metrics import all_or_none

    def make(engine: Engine) -> Evaluate:
        def evaluate(model: torch.nn.Module, step: int) -> dict[str, float]:
            place = folder.path / "evaluation" / f"step-{step}"
            scored = model_to_score(model, low_precision=config.precision == "bf16")
            decoded = [
                decode_task(
                    scored,
                    tokenizer,
                    held,
                    config.inputs_length,
                    config.targets_length,
                    batch_size=config.eval_batch_size,
                    autocast=engine.autocast,
                    peers=process_group if process_group.world_size > 1 else None,
                )
                for held in held_out
            ]
            with all_or_none(process_group):
                out = place if process_group.is_first else None
                if out:
                    place.parent.mkdir(exist_ok=True)  # not its parents: a run that was removed must not come back
                scores: list[TaskScore] = [score_decoded(one, out) for one in decoded]
                if process_group.is_first:
                    write_scores(place, summarise(scores, f"step-{step}"))
            values = {"score": sum(s.score for s in scores) / len(scores)}
            values |= {suite.suite: suite.score for suite in score_suites(scores)}
            return values | {s.task: s.score for s in scores}

        return evaluate

    return make


def model_to_score(model: torch.nn.Module, low_precision: bool) -> Any:
    """`model`, or a copy of its present weights that computes the same.

    Sharded weights are gathered, because processes that decode take different numbers of steps (a collective:
    every process must call it). With `low_precision`, for a run under bf16 autocast, weights are rounded once
    instead of in every step of every answer.
    """
    import torch
    from torch.distributed.tensor import DTensor

    from altup.evaluation.decoding import round_weights
    from altup.models.t5.model import AltUpT5ForConditionalGeneration
    from altup.training.parallel import full_tensor

    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if not sharded and not low_precision:
        return model
    trained: Any = model
    with torch.device("meta"):
        copy: Any = AltUpT5ForConditionalGeneration(trained.config)
    copy.load_state_dict({name: full_tensor(tensor) for name, tensor in model.state_dict().items()}, assign=True)
    copy.generation_config = trained.generation_config
    if low_precision:
        round_weights(copy, torch.bfloat16)
    return copy.eval()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _introduction(config: FinetuneConfig, mixture: Any) -> list[str]:
    """The run that is about to start, on one line, and what may not be meant."""
    parts = ", ".join(
        f"{task.name} {share / sum(mixture.shares):.1%}"
        for task, share in zip(mixture.tasks, mixture.shares, strict=True)
    )
    epochs = config.steps * config.batch_size / mixture.sequences_per_epoch
    lines = [
        f"{config.model}: {number_of(config.steps, 'step')} of {number_of(config.batch_size, 'example')}, "
        f"{epochs:,.2f} epochs of {mixture.sequences_per_epoch:,}{', packed' if config.pack else ''}; "
        f"{parts}; {config.precision}",
        *warn_of_epochs(epochs),
    ]
    assert config.save_every is not None
    if config.keep_best and config.eval_every % config.save_every:
        both = f"eval_every={config.eval_every}, save_every={config.save_every}"
        lines.append(f"{both}: only steps that are both measured and saved can be kept as the best")
    return lines

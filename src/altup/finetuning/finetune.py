"""Fine-tuning: a pretrained model, a mixture of tasks, the one training loop, and scores along the way."""

from __future__ import annotations

import functools
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
    from altup.finetuning.learning import Learning
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
    from altup.core.runs import find_model
    from altup.data.bad_input import BadInput
    from altup.evaluation.loading import check_vocabulary
    from altup.evaluation.scores import suites_of
    from altup.finetuning.learning import learning_of
    from altup.finetuning.mixture import describe_held_out, load_data
    from altup.training.loop import Loop
    from altup.training.model_card import create_repository, upload, write_card
    from altup.training.parallel import join_process_group
    from altup.training.run_folder import RunFolder
    from altup.transformers_hooks import is_widened

    with join_process_group() as process_group:
        folder = RunFolder(Path(out))
        say = _say if process_group.is_first else lambda text: None
        if process_group.is_first and push_to_hub:
            create_repository(push_to_hub)
        checkpoint = folder.newest_checkpoint(process_group)
        place = str(checkpoint) if checkpoint else find_model(config.model)
        config = config.for_model(place)
        learning = learning_of(config, place)
        tokenizer, kind = learning.answering.tokenizer, learning.answering.kind
        bad_input = BadInput(config.on_error)
        packing = functools.partial(learning.packing, process_group.device, say) if config.pack else None
        data = load_data(config, learning, bad_input, say, packing)
        if left_out := bad_input.summary():
            say(f"skipped: {left_out}")
        config = replace(config, batches=data.mixture.describe(), pack=data.mixture.packs)
        names = [held.task.name for held in data.held_out]

        def afterwards(outcome: TrainOutcome) -> None:
            described = (
                f"{config.model} fine-tuned for {number_of(outcome.step, 'step')} at batch {config.batch_size} "
                f"on {', '.join(config.tasks)} ({number_of(data.mixture.sequences_per_epoch, 'example')})."
            )
            example = shlex.join(["altup", "evaluate", str(folder.path), "--task", (names or config.tasks)[0]])
            title = f"{Path(config.model).name} on {', '.join(config.tasks)}"
            write_card(
                folder, config, title=title, data=described, verb="finetune", example=example, model=kind,
                auto_class=learning.auto_class, widened=is_widened(learning.answering.config),
            )  # fmt: skip

        outcome = Loop(
            config=config,
            folder=folder,
            process_group=process_group,
            batches=data.mixture,
            build_model=lambda checkpoint: check_vocabulary(learning.build(checkpoint), tokenizer),
            make_evaluate=make_evaluate(learning, data.held_out, folder, process_group) if names else None,
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


def make_evaluate(
    learning: Learning,
    held_out: list[HeldOutTask],
    folder: RunFolder,
    process_group: ProcessGroup,
) -> Callable[[Engine], Evaluate]:
    """The loop's callback: every task's score, the suites' means, and `score`, the mean of all tasks.

    Predictions and scores go to `evaluation/step-N` in the run's folder.
    """
    from altup.evaluation.evaluate import decode_task, score_decoded
    from altup.evaluation.scores import score_suites, summarise, write_scores
    from altup.training.metrics import all_or_none

    config = learning.config

    def make(engine: Engine) -> Evaluate:
        def evaluate(model: torch.nn.Module, step: int) -> dict[str, float]:
            place = folder.path / "evaluation" / f"step-{step}"
            scored = learning.to_score(model)
            decoded = [
                decode_task(
                    scored,
                    learning.answering,
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


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _own_rates(config: FinetuneConfig) -> str:
    """`, coefficients at 0.001`: the parts of the model whose rate differs."""
    assert config.lr is not None
    factors = {part: factor for part, factor in config.lr_factors.items() if factor != 1}
    return "".join(f", {part} at {factor * config.lr:g}" for part, factor in factors.items())


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
        f"{parts}; {config.optimizer} at {config.lr:g}{_own_rates(config)}, {config.precision}",
        *warn_of_epochs(epochs),
    ]
    assert config.save_every is not None
    if config.keep_best and config.eval_every % config.save_every:
        both = f"eval_every={config.eval_every}, save_every={config.save_every}"
        lines.append(f"{both}: only steps that are both measured and saved can be kept as the best")
    return lines

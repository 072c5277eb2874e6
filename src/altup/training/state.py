"""A training checkpoint: a Hugging Face model folder with the optimizer and the loop's state beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from altup.training import checkpoints
from altup.training.engine import Engine
from altup.training.optimizers import load_state_tensors, state_tensors
from altup.training.parallel import gather
from altup.training.run import OPTIMIZER_FILE, STATE_FILE, RunFolder


def save_checkpoint(engine: Engine, folder: RunFolder, tokenizer: Any, state: dict[str, Any]) -> Path:
    """Publish `checkpoints/step-N`; every process takes part in gathering, the first one writes."""
    process_group = engine.process_group
    weights = gather(engine.plain.state_dict(), process_group)
    moments = state_tensors(engine.optimizer, engine.plain, keep=process_group.is_first)
    name = f"step-{state['step']}"

    def write(path: Path) -> None:
        write_model(engine, path, tokenizer, weights)
        checkpoints.save_tensors(path / OPTIMIZER_FILE, moments)
        checkpoints.save_json(path / STATE_FILE, state)

    if process_group.is_first:
        checkpoints.publish(folder.checkpoints, name, write)
    process_group.barrier()
    return folder.checkpoints / name


def save_final(engine: Engine, folder: RunFolder, tokenizer: Any) -> None:
    """Publish `final/`: the model and its tokenizer alone."""
    weights = gather(engine.plain.state_dict(), engine.process_group)
    if engine.process_group.is_first:
        checkpoints.publish(
            folder.path, folder.final.name, lambda path: write_model(engine, path, tokenizer, weights)
        )
    engine.process_group.barrier()


def write_model(engine: Engine, path: Path, tokenizer: Any, weights: dict[str, Any]) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    engine.plain.save_pretrained(path, state_dict=weights)  # type: ignore[operator]
    if tokenizer is not None:
        tokenizer.save_pretrained(path)


def load_optimizer(engine: Engine, checkpoint: Path) -> None:
    load_state_tensors(engine.optimizer, engine.plain, checkpoints.load_tensors(checkpoint / OPTIMIZER_FILE))

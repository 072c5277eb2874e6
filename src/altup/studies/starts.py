"""Other starting values of AltUp's coefficients: a checkpoint of step 0 from which the ordinary run goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from altup.core.errors import UserError, check_choice

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from altup.training.pretraining import PretrainConfig

NOISE = 0.1


def _average(P: Tensor, active: int) -> None:
    """Every block is predicted as the mean of all."""
    P.fill_(1 / len(P))


def _noisy(P: Tensor, active: int) -> None:
    """The identity and noise whose rows sum to zero."""
    import torch

    noise = NOISE * torch.randn_like(P)
    P.add_(noise - noise.mean(dim=1, keepdim=True))


def _active(g: Tensor, active: int) -> None:
    """Only the block that was computed is corrected."""
    g.zero_()
    g[active] = 1


STARTS: dict[str, dict[str, Callable[[Tensor, int], None]]] = {
    "P": {"average": _average, "noisy": _noisy},
    "g": {"active": _active},
}


def check_start(start: dict[str, str]) -> None:
    for name, value in start.items():
        check_choice("start", name, STARTS)
        check_choice(f"start {name}", value, STARTS[name])


def set_coefficients(model: nn.Module, start: dict[str, str]) -> None:
    """Change P and g of every update of a fresh model."""
    import torch

    from altup.nn.altup import AltUpUpdate

    updates = [module for module in model.modules() if isinstance(module, AltUpUpdate)]
    if not updates:
        raise UserError(f"start={start!r} needs a method with coefficients, such as altup")
    with torch.no_grad():
        for update in updates:
            for name, value in start.items():
                STARTS[name][value](getattr(update, name), update.active)


def begin_with(config: PretrainConfig, start: dict[str, str], out: Path) -> None:
    """Publish `out/checkpoints/step-0`: the run's fresh model, but for its coefficients.

    `pretrain(config, out, resume=True)` then goes on from it as from any other checkpoint.
    """
    from transformers import AutoTokenizer

    from altup.data.shards import TOKENIZER, TokenStream
    from altup.studies.parts import fresh_model
    from altup.training import checkpoints
    from altup.training.engine import Engine
    from altup.training.parallel import join_process_group
    from altup.training.run_folder import RunFolder

    check_start(start)
    folder = RunFolder(out)
    if folder.started or checkpoints.list_checkpoints(folder.checkpoints):
        return
    with join_process_group() as process_group:
        model = fresh_model(config, TokenStream(config.data, "train").vocabulary)
        set_coefficients(model, start)
        engine = Engine(model, config, process_group)
        state = checkpoints.TrainingState(meter=engine.meter.read(process_group))
        tokenizer = AutoTokenizer.from_pretrained(f"{config.data}/{TOKENIZER}")
        checkpoints.save_checkpoint(engine, folder.checkpoints, tokenizer, state)

"""How a run begins that does not begin with fresh weights: with other coefficients, or as another run's model.

It gets a checkpoint of step 0, from which `pretrain(config, out, resume=True)` goes on as from any other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from altup.core.errors import UserError
from altup.studies.jobs import Job, fresh_model

if TYPE_CHECKING:
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


STARTERS: dict[tuple[str, str], Callable[[Tensor, int], None]] = {
    ("P", "average"): _average,
    ("P", "noisy"): _noisy,
    ("g", "active"): _active,
}


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
                STARTERS[name, value](getattr(update, name), update.active)


def widened_model(config: PretrainConfig, trained: Path) -> nn.Module:
    """The dense model of the run folder `trained`, widened to the method of `config`; it computes the same."""
    from altup.core.runs import newest_model
    from altup.data.shards import TokenStream
    from altup.models.upcycling import upcycle

    wide = config.model_config(TokenStream(config.data, "train").vocabulary)
    model: nn.Module = upcycle(
        newest_model(trained), str(config.method), wide.num_blocks, config.seed, wide.coefficients
    )
    return model.float()


def begin(job: Job, config: PretrainConfig, out: Path) -> None:
    """Give a pretraining job its beginning, if it has one of its own and has not begun yet."""
    start, continues = job.settings["start"], job.settings.get("continues")
    if not start and not continues:
        return
    from altup.core.pretrained import load_tokenizer
    from altup.data.shards import TOKENIZER, TokenStream
    from altup.training import checkpoints
    from altup.training.engine import Engine
    from altup.training.parallel import join_process_group
    from altup.training.run_folder import RunFolder

    folder = RunFolder(job.folder(out))
    if folder.started:
        return
    with join_process_group() as group:
        if continues:
            model = widened_model(config, trained_folder(job, continues["run"], out))
        else:
            model = fresh_model(config, TokenStream(config.data, "train").vocabulary)
        if start:
            set_coefficients(model, start)
        engine = Engine(model, config, group)
        state = checkpoints.TrainingState(meter=engine.meter.read(group))
        tokenizer = load_tokenizer(f"{config.data}/{TOKENIZER}")
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        checkpoints.save_checkpoint(engine, folder.checkpoints, tokenizer, state)


def trained_folder(job: Job, key: str, out: Path) -> Path:
    """The finished run that a job needs."""
    found = [path for path in (out / "runs").glob(f"*-{key}") if (path / "final").is_dir()]
    if not found:
        raise UserError(
            f"{job.title}: its pretrained model is not in {out / 'runs'}; run the study without --only"
        )
    return found[0]

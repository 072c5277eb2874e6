"""What finished runs say of themselves: results, curves, parameters and learned coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.core.errors import UserError

if TYPE_CHECKING:
    from altup.models.t5.config import AltUpT5Config
    from altup.training.pretraining import PretrainConfig


@dataclass(frozen=True)
class Run:
    """A finished pretraining run, read from its folder."""

    name: str
    folder: Path
    config: PretrainConfig
    model: AltUpT5Config
    records: list[dict[str, Any]]
    embedding: int
    non_embedding: int

    def curve(self, split: str, field: str) -> list[tuple[float, float]]:
        """(step, value) of every record of `split` that has `field`."""
        return [(r["step"], r[field]) for r in self.records if r["split"] == split and r.get(field) is not None]

    @property
    def held_out(self) -> dict[str, Any]:
        """The last record on held-out text."""
        return [r for r in self.records if r["split"] == "validation"][-1]


def read_run(name: str, folder: Path) -> Run:
    from altup.models.accounting import account
    from altup.models.t5.config import AltUpT5Config
    from altup.training.metrics import read_records
    from altup.training.pretraining import PretrainConfig
    from altup.training.run_folder import RunFolder

    run = RunFolder(folder)
    if not run.final.is_dir():
        raise UserError(f"{folder} holds no finished run; finish it with `altup pretrain --out {folder} --resume`")
    model = AltUpT5Config.from_pretrained(run.final)
    cost = account(model)
    return Run(
        name,
        folder,
        run.read_config(PretrainConfig),
        model,
        read_records(run.metrics),
        cost.embedding,
        cost.non_embedding,
    )


@dataclass(frozen=True)
class LayerCoefficients:
    """P [K][K] and g [K] of one layer, and the block it computes on."""

    stack: str
    layer: int
    active: int
    P: list[list[float]]
    g: list[float]


def coefficients(run: Run) -> list[LayerCoefficients]:
    """What the update rule learned, encoder first; empty for models without one."""
    from altup.nn.altup import active_blocks
    from altup.training.checkpoints import load_tensors

    model = run.model
    if not model.selects_blocks or model.num_blocks == 1:
        return []
    weights = load_tensors(run.folder / "final" / "model.safetensors")
    found = []
    for stack, layers in (("encoder", model.num_layers), ("decoder", model.num_decoder_layers)):
        for layer, active in enumerate(active_blocks(model.num_blocks, layers, model.selection or "alternating")):
            P, g = (weights[f"{stack}.rule.updates.{layer}.{name}"].tolist() for name in ("P", "g"))
            found.append(LayerCoefficients(stack, layer, active, P, g))
    return found

"""GPU memory of a step of `altup pretrain`, from counts alone, and the settings with which it would fit.

Weights, gradients and the optimizer's state are float32; autocast keeps a copy of the weights in bf16.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from altup.core.errors import UserError, named
from altup.models.accounting import Accounting, list_layers
from altup.models.config import AltUpConfig

GIB = 2**30
RESERVED = GIB  # of a GPU: CUDA itself, kernels and workspaces
TABLES = ("input_table", "output_head")
# Bytes of state for a number of a layer, and of a table. Adafactor keeps sums of rows and columns.
STATE_BYTES = {"muon": (4, 8), "adamw": (8, 8), "adamw-rms": (8, 8), "adafactor": (0, 0)}
GPUS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Plan:
    """What decides how much memory a step takes; `rows` are the examples of one forward pass on one GPU."""

    rows: int
    optimizer: str = "muon"
    precision: str = "bf16"
    activation_checkpointing: bool = False
    gpus: int = 1  # that share weights and optimizer by FSDP


@dataclass(frozen=True)
class StepMemory:
    """Bytes on each GPU."""

    weights: int
    gradients: int
    optimizer: int
    bf16_copies: int
    activations: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def fits(self, gpu: int) -> bool:
        return self.total + RESERVED <= gpu


def step_memory(cost: Accounting, plan: Plan) -> StepMemory:
    """What the model of `cost` takes under `plan`. FSDP uses all tables and two whole layers at a time."""
    tables = sum(cost.parameters[part] for part in TABLES)
    layers = cost.total - tables
    of_layers, of_tables = STATE_BYTES[plan.optimizer]
    state = of_layers * layers + of_tables * tables
    weights, copies = 4 * cost.total, 2 * cost.total if plan.precision != "fp32" else 0
    if plan.gpus == 1:
        return StepMemory(weights, weights, state, copies, kept_bytes(cost, plan))
    in_use = tables + 2 * layers // _depth(cost)
    return StepMemory(
        weights // plan.gpus,
        weights // plan.gpus + 4 * tables,
        state // plan.gpus,
        (2 if copies else 4) * in_use,
        kept_bytes(cost, plan),
    )


def kept_bytes(cost: Accounting, plan: Plan) -> int:
    """Activations of a forward pass; where layers are recomputed, what all of them read and the inside of one."""
    logits = cost.activations["logits"]
    layers = cost.activation_bytes - logits
    if plan.activation_checkpointing:
        layers = layers // _depth(cost) + _inputs_of_layers(cost)
    return plan.rows * (layers * (2 if plan.precision == "fp32" else 1) + logits)


def settings_that_fit(cost: Accounting, batch: int, plan: Plan, gpu: int) -> list[str]:
    """Options of `altup pretrain` under which `batch` examples a step fit: on one GPU, else on several."""
    found = [_options(batch, fitting) for fitting in _fitting(cost, plan, [1], gpu)]
    if not found and plan.optimizer != "adafactor":
        small = Plan(plan.rows, "adafactor", plan.precision)
        found = [
            f"--optimizer adafactor {_options(batch, fitting)}" for fitting in _fitting(cost, small, [1], gpu)
        ]
    return found + [_options(batch, fitting) for fitting in _fitting(cost, plan, list(GPUS), gpu)][:1]


def _fitting(cost: Accounting, plan: Plan, numbers: list[int], gpu: int) -> Iterator[Plan]:
    """For each number of GPUs, without and with recomputation, the most rows that fit."""
    for gpus, again in product(numbers, (False, True)):
        rows = plan.rows // gpus
        while rows:
            tried = Plan(rows, plan.optimizer, plan.precision, again, gpus)
            if step_memory(cost, tried).fits(gpu):
                yield tried
                break
            rows //= 2


def _options(batch: int, plan: Plan) -> str:
    options = ["--activation-checkpointing"] if plan.activation_checkpointing else []
    if plan.rows * plan.gpus < batch:
        options.append(f"--micro-batch {plan.rows * plan.gpus}")
    if plan.gpus > 1:
        options.append(f"--parallel fsdp on {plan.gpus} GPUs")
    return " ".join(options) or "as it is"


def _depth(cost: Accounting) -> int:
    if isinstance(cost.config, AltUpConfig):
        return len(list_layers(cost.config, cost.inputs, cost.targets))
    return sum(_foreign_depths(cost.config))


def _foreign_depths(config: Any) -> tuple[int, int]:
    """Layers of a model of transformers: those that read the inputs, and those that read the targets."""
    config = getattr(config, "text_config", config)
    behind = config.num_hidden_layers if config.is_encoder_decoder else 0
    if behind:
        behind = getattr(config, "decoder_layers", None) or getattr(config, "num_decoder_layers", None) or behind
    return config.num_hidden_layers, behind


def _inputs_of_layers(cost: Accounting) -> int:
    if isinstance(cost.config, AltUpConfig):
        width = cost.config.layer_width * (cost.config.num_blocks if cost.config.mixes_blocks else 1)
        return sum(2 * width * layer.state_tokens for layer in list_layers(cost.config, cost.inputs, cost.targets))
    before, behind = _foreign_depths(cost.config)
    width = getattr(cost.config, "text_config", cost.config).hidden_size
    return 4 * width * (before * cost.inputs + behind * cost.targets)  # float32: what autocast leaves of a sum


def gpu_bytes(text: str) -> int:
    """`24GB`: the size of a GPU's memory, in GiB, as makers mean it."""
    found = re.fullmatch(r"(\d{1,5}(?:\.\d+)?) ?(GB|GiB)?", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise UserError(f"{named('gpu', text)} is no size of a GPU's memory; give 24GB, say")
    return int(float(found[1]) * GIB)

"""An optimizer by its name, with a rate for each part of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from altup.core.errors import UserError, check_choice, named
from altup.kernels.muon.reference import Block
from altup.nn import Attention, GroupedAttention, RelativeBias, coefficient_names
from altup.training.optimizers.adafactor import Adafactor
from altup.training.optimizers.adamw import AdamW, RelativeAdamW
from altup.training.optimizers.config import COEFFICIENT_GROWTH, MUON_BY, OptimizerConfig
from altup.training.optimizers.muon import Muon
from altup.training.optimizers.sharding import kind

HIDDEN = range(64, 15, -1)  # units of a feed-forward's hidden layer in a block; a head usually has 64
UNIT_OF_SCORES = 1.0  # tables of relative positions begin far below it, and what they are added to is in it
EPS = 1e-8  # of AdamW


def parts_of(model: nn.Module) -> dict[str, str]:
    """Parameter name → `embeddings`, `head`, `coefficients`, `positions` (relative ones), `matrix` (of a layer) or
    `vectors` (all else).

    A head that is tied to the embeddings belongs to them. Convolutions and the decay rates of state-space models
    (`A_log`) are no matrices that map one space to another.
    """
    modules = [module for module in model.modules() if isinstance(getattr(module, "weight", None), Tensor)]
    positions = {m.weight for name, m in model.named_modules() if name.endswith("relative_attention_bias")}
    positions |= {module.weight for module in modules if isinstance(module, RelativeBias)}
    convolutions = {m.weight for m in modules if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)}
    tables = {module.weight for module in modules if isinstance(module, nn.Embedding)} - positions
    find_head = getattr(model, "get_output_embeddings", lambda: None)
    head = getattr(find_head(), "weight", None)
    coefficients = coefficient_names(model)

    def part(name: str, parameter: Tensor) -> str:
        if name in coefficients:
            return "coefficients"
        if parameter in tables:
            return "embeddings"
        if parameter is head:
            return "head"
        if parameter in positions:
            return "positions"
        is_matrix = parameter.ndim >= 2 and parameter not in convolutions and not name.endswith("A_log")
        return "matrix" if is_matrix else "vectors"

    return {name: part(name, parameter) for name, parameter in model.named_parameters()}


def blocks_of(model: nn.Module, muon_by: str) -> dict[Tensor, Block]:
    """The shapes of blocks that Muon orthogonalizes one by one; matrices that are not listed stay whole.

    By `matrix` no matrix is cut. By `head` attention's projections are cut into heads, because no head knows of
    another. By `block` the maps into and out of a feed-forward's hidden layer are cut too, into blocks of as many
    hidden units as `HIDDEN` allows. Only the modules of our own models are known.
    """
    check_choice("muon_by", muon_by, MUON_BY)
    found: dict[Tensor, Block] = {}

    def cut(width: int, into: Iterable[nn.Module], out_of: nn.Module) -> None:
        for linear in into:
            if isinstance(linear, nn.Linear):  # and no adapter
                found[linear.weight] = (width, linear.in_features)
        if isinstance(out_of, nn.Linear):
            found[out_of.weight] = (out_of.out_features, width)

    for module in model.modules():
        hidden_maps = getattr(module, "hidden_maps", None)
        if muon_by != "matrix" and isinstance(module, Attention | GroupedAttention):
            cut(module.d_kv, (module.q, module.k, module.v), module.o)
        elif muon_by == "block" and hidden_maps is not None:
            into, out_of = hidden_maps()
            hidden = out_of.in_features
            cut(next((units for units in HIDDEN if hidden % units == 0), hidden), into, out_of)
    if muon_by != "matrix" and not found:
        raise UserError(
            f"{named('muon_by', muon_by)} is for the layers of altup's own T5, BERT and decoder, and "
            f"{type(model).__name__} has none; leave it at 'matrix'"
        )
    return {p: block for p, block in found.items() if tuple(p.shape) != block}


def build_optimizer(
    config: OptimizerConfig, model: nn.Module, lr: float | Tensor | None = None
) -> torch.optim.Optimizer:
    """The optimizer of a config over the parameters of `model` that ask for gradients.

    `optimizer.step(skip=flag)` leaves every weight and all state unchanged where the bool tensor `flag`, on the
    parameters' device, is true; the host never waits for it. `set_rate` sets the learning rate of a step, which is
    `lr` before. Shard the model (`fully_shard`) before this call.
    """
    lr = (config.lr or 0.0) if lr is None else lr
    groups: dict[tuple, dict[str, Any]] = {}
    parts, blocks = parts_of(model), blocks_of(model, config.muon_by)
    scalars = coefficient_names(model, scalars_alone=True)
    factors = dict(config.lr_factors)
    if factors.get("coefficients", 1.0) != 1:
        _require("coefficients", "coefficients of AltUp", factors, parts, model)
    in_scores = "positions" in factors
    if in_scores:
        _require("positions", "tables of relative positions", factors, parts, model)
    factors.setdefault("positions", factors.get("vectors", 1.0))
    for n, p in model.named_parameters():
        if not p.requires_grad:
            continue
        own: dict[str, Any] = {"lr_factor": factors.get(parts[n], 1.0)}
        if config.optimizer != "adafactor":
            decays = p.ndim >= 2 and parts[n] != "coefficients"
            own |= {"weight_decay": (config.weight_decay or 0.0) * decays, "sharding": kind(p).sharding}
        if config.optimizer == "muon":
            growth = COEFFICIENT_GROWTH if config.coefficient_growth is None else config.coefficient_growth
            growth, pull = (growth, config.coefficient_decay) if n in scalars else (config.muon_growth, 0.0)
            own |= {"orthogonal": parts[n] == "matrix", "block": blocks.get(p), "growth": growth, "pull": pull}
            own["unit"] = UNIT_OF_SCORES if parts[n] == "positions" and in_scores else None
        groups.setdefault(tuple(own.values()), {**own, "params": []})["params"].append(p)
    if not groups:
        raise UserError("the model has no parameter that asks for gradients; nothing to optimize")
    for group in groups.values():
        group.pop("sharding", None)
        group["lr"] = (lr.detach().clone() if isinstance(lr, Tensor) else lr) * group["lr_factor"]
    if config.optimizer == "adafactor":
        return Adafactor(groups.values(), lr=lr)
    betas = (0.9 if config.beta1 is None else config.beta1, 0.999 if config.beta2 is None else config.beta2)
    build: Any = {"adamw": AdamW, "adamw-rms": RelativeAdamW, "muon": Muon}[str(config.optimizer)]
    return build(groups.values(), lr=lr, betas=betas, eps=EPS)


def _require(part: str, words: str, factors: dict[str, float], parts: dict[str, str], model: nn.Module) -> None:
    """UserError for a factor of a part that the model does not have."""
    if part not in parts.values():
        raise UserError(
            f"{named(f'lr_factors.{part}', factors[part])}: {type(model).__name__} has no {words}; leave it "
            "out, or "
            "take a model that has them"
        )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next step, for each group times its factor.

    A rate that is a tensor stays where it is, because recorded graphs read it there.
    """
    for group in optimizer.param_groups:
        own = rate * group["lr_factor"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own

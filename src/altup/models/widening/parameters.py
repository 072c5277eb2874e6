"""Parameters made K blocks wide so that K equal blocks are treated as the one block was, and back again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from altup.core.errors import UserError
from altup.models.widening.plan import Plan, shares


def repeat(weight: Tensor, dim: int, num_blocks: int) -> Tensor:
    """What makes one block makes K equal ones."""
    return torch.cat([weight] * num_blocks, dim)


def share(weight: Tensor, dim: int, num_blocks: int) -> Tensor:
    """What reads one block reads K, each by its share."""
    blocks = [weight * part for part in shares(num_blocks)]
    if weight.dtype == torch.float16:
        # Below 2⁻¹⁴ halving loses bits: the last block takes what the others leave.
        rest = weight.float()
        for block in blocks[:-1]:
            rest = rest - block
        blocks[-1] = rest.half()
    return torch.cat(blocks, dim)


def unrepeat(name: str, weight: Tensor, dim: int, num_blocks: int) -> Tensor:
    first, *others = weight.detach().chunk(num_blocks, dim)
    if not all(torch.equal(first, other) for other in others):
        raise UserError(
            f"{name}: its blocks differ, so the model was trained and no narrow model computes the same; keep the "
            "widened one"
        )
    return first.clone()


def unshare(weight: Tensor, dim: int, num_blocks: int) -> Tensor:
    """The sum over the blocks, which are read alike; exact where they still are the shares of one matrix."""
    blocks = weight.detach().chunk(num_blocks, dim)
    first, *others = [block / part for block, part in zip(blocks, shares(num_blocks), strict=True)]
    if all(torch.equal(first, other) for other in others):
        return first
    return torch.stack(blocks).double().sum(dim=0).to(weight.dtype)


def names_of(model: nn.Module, parameter: nn.Parameter) -> list[str]:
    """All names of a parameter: tied ones have several."""
    return [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]


def homes(model: nn.Module, names: list[str]) -> Iterator[tuple[nn.Module, str]]:
    """The module that holds each parameter, and its name there."""
    for name in names:
        home, _, own = name.rpartition(".")
        yield model.get_submodule(home), own


def replace(model: nn.Module, names: list[str], value: Tensor) -> None:
    """One new parameter in the place of an old one, under all its names."""
    old = model.get_parameter(names[0])
    new = nn.Parameter(value.contiguous(), requires_grad=old.requires_grad)
    for module, own in homes(model, names):
        setattr(module, own, new)
        refresh_sizes(module)


def refresh_sizes(module: nn.Module) -> None:
    """The sizes that a module keeps beside its weight."""
    weight = getattr(module, "weight", None)
    if weight is None:
        return
    if isinstance(module, nn.Embedding):
        module.embedding_dim = weight.shape[1]
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, Conv1D):
        module.nx, module.nf = weight.shape
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        module.out_channels = weight.shape[0]
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        module.normalized_shape = tuple(weight.shape)


def widen_parameter(model: nn.Module, plan: Plan, name: str, dim: int, shared: bool = False) -> None:
    """Widen a parameter under all its names and note it in the plan."""
    names = names_of(model, model.get_parameter(name))
    for other in names:
        (plan.shared if shared else plan.repeated)[other] = dim
    with torch.no_grad():
        value = (share if shared else repeat)(model.get_parameter(name), dim, plan.num_blocks)
    replace(model, names, value)


def untie(model: PreTrainedModel, plan: Plan, table: str) -> None:
    """Give every matrix that is tied to an embedding table, and is no table itself, its own weights.

    A wide table is not the head that reads a state: see `Plan.untied`.
    """
    names = names_of(model, model.get_parameter(table))
    tables = [name for (module, _), name in zip(homes(model, names), names, strict=True) if _is_table(module)]
    for name in sorted(set(names) - set(tables)) if tables else []:
        replace(model, [name], model.get_parameter(name).detach().clone())
        plan.untied[name] = tables[0]
    forget_ties(model, plan)


def forget_ties(model: PreTrainedModel, plan: Plan) -> None:
    """Let Hugging Face no longer tie what is untied, whatever the config says about the other ties."""
    for prefix, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            lost = {name.removeprefix(f"{prefix}." if prefix else "") for name in plan.untied}
            for attribute in ("_tied_weights_keys", "all_tied_weights_keys"):
                ties = getattr(module, attribute, None) or {}
                if lost & ties.keys():
                    setattr(module, attribute, {key: ties[key] for key in ties if key not in lost})


def tie_again(model: PreTrainedModel) -> None:
    """Tie again all that the model's own class ties."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.__dict__.pop("_tied_weights_keys", None)
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    model.tie_weights(recompute_mapping=False)


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)

"""Parameters made K blocks wide, so that K equal blocks are treated as the one block was, and back again.

The plan notes what was done to a model: saved in its config, so that it can be done again or undone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from altup.core.errors import UserError, check_choice, check_whole, named
from altup.models.methods import PRESETS
from altup.nn import AltUp

# Methods of `widen` with the blocks that their layers work on.
METHODS = {
    name: one.fields["selection"] for name, one in PRESETS.items() if one.upcycles and "selection" in one.fields
}
Layers = slice | Sequence[int]
LATER = ("layers", "dropouts")  # fields that folders of older versions lack


@dataclass
class WideningPlan:
    """The choices, and the names of what they touch.

    - `stacks`: each list of layers, and whether its layers return a tuple.
    - `repeated`: parameters that make the state or scale it, with the dimension that was repeated K times.
    - `shared`: matrices that read the wide state, with the dimension that was repeated; the copies' shares add up
      to one.
    - `untied`: parameters that no longer are the table they were tied to, and that table.
    - `layers`: of stacks that are wide in one part only, the first wide layer and the one after the last.
    - `dropouts`: those that the wide state goes through outside of the layers, with the width of a block.
    """

    method: str
    num_blocks: int
    selection: str | list[int]
    seed: int = 0
    stacks: dict[str, bool] = field(default_factory=dict)
    repeated: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    untied: dict[str, str] = field(default_factory=dict)
    layers: dict[str, list[int]] = field(default_factory=dict)
    dropouts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def choose(cls, method: str, num_blocks: int, selection: str | list[int] | None, seed: int) -> WideningPlan:
        check_choice("method", method, METHODS)
        check_whole("num_blocks", num_blocks, 2)
        if method == "sameup" and selection not in (None, "same"):
            raise UserError(f"{named('selection', selection)} does not fit method='sameup'; use method='altup'")
        return cls(method, num_blocks, METHODS[method] if selection is None else selection, seed)

    @classmethod
    def of(cls, model: nn.Module) -> WideningPlan | None:
        saved = getattr(getattr(model, "config", None), "altup", None)
        return cls(**saved) if isinstance(saved, dict) else None

    @classmethod
    def required(cls, model: nn.Module) -> WideningPlan:
        """That of a model which must have one."""
        plan = cls.of(model)
        if plan is None:
            raise UserError(f"{type(model).__name__} is not widened")
        return plan

    def save(self, model: PreTrainedModel) -> None:
        """Into a config of the model's own: other models may have been built from the same one."""
        shared = model.config
        own = copy.deepcopy(shared)
        own.altup = {name: value for name, value in asdict(self).items() if value or name not in LATER}
        for module in model.modules():
            for name in [name for name, value in vars(module).items() if value is shared]:
                setattr(module, name, own)

    @property
    def recycled(self) -> bool:
        return self.method == "recycled"

    def choose_layers(self, model: nn.Module, layers: Layers | Mapping[str, Layers]) -> None:
        """Note which layers of each stack are wide, once the stacks are known."""
        if not self.recycled:
            raise UserError(
                f"{named('layers', _as_typed(layers))} does not fit {named('method', self.method)}, whose "
                "tables and head are wide, "
                "so that every layer between them must be; take method='recycled'"
            )
        of_stack = layers if isinstance(layers, Mapping) else dict.fromkeys(self.stacks, layers)
        if unknown := sorted(of_stack.keys() - self.stacks.keys()):
            known = " or ".join(map(repr, self.stacks))
            raise UserError(f"layers names {unknown[0]!r}, which is no stack that is widened; name {known}")
        for stack, chosen in of_stack.items():
            run = _consecutive(chosen, len(cast(nn.ModuleList, model.get_submodule(stack))), stack)
            self.layers[stack] = [run.start, run.stop]

    def wide_layers(self, model: nn.Module, stack: str) -> dict[str, Any]:
        """The layers of a stack that are wide, by name and in order."""
        layers = list(cast(nn.ModuleList, model.get_submodule(stack)))
        start, stop = self.layers.get(stack, (0, len(layers)))
        return {f"{stack}.{i}": layer for i, layer in enumerate(layers) if start <= i < stop}

    def rule(self, num_layers: int) -> AltUp:
        """A stack's coefficients as they start: all blocks move together, and twins may part."""
        rule = AltUp(self.num_blocks, num_layers, self.selection)
        if rule.has_twins:
            rule.part_twins(generator=torch.Generator().manual_seed(self.seed))
        return rule


def _as_typed(chosen: Layers | Mapping[str, Layers]) -> Any:
    """`2:6` for slice(2, 6), as the command line has it."""
    if not isinstance(chosen, slice):
        return chosen
    return ":".join("" if bound is None else str(bound) for bound in (chosen.start, chosen.stop))


def _consecutive(chosen: Layers, number: int, stack: str) -> range:
    """The layers from the first to the last chosen one, which are all chosen."""
    if isinstance(chosen, slice):
        picked = list(range(number)[chosen])
    elif isinstance(chosen, Sequence) and all(type(i) is int and -number <= i < number for i in chosen):
        picked = sorted(i % number for i in chosen)
    else:
        raise UserError(
            f"{named('layers', chosen)} are no layers of {stack}, which has {number}; give slice(2, 6) or [2, "
            "3, 4, 5]"
        )
    if not picked:
        raise UserError(
            f"{named('layers', _as_typed(chosen))} holds none of the {number} layers of {stack}; give others"
        )
    if picked != list(range(picked[0], picked[-1] + 1)):
        raise UserError(
            f"{named('layers', chosen)} of {stack}, which has {number} layers, must be one run of layers "
            "without a gap: "
            "the state is wide from the first to the last of them"
        )
    return range(picked[0], picked[-1] + 1)


def shares(num_blocks: int) -> list[float]:
    """K powers of two that add up to one, as even as can be: exact to multiply with and to divide by.

    1/2 1/2, 1/2 1/4 1/4, 1/4 1/4 1/4 1/4, 1/4 1/4 1/4 1/8 1/8, …
    """
    parts = [1.0]
    while len(parts) < num_blocks:
        half = parts.pop(0) / 2
        parts += [half, half]
    return sorted(parts, reverse=True)


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


def spread(weight: Tensor, shape: torch.Size, reads_blocks: bool) -> Tensor:
    """`weight` in a wider `shape`, so that it treats K equal blocks as it treated the one.

    It is repeated in every dimension that is wider; of what reads K blocks, the last of these is shared out.
    """
    wider = [dim for dim, (one, wide) in enumerate(zip(weight.shape, shape, strict=True)) if wide > one]
    for dim in wider:
        widened = share if reads_blocks and dim == wider[-1] else repeat
        weight = widened(weight, dim, shape[dim] // weight.shape[dim])
    return weight


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


SIZES = ("embedding_dim", "out_features", "in_features", "nx", "nf", "out_channels", "normalized_shape")


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


def widen_parameter(model: nn.Module, plan: WideningPlan, name: str, dim: int, shared: bool = False) -> None:
    """Widen a parameter under all its names and note it in the plan."""
    names = names_of(model, model.get_parameter(name))
    for other in names:
        (plan.shared if shared else plan.repeated)[other] = dim
    with torch.no_grad():
        value = (share if shared else repeat)(model.get_parameter(name), dim, plan.num_blocks)
    replace(model, names, value)


def untie(model: PreTrainedModel, plan: WideningPlan, table: str) -> None:
    """Give every matrix that is tied to an embedding table, and is no table itself, its own weights.

    A wide table is not the head that reads a state: see `WideningPlan.untied`.
    """
    names = names_of(model, model.get_parameter(table))
    tables = [name for (module, _), name in zip(homes(model, names), names, strict=True) if _is_table(module)]
    for name in sorted(set(names) - set(tables)) if tables else []:
        replace(model, [name], model.get_parameter(name).detach().clone())
        plan.untied[name] = tables[0]
    forget_ties(model, plan)


def forget_ties(model: PreTrainedModel, plan: WideningPlan) -> None:
    """Let Hugging Face no longer tie what is untied, whatever the config says about the other ties."""
    for prefix, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            lost = {name.removeprefix(f"{prefix}." if prefix else "") for name in plan.untied}
            for attribute in ("_tied_weights_keys", "all_tied_weights_keys"):
                ties = getattr(module, attribute, None) or {}
                if lost & ties.keys():
                    setattr(module, attribute, {key: ties[key] for key in ties if key not in lost})


def tie_again(model: PreTrainedModel, plan: WideningPlan) -> None:
    """Tie again all that was tied, by the model's class or, as Bark does it, by its constructor."""
    for prefix, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and "_tied_weights_keys" in vars(module):
            start = f"{prefix}." if prefix else ""
            lost = {
                name.removeprefix(start): table.removeprefix(start)
                for name, table in plan.untied.items()
                if name.startswith(start)
            }
            own = cast(dict, vars(module).pop("_tied_weights_keys")) or {}
            if not lost.keys() & (module._tied_weights_keys or {}).keys():
                module._tied_weights_keys = own | lost
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    model.tie_weights(recompute_mapping=False)


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)

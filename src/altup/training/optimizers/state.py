"""The state of an optimizer as whole tensors by parameter name: what a checkpoint stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from altup.core.errors import UserError
from altup.training.tensor_files import StoredTensor, put


@torch.no_grad()
def state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """Copies on the CPU under `"{parameter name}/{state name}"`, independent of how the model is sharded.

    Under FSDP2 every process must call this; those that will not write pass keep=False and get {}.
    """
    tensors = {}
    for name, tensor in named_state(optimizer, model):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            tensors[name] = whole.detach().to("cpu", copy=True)
    return tensors


@torch.no_grad()
def load_state_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor] | Mapping[str, StoredTensor]
) -> None:
    """Puts back what `state_tensors` gave; nothing is changed unless names and shapes all fit."""
    state = dict(named_state(optimizer, model))
    problems = [f"{name} is missing" for name in state if name not in tensors]
    problems += [f"{name} is not in this optimizer" for name in tensors if name not in state]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)} and dtype {tensors[name].dtype} "
        f"instead of {tuple(tensor.shape)} and {tensor.dtype}"
        for name, tensor in state.items()
        if name in tensors and (tensors[name].shape != tensor.shape or tensors[name].dtype != tensor.dtype)
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"the stored state does not fit {type(optimizer).__name__} over this model: "
            f"{'; '.join(problems[:3])}{more}. Resume with the optimizer and the model it was saved with"
        )
    for name, tensor in state.items():
        put(tensor, tensors[name])


def named_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the state, as it lies here, under `"{parameter name}/{state name}"`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UserError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model; "
                    "pass the model it was built for"
                )
            for key, tensor in optimizer.state[parameter].items():
                yield f"{names[parameter]}/{key}", tensor

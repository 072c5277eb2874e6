"""What optimizers share whose updates are measured by the size of the parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from altup.training.optimizers.sharding import Kind, kind, local, stacks

SMALLEST_RMS = 1e-3


class RelativeOptimizer(torch.optim.Optimizer):
    """p ← p - lr · size · U, where a subclass says what U is; the size is max(1e-3, RMS(p)) unless it says more,
    and at least the group's `unit`, if it has one.

    Parameters of one kind are stacked and updated together, so that the number of kernels depends on the
    number of shapes and not of tensors. Nothing waits for the device. Under FSDP2 each process updates its
    own pieces, with means taken over the whole tensor.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, options)
        for group in self.param_groups:
            for p in group["params"]:
                what = kind(p)
                self.state[p] = {"step": torch.zeros((), device=p.device), **self.initial_state(p, what, group)}

    def initial_state(self, p: Tensor, what: Kind, group: dict[str, Any]) -> dict[str, Tensor]:
        """Of a parameter before its first step, besides `step`."""
        raise NotImplementedError

    def direction(
        self, what: Kind, state: dict[str, Tensor], grad: Tensor, group: dict[str, Any]
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """New moments, and U as a tensor [n, ...] (which may reuse `grad`) and a factor [n], for n stacked
        parameters; `state["step"]` [n] counts this step already."""
        raise NotImplementedError

    def size(self, what: Kind, weights: list[Tensor], state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        """[n]: what the updates of n parameters, with these local pieces, are measured by."""
        return what.rms(weights).clamp(min=smallest_size(group))

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """One update; where the bool scalar `skip` is true, none of weights and state."""
        for group in self.param_groups:
            self._update_all(group["params"], group, skip)

    def _update_all(self, parameters: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        for what, alike in stacks(parameters):
            self._update(what, alike, group, skip)

    def _update(self, what: Kind, parameters: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        states = [self.state[p] for p in parameters]
        stored = {name: [local(state[name]) for state in states] for name in states[0]}
        weights = [local(p) for p in parameters]
        grad = torch.stack([local(p.grad) for p in parameters if p.grad is not None]).to(what.working_dtype)
        old = {name: torch.stack(tensors) for name, tensors in stored.items()}

        step = old["step"] + 1
        moments, update, factor = self.direction(what, {**old, "step": step}, grad, group)
        update.mul_(along(group["lr"] * self.size(what, weights, old, group) * factor, update))
        shrink = 1 - group["lr"] * group.get("weight_decay", 0.0)

        new = {"step": step, **moments}
        if skip is not None:
            update.masked_fill_(skip, 0)
            shrink = torch.where(skip, 1.0, shrink)
            new = {name: torch.where(skip, old[name], tensor) for name, tensor in new.items()}
        if group.get("weight_decay"):
            torch._foreach_mul_(weights, shrink)
        torch._foreach_sub_(weights, list(update.unbind()))
        for name, tensor in new.items():
            torch._foreach_copy_(stored[name], list(tensor.unbind()))


def smallest_size(group: dict[str, Any]) -> float:
    """Of what the updates of a group are measured by."""
    return group.get("unit") or SMALLEST_RMS


def along(values: Tensor, tensor: Tensor) -> Tensor:
    """`values` [n] in a shape that multiplies `tensor` [n, ...]."""
    return values.view(-1, *[1] * (tensor.ndim - 1))

"""AdamW, torch's own and one with updates relative to the size of the parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from altup.kernels.adamw import adamw_update, runs_fused
from altup.training.optimizers.relative import RelativeOptimizer, along, smallest_size
from altup.training.optimizers.sharding import Kind


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW. Its kernels leave weights and moments alone where `found_inf` is 1, made for torch's
    GradScaler; `skip` takes that way. State of a parameter: `step`, `exp_avg`, `exp_avg_sq`."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, fused=True, **options)
        for group in self.param_groups:  # so that a step may be recorded as a CUDA graph
            group["capturable"] = all(p.is_cuda for p in group["params"])
        for group in self.param_groups:
            for p in group["params"]:
                step = torch.zeros((), device=p.device)
                self.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """One update; where the bool scalar `skip` is true, none of weights and state."""
        self.found_inf = None if skip is None else skip.float()
        super().step()


class RelativeAdamW(RelativeOptimizer):
    """AdamW that takes T5's learning rates, as nanoT5 does: U = m̂ / (√v̂ + eps), so that

    p ← (1 - lr·weight_decay)·p - lr · max(1e-3, RMS(p)) · m̂ / (√v̂ + eps).
    """

    KERNEL_STATE: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "step")

    def initial_state(self, p: Tensor, what: Kind, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"exp_avg": what.zeros(*what.shape), "exp_avg_sq": what.zeros(*what.shape)}

    def _update_all(self, parameters: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        """By kernels, many tensors at once, where they can."""
        fused = [p for p in parameters if p.grad is not None and self._runs_kernels(p, p.grad)]
        if fused:
            moments = ([self.state[p][name] for p in fused] for name in self.KERNEL_STATE)
            grads = [p.grad for p in fused if p.grad is not None]
            options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            adamw_update(fused, grads, *moments, skip=skip, smallest=smallest_size(group), **options)
        by_kernels = set(fused)
        super()._update_all([p for p in parameters if p not in by_kernels], group, skip)

    def _runs_kernels(self, p: Tensor, grad: Tensor) -> bool:
        state = self.state[p]
        return not isinstance(p, DTensor) and runs_fused(p, grad, *(state[name] for name in self.KERNEL_STATE))

    def direction(
        self, what: Kind, state: dict[str, Tensor], grad: Tensor, group: dict[str, Any]
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        (beta1, beta2), step = group["betas"], state["step"].to(grad.dtype)
        mean = state["exp_avg"].lerp(grad, 1 - beta1)
        square = state["exp_avg_sq"].lerp(grad.square_(), 1 - beta2)
        root = (square / along(1 - beta2**step, square)).sqrt_().add_(group["eps"])
        return {"exp_avg": mean, "exp_avg_sq": square}, mean / root, 1 / (1 - beta1**step)

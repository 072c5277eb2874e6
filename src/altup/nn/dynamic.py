"""AltUp with coefficients that depend on the token, as Gemma 3n has them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from altup.errors import check_choice
from altup.kernels.altup_update import State
from altup.nn.altup import AltUp, Layer, residual_and_update
from altup.nn.coefficients import CoefficientModule, coefficient


class DynamicUpdate(CoefficientModule):
    """One layer's prediction and correction with K² + K coefficients that each token makes for itself.

        m(x) = tanh(R·norm(x) / d),    P = I + A·m(xᵃ),    g = 1 + C·m(y)

    norm is an RMS norm with learned scale; R: [K, d], A: [K, K, K], C: [K, K]. A and C start at zero, so that the
    rule starts as the static one does. In training A and C are clipped to ±`clip`.
    """

    def __init__(
        self, num_blocks: int, active: int, width: int, clip: float | None = None, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.active = active
        self.clip = clip
        self.eps = eps
        self.norm = coefficient(width)
        self.R = coefficient(num_blocks, width)
        self.A = coefficient(num_blocks, num_blocks, num_blocks)
        self.C = coefficient(num_blocks, num_blocks)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.norm)
        nn.init.normal_(self.R, std=self.R.shape[1] ** 0.5)  # the division by d leaves m of size one
        nn.init.zeros_(self.A)
        nn.init.zeros_(self.C)

    @classmethod
    def from_gemma3n(cls, module: nn.Module) -> DynamicUpdate:
        """The rule of a `Gemma3nTextAltUp`, with its weights. (Its output scale is no part of the rule.)"""
        config: Any = module.config
        K, d = config.altup_num_inputs, config.hidden_size
        update = cls(K, config.altup_active_idx, d, config.altup_coef_clip, config.rms_norm_eps)
        weights = module.state_dict()
        with torch.no_grad():
            update.norm.copy_(weights["router_norm.weight"])
            update.R.copy_(weights["modality_router.weight"])
            update.A.copy_(weights["prediction_coefs.weight"].view(K, K, K))
            update.C.copy_(weights["correction_coefs.weight"])
        return update.train(module.training)

    def part_twins(self, noise: float, generator: torch.Generator | None = None) -> None:
        """Noise in A that leaves the rows of P adding up to one."""
        step = noise * torch.randn(self.A.shape, generator=generator, dtype=self.A.dtype).to(self.A.device)
        self.A.add_(step - step.mean(dim=1, keepdim=True))

    def modalities(self, x: Tensor) -> Tensor:
        """m(x): [..., d] → [..., K], in float32 or wider."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps) * self.norm
            return torch.tanh(F.linear(normed / x.shape[-1], self.R.to(x.dtype)))

    def prediction(self, x: Tensor) -> Tensor:
        """P for each token of the active block: [..., d] → [..., K, K]."""
        mixed = torch.einsum("ijm,...m->...ij", *_same_dtype(self._clipped(self.A), self.modalities(x)))
        return mixed + torch.eye(mixed.shape[-1], dtype=mixed.dtype, device=mixed.device)

    def correction(self, y: Tensor) -> Tensor:
        """g for each token of the layer's output: [..., d] → [..., K]."""
        return 1 + torch.einsum("im,...m->...i", *_same_dtype(self._clipped(self.C), self.modalities(y)))

    def predict(self, state: State) -> State:
        """x̂ⁱ = Σⱼ Pᵢⱼ xʲ."""
        return _mix(self.prediction(state[self.active]), state)

    def correct(self, predicted: State, computed: Tensor) -> State:
        """x_newⁱ = x̂ⁱ + gᵢ (y − x̂ᵃ)."""
        g = self.correction(computed)
        change = computed - predicted[self.active]
        rows = [(x + g[..., i, None] * change).to(x.dtype) for i, x in enumerate(predicted)]
        return torch.stack(rows) if isinstance(predicted, Tensor) else tuple(rows)

    def forward(self, state: State, computed: Tensor, residual: Tensor | None = None) -> State:
        """Both in one pass over the state, for y = residual + computed."""
        y = computed if residual is None else residual + computed
        P, g = self.prediction(state[self.active]), self.correction(y)
        M = P - g.unsqueeze(-1) * P[..., self.active, None, :]
        return _mix(M, state, g, y)

    def _clipped(self, weight: Tensor) -> Tensor:
        return weight.clamp(-self.clip, self.clip) if self.training and self.clip is not None else weight


class DynamicAltUp(AltUp):
    """AltUp with data-dependent coefficients, d + K·d + K³ + K² of them a layer.

    A layer is fed the `old` active block, as in the paper, or the `predicted` one, as in Gemma 3n.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        width: int,
        selection: str | Sequence[int] = "alternating",
        *,
        recycled: bool = False,
        lowering: str | None = None,
        feed: str = "old",
        clip: float | None = None,
    ) -> None:
        check_choice("feed", feed, ("old", "predicted"))
        super().__init__(num_blocks, num_layers, selection, recycled=recycled, lowering=lowering)
        self.feed = feed
        if num_blocks > 1:
            self.updates = nn.ModuleList([DynamicUpdate(num_blocks, a, width, clip) for a in self.active])
            self.reset_parameters()

    @torch.no_grad()
    def part_twins(self, noise: float = 0.1, generator: torch.Generator | None = None) -> None:
        for update in self.updates:
            if isinstance(update, DynamicUpdate):
                update.part_twins(noise, generator)

    def forward(self, state: State, layer: Layer, index: int, *args: Any, **kwargs: Any) -> State:
        if self.feed == "old" or self.num_blocks == 1:
            return super().forward(state, layer, index, *args, **kwargs)
        predicted = self.predict(state, index)
        residual, computed = residual_and_update(layer(predicted[self.active[index]], *args, **kwargs))
        return self.correct(predicted, computed if residual is None else residual + computed, index)


def _same_dtype(weight: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    return weight.to(like.dtype), like


def _mix(M: Tensor, state: State, g: Tensor | None = None, y: Tensor | None = None) -> State:
    """Σⱼ Mᵢⱼ xʲ + gᵢ y with coefficients a token, M: [..., K, K], g: [..., K]."""
    rows = []
    for i in range(len(state)):
        terms = [M[..., i, j, None] * x for j, x in enumerate(state)]
        if g is not None and y is not None:
            terms.append(g[..., i, None] * y)
        rows.append(functools.reduce(torch.add, terms).to(state[0].dtype))
    return torch.stack(rows) if isinstance(state, Tensor) else tuple(rows)

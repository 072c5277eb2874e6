"""AltUp with coefficients that depend on the token, as Gemma 3n has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from altup.core.errors import check_choice
from altup.kernels.altup_update import State
from altup.kernels.altup_update_dynamic import altup_update_dynamic, mix_blocks
from altup.nn.altup import TWIN_NOISE, AltUp
from altup.nn.coefficients import CoefficientModule, coefficient
from altup.nn.rule import Reading


class DynamicUpdate(CoefficientModule):
    """One layer's prediction and correction with K² + K coefficients that each token makes for itself.

        m(x) = tanh(R·norm(x) / d),    P = I + A·m(xᵃ),    g = 1 + C·m(y)

    norm is an RMS norm with learned scale; R: [K, d], A: [K, K, K], C: [K, K]. A and C start at zero, so that the
    rule starts as the static one does. In training A and C are clipped to ±`clip` as Gemma 3n does it: A itself,
    and C where it is read. `implementation` is that of `altup_update_dynamic`: how the blocks are mixed once P and
    g are there.
    """

    compiled = True
    from_data = True

    def __init__(
        self,
        num_blocks: int,
        active: int,
        width: int,
        clip: float | None = None,
        eps: float = 1e-6,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        self.active = active
        self.clip = clip
        self.eps = eps
        self.implementation = implementation
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
    def from_gemma3n(cls, module: nn.Module, implementation: str = "auto") -> DynamicUpdate:
        """The rule of a `Gemma3nTextAltUp`, with its weights. (Its output scale is no part of the rule.)"""
        config: Any = module.config
        K, d = config.altup_num_inputs, config.hidden_size
        update = cls(K, config.altup_active_idx, d, config.altup_coef_clip, config.rms_norm_eps, implementation)
        weights = module.state_dict()
        update.to(weights["modality_router.weight"].device)
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
        """m(x): [..., d] → [..., K], in float32 or wider.

        R·norm(x) is (R·scale)·x over the root mean square of x, so that x is read once and not written normed.
        """
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            mean_square = x.square().mean(dim=-1, keepdim=True)
            routed = _project(x, self.R * (self.norm / x.shape[-1]))
            return torch.tanh(routed * torch.rsqrt(mean_square + self.eps))

    def prediction(self, x: Tensor) -> Tensor:
        """P for each token of the active block: [..., d] → [..., K, K]."""
        if self.training and self.clip is not None:
            # Through `data`: a graph that has read A before must not take this for a change of what it read.
            self.A.data.clamp_(-self.clip, self.clip)
        mixed = self._coefficients(self.A.flatten(0, 1), x).unflatten(-1, self.A.shape[:2])
        return mixed + torch.eye(mixed.shape[-1], dtype=mixed.dtype, device=mixed.device)

    def correction(self, y: Tensor) -> Tensor:
        """g for each token of the layer's output: [..., d] → [..., K]."""
        C = self.C if self.clip is None or not self.training else self.C.clamp(-self.clip, self.clip)
        return 1 + self._coefficients(C, y)

    def predict(self, state: State) -> State:
        """x̂ⁱ = Σⱼ Pᵢⱼ xʲ."""
        return mix_blocks(state, self.prediction(state[self.active]), implementation=self.implementation)

    def correct(self, predicted: State, computed: Tensor) -> State:
        """x_newⁱ = x̂ⁱ + gᵢ (y − x̂ᵃ)."""
        g = self.correction(computed)
        return altup_update_dynamic(predicted, computed, None, g, self.active, self.implementation)

    def forward(self, state: State, computed: Tensor, residual: Tensor | None = None) -> State:
        """Both in one pass over the state, for y = residual + computed."""
        y = computed if residual is None else residual + computed
        P, g = self.prediction(state[self.active]), self.correction(y)
        return altup_update_dynamic(state, y, P, g, self.active, self.implementation)

    def _coefficients(self, weight: Tensor, x: Tensor) -> Tensor:
        """Those that the token x makes, without autocast's rounding: weight [n, K] → [..., n]."""
        m = self.modalities(x)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(m, weight.to(m.dtype))


class DynamicAltUp(AltUp):
    """AltUp with data-dependent coefficients, d + K·d + K³ + K² of them a layer.

    A layer is fed the `old` active block, as in the paper, or the `predicted` one, as in Gemma 3n.

    Args:
        num_blocks: K, how many blocks of the layers' width d the state has.
        num_layers: How many layers will be run through the rule.
        width: d, the width of a block.
        selection: The block that each layer works on: `alternating`, `same`, or a list with one block a layer.
        recycled: Whether the table is d wide and its rows are repeated K times.
        lowering: `concat`, `sum` or `mean` of the blocks at the end.
        feed: What a layer is fed: the `old` active block or the `predicted` one.
        clip: Bound of A and C in training, as Gemma 3n has it; None is none.

    Examples:
        >>> import torch
        >>> from altup import DynamicAltUp
        >>> rule = DynamicAltUp(num_blocks=2, num_layers=1, width=8)
        >>> state = rule(rule.lift(torch.randn(3, 5, 16)), torch.nn.Linear(8, 8), 0)
        >>> rule.lower(state).shape
        torch.Size([3, 5, 16])
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
    def part_twins(self, noise: float = TWIN_NOISE, generator: torch.Generator | None = None) -> None:
        for update in self.updates:
            if isinstance(update, DynamicUpdate):
                update.part_twins(noise, generator)

    def read(self, state: State, site: int) -> Reading:
        if self.feed == "old" or self.num_blocks == 1:
            return super().read(state, site)
        predicted = self.predict(state, site)
        return Reading(predicted[self.active[site]], kept=predicted)

    def write(self, state: State, site: int, residual: Tensor | None, update: Tensor, kept: Any = None) -> State:
        if kept is None:
            return super().write(state, site, residual, update)
        return self.correct(kept, update if residual is None else residual + update, site)


def _project(x: Tensor, weight: Tensor) -> Tensor:
    """weight·x: [..., d] → [..., n], for few n.

    `torch.compile` makes n sums one pass over x, together with x's mean square; a matrix product would be none of
    its own kernels, and would need a copy of x in float32.
    """
    weight = weight.to(x.dtype)
    if torch.compiler.is_compiling():
        return torch.stack([(x * row).sum(dim=-1) for row in weight.unbind(0)], dim=-1)
    return F.linear(x, weight)

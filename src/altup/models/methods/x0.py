"""x0: every layer reads λ·x + μ·x₀, where x₀ is the embedding; two learned numbers a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from altup.kernels.altup_update import State
from altup.models.methods.dense import Dense
from altup.models.methods.registry import Preset, register
from altup.nn.coefficients import CoefficientModule, coefficient
from altup.nn.rule import Reading, Rule

if TYPE_CHECKING:
    from altup.models.accounting import Layer
    from altup.models.config import AltUpConfig


class Mixture(CoefficientModule):
    """λ·x + μ·x₀, which starts as x."""

    compiled = True

    def __init__(self) -> None:
        super().__init__()
        self.weights = coefficient(2)  # λ and μ
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weights.copy_(torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        of_x, of_first = self.weights.unbind()
        return (of_x * x + of_first * first).to(x.dtype)


class X0Rule(Rule):
    """The state is x and x₀."""

    def __init__(self, num_sites: int) -> None:
        super().__init__()
        self.mixtures = nn.ModuleList(Mixture() for _ in range(num_sites))

    def lift(self, embeddings: Tensor) -> Tensor:
        return torch.stack([embeddings, embeddings])

    def read(self, state: State, site: int) -> Reading:
        return Reading(self.mixtures[site](state[0], state[1]))

    def write(self, state: State, site: int, residual: Tensor | None, update: Tensor, kept: Any = None) -> State:
        x = update if residual is None else residual + update
        return torch.stack([x, state[1]]) if isinstance(state, Tensor) else (x, state[1])

    def lower(self, state: State) -> Tensor:
        return state[0]


@register
class X0(Dense):
    name = "x0"
    presets: ClassVar = {"x0": Preset("every layer also reads the embedding", {"widening": "x0"})}

    def build_rule(self, config: AltUpConfig, num_sites: int, lowering: str | None) -> Rule:
        return X0Rule(num_sites)

    def state_blocks(self, config: AltUpConfig) -> int:
        return 2

    def has_coefficients(self, config: AltUpConfig) -> bool:
        return True

    def parameters(self, config: AltUpConfig, layer: Layer) -> int:
        return 2

    def flops(self, config: AltUpConfig, layer: Layer) -> int:
        return 2 * layer.state_tokens * 2 * config.d_model

    def activation_bytes(self, config: AltUpConfig, layer: Layer) -> int:
        """x, for λ. The mixture is the input of the layer's first norm, and x₀ that of the first layer."""
        return 2 * layer.state_tokens * config.d_model

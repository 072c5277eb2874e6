"""Linear maps inside modules: which are computed in fp8, and which are nothing but their weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from altup.core.errors import UserError
from altup.kernels.fp8 import MULTIPLE, Low, Rounded, check_fp8, fits_fp8, fp8_linear, round_many_weights
from altup.kernels.fp8.self_test import ALLOWED, fused_error, products_error
from altup.kernels.join_rows import join_rows
from altup.kernels.launch import can_launch, runs_triton

# Of attention: what makes queries, keys and values; the map behind it; keys and values of an encoder's output.
# And the feed-forward.
KINDS = ("projections", "output", "memory", "feed_forward")


# Rounding costs time for each number of x and y, a product's gain grows with k·n: on an H200 it pays for a map
# from k to n numbers from k·n = 512·(k + n) on.
PAYS = 512
Bound = Callable[[], Tensor]  # an upper bound of a module's absolute inputs, which the norm before it knows
Rounding = Low | Bound | None  # what is known of an input for 8 bits: its rounded form, or a bound


class Fp8Maps(nn.Module):
    """A module whose linear maps may be computed in fp8 in training: `fp8` holds the kinds that are."""

    fp8: frozenset[str] = frozenset()
    fused_fp8: bool = True  # whether the kernels of the feed-forward are right on this device
    joins_maps: bool = True  # whether maps of one input may be computed as one product (`join_maps`)
    rounded: dict[str, Rounded] | None = None  # weights in 8 bits, while `weights_rounded_together` lasts

    def maps_of_one_input(self) -> dict[str, Sequence[nn.Linear]]:
        """Those that are rounded as one, in the order of their results, by a name; where many layers have them."""
        return {}

    def takes_fp8(self, x: Tensor) -> bool:
        """Whether it may be given an input like x in 8 bits, because its maps read nothing else of it."""
        return False

    def rounded_maps(self, name: str) -> Rounded | None:
        return None if self.rounded is None else self.rounded.get(name)

    def joins(self, kind: str, x: Tensor) -> bool:
        """Whether maps of one input x are computed as one product.

        A backward pass then writes one gradient of the input instead of three that are added up, and starts fewer
        kernels. The sums are the same in another order.
        """
        wanted = self.joins_maps and self.training and fuses(x) and not self.in_fp8(kind)
        alike = len({getattr(part, "bias", None) is None for part in self.children()}) == 1
        return wanted and alike and self.has_plain_maps()

    def in_fp8(self, kind: str) -> bool:
        """Whether maps of this kind are computed in fp8 now. An adapter may have taken a map's place since
        `use_fp8`."""
        return self.training and kind in self.fp8 and self.has_plain_maps()

    def has_plain_maps(self) -> bool:
        return all(type(part) is nn.Linear and is_unhooked(part) for part in self.children())


def use_fp8(model: nn.Module, kinds: Collection[str] = KINDS, device: torch.device | None = None) -> int:
    """Compute linear maps of a model's layers in fp8, in training; gives the number of modules.

    Not where they are wrapped, as an adapter does, or watched by hooks. Evaluation stays in 16 bits. Without kinds
    everything goes back to 16 bits.

    On a GPU small maps are tried first, beside float64. Where the kernels of the feed-forward are wrong, it is
    made of plain maps; where those are wrong, it is a UserError. `device` is where the model will run, by default
    where it is.
    """
    fused = not kinds or _try_device(device or next(model.parameters()).device)
    number = 0
    for module in model.modules():
        if isinstance(module, Fp8Maps):
            module.fp8 = frozenset(kinds) if module.has_plain_maps() else frozenset()
            module.fused_fp8 = fused
            number += bool(module.fp8)
    return number


def _try_device(device: torch.device) -> bool:
    """Whether the fused kernels may be used; UserError where no product in fp8 is right."""
    if device.type != "cuda":
        return True
    machine = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    error = products_error(device)
    if error > ALLOWED:
        raise UserError(
            f"precision='fp8' computes wrong products on this machine: a gradient is off by {error:.0%}, where "
            f"rounding explains 10% ({machine}); take 'bf16'"
        )
    error = fused_error(device)
    if error > ALLOWED:
        warnings.warn(
            f"fp8: the feed-forward's fused kernels are wrong on this machine, by {error:.0%} ({machine}). Plain "
            "maps take their place, which are right and somewhat slower",
            stacklevel=3,
        )
    return error <= ALLOWED


def enable_fp8(model: nn.Module, device: torch.device) -> None:
    """`use_fp8` for a run, or a UserError where the GPU or the model cannot."""
    check_fp8(device)
    if not use_fp8(model, device=device):
        raise UserError(
            f"precision='fp8' is for the layers of altup's own T5, BERT and decoder, and {type(model).__name__} "
            "has none; take 'bf16'"
        )


def join_maps(model: nn.Module, joined: bool = True) -> None:
    """Whether modules may compute maps of one input as one product: a copy of the joined weights then lives until
    the backward pass."""
    for module in model.modules():
        if isinstance(module, Fp8Maps):
            module.joins_maps = joined


def fuses(x: Tensor) -> bool:
    """Whether products and passes over x are joined in training: on a GPU in bf16, where that was measured."""
    return x.dtype == torch.bfloat16 and torch.is_grad_enabled() and runs_triton(x.device)


def joined_linear(x: Tensor, linears: Sequence[nn.Linear]) -> Tensor:
    """The maps' results side by side, by one product."""
    if len(linears) == 1:
        return linears[0](x)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else linears[0].weight.dtype
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = join_rows(biases, dtype) if biases else None
    return F.linear(x, join_rows([linear.weight for linear in linears], dtype), bias)


@contextmanager
def weights_rounded_together(layers: Iterable[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Round the weights that `layers` multiply in fp8, alike ones in two launches, for as long as this lasts.

    Where they are sharded, each layer rounds its own.
    """
    alike: dict[Any, list[tuple[Fp8Maps, str, list[Tensor]]]] = {}
    modules = [part for layer in layers for part in layer.modules() if isinstance(part, Fp8Maps) and part.fp8]
    for module in modules:
        module.rounded = {}
        for name, linears in module.maps_of_one_input().items():
            weights = [linear.weight for linear in linears]
            if _are_alike(linears, dtype):
                key = len(weights), weights[0].shape, weights[0].dtype
                alike.setdefault(key, []).append((module, name, weights))
    try:
        for (each, *_), found in alike.items():
            every = [weight for _, _, weights in found for weight in weights]
            for (module, name, _), rounded in zip(found, round_many_weights(every, each, dtype), strict=True):
                module.rounded[name] = rounded  # type: ignore[index]
        yield
    finally:
        for module in modules:
            module.rounded = None


def _are_alike(linears: Sequence[nn.Linear], dtype: torch.dtype) -> bool:
    """Whether weights are alike, of sizes that fp8 takes and that make it pay, and kernels can read them."""
    plain = all(type(linear) is nn.Linear and is_unhooked(linear) for linear in linears)
    if not plain or not all(type(linear.weight) is nn.Parameter for linear in linears):
        return False
    weights = [linear.weight.detach() for linear in linears]
    alike = all(weight.shape == weights[0].shape and weight.dtype == weights[0].dtype for weight in weights)
    x = weights[0].new_empty(MULTIPLE, linears[0].in_features, dtype=dtype)
    return alike and _can_read(weights) and fits_fp8(x, *weights) and _pays(x, linears)


def _can_read(weights: Sequence[Tensor]) -> bool:
    """Whether kernels can, where there are any."""
    if not can_launch(weights[0].device):
        return True
    from altup.kernels.multi_tensor import can_read

    return can_read(weights)


def apply_linears(
    x: Tensor,
    linears: Sequence[nn.Linear],
    fp8: bool,
    rounding: Rounding = None,
    slots: int = 0,
    rounded: Rounded | None = None,
) -> tuple[Tensor, ...]:
    """linear(x) for each; where `fp8` is wanted, and sizes allow it and make it pay, as one product, which may be
    followed by `slots` (see `LinearMaps`). `rounding`: of x, as the norm before it knows; `rounded`: the weights
    in 8 bits, where that is done."""
    if not fp8 or not multiplies_in_fp8(x, linears):
        return tuple(linear(x) for linear in linears)
    weights = [linear.weight for linear in linears]
    results = fp8_linear(x, weights, slots=slots, rounded=rounded, **rounding_options(rounding))
    mapped = (
        result if linear.bias is None else result + linear.bias.to(result.dtype)
        for linear, result in zip(linears, results, strict=False)
    )
    return (*mapped, *results[len(linears) :])


def rounding_options(rounding: Rounding) -> dict[str, Any]:
    """`rounding` as arguments of the kernels."""
    if isinstance(rounding, Low):
        return {"low": rounding}
    return {} if rounding is None else {"bound": rounding()}


def multiplies_in_fp8(x: Tensor, linears: Sequence[nn.Linear]) -> bool:
    """Whether sizes allow it and make it pay."""
    return fits_fp8(x, *(linear.weight for linear in linears)) and _pays(x, linears)


def _pays(x: Tensor, linears: Sequence[nn.Linear]) -> bool:
    k, n = x.shape[-1], sum(linear.out_features for linear in linears)
    return not x.is_cuda or k * n >= PAYS * (k + n)


def is_bare(module: nn.Module, bias: bool = False) -> bool:
    """Whether a linear map's weight may be taken for the map: `module(x)` is x·weightᵀ (+ bias) and nothing else
    happens. It is no adapter, its forward is neither hooked nor replaced, and it has a bias exactly if
    `bias`."""
    return type(module) is nn.Linear and (module.bias is not None) == bias and is_unhooked(module)


def is_unhooked(module: nn.Module) -> bool:
    """Whether calling a module does what its class does: nothing is hooked to it, nor its forward replaced."""
    return (
        not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and "forward" not in module.__dict__
    )

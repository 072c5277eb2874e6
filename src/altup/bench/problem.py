"""What a case is made of: problems, providers, works (see `altup.bench`), and comparing with the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from altup.bench.timing import Spread

Timings = dict[str, dict[str, "Spread"]]  # provider → mode → milliseconds
Answer = Mapping[str, Tensor | Sequence[Tensor]]  # what a work computes: outputs and gradients by name


@dataclass(frozen=True)
class Setup:
    """Where and how large: `quick` shrinks every case to seconds; `sizes` are the models of the `step` case.

    Compiled code and Triton kernels are timed on GPUs. They can be tried elsewhere, which takes long.
    """

    device: torch.device
    quick: bool
    sizes: Sequence[str] = ("base",)
    compiles: bool = False
    runs_triton: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


@dataclass
class Work:
    """One provider, ready to run.

    `forward(i)` is repetition i, which may choose among several inputs so that none lies in a cache; `backward`
    takes what it returned. `errors` compares outputs and gradients with the reference, as `errors` does.
    `mode` names the work where there is no backward pass. `per_repetition` counts what `unit` counts, in one
    repetition. `held` are the bytes of weights, which peak memory includes; it is that of `unrecorded`, where a
    repetition replays a graph, whose memory is allocated when it is recorded. `records`: the warm-up records such
    a graph, and what that holds counts. `on_host`: time spent on the host counts, as for someone who waits for an
    answer; otherwise it is hidden behind the device's. `together`: a burst of repetitions is timed as one, within
    the context that `around` makes.
    """

    forward: Callable[[int], Any]
    backward: Callable[[Any], Any] | None = None
    errors: Callable[[], dict[str, float]] | None = None
    mode: str = "forward"
    per_repetition: float = 0
    unit: str = "seq/s"
    held: int = 0
    on_host: bool = False
    unrecorded: Callable[[], Any] | None = None
    records: bool = False
    together: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def whole(self) -> str:
        """The mode that counts."""
        return self.mode if self.backward is None else "both"


@dataclass(frozen=True)
class Provider:
    """`kind` is ours, plain, peer or floor (see `altup.bench`). The start of `compiled` ones is timed too."""

    name: str
    build: Callable[[], Work]
    kind: str = "ours"
    compiled: bool = False
    triton: bool = False

    def fits(self, setup: Setup) -> bool:
        return (setup.compiles or not self.compiled) and (setup.runs_triton or not self.triton)


@dataclass(frozen=True)
class Fact:
    """A number that follows from several timings, such as an overhead."""

    provider: str
    metric: str
    value: float
    note: str
    mode: str = "both"


def no_facts(timings: Timings) -> Iterable[Fact]:
    return ()


@dataclass
class Problem:
    """Providers of one work at one size. Ratios are to the provider `baseline`; without one, to the fastest peer.

    `tolerances` are the largest errors allowed, by the name of what is compared; `""` stands for all others.
    """

    case: str
    sizes: dict[str, int | str]
    providers: list[Provider]
    baseline: str | None = None
    tolerances: dict[str, float] = field(default_factory=lambda: {"": 0.0})
    derive: Callable[[Timings], Iterable[Fact]] = no_facts

    def find_baseline(self, timings: Timings, mode: str) -> str | None:
        """Whose time the others' are compared with; None where it was not measured."""
        if self.baseline is not None:
            return self.baseline if mode in timings.get(self.baseline, {}) else None
        peers = [one.name for one in self.providers if one.kind == "peer" and mode in timings.get(one.name, {})]
        return min(peers, key=lambda name: timings[name][mode].p50, default=None)

    def excess(self, errors: dict[str, float]) -> str | None:
        """The first error above its tolerance, in words; NaN is above any."""
        for name, error in errors.items():
            allowed = self.tolerances.get(name, self.tolerances.get("", 0.0))
            if not error <= allowed:
                return f"{name} is off by {error:.2g}, more than {allowed:.2g}"
        return None

    def is_where(self, wanted: Sequence[str]) -> bool:
        """Whether its sizes are among those wanted, `name=value` each: of one name any, of several all."""
        names = {text.partition("=")[0] for text in wanted}
        return all(f"{name}={self.sizes.get(name)}" in wanted for name in names)

    def __str__(self) -> str:
        return f"{self.case} " + " ".join(f"{name}={value}" for name, value in self.sizes.items())


def distance(got: Tensor | Sequence[Tensor], want: Tensor | Sequence[Tensor]) -> float:
    """‖got − want‖ / ‖want‖ in float64. Several tensors count as one long vector; where `want` is zero, ‖got‖."""
    pairs = [(got, want)] if isinstance(got, Tensor) and isinstance(want, Tensor) else zip(got, want, strict=True)
    off = size = 0.0
    for a, b in pairs:
        wide = b.detach().double()
        if a.shape != b.shape:
            return float("inf")
        off += float((a.detach().double() - wide).square().sum())
        size += float(wide.square().sum())
    return float((off / (size or 1.0)) ** 0.5)


def errors(got: Answer, want: Answer) -> dict[str, float]:
    return {name: distance(got[name], want[name]) for name in want}


def doubled(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Float64 copies that require gradients: the inputs of a reference."""
    return [t.detach().to(torch.float64).requires_grad_() for t in tensors]


def autograd_work(
    run: Callable[[], Tensor],
    inputs: Sequence[Tensor],
    upstream: Tensor | None,
    compare: Callable[[Tensor, tuple[Tensor, ...]], dict[str, float]] | None,
    **more: Any,
) -> Work:
    """Forward `run()`, backward the gradients of `inputs` given that of the output.

    `compare(output, gradients)` gives the errors; `more` are further fields of `Work`.
    """

    def forward(i: int) -> Tensor:
        return run()

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, upstream)

    def errors() -> dict[str, float]:
        out = forward(0)
        assert compare is not None
        return compare(out, backward(out))

    return Work(forward, backward, errors if compare else None, **more)

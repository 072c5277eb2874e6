"""`explain`: what each kind of part of an accelerated model runs on, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from altup.core.errors import UserError
from altup.models.recorded_calls import RecordedCalls


@dataclass(frozen=True)
class Part:
    """One line: `count` parts run as `runs` says, because of `why` (empty where nothing stands against it).

    `runs` is kernel, plain (altup's formulas in PyTorch) or original; of layers compiled or eager; and of whole
    calls recorded (as CUDA graphs) or launched.
    """

    name: str
    count: int
    runs: str
    why: str = ""


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; it prints as a table."""

    parts: tuple[Part, ...]

    def as_dict(self) -> dict[str, list[dict[str, Any]]]:
        """By name of the part, each way in which such parts run: {count, runs, why}."""
        found: dict[str, list[dict[str, Any]]] = {}
        for part in self.parts:
            found.setdefault(part.name, []).append({k: v for k, v in asdict(part).items() if k != "name"})
        return found

    def __str__(self) -> str:
        rows = [("part", "", "runs", "why"), *((p.name, str(p.count), p.runs, p.why) for p in self.parts)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ("  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows)
        return "\n".join(lines)

    __repr__ = __str__


def explain(model: nn.Module) -> Explanation:
    """What `altup.accelerate` gave each kind of part of a model: a kernel, compiled or recorded code, or nothing.

    Args:
        model: A Gemma 3n, a model of altup or a widened one, accelerated or not, or a model that contains one
            (as PEFT's do).

    Returns:
        An `Explanation`, which prints as a table; `as_dict()` has the same facts.

    Examples:
        >>> import altup
        >>> model = altup.AltUpDecoderForCausalLM(altup.AltUpDecoderConfig.from_preset("tiny", vocab_size=20))
        >>> print(altup.explain(model))
        part       runs      why
        layers  4  eager     compile=True was not asked for
        calls   1  launched  record=True was not asked for
    """
    from altup.models.accelerate import _check_model, _has_gemma3n, _is_ours

    _check_model("explain", model)
    if _has_gemma3n(model):
        from altup.models.gemma3n.explanation import parts

        found: Iterable[tuple[str, str, str]] = parts(model)
    elif _is_ours(model):
        found = ()
    else:
        raise UserError(
            f"{type(model).__name__} holds no part that altup.accelerate knows: there is nothing to explain"
        )
    counted = Counter([*found, *_layers(model), _calls(model)])
    return Explanation(tuple(Part(name, count, runs, why) for (name, runs, why), count in counted.items()))


def _layers(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    kinds = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    for part in model.modules():
        if type(part).__name__ in kinds:
            compiled = part._compiled_call_impl is not None
            yield ("layers", "compiled", "") if compiled else ("layers", "eager", "compile=True was not asked for")


def _calls(model: nn.Module) -> tuple[str, str, str]:
    for part in model.modules():  # an adapter may have been put around what was accelerated
        calls: Any = part._compiled_call_impl
        if isinstance(calls, RecordedCalls):
            obstacle = calls.obstacle(part)
            return "calls", "launched" if obstacle else "recorded", obstacle or ""
    return "calls", "launched", "record=True was not asked for"

"""Speedup at equal accuracy, as the paper defines it.

The dense models are points (latency, score); between neighbours in latency the score is taken to be linear. The
dense model that would reach a score is the fastest place on that line with it, and

    speedup = (latency of that dense model − latency of the model) / latency of the model.

A score outside the dense models' range has no such place: nothing is extrapolated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from altup.core.errors import UserError


class OutsideDenseRangeError(UserError):
    """No dense model that was measured brackets the score."""


def dense_latency(dense: Sequence[tuple[float, float]], score: float) -> float:
    """The latency at which the line through the dense points (latency, score) first has `score`."""
    points = sorted(dense)
    if not points:
        raise OutsideDenseRangeError("no dense model was measured; run the frontier's dense rows")
    if any(not latency > 0 for latency, _ in points):
        raise UserError(f"latencies must be above 0: {[latency for latency, _ in points]}")
    if points[0][1] == score:
        return points[0][0]
    if score > points[0][1]:  # a lower one would be reached by a faster model than any measured
        for (fast, low), (slow, high) in itertools.pairwise(points):
            if low <= score <= high:
                return slow if high == low else fast + (slow - fast) * (score - low) / (high - low)
    low, high = min(s for _, s in points), max(s for _, s in points)
    raise OutsideDenseRangeError(
        f"score {score:.2f} is outside the dense range ({points[0][1]:.2f} for the fastest, {low:.2f} to "
        f"{high:.2f} in all); measure a dense model beyond it, for nothing is extrapolated"
    )


def speedup(dense: Sequence[tuple[float, float]], latency: float, score: float) -> float:
    """Relative speedup of a model with `latency` and `score`; 0.27 means 27 % faster than dense."""
    if not latency > 0:
        raise UserError(f"latency={latency} must be above 0")
    return (dense_latency(dense, score) - latency) / latency

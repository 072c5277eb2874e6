"""The part of the training text that a vocabulary is trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from altup.core.errors import UserError
from altup.data.bad_input import BadInput
from altup.data.sources import Chain

if TYPE_CHECKING:
    from altup.data.prepare import Recipe

READERS = 32  # files open at a time
LARGEST_STEP = 8


def sample(recipe: Recipe) -> Iterator[str]:
    """About `sample_bytes` of training text, or all of it where there is less: the same on every run.

    Documents come from up to 32 files in turn, spread over all of them; a file that ends gives its place to the
    next. Of large sources only every k-th document is taken, so that the sample reaches further in; should that
    not fill it, the documents left out follow in k - 1 further passes.
    """
    chain = Chain(recipe.sources)
    parts = chain.parts()
    stride = -(-len(parts) // READERS)
    spread = [part for first in range(stride) for part in parts[first::stride]]
    every = min(LARGEST_STEP, max(1, chain.text_bytes() // recipe.sample_bytes))
    left = recipe.sample_bytes
    for offset in range(every):
        bad_input = BadInput(recipe.on_error, recipe.limits)
        waiting = (islice(part.read(bad_input), offset, None, every) for part in spread)
        readers = deque(islice(waiting, READERS))
        while readers:
            reader = readers.popleft()
            text = next(reader, None)
            if text is None:
                readers.extend(islice(waiting, 1))
                continue
            readers.append(reader)
            if not recipe.held_out(text):
                left -= len(text.encode())
                yield text
                if left <= 0:
                    return
    if left == recipe.sample_bytes:
        reasons = (
            f"{bad_input.summary()}; --on-error stop says more" if bad_input.state() else "empty, or all held out"
        )
        raise UserError(f"the sources hold no text to train a vocabulary on: {reasons}")

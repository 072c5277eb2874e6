"""Which documents are held out, and how many of them by default."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from altup.core.errors import UserError
from altup.data import RAW_LENGTH
from altup.data.bad_input import BadInput, Limits
from altup.data.shards import Manifest
from altup.data.sources import Chain, Source

FRACTION = 0.01
LARGER = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
ENOUGH = 4 << 20  # bytes of text of which FRACTION is always enough
SEQUENCE = RAW_LENGTH * 4  # characters, about
SEQUENCES = 8  # to hold out, if they are no more than a tenth of the text


def document_hash(text: str) -> int:
    """64 bits by which a document is held out or not; the same text always falls on the same side."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def choose_fraction(out: Path, sources: Sequence[Source], on_error: str, limits: Limits) -> float:
    """The part of the documents to hold out: FRACTION, or of little text the smallest that can be measured on.

    A folder that has shards already keeps the part they were made with.
    """
    if (stored := _stored_fraction(out)) is not None:
        return stored
    chain = Chain(sources)
    if not 0 < chain.text_bytes() < ENOUGH:
        return FRACTION
    documents = [(document_hash(text), len(text)) for text in chain.read(BadInput(on_error, limits))]
    total = sum(length for _, length in documents)
    for wanted in (max(SEQUENCE, min(SEQUENCES * SEQUENCE, total // 10)), 1):
        for fraction in (FRACTION, *LARGER):
            held_out = sum(length for place, length in documents if place < fraction * 2**64)
            if wanted <= held_out <= total / 2:
                return fraction
    return FRACTION


def _stored_fraction(out: Path) -> float | None:
    try:
        manifest = Manifest.load(out)
    except (UserError, OSError):  # there is none, or `prepare` will say what is wrong with it
        return None
    stored = manifest.settings.get("validation")
    return stored if isinstance(stored, float) and manifest.shards("train") else None

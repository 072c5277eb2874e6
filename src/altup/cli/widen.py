"""`altup widen`: any Hugging Face model to a wider one that computes the same function."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from altup.core.errors import UserError, named

if TYPE_CHECKING:
    from altup.models.widening.folders import Written


def command(
    model: Annotated[str, typer.Argument(help="A folder or hub name of any model of transformers.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the wider model to.")],
    method: Annotated[str, typer.Option(help="recycled, altup or sameup.")] = "recycled",
    k: Annotated[int, typer.Option("--k", help="Number of blocks.")] = 2,
    layers: Annotated[
        str,
        typer.Option(help="Where the state is wide, as in Python: 6: is from the seventh layer on. All if empty."),
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of the noise that lets equal blocks become different.")] = 0,
) -> None:
    """Widen any Hugging Face model and keep its class; it computes the same function until it is trained.

    `altup.load_widened` loads the result and `altup narrow` undoes it. `altup upcycle` converts a T5, BERT or
    Llama to altup's own model instead, which trains faster.
    """
    from transformers.utils import logging

    from altup.core.runs import find_model
    from altup.core.terminal import Console
    from altup.models.widening.folders import widen_folder

    logging.disable_progress_bar()
    console = Console()
    with console.status("Loading") as status:
        made = widen_folder(find_model(model), out, method, k, seed, _slice(layers), say=status.update)
    report(made, out)


def _slice(layers: str) -> slice | None:
    """`2:6` as Python reads it."""
    if not layers:
        return None
    if not re.fullmatch(r"(-?\d{1,4})?:(-?\d{1,4})?", layers):
        raise UserError(f"{named('layers', layers)} is no run of layers; give 2:6, 6: or :4")
    start, stop = (int(part) if part else None for part in layers.split(":"))
    return slice(start, stop)


def report(made: Written, out: Path) -> None:
    """What lies in `out`."""
    typer.echo(made.description)
    more = made.parameters - made.parameters_before
    change = f"{more / made.parameters_before:+.1%}" if abs(more) > made.parameters_before / 1000 else f"{more:+,}"
    typer.echo(f"{out}: {made.parameters:,} parameters ({change}); {made.no_tokenizer or 'tokenizer copied'}")

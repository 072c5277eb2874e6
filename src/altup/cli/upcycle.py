"""`altup upcycle`: a pretrained checkpoint to a wider model that computes the same function."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    model: Annotated[
        str,
        typer.Argument(help="A run, folder or hub name: T5 1.1, Flan-T5, BERT, Llama, or a dense model of altup."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the wider model to.")],
    method: Annotated[
        str, typer.Option(help="recycled, altup, sameup, or dense (plain conversion).")
    ] = "recycled",
    k: Annotated[int, typer.Option("--k", help="Number of blocks.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the noise that lets equal blocks become different.")] = 0,
    coefficients: Annotated[str, typer.Option(help="static, dynamic, or fixed (not for recycled).")] = "static",
) -> None:
    """Convert a pretrained T5, BERT or Llama to altup's own model, wider, computing the same function at first.

    The result loads with the Auto classes after `import altup.models`. `altup widen` takes any model of Hugging
    Face and keeps its class.
    """
    from transformers.utils import logging

    from altup.core.runs import find_model
    from altup.core.terminal import Console
    from altup.models.upcycling import upcycle_to_folder

    logging.disable_progress_bar()
    console = Console()
    with console.status("Loading") as status:
        made = upcycle_to_folder(find_model(model), out, method, k, seed, status.update, coefficients)
    console.print(
        f"{out}: {method}, {made.num_blocks} block(s), {made.parameters:,} parameters "
        f"({made.parameters / made.parameters_before - 1:+.2%}); relative difference of the logits "
        f"{made.difference:.1e}; {made.no_tokenizer or 'tokenizer copied'}",
        markup=False,
    )

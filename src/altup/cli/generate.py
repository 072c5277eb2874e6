"""`altup generate`: fill in the gaps of a text, or continue it, with a trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    model: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run's folder (final model or newest checkpoint) or a model folder."),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", help="Text, maybe with gaps: 'I <extra_id_0> tea.' Repeat it; default: lines of stdin."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to write for a prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; higher samples.")] = 0.0,
    beams: Annotated[int, typer.Option(help="Beams of a beam search.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
) -> None:
    """Fill in the gaps (<extra_id_0>, <extra_id_1>, …) of each prompt, or continue it.

    A T5 fills gaps with any number of tokens, a BERT with one each; a decoder continues the text. What the model
    wrote is green in a terminal, and a gap for which it wrote nothing is a red ␣.
    """
    from altup.core.errors import UserError

    prompts = prompt or [
        line for line in sys.stdin.buffer.read().decode(errors="replace").splitlines() if line.strip()
    ]
    if not prompts:
        raise UserError("no prompt; give --prompt TEXT or lines on stdin")

    from rich.console import Console
    from rich.text import Text

    from altup.evaluation.generate import answer_prompts

    answers = answer_prompts(
        model, prompts, max_new_tokens=max_new_tokens, temperature=temperature, beams=beams, seed=seed, say=_remark
    )
    console = Console(highlight=False, soft_wrap=True)
    for pieces in answers:
        shown = [
            (text, "bold green" if filled else "") if text or not console.is_terminal else ("␣", "bold red")
            for text, filled in pieces
        ]
        console.print(Text.assemble(*shown))


def _remark(text: str) -> None:
    """Beside the answers, which a program may read."""
    typer.secho(text, err=True, fg="yellow")

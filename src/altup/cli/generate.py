"""`altup generate`: fill in the gaps of a text, or continue it, with a trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from altup.cli.options import option


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
    temperature: Annotated[
        float | None,
        option(
            "--temperature",
            "0 takes the likeliest token; higher samples. Default: 0; with --top-k or --top-p 1.",
            "Options",
        ),
    ] = None,
    top_k: Annotated[
        int | None, option("--top-k", "Sample from this many of the likeliest tokens.", "Options")
    ] = None,
    top_p: Annotated[
        float | None,
        option("--top-p", "Sample from the likeliest tokens that together have this probability.", "Options"),
    ] = None,
    beams: Annotated[int, typer.Option(help="Beams of a beam search.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    stream: Annotated[
        bool | None,
        option(
            "--stream/--no-stream",
            "Print a decoder's answer to one prompt while it writes. Default: in a terminal.",
            "Options",
        ),
    ] = None,
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

    from rich.text import Text

    from altup.core.terminal import Console
    from altup.evaluation.generate import answer_prompts

    console = Console(highlight=False, soft_wrap=True)
    written: list[str] = []

    def write(text: str) -> None:
        if not written:
            console.print(Text(prompts[0]), end="")
        console.print(Text(text, "bold green"), end="")
        written.append(text)

    answers = answer_prompts(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        beams=beams,
        seed=seed,
        say=_remark,
        stream=write if (console.is_terminal if stream is None else stream) else None,
    )
    if written:
        console.print()
        return
    for pieces in answers:
        shown = [
            (text, "bold green" if filled else "") if text or not console.is_terminal else ("␣", "bold red")
            for text, filled in pieces
        ]
        console.print(Text.assemble(*shown))


def _remark(text: str) -> None:
    """Beside the answers, which a program may read."""
    typer.secho(text, err=True, fg="yellow")

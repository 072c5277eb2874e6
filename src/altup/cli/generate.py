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

    A T5 fills gaps with any number of tokens, a BERT with one each; a decoder continues the text.
    """
    from altup.core.errors import UserError, check_range, check_whole

    check_whole("max_new_tokens", max_new_tokens, 1)
    check_whole("beams", beams, 1)
    check_range("temperature", temperature, 0, float("inf"))
    prompts = prompt or [
        line for line in sys.stdin.buffer.read().decode(errors="replace").splitlines() if line.strip()
    ]
    if not prompts:
        raise UserError("no prompt; give --prompt TEXT or lines on stdin")

    import torch
    import transformers
    from rich.console import Console
    from rich.text import Text
    from safetensors import SafetensorError
    from transformers.utils import logging

    import altup.models  # noqa: F401  registers our models with the Auto classes
    from altup.core.cpu import ensure_bf16
    from altup.evaluation.filling import fill_spans
    from altup.evaluation.prompting import continue_text, fill_masks
    from altup.models.families import FAMILIES, family_name
    from altup.training.run_folder import newest_model

    logging.disable_progress_bar()
    folder = newest_model(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = family_name(transformers.AutoConfig.from_pretrained(folder).model_type)
        auto_class = getattr(transformers, FAMILIES[kind or "t5"].auto_class)
        network = auto_class.from_pretrained(folder).to(device).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder} holds no whole model with a tokenizer: {error}") from None
    if network.dtype == torch.bfloat16:
        ensure_bf16(device)
    torch.manual_seed(seed)
    options = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    console = Console(highlight=False, soft_wrap=True)
    if kind == "bert":
        if temperature or beams > 1:
            raise UserError("--temperature, --beams: a BERT names the likeliest token of each gap; leave them out")
        answers = fill_masks(network, tokenizer, prompts)
    else:
        answer = continue_text if kind == "decoder" else fill_spans
        answers = answer(network, tokenizer, prompts, max_new_tokens=max_new_tokens, num_beams=beams, **options)
    for pieces in answers:
        console.print(Text.assemble(*((text, "bold green" if filled else "") for text, filled in pieces)))

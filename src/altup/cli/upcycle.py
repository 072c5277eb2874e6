"""`altup upcycle`: a pretrained checkpoint to a wider model that computes the same function."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "spiece.model", "tokenizer.model", "vocab.txt")


def command(
    model: Annotated[
        str,
        typer.Argument(help="A run, folder or hub name: T5 1.1, Flan-T5, BERT, Llama, a dense model of ours."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the wider model to.")],
    method: Annotated[
        str, typer.Option(help="recycled, altup, sameup, or dense (plain conversion).")
    ] = "recycled",
    k: Annotated[int, typer.Option("--k", help="Number of blocks.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the noise that parts blocks which would stay equal.")] = 0,
) -> None:
    """Widen a pretrained T5, BERT or Llama so that it starts exactly where its weights stand.

    The result loads with the Auto classes after `import altup.models`, and trains on with any tool.
    """
    import torch
    from rich.console import Console
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from altup.core.errors import UserError
    from altup.models.upcycling import load_pretrained, upcycle
    from altup.training.run_folder import find_model

    logging.disable_progress_bar()
    console = Console()
    model = find_model(model)
    fresh = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {error.strerror}; give a new folder") from None
    if any(out.iterdir()):
        raise UserError(f"--out {out} is not empty; give a new folder")
    try:
        with console.status(f"Loading {model}"):
            original = load_pretrained(model)
        with console.status("Widening"):
            wide = upcycle(original, method=method, num_blocks=k, seed=seed)
    except UserError:
        if fresh:
            out.rmdir()
        raise
    with console.status("Comparing with the original"), torch.no_grad():
        ids = torch.randint(3, wide.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
        inputs = {"input_ids": ids.to(wide.device)}
        if wide.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = inputs["input_ids"][:, :8]
        before, after = original(**inputs).logits.float(), wide(**inputs).logits.float()
        difference = (after - before).abs().max().item() / before.std().item()
    wide.save_pretrained(out)
    tokenizer = "no tokenizer found beside the original; copy it yourself"
    # Without a file to read, the Auto class would make up an empty T5 tokenizer.
    if not Path(model).is_dir() or any((Path(model) / name).exists() for name in TOKENIZER_FILES):
        with contextlib.suppress(OSError, ValueError, KeyError):
            AutoTokenizer.from_pretrained(model).save_pretrained(out)
            tokenizer = "tokenizer copied"
    number, old = wide.num_parameters(), original.num_parameters()
    console.print(
        f"{out}: {method}, {wide.config.num_blocks} block(s), {number:,} parameters ({number / old - 1:+.2%}); "
        f"largest difference of the logits {difference:.1e} of their spread; {tokenizer}"
    )

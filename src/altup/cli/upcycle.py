"""`altup upcycle`: a pretrained checkpoint to a wider model that computes the same function."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    model: Annotated[str, typer.Argument(help="A folder or hub name: T5 1.1, Flan-T5, or a dense T5 of ours.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the wider model to.")],
    method: Annotated[
        str, typer.Option(help="recycled, altup, sameup, or dense (plain conversion).")
    ] = "recycled",
    k: Annotated[int, typer.Option("--k", help="Number of blocks.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the noise that parts blocks which would stay equal.")] = 0,
) -> None:
    """Widen a pretrained T5 so that it starts exactly where its weights stand.

    The result loads with `AutoModelForSeq2SeqLM` after `import altup.models`, and trains on with any tool.
    """
    import torch
    from rich.console import Console
    from transformers import AutoTokenizer

    from altup.errors import UserError
    from altup.models.upcycling import load_pretrained, upcycle

    console = Console()
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty; give a new folder")
    with console.status(f"Loading {model}"):
        original = load_pretrained(model)
    with console.status("Widening"):
        wide = upcycle(original, method=method, num_blocks=k, seed=seed)
    with console.status("Comparing with the original"), torch.no_grad():
        ids = torch.randint(3, wide.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
        inputs = {"input_ids": ids.to(wide.device), "decoder_input_ids": ids[:, :8].to(wide.device)}
        before, after = original(**inputs).logits.float(), wide(**inputs).logits.float()
        difference = (after - before).abs().max().item() / before.std().item()
    wide.save_pretrained(out)
    try:
        AutoTokenizer.from_pretrained(model).save_pretrained(out)
        tokenizer = "tokenizer copied"
    except (OSError, ValueError, KeyError):
        tokenizer = "no tokenizer found beside the original; copy it yourself"
    number, old = wide.num_parameters(), original.num_parameters()
    console.print(
        f"{out}: {method}, {wide.config.num_blocks} block(s), {number:,} parameters ({number / old - 1:+.2%}); "
        f"largest difference of the logits {difference:.1e} of their spread; {tokenizer}"
    )

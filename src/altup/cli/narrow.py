"""`altup narrow`: a widened model back to the one that it was."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    model: Annotated[str, typer.Argument(help="A folder or hub name of a model that was widened.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the narrow model to.")],
) -> None:
    """Undo `altup widen`, while all blocks are still equal.

    Training the layers alone keeps them equal. Once coefficients or wide tables have moved, no narrow model
    computes the same, and this refuses.
    """
    from transformers.utils import logging

    from altup.cli.widen import report
    from altup.core.runs import find_model
    from altup.core.terminal import Console
    from altup.models.widening.folders import narrow_folder

    logging.disable_progress_bar()
    with Console().status("Loading") as status:
        made = narrow_folder(find_model(model), out, say=status.update)
    report(made, out)

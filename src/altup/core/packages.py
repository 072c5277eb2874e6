"""Packages that only some work needs: what each is for, and how a run asks for one before it begins."""

from __future__ import annotations

import importlib

from altup.core.errors import UserError

OPTIONAL = {
    "datasets": "Hugging Face datasets such as C4",
    "scikit-learn": "F1 and Matthews correlation, for most of GLUE and SuperGLUE",
    "sentencepiece": "tokenizers that are SentencePiece files alone, such as T5 1.1's",
    "tensorboard": "training curves",
    "accelerate": "transformers.Trainer",
    "wandb": "tracking runs on Weights & Biases",
    "trackio": "tracking runs locally",
}
MODULES = {"scikit-learn": "sklearn"}  # where the name to import is another


def require(package: str, what: str) -> None:
    """UserError, before hours of work, if `what` will need a package that cannot be imported."""
    try:
        importlib.import_module(MODULES.get(package, package))
    except Exception as error:  # a broken installation raises anything
        raise UserError(f"{what} needs the package {package!r}: pip install {package}   ({error})") from error

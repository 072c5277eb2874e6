"""The final model on the Hugging Face Hub."""

from __future__ import annotations

import shutil

from altup.core.errors import UserError
from altup.training.card import CURVES
from altup.training.run import RunFolder


def create_repository(name: str) -> None:
    """Before training, so that a wrong name or a missing login is not found out after it."""
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(name, exist_ok=True)
    except Exception as error:  # the library raises its own, its HTTP client's and OSError
        raise UserError(
            f"--push-to-hub {name}: {error}; log in with `hf auth login`, check the name, or leave it out"
        ) from error


def upload(folder: RunFolder, name: str) -> None:
    from huggingface_hub import HfApi

    for file in (folder.card, folder.path / CURVES):
        if file.exists():
            shutil.copy(file, folder.final / file.name)
    try:
        HfApi().upload_folder(repo_id=name, folder_path=folder.final)
    except Exception as error:  # as above
        raise UserError(
            f"--push-to-hub {name}: {error}; the model is whole in {folder.final}, upload it with "
            f"`hf upload {name} {folder.final}`"
        ) from error

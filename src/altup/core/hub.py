"""Names of models: a folder, or a repository on the Hugging Face hub. An error names a mistyped folder."""

from __future__ import annotations

import difflib
from pathlib import Path

from altup.core.errors import UserError

TIMEOUT = 10.0  # seconds that the hub has to answer whether it knows a name
MODEL = "give a run or a model folder"
TOKENIZER = "give a folder with a tokenizer, a tokenizer.json, or a name on the hub"


def find_pretrained(name: str) -> str:
    """The folder `name`, or the hub's repository of this name, in the local cache or online."""
    path = _path(name, MODEL)
    if path.exists():
        return str(path)
    if not downloaded(name, "config.json") and (problem := hub_problem(name)):
        raise missing_folder(path, f"and {problem}")
    return name


def find_tokenizer(name: str) -> str:
    """The file or folder `name`, or the hub's repository, or the folder to which it was downloaded before."""
    path = _path(name, TOKENIZER)
    if path.exists():
        return str(path)
    if not (problem := hub_problem(name)):
        return name
    found = downloaded(name, "tokenizer.json") or downloaded(name, "tokenizer_config.json")
    if not found:
        raise missing_folder(path, f"and {problem}", TOKENIZER)
    return str(found.parent)


def downloaded(name: str, file: str) -> Path | None:
    """A file of a repository on the hub, if it was downloaded before."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        found = huggingface_hub.try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def hub_problem(name: str, kind: str = "model") -> str:
    """Why the hub does not give a `model` or `dataset`; empty if it does.

    The hub is asked once, because the libraries would retry for half a minute and print many lines.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        huggingface_hub.HfApi().repo_info(name, repo_type=kind, timeout=TIMEOUT)
    except RepositoryNotFoundError:
        return f"there is no {kind} of this name on the hub that you may read"
    except HFValidationError:
        return f"no {kind} on the hub can have this name"
    except OfflineModeIsEnabled:
        return "the hub is not asked (HF_HUB_OFFLINE is set)"
    except Exception as error:  # whatever the library and the network raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return f"the hub cannot be reached ({reason})"
    return ""


def _path(name: str, remedy: str) -> Path:
    """A name that can only be a path must exist; it is not looked up on the hub."""
    if not name:  # as a path it would be this folder
        raise UserError(f"the name '' is empty; {remedy}")
    path = Path(name).expanduser()
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise missing_folder(path, remedy=remedy)
    return path


def missing_folder(path: Path, elsewhere: str = "", remedy: str = MODEL) -> UserError:
    """The error for a missing folder, with similar names that exist."""
    if path.is_symlink():
        return UserError(f"{str(path)!r} is a link to {str(path.readlink())!r}, which does not exist; repair it")
    there = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
    near = [str(path.parent / name) for name in difflib.get_close_matches(path.name, there)]
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else remedy
    return UserError(f"{str(path)!r}: no such folder{f', {elsewhere}' if elsewhere else ''}; {hint}")

"""Names of models: a folder, or a repository on the Hugging Face hub. A mistyped folder is told as that."""

from __future__ import annotations

import difflib
from pathlib import Path

from altup.errors import UserError

TIMEOUT = 10.0  # seconds that the hub has to answer whether it knows a name


def find_place(name: str) -> str:
    """The folder `name`, or the hub's repository of this name: one that was downloaded before, or that is there.

    What can only be a path is not looked up on the hub. The rest is asked for once, as the libraries would try to
    connect for half a minute, in many lines, before they give up.
    """
    path = Path(name).expanduser()
    if path.exists():
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise missing(path)

    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        if not isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            huggingface_hub.HfApi().model_info(name, timeout=TIMEOUT)
    except RepositoryNotFoundError:
        raise missing(path, "nor is there a model of this name on the hub that you may read") from None
    except HFValidationError:
        raise missing(path, "and no model on the hub can have this name") from None
    except OfflineModeIsEnabled:
        raise missing(path, "and the hub is not asked (HF_HUB_OFFLINE is set)") from None
    except Exception as error:  # whatever the library and the network raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise missing(path, f"and the hub cannot be reached ({reason})") from None
    return name


def missing(path: Path, elsewhere: str = "") -> UserError:
    """The error for a folder that is not there, with names like it that are."""
    there = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
    near = [str(path.parent / name) for name in difflib.get_close_matches(path.name, there)]
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "give a run or a model folder"
    return UserError(f"{str(path)!r}: no such folder{f', {elsewhere}' if elsewhere else ''}; {hint}")

"""The model that a folder means."""

from __future__ import annotations

from pathlib import Path

import pytest

from altup.core.errors import UserError
from altup.core.runs import newest_model
from altup.core.sealed_folders import atomic_folder


def save(folder: Path, *names: str) -> None:
    def write(path: Path) -> None:
        for file in ("config.json", "model.safetensors"):
            (path / file).write_text("{}")

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        atomic_folder(folder, name, write)


def test_the_newest_model_of_a_run(tmp_path: Path) -> None:
    save(tmp_path / "cut" / "checkpoints", "step-9", "step-10")
    save(tmp_path / "done" / "checkpoints", "step-9")
    save(tmp_path / "done", "final")
    assert newest_model(tmp_path / "done").name == "final"
    assert newest_model(tmp_path / "done" / "final").name == "final"
    assert newest_model(tmp_path / "cut").name == "step-10"
    (tmp_path / "cut/checkpoints/step-10/model.safetensors").write_bytes(b"")
    assert newest_model(tmp_path / "cut").name == "step-9"
    with pytest.raises(UserError, match="neither a model folder"):
        newest_model(tmp_path)


def test_who_needs_a_damaged_final_model_is_told_how_to_get_it(tmp_path: Path) -> None:
    save(tmp_path, "final")
    (tmp_path / "final/model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"final is damaged: .* resume the run \(--resume\), which makes it again"):
        newest_model(tmp_path)

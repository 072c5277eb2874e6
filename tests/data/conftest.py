"""Real prose, and a small prepared folder, for all tests of the data pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from altup.core.sealed_folders import SEAL, write_sealed_json
from altup.data.embedded import documents
from altup.data.prepare import Recipe, prepare
from altup.data.shards import MANIFEST
from altup.data.text_files import LocalFiles


@pytest.fixture(scope="session")
def prose() -> list[str]:
    """Some 300 kB of English in 300 documents."""
    merged = [" ".join(documents()[i : i + 5]) for i in range(0, 1500, 5)]
    assert sum(map(len, merged)) > 200_000
    return merged


@pytest.fixture(scope="session")
def corpus(prose: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "prose.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in prose))
    return path


@pytest.fixture(scope="session")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of the corpus: small ones, so that sequences cross their borders."""
    out = tmp_path_factory.mktemp("prepared") / "data"
    prepare(
        out, Recipe([LocalFiles(corpus)], validation_fraction=0.1, vocab_size=800, shard_tokens=7_001), workers=1
    )
    return out


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object], sealed: bool = True) -> None:
    """Change the manifest of a prepared folder; `sealed`: as a program would that knows how, with its hash."""
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    content.pop(SEAL)
    change(content)
    if sealed:
        write_sealed_json(path, content)
    else:
        path.write_text(json.dumps({**content, SEAL: json.loads(path.read_text())[SEAL]}))

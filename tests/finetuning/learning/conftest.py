"""What models of every kind learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluation.tiny import made_up_words


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight questions whose answers have nothing to do with them."""
    folder, words = tmp_path_factory.mktemp("tasks") / "pairs", made_up_words()
    folder.mkdir()
    lines = [{"input": f"what is {words[i]} {words[i + 9]}?", "target": words[100 + i]} for i in range(8)]
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder

"""Tokenizers that hang, fill the memory or panic are refused before they are loaded."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from altup.core import tokenizer_trial
from altup.core.errors import UserError
from altup.core.pretrained import load_tokenizer
from altup.core.tokenizer_trial import try_tokenizer
from altup.data.tokenizer import take

GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
SEARCHES = {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "b"}


def save(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    content = {**json.loads(words.to_str()), **changes}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_plain_one_is_loaded(tmp_path: Path) -> None:
    assert load_tokenizer(save(tmp_path))("a b").input_ids == [1, 2]


@pytest.mark.parametrize(
    "normalizer",
    [{"type": "Sequence", "normalizers": [GROWS] * 8}, SEARCHES],
    ids=["a letter becomes 100 MB", "a regular expression without end"],
)
def test_one_that_would_hang_or_panic_is_refused(tmp_path: Path, normalizer: dict[str, Any]) -> None:
    folder, began = save(tmp_path, normalizer=normalizer), time.monotonic()
    with pytest.raises(UserError, match="no tokenizer that can be"):
        load_tokenizer(folder)
    with pytest.raises(UserError, match="cannot be loaded"):
        take(str(folder / "tokenizer.json"), tmp_path / "taken")
    assert time.monotonic() - began < 3 * tokenizer_trial.SECONDS


def test_added_tokens_have_an_end(tmp_path: Path) -> None:
    """Transformers takes 40 s for 200,000 of them, in either file."""
    many = [{"id": i, "content": f"<t{i}>", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": True, "special": False} for i in range(3, 60_003)]  # fmt: skip
    with pytest.raises(UserError, match=r"it adds 60,\d+ tokens to its vocabulary; the most is 50,000"):
        load_tokenizer(save(tmp_path / "one", added_tokens=many))
    folder = save(tmp_path / "other")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    decoder = {str(token["id"]): {**token, "id": None} for token in many}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": decoder}))
    with pytest.raises(UserError, match=r"it adds 60,000 tokens to its vocabulary"):
        load_tokenizer(folder)


def test_time_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that nothing else is wrong with, and a limit that its child process cannot keep."""
    program = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass"
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{program}'\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(tokenizer_trial.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match="takes more than 20 seconds for a few words"):
        try_tokenizer(save(tmp_path / "plain") / "tokenizer.json")

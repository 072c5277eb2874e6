"""What a run will need is asked for before it begins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from altup.core.errors import UserError
from altup.core.packages import require
from altup.core.pretrained import load_tokenizer


def test_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require("scikit-learn", "this")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match="this needs the package 'scikit-learn': pip install scikit-learn"):
        require("scikit-learn", "this")


def test_a_package_that_is_there_and_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise ValueError('numpy.dtype size changed')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"pip install broken_package .*numpy.dtype size changed"):
        require("broken_package", "this")


def test_a_sentencepiece_file_asks_for_sentencepiece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks for tiktoken, which would not help."""
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    (tmp_path / "spiece.model").write_bytes(b"\n\x0e\n\x05<pad>\x15\0\0\0\0\x18\x03")
    with pytest.raises(UserError, match="pip install sentencepiece"):
        load_tokenizer(tmp_path)

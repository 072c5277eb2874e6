from __future__ import annotations

import subprocess
import sys

from altup.data.bad_input import BadInput
from altup.data.embedded import Embedded, documents


def test_it_is_english_prose_and_enough_of_it() -> None:
    texts = documents()
    assert sum(map(len, texts)) > 1_200_000
    words = " ".join(texts).lower().split()
    assert 0.03 < words.count("the") / len(words) < 0.12
    assert not any(">>>" in text for text in texts)
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n")]
    assert len(set(paragraphs)) == len(paragraphs)


def test_docstrings_and_topics_are_there_and_tests_are_not() -> None:
    text = "\n".join(documents())
    assert "Return a shallow copy" in text or "Shallow copy operation" in text
    assert "The try statement specifies exception handlers" in text.replace('"', "")
    assert "Test suite for" not in text


def test_another_process_finds_the_same_and_imports_none_of_it() -> None:
    code = """
import sys
from altup.data.embedded import Embedded
print(Embedded().describe()["sha256"], "turtle" in sys.modules, "antigravity" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [Embedded().describe()["sha256"], "False", "False"]


def test_reading_goes_on_from_a_cursor() -> None:
    reader = Embedded().read(BadInput())
    for _, text in zip(range(1000), reader, strict=False):
        last = text
    assert last == documents()[999]
    assert tuple(Embedded().read(BadInput(), reader.cursor())) == documents()[1000:]

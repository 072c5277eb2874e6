from __future__ import annotations

import json
from pathlib import Path

import pytest

from altup.core.errors import UserError
from altup.data.files import LocalFiles
from altup.data.prepare import Recipe
from altup.data.sample import sample


def folder_of(path: Path, files: int, documents: int, characters: int) -> list[str]:
    """.jsonl files of so many documents each; every document begins with its place."""
    path.mkdir()
    texts = []
    for file in range(files):
        mine = [f"{file}-{number} ".ljust(characters, "x") for number in range(documents)]
        (path / f"{file:04d}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in mine))
        texts += mine
    return texts


def taken(path: Path, sample_bytes: int, fraction: float = 0.0) -> list[str]:
    return list(sample(Recipe([LocalFiles(path)], validation_fraction=fraction, sample_bytes=sample_bytes)))


@pytest.mark.parametrize(("files", "documents"), [(1, 400), (40, 3), (400, 1), (33, 20)])
def test_text_that_fits_is_taken_whole(tmp_path: Path, files: int, documents: int) -> None:
    texts = folder_of(tmp_path / "in", files, documents, 500)
    assert sorted(taken(tmp_path / "in", 1 << 30)) == sorted(texts)


@pytest.mark.parametrize(("files", "documents"), [(1, 600), (40, 15), (200, 3), (600, 1), (3, 200)])
@pytest.mark.parametrize("share", [2, 3, 50])
def test_the_sample_is_filled_once_and_no_further(tmp_path: Path, files: int, documents: int, share: int) -> None:
    """Whatever the files are like, it has the bytes asked for, with no document twice, the same every time."""
    texts = folder_of(tmp_path / "in", files, documents, 500)
    size = sum(map(len, texts)) // share
    found = taken(tmp_path / "in", size)
    assert size <= sum(map(len, found)) < size + 500
    assert len(set(found)) == len(found)
    assert found == taken(tmp_path / "in", size)


def test_files_with_little_text_in_them_still_fill_it(tmp_path: Path) -> None:
    """Fields beside the text make the files look larger than their text is."""
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"{i} ".ljust(100, "x"), "html": "y" * 1900}) for i in range(300)]
    path.write_text("\n".join(lines))
    assert sum(map(len, taken(path, 20_000))) == 20_000


def test_it_comes_from_all_over(tmp_path: Path) -> None:
    folder_of(tmp_path / "in", 320, 10, 500)
    found = taken(tmp_path / "in", 320 * 10 * 500 // 20)
    files = {int(text.split("-")[0]) for text in found}
    assert {file // 32 for file in files} == set(range(10))
    one = tmp_path / "one"
    folder_of(one, 1, 1000, 500)
    places = [int(text.split()[0].split("-")[1]) for text in taken(one, 100 * 500)]
    assert max(places) > 700


def test_held_out_text_is_never_taken(tmp_path: Path) -> None:
    texts = folder_of(tmp_path / "in", 50, 10, 100)
    recipe = Recipe([LocalFiles(tmp_path / "in")], validation_fraction=0.3)
    assert sorted(taken(tmp_path / "in", 1 << 30, 0.3)) == sorted(t for t in texts if not recipe.held_out(t))


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    folder_of(tmp_path / "in", 200, 2, 100)
    most = 0
    for _ in sample(Recipe([LocalFiles(tmp_path / "in")], validation_fraction=0.0)):
        most = max(
            most, sum(str(tmp_path) in str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.exists())
        )
    assert 1 < most <= 33


def test_sources_without_text_are_told_from_bad_ones(tmp_path: Path) -> None:
    """The commonest mistake: the text stands in another field."""
    path = tmp_path / "other.jsonl"
    path.write_text('{"content": "some text"}\n' * 2)
    with pytest.raises(UserError, match=r"2 × no text field \(first: .*other.jsonl, line 1\).*--on-error stop"):
        list(sample(Recipe([LocalFiles(path)])))
    path.write_text("")
    with pytest.raises(UserError, match="no text to train a vocabulary on: empty"):
        list(sample(Recipe([LocalFiles(path)])))

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from altup.core.errors import UserError
from altup.data.prepare import Recipe, prepare
from altup.data.text_files import LocalFiles


@pytest.fixture
def recipe(prepared: Path, corpus: Path) -> Recipe:
    return Recipe([LocalFiles(corpus)], validation_fraction=0.1, tokenizer=str(prepared / "tokenizer"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("years of work")


def test_a_folder_with_other_things_is_refused_and_left_as_it_is(recipe: Recipe, tmp_path: Path) -> None:
    write(tmp_path, "mywork.tmp/thesis", "notes.tmp", "x.md", "tokenizer.tmp/x", "train-00000.bin.tmp")
    before = contents(tmp_path)
    with pytest.raises(UserError, match="holds other things"):
        prepare(tmp_path, recipe, workers=1)
    assert contents(tmp_path) == before


def test_a_manifest_of_something_else_protects_its_folder_too(recipe: Recipe, tmp_path: Path) -> None:
    write(tmp_path, "tokenizer.tmp/x", "tokenizer/x", "train-00000.bin", "train-00000.bin.tmp")
    (tmp_path / "manifest.json").write_text('{"name": "some web page"}')
    before = contents(tmp_path)
    with pytest.raises(UserError, match="not a manifest of altup"):
        prepare(tmp_path, recipe, workers=1)
    assert contents(tmp_path) == before


def test_what_a_kill_left_is_cleared_and_nothing_else(recipe: Recipe, tmp_path: Path) -> None:
    write(tmp_path, "manifest.json.tmp")
    prepare(tmp_path, recipe, workers=1)
    before = contents(tmp_path)
    write(tmp_path, "manifest.json.tmp", "tokenizer.tmp/x", "validation-00001.bin.tmp", "notes.tmp")
    prepare(tmp_path, recipe, workers=1)
    assert contents(tmp_path) == {**before, "notes.tmp": b"years of work"}


def test_two_at_once_in_one_folder_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    import fcntl

    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="another `altup prepare` is writing"):
        prepare(tmp_path, recipe)
    os.close(handle)


def test_a_run_that_found_nothing_usable_can_be_corrected(recipe: Recipe, corpus: Path, tmp_path: Path) -> None:
    wrong = Recipe([LocalFiles(corpus, "body")], validation_fraction=0.1, tokenizer=recipe.tokenizer)
    with pytest.raises(UserError, match="no text field"):
        prepare(tmp_path, wrong, workers=1)
    assert prepare(tmp_path, recipe, workers=1).finished


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """The system refuses to make a file longer than this, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module", params=["tokenizer taken", "tokenizer trained"])
def finished(
    request: pytest.FixtureRequest, prepared: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Recipe, Path]:
    """A recipe, and the folder it gives where there is room."""
    tokenizer = {"tokenizer": str(prepared / "tokenizer")} if "taken" in request.param else {"vocab_size": 800}
    chosen = Recipe([LocalFiles(corpus)], validation_fraction=0.1, **tokenizer)
    whole = tmp_path_factory.mktemp("finished") / "whole"
    prepare(whole, chosen, workers=1)
    return chosen, whole


@pytest.mark.parametrize("last", ["manifest.json", "tokenizer/tokenizer.json", "train-00000.bin"])
def test_where_the_disk_is_full(finished: tuple[Recipe, Path], tmp_path: Path, last: str) -> None:
    """One clear error, no half files; and the same command goes on once there is room."""
    recipe, whole = finished
    sizes = [(whole / name).stat().st_size for name in ("tokenizer/tokenizer.json", "train-00000.bin")]
    assert sizes[0] < sizes[1]
    out = tmp_path / "data"
    room = 100 if last == "manifest.json" else (whole / last).stat().st_size - 1
    with room_for(room), pytest.raises(UserError, match=r"preparing .* failed: .*free space"):
        prepare(out, recipe, workers=1)
    assert not [path for path in out.rglob("*") if path.name.endswith(".tmp")]
    assert prepare(out, recipe, workers=1).finished
    assert contents(out) == contents(whole)


def test_a_manifest_that_cannot_be_read(recipe: Recipe, prepared: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(prepared, tmp_path / "data"))
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        prepare(folder, recipe)

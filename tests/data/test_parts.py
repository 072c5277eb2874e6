"""Preparing in parts and merging gives the bytes of one call; wrong mixtures are refused."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from altup.core.errors import UserError
from altup.data.parts import Part, merge_parts, parse_part, prepare_part
from altup.data.prepare import Recipe, prepare
from altup.data.shards import verify
from altup.data.sources import HubDataset, Source
from altup.data.text_files import LocalFiles
from tests.data.test_prepare import contents


@pytest.fixture(scope="module")
def files(prose: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven files of different sizes, one of them empty and one broken, with bad lines in between."""
    folder = tmp_path_factory.mktemp("files") / "in"
    folder.mkdir()
    start = 0
    for number, count in enumerate([40, 3, 90, 1, 120, 46]):
        lines = [json.dumps({"text": text}) for text in prose[start : start + count]]
        lines.insert(count // 2, "{broken")
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
        start += count
    (folder / "3a.txt").write_text("")
    (folder / "5.txt.gz").write_bytes(b"no archive")
    return folder


@pytest.fixture(scope="module")
def recipe(files: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    other = tmp_path_factory.mktemp("validation") / "in"
    other.mkdir()
    for name in "ab":
        (other / f"{name}.txt").write_text(f"The text {name} to validate on. " * 30)

    def make(**changes: object) -> Recipe:
        fields: dict[str, object] = {"tokenizer": str(prepared / "tokenizer"), "shard_tokens": 7_001, **changes}
        sources: list[Source] = [LocalFiles(files), LocalFiles(files / "2.jsonl")]
        return Recipe(sources, [LocalFiles(other)], **fields)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="module")
def whole(recipe: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "data"
    prepare(out, recipe(), workers=1)
    return out


@pytest.mark.parametrize("count", [1, 3, 20])
def test_merged_parts_are_the_bytes_of_one_call(
    recipe: Callable[..., Recipe], whole: Path, tmp_path: Path, count: int
) -> None:
    for number in reversed(range(1, count + 1)):
        prepare_part(tmp_path / "data", recipe(), Part(number, count), workers=1)
    merge_parts(tmp_path / "data", recipe().settings())
    assert contents(tmp_path / "data") == contents(whole)
    verify(tmp_path / "data")
    assert merge_parts(tmp_path / "data").finished


def test_a_vocabulary_is_trained_once_and_on_all_of_the_text(files: Path, tmp_path: Path) -> None:
    chosen = Recipe([LocalFiles(files)], validation_fraction=0.1, vocab_size=700, shard_tokens=9_001)
    for number in (2, 1):
        prepare_part(tmp_path / "data", chosen, Part(number, 2), workers=1)
        (tmp_path / "trained" if number == 2 else tmp_path / "again").write_text(
            str((tmp_path / "data/parts/tokenizer/tokenizer.json").stat().st_mtime_ns)
        )
    assert (tmp_path / "trained").read_text() == (tmp_path / "again").read_text()
    merge_parts(tmp_path / "data")
    prepare(tmp_path / "whole", chosen, workers=1)
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_parts_of_a_dataset(prepared: Path, prose: list[str], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [text if i % 40 else None for i, text in enumerate(prose)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "set", num_shards=5)
    source = HubDataset(str(tmp_path / "set"))
    chosen = Recipe([source], tokenizer=str(prepared / "tokenizer"), shard_tokens=7_001, validation_fraction=0.1)
    prepare(tmp_path / "whole", chosen, workers=1)
    for number in (1, 2, 3):
        prepare_part(tmp_path / "data", chosen, Part(number, 3), workers=1)
    merge_parts(tmp_path / "data")
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_what_was_lost_is_made_again(recipe: Callable[..., Recipe], whole: Path, tmp_path: Path) -> None:
    """A shard of a part, which refuses to merge until the part ran again; then one of a merge that was killed."""
    out = tmp_path / "data"
    for number in (1, 2):
        prepare_part(out, recipe(), Part(number, 2), workers=1)
    (out / "parts/2-of-2/train-00001.bin").write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"train-00001\.bin has 7 bytes.*run that part again"):
        merge_parts(out)
    begun = {name: (out / name).stat().st_mtime_ns for name in ("train-00000.bin", "train-00002.bin")}
    (out / "train-00001.bin").unlink()
    prepare_part(out, recipe(), Part(2, 2), workers=1)
    merge_parts(out)
    assert contents(out) == contents(whole)
    after = {name: (out / name).stat().st_mtime_ns for name in begun}
    assert after["train-00000.bin"] == begun["train-00000.bin"]


def test_wrong_mixtures_are_refused(
    recipe: Callable[..., Recipe], files: Path, prepared: Path, tmp_path: Path
) -> None:
    out = tmp_path / "data"
    with pytest.raises(UserError, match="holds no parts"):
        merge_parts(out)
    for number in (1, 3):
        prepare_part(out, recipe(), Part(number, 3), workers=1)
    with pytest.raises(UserError, match="2/3 is missing; run"):
        merge_parts(out)
    with pytest.raises(UserError, match=r"in 3 parts, not 4; give --part N/3"):
        prepare_part(out, recipe(), Part(2, 4))
    with pytest.raises(UserError, match=r"shard_tokens: there 7001, now 7000"):
        prepare_part(out, recipe(shard_tokens=7_000), Part(2, 3))
    with pytest.raises(UserError, match=r"tokenizer: there "):
        prepare_part(out, recipe(tokenizer=None), Part(2, 3))
    more = recipe()
    more = replace(more, sources=[*more.sources[:1], LocalFiles(files / "0.jsonl"), *more.sources[1:]])
    words = r"2 sources there, 3 now; the first that differs: \[1\]\.files\[0\]\.name: there '2.jsonl', now '0"
    with pytest.raises(UserError, match=words):
        prepare_part(out, more, Part(2, 3))
    with pytest.raises(
        UserError, match=r"2 sources there, 1 now; the first that differs: \[1\] is gone: .*2\.jsonl"
    ):
        prepare_part(out, replace(more, sources=more.sources[:1]), Part(2, 3))
    with pytest.raises(UserError, match=r"on_error: there 'skip', now 'stop'"):
        merge_parts(out, recipe(on_error="stop").settings())
    with pytest.raises(UserError, match=r"being prepared in parts; give --part, or --merge"):
        prepare(out, recipe())
    with pytest.raises(UserError, match=r"begun without parts"):
        prepare_part(prepared, recipe(), Part(1, 2))
    prepare_part(tmp_path / "other", recipe(shard_tokens=6_999), Part(2, 3), workers=1)
    shutil.copytree(tmp_path / "other/parts/2-of-3", out / "parts/2-of-3")
    with pytest.raises(UserError, match=r"2-of-3 was begun with other settings"):
        merge_parts(out)


def test_another_tokenizer_under_the_same_name_is_refused(
    recipe: Callable[..., Recipe], prepared: Path, tmp_path: Path
) -> None:
    out = tmp_path / "data"
    prepare_part(out, recipe(), Part(1, 2), workers=1)
    path = out / "parts/tokenizer/tokenizer.json"
    path.write_text(path.read_text().replace('"the"', '"teh"') + "\n")
    prepare_part(out, recipe(), Part(2, 2), workers=1)
    with pytest.raises(
        UserError, match=r"2-of-2 was made with another tokenizer than .*1-of-2; remove it and run"
    ):
        merge_parts(out)


STEP = """
import sys
from pathlib import Path
from altup.data.text_files import LocalFiles
from altup.data.parts import merge_parts, parse_part, prepare_part
from altup.data.prepare import Recipe
out, files, part = sys.argv[1:]
recipe = Recipe([LocalFiles(Path(files))], validation_fraction=0.1, vocab_size=800, shard_tokens=1501)
merge_parts(out) if part == "merge" else prepare_part(out, recipe, parse_part(part), workers=1)
"""


@pytest.mark.slow
def test_kills_change_nothing(files: Path, tmp_path: Path) -> None:
    """Two parts at once, and their merge, killed at random instants until they are done."""
    chosen = Recipe([LocalFiles(files)], validation_fraction=0.1, vocab_size=800, shard_tokens=1501)
    prepare(tmp_path / "whole", chosen, workers=1)
    rng, kills = random.Random(0), 0
    for together in (["1/2", "2/2"], ["merge"]):
        left, patience = together, 1.0
        while left:
            started = {
                part: subprocess.Popen([sys.executable, "-c", STEP, str(tmp_path / "data"), str(files), part])
                for part in left
            }
            time.sleep(rng.uniform(0.5, 1) * patience)
            patience *= 1.1
            for process in started.values():
                process.kill()
            left = [part for part, process in started.items() if process.wait() != 0]
            kills += len(left)
    assert kills >= 5
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


@pytest.mark.parametrize("text", ["0/4", "5/4", "3", "3/", "1/0", "-1/4", "1/2/3", "", "1/100000000"])
def test_parts_are_named_by_two_numbers(text: str) -> None:
    with pytest.raises(UserError, match="as 3/16"):
        parse_part(text)


def test_a_refused_part_leaves_nothing_behind(
    recipe: Callable[..., Recipe], prepared: Path, tmp_path: Path
) -> None:
    """Else the corrected command would be refused for its other settings. What another part has begun stays."""
    out, broken = tmp_path / "data", tmp_path / "broken"
    broken.mkdir()
    with pytest.raises(UserError, match="broken"):
        prepare_part(out, recipe(tokenizer=str(broken)), Part(1, 2), workers=1)
    assert not out.exists()

    shutil.copytree(prepared / "tokenizer", broken, dirs_exist_ok=True)
    prepare_part(out, recipe(tokenizer=str(broken)), Part(1, 2), workers=1)
    shutil.rmtree(out / "parts" / "tokenizer")
    for path in broken.iterdir():
        path.unlink()
    with pytest.raises(UserError, match="broken"):
        prepare_part(out, recipe(tokenizer=str(broken)), Part(2, 2), workers=1)
    assert sorted(path.name for path in (out / "parts").iterdir() if path.suffix != ".lock") == [
        "1-of-2",
        "plan.json",
    ]


def test_parts_have_about_the_same_amount_of_text() -> None:
    assert [list(Part(n, 3).files([5, 1, 1, 1, 1, 1])) for n in (1, 2, 3)] == [[0], [1, 2], [3, 4, 5]]
    assert [list(Part(n, 4).files([0] * 8)) for n in range(1, 5)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for count in range(1, 12):
        parts = [i for n in range(1, count + 1) for i in Part(n, count).files([3, 100, 1, 0, 40, 2])]
        assert parts == list(range(6))

"""What is left of checkpoints, final models, prepared data, converted folders and results by a power cut at any
instant is whole, or what was there before; and a flush that is left out would be noticed."""

from __future__ import annotations

import json
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from altup.core.errors import UserError
from altup.core.files import atomic_write
from altup.core.runs import list_checkpoints, newest_whole
from altup.core.sealed_folders import (
    atomic_folder,
    damage,
    new_sealed_folder,
    read_sealed_json,
    remove_leftovers,
    write_sealed_json,
)
from altup.data.prepare import Recipe, prepare
from altup.data.shards import SPLITS, Manifest, TokenStream, token_type, tokenizer_damage, verify
from altup.data.shards import damage as shard_damage
from altup.data.text_files import LocalFiles
from altup.training.checkpoints import prune
from tests.core.forgetting_disk import check_every_cut


def parts(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(text)
        (folder / "weights").mkdir()
        (folder / "weights" / "part").write_text(text * 50)

    return write


class Checkpoints:
    """A second one, the first pruned, and the second replaced: as a run does that a spike has set back."""

    def before(self, folder: Path) -> None:
        atomic_folder(folder / "checkpoints", "step-1", parts("one"))

    def work(self, folder: Path) -> None:
        atomic_folder(folder / "checkpoints", "step-2", parts("two"))
        prune(folder / "checkpoints", 1)
        atomic_folder(folder / "checkpoints", "step-2", parts("two again"))

    def check(self, folder: Path) -> None:
        remove_leftovers(folder / "checkpoints")
        assert [damage(path) for path in list_checkpoints(folder / "checkpoints") if damage(path)] == []
        newest = newest_whole(folder / "checkpoints")
        assert newest is not None
        assert (newest / "config.json").read_text() in ("one", "two", "two again")

    def done(self, folder: Path) -> None:
        self.check(folder)
        newest = newest_whole(folder / "checkpoints")
        assert newest is not None
        assert (newest / "config.json").read_text() == "two again"


class Final:
    """A final model that is made again."""

    def before(self, folder: Path) -> None:
        atomic_folder(folder, "final", parts("damaged"))

    def work(self, folder: Path) -> None:
        atomic_folder(folder, "final", parts("whole"))

    def check(self, folder: Path) -> None:
        remove_leftovers(folder)
        assert damage(folder / "final") is None
        assert (folder / "final/config.json").read_text() in ("damaged", "whole")

    def done(self, folder: Path) -> None:
        self.check(folder)
        assert (folder / "final/config.json").read_text() == "whole"


class Converted:
    def before(self, folder: Path) -> None:
        pass

    def work(self, folder: Path) -> None:
        with new_sealed_folder(folder / "models/new/wide") as temporary:
            parts("wide")(temporary)

    def check(self, folder: Path) -> None:
        wide = folder / "models/new/wide"
        assert not wide.exists() or not any(wide.iterdir()) or damage(wide) is None

    def done(self, folder: Path) -> None:
        assert damage(folder / "models/new/wide") is None


class Results:
    """A table, and a record that is sealed, written over older ones."""

    def before(self, folder: Path) -> None:
        atomic_write(folder / "table.csv", "old\n" * 20)
        write_sealed_json(folder / "record.json", {"loss": 1.0})

    def work(self, folder: Path) -> None:
        atomic_write(folder / "table.csv", "new\n" * 20)
        write_sealed_json(folder / "record.json", {"loss": 2.0})
        write_sealed_json(folder / "new/folder/record.json", {"loss": 3.0})

    def check(self, folder: Path) -> None:
        assert (folder / "table.csv").read_text() in ("old\n" * 20, "new\n" * 20)
        assert read_sealed_json(folder / "record.json")["loss"] in (1.0, 2.0)

    def done(self, folder: Path) -> None:
        assert (folder / "table.csv").read_text() == "new\n" * 20
        assert read_sealed_json(folder / "record.json") == {"loss": 2.0}
        assert read_sealed_json(folder / "new/folder/record.json") == {"loss": 3.0}


class Prepared:
    """Every shard that a manifest names is whole, and so is the tokenizer; a finished folder can be trained on."""

    def before(self, folder: Path) -> None:
        draw = random.Random(0)
        words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(400)]
        lines = (json.dumps({"text": " ".join(draw.choices(words, k=40))}) for _ in range(120))
        (folder / "text.jsonl").write_text("\n".join(lines))

    def work(self, folder: Path) -> None:
        source = [LocalFiles(folder / "text.jsonl")]
        prepare(
            folder / "data", Recipe(source, validation_fraction=0.2, vocab_size=400, shard_tokens=4_000), workers=1
        )

    def check(self, folder: Path) -> None:
        if not (folder / "data/manifest.json").exists():
            return
        manifest = Manifest.load(folder / "data")
        if manifest.finished:
            verify(folder / "data")
        if manifest.vocabulary:
            assert tokenizer_damage(folder / "data", manifest) is None
            itemsize = token_type(manifest.vocabulary.size).itemsize
            for shard in (shard for split in SPLITS for shard in manifest.shards(split)):
                assert shard_damage(folder / "data", shard, itemsize) is None

    def done(self, folder: Path) -> None:
        verify(folder / "data")
        assert len(TokenStream(folder / "data")) > 1000


WORK = [Checkpoints, Final, Converted, Results, Prepared]


@pytest.mark.parametrize("kind", WORK)
def test_every_state_that_a_power_cut_leaves_is_whole(tmp_path: Path, kind: type[Checkpoints]) -> None:
    work, folder = kind(), tmp_path / "disk"
    folder.mkdir()
    work.before(folder)
    states = check_every_cut(folder, work.work, work.check, work.done)
    assert states > 10


@pytest.mark.parametrize("of", [stat.S_ISREG, stat.S_ISDIR], ids=["files", "folders"])
@pytest.mark.parametrize("kind", WORK)
def test_a_flush_that_is_left_out_is_noticed(
    tmp_path: Path, kind: type[Checkpoints], of: Callable[[int], bool]
) -> None:
    work, folder = kind(), tmp_path / "disk"
    folder.mkdir()
    work.before(folder)
    with pytest.raises((AssertionError, UserError, ValueError, OSError)):
        check_every_cut(folder, work.work, work.check, work.done, forget_flush=of)
    shutil.rmtree(folder)

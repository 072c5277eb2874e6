from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from altup.core.errors import UserError
from altup.data.shards import MANIFEST, SAMPLE, Manifest, TokenStream, token_type, verify


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(prepared, tmp_path / "data"))


def test_the_stream_is_the_shards_one_after_the_other(prepared: Path) -> None:
    stream = TokenStream(prepared)
    files = sorted(prepared.glob("train-*.bin"))
    assert len(files) > 5
    whole = np.concatenate([np.fromfile(path, "<u2") for path in files])
    assert len(stream) == len(whole)
    assert np.array_equal(stream.read(0, len(whole)), whole)


@pytest.mark.parametrize("length", [1, 7, 568, 9_000])
def test_windows_are_slices_wherever_shards_end(prepared: Path, length: int) -> None:
    stream = TokenStream(prepared)
    whole = stream.read(0, len(stream))
    starts = np.random.default_rng(0).integers(0, len(stream) - length + 1, 200)
    starts[:2] = 0, len(stream) - length
    assert np.array_equal(stream.windows(starts, length), np.stack([whole[s : s + length] for s in starts]))


def test_verify_passes_what_is_whole(prepared: Path) -> None:
    assert verify(prepared).finished


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("name", ["train-00003.bin", "validation-00000.bin"])
@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
def test_a_damaged_shard_is_found_and_named(folder: Path, name: str, harm: object) -> None:
    harm(folder / name)  # type: ignore[operator]
    with pytest.raises(UserError, match=rf"{name}.*run the same `altup prepare` command"):
        verify(folder)
    if harm is not flip:
        with pytest.raises(UserError, match=name):
            TokenStream(folder, name.split("-")[0])


def test_a_sample_finds_other_bytes_of_the_same_size(folder: Path) -> None:
    """A corpus that is smaller than the sample is read whole; a larger one in parts, another one every time."""
    flip(folder / "train-00003.bin")
    with pytest.raises(UserError, match=r"train-00003.bin has other content than was written"):
        verify(folder, SAMPLE)
    found = []
    for _ in range(200):
        try:
            verify(folder, most_bytes=1)
        except UserError:
            found.append(True)
    assert 0 < len(found) < 150  # one of some ten shards was damaged
    truncate(folder / "train-00004.bin")
    with pytest.raises(UserError, match=r"train-0000[34]"):
        verify(folder, most_bytes=1)


def test_an_id_beyond_the_vocabulary_is_named(folder: Path) -> None:
    """Whatever the hashes say: an index without its row is an error of the model, or stops a GPU."""
    stream = TokenStream(folder)
    tokens = np.fromfile(folder / "train-00003.bin", "<u2")
    tokens[5] = 60_000
    tokens.tofile(folder / "train-00003.bin")
    place = sum(shard.tokens for shard in stream.shards[:3])
    assert stream.windows(np.array([0, place + 6]), 32).shape == (2, 32)
    with pytest.raises(UserError, match=r"train-00003.bin has the id 60,000, but the vocabulary only \d+ tokens"):
        stream.windows(np.array([0, place]), 32)


def test_another_tokenizer_is_found(folder: Path) -> None:
    path = folder / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(UserError, match=r"tokenizer\.json is missing or not the one"):
        verify(folder)


def test_folders_that_are_not_prepared_data(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no prepared data"):
        TokenStream(tmp_path / "nothing")
    with pytest.raises(UserError, match="split='test' is not known"):
        TokenStream(folder, "test")
    content = json.loads((folder / MANIFEST).read_text())
    changes: list[tuple[dict[str, object], str]] = [
        ({"finished": False}, "not finished"),
        ({"format": 99}, "format 99"),
        ({"segments": 3}, "damaged"),
        ({"segments": [{**content["segments"][0], "shards": []}]}, "damaged"),
        ({"tokenizer": ["tokenizer.json"]}, "damaged"),
        ({"vocabulary": None}, "not finished"),
        ({"settings": None, "format": None}, "format None"),
    ]
    for change, message in changes:
        (folder / MANIFEST).write_text(json.dumps({**content, **change}))
        with pytest.raises(UserError, match=message):
            verify(folder)
    (folder / MANIFEST).write_text('{"format"')
    with pytest.raises(UserError, match="damaged"):
        Manifest.load(folder)
    (folder / MANIFEST).write_text("[]")
    with pytest.raises(UserError, match=r"manifest\.json is damaged.*it holds a list where a mapping belongs"):
        Manifest.load(folder)
    (folder / MANIFEST).write_text('{"name": "some web page"}')
    with pytest.raises(UserError, match="not a manifest of altup") as caught:
        Manifest.load(folder)
    assert "delete" not in str(caught.value)


def test_large_vocabularies_get_wider_tokens() -> None:
    assert token_type(1 << 16) == np.dtype("<u2")
    assert token_type((1 << 16) + 1) == np.dtype("<u4")


@pytest.mark.parametrize("name", ["../elsewhere.bin", "/dev/zero"])
def test_names_in_a_manifest_lead_nowhere_else(folder: Path, name: str) -> None:
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    content["segments"][0]["shards"]["train"]["file"] = name
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="cannot be a file's name"):
        TokenStream(folder)
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match="nested too deeply"):
        TokenStream(folder)


@pytest.mark.parametrize("token", [-1, 10**30, "x", None, 1.5])
def test_a_vocabulary_of_other_things_than_tokens_is_refused(folder: Path, token: object) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    content["vocabulary"]["sentinels"][0] = token
    (folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(UserError, match="a vocabulary with"):
        Manifest.load(folder)

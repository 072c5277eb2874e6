from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from altup.core.errors import UserError
from altup.core.sealed_folders import read_sealed_json, write_sealed_json
from altup.data import tokenizer
from altup.data.batches import ShardBatches
from altup.data.objectives import Causal
from altup.data.shards import MANIFEST, SAMPLE, Manifest, TokenStream, token_type, verify
from tests.data.conftest import edit_manifest


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
    content = read_sealed_json(folder / MANIFEST)
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
        write_sealed_json(folder / MANIFEST, {**content, **change})
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
    content = read_sealed_json(path)
    content["segments"][0]["shards"]["train"]["file"] = name
    write_sealed_json(path, content)
    with pytest.raises(UserError, match="cannot be a file's name"):
        TokenStream(folder)
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match="nested too deeply"):
        TokenStream(folder)


@pytest.mark.parametrize("token", [-1, 10**30, "x", None, 1.5])
def test_a_vocabulary_of_other_things_than_tokens_is_refused(folder: Path, token: object) -> None:
    content = read_sealed_json(folder / MANIFEST)
    content["vocabulary"]["sentinels"][0] = token
    write_sealed_json(folder / MANIFEST, content)
    with pytest.raises(UserError, match="a vocabulary with"):
        Manifest.load(folder)


def test_every_flipped_byte_of_a_manifest_is_noticed(folder: Path) -> None:
    """A part of them, from one end to the other: what decides training is sealed."""
    path = folder / MANIFEST
    content, known = path.read_bytes(), Manifest.load(folder)
    for place in range(0, len(content), 7):
        for bit in (1, 16):
            path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
            with contextlib.suppress(UserError):
                assert Manifest.load(folder) == known, place


ROLES: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("sentinels reversed", lambda vocabulary: vocabulary["sentinels"].reverse()),
    ("another eos", lambda vocabulary: vocabulary.update(eos=7)),
    ("a sentinel that is eos", lambda vocabulary: vocabulary["sentinels"].__setitem__(0, vocabulary["eos"])),
    ("a sentinel less", lambda vocabulary: vocabulary["sentinels"].pop()),
    ("a sentinel beyond the table", lambda vocabulary: vocabulary["sentinels"].__setitem__(0, 99_999)),
    ("the hash of another tokenizer", lambda vocabulary: vocabulary.update(sha256="0" * 64)),
    ("a larger table", lambda vocabulary: vocabulary.update(size=70_000)),
    ("no mask", lambda vocabulary: vocabulary.update(mask=None)),
]


@pytest.mark.parametrize(("what", "change"), ROLES, ids=[what for what, _ in ROLES])
def test_the_tokenizer_decides_what_its_tokens_are(
    folder: Path, what: str, change: Callable[[dict[str, Any]], Any]
) -> None:
    """The manifest is sealed, and where whoever changed it sealed it again, the tokenizer is asked."""
    edit_manifest(folder, lambda content: change(content["vocabulary"]), sealed=False)
    with pytest.raises(UserError, match="changed after it was written"):
        Manifest.load(folder)
    edit_manifest(folder, lambda content: None)
    for read in (verify, TokenStream):
        with pytest.raises(UserError, match="names other tokens than"):
            read(folder)


def test_a_run_is_sealed_with_the_roles_of_its_tokens(folder: Path) -> None:
    """Another eos in the tokenizer's own config, with every hash made to fit, changes the description."""
    before = ShardBatches(TokenStream(folder), Causal(1, 32), 4).describe()
    config = folder / "tokenizer/tokenizer_config.json"
    config.write_text(config.read_text().replace('"eos_token": "</s>"', '"eos_token": "<unk>"'))
    vocabulary = tokenizer.vocabulary(folder / "tokenizer").to_json()
    edit_manifest(folder, lambda content: content.update(vocabulary=vocabulary))
    after = ShardBatches(TokenStream(folder), Causal(1, 32), 4).describe()
    assert {name for name in before if before[name] != after[name]} == {"vocabulary"}

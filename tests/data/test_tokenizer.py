from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from altup.core.errors import UserError
from altup.data import tokenizer as tokenizers

SIZE = 1000


@pytest.fixture(scope="module")
def folder(prose: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "own"
    tokenizers.save(tokenizers.train(prose, SIZE), path)
    return path


@pytest.fixture(scope="module")
def own(folder: Path) -> Tokenizer:
    return tokenizers.load(folder)


def test_the_layout_is_t5s(folder: Path, own: Tokenizer) -> None:
    found = tokenizers.vocabulary(folder)
    assert (found.size, found.pad, found.eos, own.token_to_id("<unk>")) == (SIZE + 100, 0, 1, 2)
    assert found.sentinels == tuple(range(SIZE + 99, SIZE - 1, -1))
    assert own.id_to_token(SIZE + 99) == "<extra_id_0>"
    assert found.padded_size == 1152
    t5 = tokenizers.Vocabulary("", 32_100, 0, 1, None, None, ())
    assert t5.padded_size == 32_128


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_survives_the_round_trip(own: Tokenizer, text: str) -> None:
    ids = own.encode(text, add_special_tokens=False).ids
    assert own.decode(ids, skip_special_tokens=False) == own.normalizer.normalize_str(text)
    assert 2 not in ids
    assert not ids or max(ids) < SIZE


def test_normalised_means_compatible_characters_and_single_spaces(own: Tokenizer) -> None:
    ids = own.encode(" ﬁne\u00a0 café\n\n\tＡＢＣ ", add_special_tokens=False).ids
    assert own.decode(ids) == "fine café ABC"


def test_real_prose_comes_back(own: Tokenizer, prose: list[str]) -> None:
    for text in prose[:50]:
        assert own.decode(own.encode(text, add_special_tokens=False).ids) == " ".join(text.split())


def test_names_of_tokens_in_a_document_are_plain_text(own: Tokenizer) -> None:
    text = "An </s> end, a <pad>, an <extra_id_7> and a byte <0x41> <unk>"
    ids = own.encode(text, add_special_tokens=False).ids
    assert own.decode(ids, skip_special_tokens=False) == text
    assert min(ids) > 2 + 256
    assert max(ids) < SIZE


def test_transformers_reads_it(folder: Path, own: Tokenizer, prose: list[str]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.unk_token_id, len(theirs)) == (0, 1, 2, SIZE + 100)
    assert theirs.convert_tokens_to_ids("<extra_id_3>") == SIZE + 96
    for text in prose[:20]:
        assert theirs(text).input_ids == [*own.encode(text, add_special_tokens=False).ids, 1]
    ids = theirs("Thank <extra_id_0> you").input_ids
    assert ids.count(SIZE + 99) == 1
    assert (
        theirs.decode(theirs("It's a test, isn't it ?").input_ids, skip_special_tokens=True)
        == "It's a test, isn't it ?"
    )


TRAIN = """
import sys, json
from pathlib import Path
from altup.data import tokenizer
texts = json.loads(Path(sys.argv[1]).read_text())
tokenizer.save(tokenizer.train(texts, 1000), Path(sys.argv[2]))
"""


def test_training_twice_gives_the_same_bytes(folder: Path, prose: list[str], tmp_path: Path) -> None:
    (tmp_path / "texts.json").write_text(json.dumps(prose))
    again = tmp_path / "again"
    subprocess.run([sys.executable, "-c", TRAIN, str(tmp_path / "texts.json"), str(again)], check=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_rare_characters_get_no_piece(prose: list[str]) -> None:
    odd = [*prose, "".join(chr(0x4E00 + i) for i in range(3000))]
    trained = tokenizers.train(odd, SIZE)
    pieces = trained.get_vocab()
    assert sum(chr(0x4E00 + i) in pieces for i in range(3000)) < SIZE // 4
    assert "the" in pieces or "▁the" in pieces


def test_too_little_text_gets_a_clear_error() -> None:
    with pytest.raises(UserError, match="vocab_size=5000 is more than the text can fill"):
        tokenizers.train(["a few words only, and no more"], 5000)
    with pytest.raises(UserError, match="no text"):
        tokenizers.train([" \n"], 5000)
    with pytest.raises(UserError, match="vocab_size=10 "):
        tokenizers.train(["text"], 10)


def test_an_existing_one_is_taken_by_folder_and_by_file(folder: Path, prose: list[str], tmp_path: Path) -> None:
    expected = tokenizers.load(folder).encode(prose[0], add_special_tokens=False).ids
    prepared = tmp_path / "prepared"
    shutil.copytree(folder, prepared / "tokenizer")
    finished, stopped = tmp_path / "finished", tmp_path / "stopped"  # runs
    shutil.copytree(folder, finished / "final")
    shutil.copytree(folder, stopped / "checkpoints" / "step-10")
    for number, name in enumerate([folder, folder / "tokenizer.json", prepared, finished, stopped]):
        taken = tmp_path / str(number)
        tokenizers.take(str(name), taken)
        found, source = tokenizers.vocabulary(taken), tokenizers.vocabulary(folder)
        assert (found.size, found.sentinels, found.pad, found.eos) == (
            source.size,
            source.sentinels,
            source.pad,
            source.eos,
        )
        assert tokenizers.load(taken).encode(prose[0], add_special_tokens=False).ids == expected


def test_a_foreign_one_without_sentinels_is_taken(tmp_path: Path) -> None:
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "hello": 5, "world": 6}
    foreign = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    foreign.pre_tokenizer = pre_tokenizers.Whitespace()
    foreign.save(str(tmp_path / "tokenizer.json"))
    tokenizers.take(str(tmp_path / "tokenizer.json"), tmp_path / "taken")
    found = tokenizers.vocabulary(tmp_path / "taken")
    assert (found.size, found.pad, found.eos, found.start, found.mask, found.sentinels) == (7, 0, 3, 2, 4, ())
    digest = hashlib.sha256((tmp_path / "taken" / "tokenizer.json").read_bytes()).hexdigest()
    assert found.sha256 == digest


@pytest.mark.parametrize("content", ["{bad", "[1]", "\x00"])
def test_a_damaged_config_is_named(folder: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer_config\.json is damaged"):
        tokenizers.vocabulary(tmp_path)


def test_one_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(UserError, match="cannot be loaded"):
        tokenizers.take(str(tmp_path / "tokenizer.json"), tmp_path / "taken")
    for name in ("nobody/nothing", "./nothing"):
        with pytest.raises(UserError, match=r"nothing': no such folder.*; give a folder with a tokenizer"):
            tokenizers.take(name, tmp_path / "taken")

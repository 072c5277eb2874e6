from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from altup.core.errors import UserError
from altup.data import tokenizer as tokenizers
from altup.data.prepare import Recipe, prepare, sample_text
from altup.data.shards import Manifest, TokenStream, verify
from altup.data.text_files import LocalFiles
from tests.processes import PATIENCE, server, wait_until

SHARD = 7_001


def recipe(corpus: Path, **changes: object) -> Recipe:
    fields: dict[str, object] = {"validation_fraction": 0.1, "vocab_size": 800, "shard_tokens": SHARD, **changes}
    return Recipe([LocalFiles(corpus)], **fields)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_tokens_are_the_documents_in_order_without_eos(prepared: Path, corpus: Path, prose: list[str]) -> None:
    tokenizer = tokenizers.load(prepared / "tokenizer")
    chosen = recipe(corpus)
    for split in ("train", "validation"):
        texts = [text for text in prose if chosen.held_out(text) == (split == "validation")]
        expected = [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False).ids]
        stream = TokenStream(prepared, split)
        assert stream.read(0, len(stream)).tolist() == expected
        shards = Manifest.load(prepared).shards(split)
        assert sum(shard.documents for shard in shards) == len(texts)
        assert sum(shard.characters for shard in shards) == sum(map(len, texts))
    assert 0.03 < len(TokenStream(prepared, "validation")) / len(TokenStream(prepared)) < 0.25


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_same_bytes(
    prepared: Path, corpus: Path, tmp_path: Path, workers: int
) -> None:
    prepare(tmp_path / "data", recipe(corpus), workers)
    assert contents(tmp_path / "data") == contents(prepared)


def prepare_and(out: Path, corpus: Path, workers: int, act: Callable[[str, int], None] | None = None) -> None:
    """`prepare` in small shards; before each file operation below `out`, `act(path, number)`."""
    numbers = itertools.count(1)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" or event.startswith("os."):
            path = str(arguments[0])
            if path.startswith(f"{out}/") and act is not None:
                act(path, next(numbers))

    if act is not None:
        sys.addaudithook(watch)  # which stays: in a process of its own
    prepare(out, recipe(corpus, shard_tokens=1501), workers)


def die_at(chosen: int, path: str, number: int) -> None:
    if number == chosen:
        os.kill(os.getpid(), signal.SIGKILL)


def hold_at_the_first_shard(path: str, number: int) -> None:
    if "train-00000" in path:
        time.sleep(600)


@pytest.fixture(scope="module")
def never_killed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "data"
    prepare_and(out, corpus, 1)
    return out


def test_kills_change_nothing(never_killed: Path, corpus: Path, tmp_path: Path) -> None:
    """A run that is killed at a file operation, again and again, ends with the bytes of one never killed."""
    assert len(list(never_killed.glob("train-*.bin"))) > 30
    out = tmp_path / "data"
    for number, workers in ((2, 1), (7, 2), (20, 1), (41, 2), (60, 1)):
        process = server.Process(
            target=prepare_and, args=(out, corpus, workers, functools.partial(die_at, number))
        )
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL
    assert 0 < len(list(out.glob("train-*.bin"))) < 30
    prepare_and(out, corpus, 2)
    assert contents(out) == contents(never_killed)


PREPARE = """
import sys
from pathlib import Path
from altup.data.text_files import LocalFiles
from altup.data.prepare import Recipe, prepare, sample_text
recipe = Recipe([LocalFiles(Path(sys.argv[2]))], validation_fraction=0.1, vocab_size=800, shard_tokens=1501)
prepare(sys.argv[1], recipe, workers=int(sys.argv[3]))
"""


def run_and_kill(out: Path, corpus: Path, workers: int, shards: int, delay: float) -> bool:
    """A real run, killed `delay` seconds after so many more shards are there; whether it was killed in time."""
    process = subprocess.Popen([sys.executable, "-c", PREPARE, str(out), str(corpus), str(workers)])
    goal = len(list(out.glob("train-*"))) + shards
    while process.poll() is None and len(list(out.glob("train-*"))) < goal:
        time.sleep(0.002)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(delay)
    process.kill()
    return process.wait() != 0


@pytest.mark.slow
def test_many_kills_change_nothing(never_killed: Path, corpus: Path, tmp_path: Path) -> None:
    """The same at random instants, at least 40 of them, many while the vocabulary is trained."""
    rng, kills, attempt = random.Random(1), 0, 0
    while kills < 40:
        out, shards = tmp_path / str(attempt), 3
        for _ in range(3):
            process = subprocess.Popen([sys.executable, "-c", PREPARE, str(out), str(corpus), "2"])
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0.2, 2.5))
            process.kill()
            kills += process.wait() != 0
        while run_and_kill(out, corpus, rng.randint(1, 2), rng.randint(0, shards), rng.uniform(0, 0.1)):
            kills += 1
            shards += kills % 4 == 0
        assert contents(out) == contents(never_killed)
        attempt += 1


def test_no_worker_outlives_a_killed_parent(corpus: Path, tmp_path: Path) -> None:
    process = server.Process(
        target=prepare_and, args=(tmp_path / "out", corpus, 2, hold_at_the_first_shard), daemon=True
    )
    process.start()

    def workers() -> int:
        found = 0
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = entry.read_bytes().decode(errors="replace")
                found += "altup.data.tokenizer_pool" in line and str(tmp_path / "out") in line
        return found

    wait_until(lambda: workers() == 2)
    process.kill()
    process.join()
    wait_until(lambda: workers() == 0)


def test_a_damaged_shard_is_made_anew(prepared: Path, corpus: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(prepared, tmp_path / "data"))
    (folder / "train-00002.bin").write_bytes(b"rubbish")
    with pytest.raises(UserError):
        verify(folder)
    prepare(folder, recipe(corpus), workers=1)
    assert contents(folder) == contents(prepared)


@pytest.mark.parametrize("content", [b"{bad", b"[]", b"\xff", None])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_made_anew(
    prepared: Path, corpus: Path, tmp_path: Path, name: str, content: bytes | None
) -> None:
    """And the shards, which are whole, are kept."""
    chosen = recipe(corpus, tokenizer=str(prepared / "tokenizer"))
    folder = tmp_path / "data"
    prepare(folder, chosen, workers=1)
    before, written = contents(folder), (folder / "train-00000.bin").stat().st_mtime_ns
    path = folder / "tokenizer" / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} is missing or not the one.*run the same"):
        verify(folder)
    assert prepare(folder, chosen, workers=1).finished
    assert contents(folder) == before
    assert (folder / "train-00000.bin").stat().st_mtime_ns == written
    verify(folder)


def test_a_finished_folder_is_left_alone(prepared: Path, corpus: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    assert prepare(prepared, recipe(corpus), workers=3).finished
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 900}, "tokenizer.vocab_size: there 800, now 900"),
        ({"shard_tokens": 5}, "shard_tokens: there 7001, now 5"),
        ({"validation_fraction": 0.2}, "validation: there 0.1, now 0.2"),
        ({"on_error": "stop"}, "on_error: there 'skip', now 'stop'"),
    ],
)
def test_other_settings_are_refused_with_the_difference(
    prepared: Path, corpus: Path, changes: dict[str, object], message: str
) -> None:
    before = contents(prepared)
    with pytest.raises(UserError) as caught:
        prepare(prepared, recipe(corpus, **changes))
    assert message in str(caught.value)
    assert contents(prepared) == before


def test_other_text_is_refused(prepared: Path, corpus: Path, tmp_path: Path) -> None:
    changed = tmp_path / corpus.name
    changed.write_bytes(corpus.read_bytes() + b'{"text": "one more"}\n')
    with pytest.raises(UserError, match=r"train\.sources\[0\]\.files\[0\]\.bytes: there"):
        prepare(prepared, recipe(changed))


def test_validation_text_of_its_own(prepared: Path, corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "validation.txt"
    other.write_text("The text to validate on.")
    chosen = recipe(corpus, validation=[LocalFiles(other)], tokenizer=str(prepared / "tokenizer"))
    prepare(tmp_path / "data", chosen, workers=1)
    stream = TokenStream(tmp_path / "data", "validation")
    tokenizer = tokenizers.load(prepared / "tokenizer")
    assert tokenizer.decode(stream.read(0, len(stream)).tolist()) == "The text to validate on."
    assert len(TokenStream(tmp_path / "data")) == len(TokenStream(prepared)) + len(
        TokenStream(prepared, "validation")
    )


def test_bad_input_is_counted_across_segments_or_stops(prepared: Path, prose: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}) if i % 10 else "{broken" for i, text in enumerate(prose)]
    path.write_text("\n".join(lines))
    tokenizer = str(prepared / "tokenizer")
    manifest = prepare(tmp_path / "data", recipe(path, tokenizer=tokenizer), workers=2)
    assert manifest.skipped() == {"broken JSON": len(prose) // 10}
    assert len(manifest.segments or []) > 3
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: broken JSON"):
        prepare(tmp_path / "stopped", recipe(path, tokenizer=tokenizer, on_error="stop"), workers=2)


def test_nothing_usable_is_an_error_that_says_why(prepared: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x"}\n' * 3)
    with pytest.raises(UserError, match=r"no usable document.*3 × no text field"):
        prepare(tmp_path / "data", recipe(path, tokenizer=str(prepared / "tokenizer")), workers=1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_dies_is_reported(prepared: Path, number: signal.Signals) -> None:
    """Only a kill, which is how the system ends a process that takes too much, is put down to memory."""
    from altup.data.tokenizer_pool import TokenizerPool

    with TokenizerPool(prepared / "tokenizer", 2) as pool:
        for process in pool._processes:
            process.send_signal(number)
        with pytest.raises(UserError, match="a tokenising process died") as caught:
            list(pool.encode([([["some text"], []], None)]))
        assert ("memory" in str(caught.value)) == (number == signal.SIGKILL)


@pytest.mark.parametrize(("highest", "kind"), [(3_099, "<u2"), (80_000, "<u4")])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_tokenizer_with_gaps_in_its_ids(highest: int, kind: str, workers: int, tmp_path: Path) -> None:
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, "the": 2_000, "cat": highest}
    foreign = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    foreign.pre_tokenizer = pre_tokenizers.Whitespace()
    foreign.save(str(tmp_path / "tokenizer.json"))
    text = tmp_path / "a.txt"
    text.write_text("the cat the dog")
    chosen = recipe(text, tokenizer=str(tmp_path / "tokenizer.json"), validation_fraction=0)
    vocabulary = prepare(tmp_path / "data", chosen, workers).vocabulary
    assert vocabulary is not None
    assert vocabulary.size == highest + 1
    assert np.fromfile(tmp_path / "data" / "train-00000.bin", kind).tolist() == [2_000, highest, 2_000, 2]
    assert TokenStream(tmp_path / "data").read(0, 4).max() < vocabulary.padded_size


def test_long_documents_are_tokenised_in_pieces_with_the_same_ids(
    prepared: Path, prose: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from altup.data import tokenizer_pool

    tokenizer = tokenizers.load(prepared / "tokenizer")
    whole = tokenizer.encode("\n".join(prose), add_special_tokens=False).ids
    monkeypatch.setattr(tokenizer_pool, "LONGEST", 1000)
    kind = np.dtype("<u2")
    assert tokenizer_pool.encode(tokenizer, [["\n".join(prose)]], kind)[0].tolist() == whole
    assert len(tokenizer_pool.encode(tokenizer, [["x" * 5000], []], kind)[0]) > 0


def test_progress_never_goes_back(corpus: Path, prepared: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, float | None, int, int]] = []
    chosen = recipe(corpus, tokenizer=str(prepared / "tokenizer"))
    prepare(tmp_path / "data", chosen, 2, lambda *state: seen.append(state))
    counts = np.array([(fraction or 0, documents, tokens) for _, fraction, documents, tokens in seen])
    assert (np.diff(counts, axis=0) >= 0).all()
    assert counts[-1, 0] == 1.0


@pytest.mark.slow  # for a quiet machine
def test_tokenising_is_fast(prepared: Path, prose: list[str]) -> None:
    """Half of the megabyte that a core must do in a second of CPU time."""
    from altup.data.tokenizer_pool import encode

    tokenizer, size = tokenizers.load(prepared / "tokenizer"), sum(map(len, prose))
    best = 0.0
    for _ in range(4):
        began = time.process_time()
        encode(tokenizer, [prose], np.dtype("<u2"))
        best = max(best, size / (time.process_time() - began))
    assert best > 500_000, "characters a second"


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
    return list(sample_text(Recipe([LocalFiles(path)], validation_fraction=fraction, sample_bytes=sample_bytes)))


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
    chosen = Recipe([LocalFiles(tmp_path / "in")], validation_fraction=0.3)
    assert sorted(taken(tmp_path / "in", 1 << 30, 0.3)) == sorted(t for t in texts if not chosen.held_out(t))


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    folder_of(tmp_path / "in", 200, 2, 100)
    most = 0
    for _ in sample_text(Recipe([LocalFiles(tmp_path / "in")], validation_fraction=0.0)):
        most = max(
            most, sum(str(tmp_path) in str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.exists())
        )
    assert 1 < most <= 33


def test_sources_without_text_are_told_from_bad_ones(tmp_path: Path) -> None:
    """The commonest mistake: the text stands in another field."""
    path = tmp_path / "other.jsonl"
    path.write_text('{"content": "some text"}\n' * 2)
    with pytest.raises(UserError, match=r"2 × no text field \(first: .*other.jsonl, line 1\).*--on-error stop"):
        list(sample_text(Recipe([LocalFiles(path)])))
    path.write_text("")
    with pytest.raises(UserError, match="no text to train a vocabulary on: empty"):
        list(sample_text(Recipe([LocalFiles(path)])))

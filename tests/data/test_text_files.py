from __future__ import annotations

import contextlib
import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from altup.core.errors import UserError
from altup.data.bad_input import BadInput, Limits
from altup.data.text_files import LocalFiles, split_lines

zstandard = pytest.importorskip("zstandard")

TEXTS = [f"Document {i}: naïve café, 東京, and some more words.\nA second line." for i in range(500)]


def json_lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": 7, field: text}, ensure_ascii=False) + "\n" for text in texts).encode()


def pack(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    elif path.suffix == ".zst":
        content = zstandard.ZstdCompressor().compress(content)
    path.write_bytes(content)
    return path


def parquet(path: Path, texts: list[str | None], **options: int) -> Path:
    pq.write_table(pa.table({"n": list(range(len(texts))), "text": pa.array(texts, pa.string())}), path, **options)
    return path


def read(path: Path, field: str = "text", **options: object) -> tuple[list[str], dict[str, int]]:
    bad_input = BadInput(**options)  # type: ignore[arg-type]
    texts = list(LocalFiles(path, field).read(bad_input))
    return texts, {reason: seen["count"] for reason, seen in bad_input.state().items()}


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_plain_and_packed(tmp_path: Path, suffix: str) -> None:
    path = pack(tmp_path / f"a.jsonl{suffix}", json_lines(TEXTS, "body"))
    assert read(path, "body") == (TEXTS, {})


def test_several_archives_in_one_file_are_all_read(tmp_path: Path) -> None:
    half = len(TEXTS) // 2
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json_lines(TEXTS[:half])) + gzip.compress(json_lines(TEXTS[half:])))
    assert read(path) == (TEXTS, {})


def test_parquet_across_row_groups(tmp_path: Path) -> None:
    assert read(parquet(tmp_path / "a.parquet", TEXTS, row_group_size=70)) == (TEXTS, {})


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_files_lose_nothing_and_are_cut_at_blank_lines(tmp_path: Path, suffix: str) -> None:
    paragraphs = [f"Paragraph {i} " + "word " * (i % 300) + "end." for i in range(400)]
    path = pack(tmp_path / f"a.txt{suffix}", "\n\n".join(paragraphs).encode())
    texts, bad_input = read(path)
    assert not bad_input
    assert "\n\n".join(texts) == "\n\n".join(paragraphs)
    assert len(texts) > 20
    assert all(4096 <= len(text) <= 4096 + 1600 for text in texts[:-1])


def test_text_without_blank_lines_is_cut_at_line_ends(tmp_path: Path) -> None:
    lines = [f"line {i} of a file that has no blank line" for i in range(20_000)]
    path = pack(tmp_path / "a.txt", "\r\n".join(lines).encode())
    texts, _ = read(path)
    assert "\n".join(texts).split("\n") == lines
    assert max(map(len, texts)) < 70_000


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    pack(tmp_path / "b" / "1.jsonl", json_lines(["third"]))
    pack(tmp_path / "a.txt.zst", b"first")
    parquet(tmp_path / "a2.parquet", ["second"])
    (tmp_path / "c.md").write_text("# fourth")
    (tmp_path / "LICENSE").write_text("not a source")
    assert read(tmp_path) == (["first", "second", "third", "# fourth"], {})
    names = [entry["name"] for entry in LocalFiles(tmp_path).describe()["files"]]
    assert names == ["a.txt.zst", "a2.parquet", "b/1.jsonl", "c.md"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert read(pack(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + json_lines(["one", "two"]))) == (["one", "two"], {})
    assert read(pack(tmp_path / "a.txt", b"\xef\xbb\xbfone")) == (["one"], {})


BROKEN_LINES: dict[str, tuple[bytes, str]] = {
    "broken": (b'{"text": "no end', "broken JSON"),
    "nested": (b"[" * 100_000, "broken JSON"),
    "big-number": (b'{"text": ' + b"9" * 5000 + b"}", "broken JSON"),
    "not-utf8": (b'{"text": "caf\xe9"}', "bad UTF-8"),
    "utf16": (b'\xff\xfe{\x00"\x00', "bad UTF-8"),
    "surrogate": (b'{"text": "\\ud800"}', "bad UTF-8"),
    "empty": (b'{"text": ""}', "empty document"),
    "white": (b'{"text": " \\n\\t "}', "empty document"),
    "missing": (b'{"body": "x"}', "no text field"),
    "number": (b'{"text": 3}', "no text field"),
    "list": (b'["text"]', "no text field"),
    "too-long": (b'{"text": "' + b"x" * 20_000 + b'"}', "too long"),
}


@pytest.mark.parametrize("name", BROKEN_LINES)
def test_a_bad_line_is_counted_or_named(tmp_path: Path, name: str) -> None:
    line, reason = BROKEN_LINES[name]
    path = pack(tmp_path / "a.jsonl.gz", json_lines(["one", "two"]) + line + b"\n" + json_lines(["three"]))
    limits = Limits(document_bytes=10_000 if name == "too-long" else 200_000)
    assert read(path, limits=limits) == (["one", "two", "three"], {reason: 1})
    with pytest.raises(UserError, match=rf"a\.jsonl\.gz, line 3: {reason}"):
        read(path, on_error="stop", limits=limits)


def test_bad_rows_of_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", ["one", None, "", "two"])
    assert read(path) == (["one", "two"], {"empty document": 2})
    with pytest.raises(UserError, match=r"a\.parquet, row 2"):
        read(path, on_error="stop")
    assert read(path, "body") == ([], {"no text field": 1})
    assert read(path, "n") == ([], {"no text field": 4})
    raw = pa.array([b"good", b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": raw}), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet") == (["good"], {"bad UTF-8": 1})


def test_bad_bytes_in_a_text_file_cost_one_document(tmp_path: Path) -> None:
    blocks = [("x" * 80 + "\n").encode() * 60 for _ in range(5)]
    blocks[2] = blocks[2][:200] + b"\xff" + blocks[2][201:]
    path = pack(tmp_path / "a.txt", b"\n".join(blocks))
    texts, bad_input = read(path)
    assert (len(texts), bad_input) == (4, {"bad UTF-8": 1})
    with pytest.raises(UserError, match="line 125: bad UTF-8"):
        read(path, on_error="stop")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("content", [b"", b"\n", b"\n \n\t\n" * 5])
def test_a_text_file_of_nothing_is_one_empty_document(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = pack(tmp_path / f"a.txt{suffix}", content)
    assert read(path) == ([], {"empty document": 1})
    text = pack(tmp_path / f"b.txt{suffix}", content + b"Words." + content)
    assert read(text) == (["Words."], {})


def test_a_text_file_of_one_line_too_long_is_not_empty_as_well(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n" + b"x" * 101 + b"\n")
    assert read(path, limits=Limits(document_bytes=100)) == ([], {"too long": 1})


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl.gz", "a.txt.zst", "a.txt.gz"])
def test_an_archive_of_0_bytes_is_a_truncated_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert read(tmp_path / name) == ([], {"truncated archive": 1})
    empty = pack(tmp_path / f"whole-{name}", b"")
    assert "truncated archive" not in read(empty)[1]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_archive_gives_what_it_holds(tmp_path: Path, suffix: str) -> None:
    rng = random.Random(0)
    texts = [f"{rng.getrandbits(4000):x}" for _ in range(3000)]
    path = pack(tmp_path / f"a.jsonl{suffix}", json_lines(texts))
    path.write_bytes(path.read_bytes()[:-100_000])
    found, bad_input = read(path)
    assert bad_input == {"truncated archive": 1}
    assert 1000 < len(found) < 3000
    assert found == texts[: len(found)]
    with pytest.raises(UserError, match=r"a\.jsonl\..*truncated archive"):
        read(path, on_error="stop")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.zst", "a.parquet"])
def test_a_file_that_is_something_else(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"This is no archive at all, whatever its name says.")
    assert read(tmp_path / name) == ([], {"unreadable file": 1})


@pytest.mark.parametrize("line_ends", [False, True])
def test_an_archive_that_unpacks_without_end_is_left(tmp_path: Path, line_ends: bool) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    line = b'{"text": "' + b"again " * 169 + b'"}'
    piece = (line + (b"\n" if line_ends else b" ")) * 64
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range((80 << 20) // len(piece)):
            file.write(piece)
    assert path.stat().st_size < 600_000
    texts, bad_input = read(path, limits=Limits(unpack_ratio=100))
    assert bad_input == {"unpacks without end": 1}
    assert len(texts) == (line_ends and (64 << 20) // (len(line) + 1))
    with pytest.raises(UserError, match=r"bomb.*unpacks without end"):
        read(path, on_error="stop", limits=Limits(unpacked_bytes=1 << 20))


MEASURE = """
import resource, sys
from pathlib import Path
from altup.data.bad_input import BadInput, Limits
from altup.data.text_files import LocalFiles
import pyarrow.parquet
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before, bad_input = peak(), BadInput()
count = sum(1 for _ in LocalFiles(Path(sys.argv[1])).read(bad_input))
print(count, {r: s["count"] for r, s in bad_input.state().items()}, peak() - before, sep="|")
"""


@pytest.mark.parametrize("name", ["line.jsonl", "line.txt", "lines.txt.gz"])
def test_100_mb_need_little_memory(tmp_path: Path, name: str) -> None:
    """One line of 100 MB is bad input; 100 MB of lines are not."""
    path = tmp_path / name
    one_line = name.startswith("line.")
    with gzip.open(path, "wb", compresslevel=1) if name.endswith("gz") else path.open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(100):
            file.write((b"so many words " if one_line else b"thirteen more\n") * 75_000 + b"\n" * (not one_line))
        file.write(b'"}\n')
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    found, bad_input, grown = done.stdout.strip().split("|")
    assert int(grown) < 60, "MiB"
    if one_line:
        assert int(found) == 0
        assert "'too long': 1" in bad_input
    else:
        assert int(found) > 1_000
        assert bad_input == "{}"


def test_blank_lines_without_end_need_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"first" + b"\n" * 8_000_000 + b"second\n")
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    found, bad_input, grown = done.stdout.strip().split("|")
    assert (found, bad_input) == ("2", "{}")
    assert int(grown) < 40, "MiB"


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet"])
def test_reading_goes_on_from_any_cursor(tmp_path: Path, kind: str) -> None:
    """From the state after any document, the rest is the same: texts and counts of bad input."""
    for part in range(3):
        path = tmp_path / f"{part}.{kind}"
        if kind == "parquet":
            parquet(path, [t if i % 7 else None for i, t in enumerate(TEXTS[:60])], row_group_size=17)
        elif kind == "jsonl":
            pack(path, b"".join(json_lines([t]) if i % 7 else b"{broken\n" for i, t in enumerate(TEXTS[:60])))
        else:
            pack(
                path, b"\n\n".join(b"\xff" if i % 7 == 0 else (t * 40).encode() for i, t in enumerate(TEXTS[:60]))
            )
    source, bad_input = LocalFiles(tmp_path), BadInput()
    whole = list(source.read(bad_input))
    assert bad_input.state()
    seen = BadInput()
    reader = source.read(seen)
    for count, _ in enumerate(reader, start=1):
        cursor = json.loads(json.dumps([reader.cursor(), seen.state()]))
        rest = BadInput(state=cursor[1])
        assert list(source.read(rest, cursor[0])) == whole[count:]
        assert rest.state() == bad_input.state()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt.zst", "a.parquet"])
def test_random_damage_never_ends_in_a_traceback(tmp_path: Path, name: str) -> None:
    rng = random.Random(1)
    path = tmp_path / name
    good = (parquet(path, TEXTS) if name == "a.parquet" else pack(path, json_lines(TEXTS))).read_bytes()
    for _ in range(60):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(bad))
            bad[at : at + rng.randint(0, 6)] = rng.randbytes(rng.randint(0, 6))
        if rng.random() < 0.3:
            del bad[rng.randrange(len(bad)) :]
        path.write_bytes(bad)
        read(path)
        with contextlib.suppress(UserError):
            read(path, on_error="stop")


def test_sources_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        LocalFiles(tmp_path / "nothing.txt")
    with pytest.raises(UserError, match="no file that can be read"):
        LocalFiles(tmp_path)
    (tmp_path / "a.docx").write_bytes(b"")
    with pytest.raises(UserError, match="no known kind"):
        LocalFiles(tmp_path / "a.docx")


def test_split_lines_against_split() -> None:
    rng = random.Random(2)
    for _ in range(300):
        content = bytes(rng.choices(b"ab\n", weights=[4, 4, 1], k=rng.randint(0, 60)))
        pieces, at = [], 0
        while at < len(content):
            size = rng.randint(1, 7)
            pieces.append(content[at : at + size])
            at += size
        expected = content.split(b"\n")
        if expected[-1] == b"":
            expected.pop()
        assert list(split_lines(pieces, 9)) == [line if len(line) <= 9 else None for line in expected]


def test_a_real_corpus_is_read_whole(shared: Path) -> None:
    """359 documents, as its own manifest says; its archive needs a window of 128 MiB."""
    texts, bad_input = read(shared / "data" / "corpus-validation.jsonl.zst")
    assert (len(texts), bad_input) == (359, {})
    assert sum(len(text.encode()) for text in texts) == 1_382_935

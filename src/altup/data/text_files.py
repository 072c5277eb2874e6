"""Documents from local .txt, .md, .jsonl and .parquet files, plain, .gz or .zst, in bounded memory.

In a .jsonl file a line is a document, in a .parquet file a row. A .txt or .md file is cut into documents at the
first blank line after 4 KiB, or at the first line end after 64 KiB where no blank line comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from altup.core.errors import UserError
from altup.core.files import check_regular, parse_json
from altup.data.bad_input import BadInput, Limits

KINDS = (".txt", ".md", ".jsonl", ".parquet")
CODECS = {".gz": "gzip", ".zst": "zstd"}
PIECE = 1 << 18  # bytes read at a time
TEXT_AT_BLANK_LINE = 1 << 12
TEXT_AT_LINE_END = 1 << 16
ROWS = 64  # of a parquet file held in memory at a time: few, because each may be long
FINGERPRINT = 1 << 16  # bytes hashed at each end of a file
GUESSED_RATIO = 3  # of text to compressed text, for estimates only


def kind_of(path: Path) -> str | None:
    """The ending, one of KINDS; None for a file of another kind."""
    stem = path.with_suffix("") if path.suffix in CODECS else path
    if stem.suffix == ".parquet" and stem is not path:
        return None
    return stem.suffix if stem.suffix in KINDS else None


class LocalFiles:
    """A file, or every file of a known kind below a folder in the order of their names."""

    def __init__(self, path: Path, field: str = "text"):
        self.path, self.field = check_regular(Path(path)), field
        known = ", ".join(KINDS) + " (all but .parquet also .gz or .zst)"
        if self.path.is_dir():
            self.paths = sorted(p for p in self.path.rglob("*") if p.is_file() and kind_of(p) and p.name[0] != ".")
            if not self.paths:
                raise UserError(f"folder {self.path} has no file that can be read; known are {known}")
        elif not self.path.exists():
            raise UserError(
                f"source {str(self.path)!r} does not exist; give a file, a folder, `embedded`, "
                "or a Hugging Face dataset as hf:NAME:CONFIG:SPLIT"
            )
        elif kind_of(self.path) is None:
            raise UserError(f"file {self.path} is of no known kind; known are {known}")
        else:
            self.paths = [self.path]

    def describe(self) -> dict[str, Any]:
        root = self.path if self.path.is_dir() else self.path.parent
        return {"kind": "files", "field": self.field, "files": fingerprints(root, self.paths)}

    def read(self, bad_input: BadInput, cursor: Any = None, one_file: bool = False) -> _FilesReader:
        return _FilesReader(self.paths, self.field, bad_input, cursor, one_file)

    def files(self) -> list[tuple[Any, int]]:
        return [([index, 0], text_bytes(path)) for index, path in enumerate(self.paths)]

    def file_of(self, cursor: Any) -> int:
        return int(cursor[0])

    def parts(self) -> list[LocalFiles]:
        return [LocalFiles(path, self.field) for path in self.paths]

    def text_bytes(self) -> int:
        return sum(map(text_bytes, self.paths))


def text_bytes(path: Path) -> int:
    """A rough guess of the size of a file's text."""
    return path.stat().st_size * (1 if path.suffix in (".txt", ".md", ".jsonl") else GUESSED_RATIO)


def fingerprints(root: Path, files: Iterable[Path]) -> list[dict[str, Any]]:
    """A cheap identity of each file: its path below `root`, its size, and a hash of its beginning and end."""
    return [{"name": p.relative_to(root).as_posix(), "bytes": p.stat().st_size, "print": _hash(p)} for p in files]


def _hash(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            digest.update(file.read(FINGERPRINT))
            file.seek(max(0, size - FINGERPRINT))
            digest.update(file.read(FINGERPRINT))
    except OSError as error:
        raise UserError(f"file {path} cannot be read ({error.strerror}); make it readable or remove it") from None
    return digest.hexdigest()[:16]


class _FilesReader:
    """The cursor is `[file, items]`: the lines or rows of that file that have been read."""

    def __init__(self, files: list[Path], field: str, bad_input: BadInput, cursor: Any, one_file: bool):
        self._files, self._field, self._bad_input = files, field, bad_input
        self._file: int
        self._items: int
        self._file, self._items = cursor or (0, 0)
        first, self._stop = (self._file, self._file + 1) if one_file else (0, len(files))
        self._sizes = {i: max(1, path.stat().st_size) for i, path in enumerate(files[first : self._stop], first)}
        self._within = 0.0

    def __iter__(self) -> Iterator[str]:
        while self._file < self._stop:
            path = self._files[self._file]
            readers = {".jsonl": self._json_lines, ".parquet": self._parquet}
            documents = readers.get(kind_of(path) or "", self._text)
            with damage_reported(path, self._bad_input):
                for items, text, where in documents(path, self._items):
                    if self._bad_input.accept(text, where):
                        self._items = items
                        yield text
            self._file, self._items, self._within = self._file + 1, 0, 0.0

    def cursor(self) -> Any:
        return [self._file, self._items]

    def fraction(self) -> float | None:
        done = sum(size for file, size in self._sizes.items() if file < self._file)
        return min(1.0, (done + self._within) / sum(self._sizes.values()))

    def _at(self, position: int) -> None:
        self._within = position

    def _json_lines(self, path: Path, skip: int) -> Iterator[tuple[int, str, str]]:
        for number, where, record in read_json_lines(path, self._bad_input, skip, self._at):
            text = record.get(self._field) if isinstance(record, dict) else None
            if isinstance(text, str):
                yield number, text, where
            else:
                detail = f"no string {self._field!r}; name another with --field"
                self._bad_input.report("no text field", where, detail)

    def _text(self, path: Path, skip: int) -> Iterator[tuple[int, str, str]]:
        held: list[bytes] = []
        size = number = 0
        first, blank = skip + 1, not skip
        for number, line in read_lines(path, self._bad_input.limits, self._at):
            if number <= skip:
                continue
            blank = blank and line is not None and not line.strip()
            if line is None:
                limit = self._bad_input.limits.document_bytes
                self._bad_input.report("too long", f"{path}, line {number}", f"a line of more than {limit} bytes")
                line = b""
            line = line.rstrip()
            if not line and not held:
                first = number + 1
                continue
            held.append(line)
            size += len(line) or 1  # blank lines count too: a file of nothing else must not pile up in memory
            if size >= TEXT_AT_LINE_END or (not line and size >= TEXT_AT_BLANK_LINE):
                yield from self._decoded(path, held, first, number)
                held, size, first = [], 0, number + 1
        if size or blank:
            yield from self._decoded(path, held, first, number)

    def _decoded(self, path: Path, lines: list[bytes], first: int, last: int) -> Iterator[tuple[int, str, str]]:
        joined = b"\n".join(lines)
        try:
            text = joined.decode("utf-8-sig" if first == 1 else "utf-8")
        except UnicodeDecodeError as error:
            bad = first + joined.count(b"\n", 0, error.start)
            self._bad_input.report("bad UTF-8", f"{path}, line {bad}")
        else:
            yield last, text.strip(), f"{path}, line {first}"

    def _parquet(self, path: Path, skip: int) -> Iterator[tuple[int, str, str]]:
        import pyarrow.parquet

        allowed, size = self._bad_input.limits.allowed(path.stat().st_size), 0
        with pyarrow.parquet.ParquetFile(path) as file:
            if self._field not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                self._bad_input.report(
                    "no text field", str(path), f"no {self._field!r} among {names}; see --field"
                )
                return
            row, groups = 0, list(range(file.num_row_groups))
            while groups and row + file.metadata.row_group(groups[0]).num_rows <= skip:
                row += file.metadata.row_group(groups.pop(0)).num_rows
            for batch in file.iter_batches(ROWS, row_groups=groups, columns=[self._field]):
                size += batch.nbytes
                if size > allowed:
                    raise UnpacksTooFarError(f"beyond {allowed} bytes")
                self._within = self._sizes[self._file] * row / max(1, file.metadata.num_rows)
                for value in batch.column(0):
                    row += 1
                    if row > skip:
                        yield from self._cell(row, value, f"{path}, row {row}")

    def _cell(self, row: int, value: pa.Scalar, where: str) -> Iterator[tuple[int, str, str]]:
        try:
            text = value.as_py()
        except UnicodeDecodeError:
            self._bad_input.report("bad UTF-8", where)
            return
        if isinstance(text, str):
            yield row, text, where
        elif text is None:
            self._bad_input.report("empty document", where)
        else:
            self._bad_input.report(
                "no text field", where, f"{self._field!r} is no string; name another with --field"
            )


class UnpacksTooFarError(Exception):
    """A file unpacks to more than `Limits` allow."""


@contextmanager
def damage_reported(path: Path, bad_input: BadInput) -> Iterator[None]:
    """Report a file that cannot be read to its end; what was read before the damage stays."""
    try:
        yield
    except UnpacksTooFarError as error:
        bad_input.report("unpacks without end", str(path), str(error))
    except (OSError, pa.ArrowException) as error:
        reason = "truncated archive" if "truncated" in str(error).lower() else "unreadable file"
        bad_input.report(reason, str(path), f"{str(error).splitlines()[0]}; what follows is lost")


def read_json_lines(
    path: Path, bad_input: BadInput, skip: int = 0, at: Callable[[int], None] | None = None
) -> Iterator[tuple[int, str, Any]]:
    """Line number, place for messages, and value of every JSON line after the first `skip` lines."""
    for number, line in read_lines(path, bad_input.limits, at):
        if number <= skip or (line is not None and not line.strip()):
            continue
        where = f"{path}, line {number}"
        if line is None:
            bad_input.report("too long", where, f"more than {bad_input.limits.document_bytes} bytes")
            continue
        try:
            value = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            bad_input.report("bad UTF-8", where, f"byte {error.start + 1}")
        except ValueError as error:
            bad_input.report("broken JSON", where, str(error))
        else:
            yield number, where, value


def read_lines(
    path: Path, limits: Limits, at: Callable[[int], None] | None = None
) -> Iterator[tuple[int, bytes | None]]:
    """Lines numbered from 1, unpacked; None for one beyond the limit. `at(position)` reports progress."""
    return enumerate(split_lines(_unpacked(path, limits, at), limits.document_bytes), start=1)


def check_unpacked_size(path: Path, limits: Limits) -> None:
    """`UnpacksTooFarError` for a compressed file beyond the limits, before anything is made of its lines."""
    if path.suffix in CODECS:
        for _ in _unpacked(path, limits, None):
            pass


def _unpacked(path: Path, limits: Limits, at: Callable[[int], None] | None) -> Iterator[bytes]:
    packed_bytes = check_regular(path).stat().st_size
    allowed, size = limits.allowed(packed_bytes), 0
    if path.suffix in CODECS and not packed_bytes:
        raise OSError("truncated to 0 bytes")  # even an empty archive has a header
    with pa.OSFile(str(path)) as packed:
        codec = CODECS.get(path.suffix)
        stream = pa.CompressedInputStream(packed, codec) if codec else packed
        while piece := stream.read(PIECE):
            size += len(piece)
            if codec and size > allowed:
                raise UnpacksTooFarError(f"beyond {allowed} bytes")
            if at:
                at(packed.tell())
            yield piece


def split_lines(pieces: Iterable[bytes], limit: int) -> Iterator[bytes | None]:
    """Lines without their ends; None for a line of more than `limit` bytes, which is dropped while it is read."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        *ended, rest = piece.split(b"\n")
        for part in ended:
            yield b"".join([*held, part]) if size + len(part) <= limit else None
            held, size = [], 0
        size += len(rest)
        if size <= limit:
            held.append(rest)
        else:
            held = []
    if size:
        yield b"".join(held) if size <= limit else None

"""Tokenising in several processes, with results in the order of the requests.

A worker is `python -m altup.data.tokenizer_pool TOKENIZER_FOLDER`. It answers requests on its standard input and
ends when that closes, so no worker outlives a killed parent. A request is a length and the JSON
`[[text, …], …]`, one list per split; the reply is one array of ids per list, each preceded by its length.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, TypeVar

import numpy as np
from tokenizers import Tokenizer

from altup.core.errors import UserError
from altup.data.shards import token_type
from altup.data.tokenizer import load, size_of

LENGTH = struct.Struct("<Q")
LONGEST = 1 << 20  # characters tokenised at a time; longer documents are cut at white space
Lists = list[list[str]]
Job = TypeVar("Job")


def encode(tokenizer: Tokenizer, lists: Lists, kind: np.dtype[Any]) -> list[np.ndarray]:
    """The token ids of each list of texts, concatenated, with the dtype `kind`."""
    encoded = []
    for texts in lists:
        pieces = [piece for text in texts for piece in _cut(text)]
        rows = [np.array(e.ids, kind) for e in tokenizer.encode_batch_fast(pieces, add_special_tokens=False)]
        encoded.append(np.concatenate(rows) if rows else np.empty(0, kind))
    return encoded


def _cut(text: str) -> Iterator[str]:
    """Pieces of at most `LONGEST` characters; with our vocabularies the ids are those of the whole text."""
    while len(text) > LONGEST:
        end = max(text.rfind(" ", 0, LONGEST), text.rfind("\n", 0, LONGEST)) + 1 or LONGEST
        yield text[:end]
        text = text[end:]
    yield text


class TokenizerPool:
    """`count` worker processes; with one, this process does the work itself."""

    def __init__(self, tokenizer_folder: Path, count: int):
        self._tokenizer = load(tokenizer_folder)
        self._kind = token_type(size_of(self._tokenizer))
        self._count = count
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        command = [sys.executable, "-m", "altup.data.tokenizer_pool", str(tokenizer_folder)]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            for _ in range(count if count > 1 else 0)
        ]
        for process in self._processes:
            self._idle.put(process)

    def __enter__(self) -> TokenizerPool:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # the reader of unsent bytes is dead
                        pipe.close()

    def encode(self, jobs: Iterable[tuple[Lists, Job]]) -> Iterator[tuple[list[np.ndarray], Job]]:
        """Ids for the texts of each job, in order. A few jobs are read ahead so that no worker waits."""
        if not self._processes:
            yield from ((encode(self._tokenizer, lists, self._kind), job) for lists, job in jobs)
            return
        with ThreadPoolExecutor(self._count) as threads:
            ahead: deque[tuple[Future[list[np.ndarray]], Job]] = deque()
            try:
                for lists, job in jobs:
                    ahead.append((threads.submit(self._ask, lists), job))
                    if len(ahead) > 2 * self._count:
                        future, oldest = ahead.popleft()
                        yield future.result(), oldest
                while ahead:
                    future, oldest = ahead.popleft()
                    yield future.result(), oldest
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, lists: Lists) -> list[np.ndarray]:
        process = self._idle.get()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, json.dumps(lists).encode())
            process.stdin.flush()
            return [np.frombuffer(_receive(process.stdout), self._kind) for _ in lists]
        except (BrokenPipeError, EOFError):
            status = process.wait()
            if status == -signal.SIGKILL:
                remedy = "usually a lack of memory; run the same command again with fewer --workers"
            else:
                remedy = "its error message is above; run the same command again, with --workers 1 if it recurs"
            raise UserError(f"a tokenising process died (exit status {status}): {remedy}") from None
        finally:
            self._idle.put(process)


def _send(pipe: IO[bytes], content: bytes | memoryview) -> None:
    pipe.write(LENGTH.pack(len(content)))
    pipe.write(content)


def _receive(pipe: IO[bytes]) -> bytes:
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    content = pipe.read(LENGTH.unpack(head)[0])
    if len(content) < LENGTH.unpack(head)[0]:
        raise EOFError
    return content


def _serve(tokenizer_folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    tokenizer = load(tokenizer_folder)
    kind = token_type(size_of(tokenizer))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            request: Any = json.loads(_receive(source))
            for ids in encode(tokenizer, request, kind):
                _send(sink, ids.data.cast("B"))
            sink.flush()
        except (EOFError, BrokenPipeError):
            os._exit(0)  # the parent has ended, and does not read the pipe


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))

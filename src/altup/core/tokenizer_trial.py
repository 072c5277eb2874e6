"""Trying a tokenizer from anyone where it can do no harm: in a child process under limits of time and memory.

A small tokenizer.json can write a gigabyte for one letter, search for ever, or end its library with a panic, which
no thread survives. The child loads it and tokenises a few texts; what it does not finish, altup does not load.
"""

from __future__ import annotations

import os
import resource
import signal
import string
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from altup.core.errors import UserError
from altup.core.files import check_regular

SECONDS = 20  # of a processor; the largest vocabularies (256,000 tokens) take two
MEMORY = 4 << 30
MOST_ADDED = 50_000  # tokens beside the vocabulary: transformers takes its time for each
TEXTS = (
    "a b",
    "a" * 64 + "b",
    string.printable * 4,
    "Ünïcödé 文字 💥 \u202e",
    "<s> </s> <pad> [CLS] <extra_id_0>",
)


def try_tokenizer(file: Path) -> None:
    """UserError for a tokenizer.json that cannot be loaded and used with modest time and memory."""
    state = check_regular(file).stat()
    if reason := _tried(file.resolve(), state.st_mtime_ns, state.st_size):
        raise UserError(f"{str(file)!r} holds no tokenizer that can be used: {reason}")


@lru_cache(1000)
def _tried(file: Path, changed: int, size: int) -> str:
    """What is wrong with it; empty if nothing is."""
    command = [sys.executable, "-P", "-m", "altup.core.tokenizer_trial", str(file)]
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, env=environment, start_new_session=True)
    if done.returncode == 0:
        return ""
    reason = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than {SECONDS} seconds for a few words"
    if done.returncode == -signal.SIGABRT:
        return f"it takes more than {MEMORY >> 30} GiB of memory for a few words"
    return reason[-1] if reason else f"it ended its process with {done.returncode}"


def check_added(number: int) -> None:
    if number > MOST_ADDED:
        raise UserError(f"it adds {number:,} tokens to its vocabulary; the most is {MOST_ADDED:,}")


def _try(file: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    check_added(len(tokenizer.get_added_tokens_decoder()))
    for text in TEXTS:
        tokenizer.decode(tokenizer.encode(text).ids)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        _try(sys.argv[1])
    except BaseException as error:  # a panic of a library in Rust is no Exception
        sys.stderr.write(f"\n{(str(error).splitlines() or [type(error).__name__])[0]}\n")
        sys.exit(1)

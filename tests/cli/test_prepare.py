from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from altup.cli.prepare import command
from altup.core.errors import UserError
from altup.data.embedded import documents
from tests.processes import _start, altup, start

app = typer.Typer()
app.command()(command)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "100"}, catch_exceptions=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "prose.jsonl"
    lines = [json.dumps({"body": text}) for text in documents()[:500]]
    path.write_text("\n".join([*lines[:200], "{broken", '{"body": ""}', *lines[200:]]))
    return path


@pytest.fixture(scope="module")
def options(corpus: Path) -> list[str]:
    return [
        str(corpus),
        "--field",
        "body",
        "--vocab-size",
        "700",
        "--workers",
        "1",
        "--validation-fraction",
        "0.1",
    ]


@pytest.fixture(scope="module")
def out(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "data"
    result = run(*options, "--out", folder)
    assert result.exit_code == 0
    for part in ("train", "validation", "sequences of 568", "--out runs/NAME", "1 × broken JSON"):
        assert part in result.output
    assert "800 with the sentinels" in result.output
    return folder


def test_again_says_it_is_finished(out: Path, options: list[str]) -> None:
    result = run(*options, "--out", out)
    assert result.exit_code == 0
    assert "is finished and whole" in result.output


def test_in_parts(out: Path, options: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    first = run(*options, "--out", folder, "--part", "1/2").output
    assert "No file fell to this part" in first
    assert f"Once all 2 are: altup prepare --merge --out {folder}" in first
    with pytest.raises(UserError, match="2/2 is missing"):
        run("--merge", "--out", folder)
    assert "Part 2/2 is done: 500 documents" in run(*options, "--out", folder, "--part", "2/2").output
    assert "Next: altup pretrain" in run("--merge", "--out", folder).output
    names = sorted(path.relative_to(out) for path in out.rglob("*"))
    assert names == sorted(path.relative_to(folder) for path in folder.rglob("*"))
    assert all((folder / name).read_bytes() == (out / name).read_bytes() for name in names if name.suffix)


def test_the_next_command_can_be_copied(out: Path, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my data; rm -r x"
    tokenizer = out / "tokenizer"
    result = run(corpus, "--field", "body", "--tokenizer", tokenizer, "--workers", "1", "--out", folder)
    (line,) = (line for line in result.output.splitlines() if line.startswith("Next: "))
    expected = ["altup", "pretrain", "--data", str(folder), "--out", "runs/NAME"]
    assert shlex.split(line.removeprefix("Next: ")) == expected


@pytest.mark.parametrize("place", ["afile", "afile/x", "/dev/null", "/dev/null/x", "/proc/foo", "n" * 300])
def test_a_place_that_cannot_be_a_folder(out: Path, corpus: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "afile").write_text("text")
    with pytest.raises(UserError, match="give a"):
        run(corpus, "--field", "body", "--tokenizer", out / "tokenizer", "--out", tmp_path / place)
    assert (tmp_path / "afile").read_text() == "text"


def test_the_advice_of_a_failed_run_can_be_followed(corpus: Path, tmp_path: Path) -> None:
    """Nothing is finished yet, so other settings begin again in the same folder."""
    arguments: list[str | Path] = [corpus, "--field", "body", "--workers", "1", "--out", tmp_path / "data"]
    with pytest.raises(UserError, match="give at most") as caught:
        run(*arguments, "--vocab-size", "50000")
    assert "give at most" in str(caught.value)
    assert not (tmp_path / "data").exists()
    assert run(*arguments, "--vocab-size", "700").exit_code == 0
    with pytest.raises(UserError, match="was made with other settings"):
        run(*arguments, "--vocab-size", "701")


def test_a_small_folder_needs_no_options(tmp_path: Path) -> None:
    """What 32,000 pieces and a hundredth would not do is chosen and said, once; what follows can be trained on."""
    folder, out = tmp_path / "my-text", tmp_path / "data"
    folder.mkdir()
    (folder / "book.txt").write_text("\n\n".join(documents())[:40_000])
    told = run(folder, "--workers", "1", "--out", out).output
    assert "little text, hence 360 pieces and not 32,000 (--vocab-size), 20% held out and not 1%" in told
    assert "training a vocabulary" in told
    assert "vocabulary of" not in told  # how many pieces suit the text is not known yet
    assert "Next: altup pretrain" in told
    assert "is finished and whole" in run(folder, "--workers", "1", "--out", out).output
    with pytest.raises(UserError, match=r"vocab_size=32000: the vocabulary .* has 360 pieces"):
        run(folder, "--workers", "1", "--out", out, "--vocab-size", "32000")
    with pytest.raises(UserError, match=r"validation: there 0\.2, now 0\.01"):
        run(folder, "--workers", "1", "--out", out, "--validation-fraction", "0.01")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("note.txt", "One note, and nothing to hold out.", "No validation text"),
        ("notes.jsonl", '{"text": "A line of a few words, each another document."}\n' * 4, "No validation text"),
        ("notes.jsonl", "\n".join(f'{{"text": "Note {n}: {"word " * n}"}}' for n in range(8)), "-length 32\n"),
    ],
)
def test_next_to_no_text_is_prepared_all_the_same(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    assert told in run(tmp_path / name, "--workers", "1", "--out", tmp_path / "data").output


def test_other_settings_are_refused(out: Path, options: list[str]) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size: there 700, now 701"):
        run(*options, "--out", out, "--vocab-size", "701")


def test_stop_names_the_line(corpus: Path, options: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prose\.jsonl, line 201: broken JSON"):
        run(*options, "--out", tmp_path / "data", "--on-error", "stop")


@pytest.mark.parametrize("size", [0, 50, 359])
def test_a_vocabulary_that_is_too_small_is_refused_at_once(size: int, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"vocab_size={size} .*at least 360"):
        run(corpus, "--field", "body", "--vocab-size", str(size), "--out", tmp_path / "data")
    assert not (tmp_path / "data").exists()  # nothing was begun


def test_the_smallest_vocabulary_can_be_had(corpus: Path, tmp_path: Path) -> None:
    done = run(corpus, "--field", "body", "--vocab-size", "360", "--workers", "1", "--out", tmp_path / "data")
    assert "460 with the sentinels" in done.output


# Commands one after the other in a fresh process, which reads where the hub is when it starts.
WITHOUT_NETWORK = """
import contextlib, io, json, sys
from altup.cli.main import _run
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["altup", "prepare", *arguments, "--workers", "1"]
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(text):
        try:
            code = _run()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, text.getvalue()]))
"""


@pytest.fixture(scope="module")
def without_network(corpus: Path, out: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Exit codes and words of commands whose hub is a port where nobody listens; one model was downloaded."""
    folder = tmp_path_factory.mktemp("offline")
    repository = folder / "hub" / "hub" / "models--some--tokenizer"
    shutil.copytree(out / "tokenizer", repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    commands = {
        "dataset": ["hf:allenai/c4:en"],
        "tokenizer": ["embedded", "--tokenizer", "google/t5-v1_1-small"],
        "downloaded": [str(corpus), "--field", "body", "--tokenizer", "some/tokenizer"],
    }
    given = [[*words, "--out", str(folder / name)] for name, words in commands.items()]
    offline = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(folder / "hub")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK, json.dumps(given)],
        env={**os.environ, **offline}, cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(zip(commands, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("what", ["dataset", "tokenizer"])
def test_without_a_network_the_hub_is_asked_once(what: str, without_network: dict[str, list[Any]]) -> None:
    if what == "dataset":
        pytest.importorskip("datasets")
    code, text = without_network[what]
    assert code == 2, text
    assert "the hub cannot be reached" in text
    assert "Retry" not in text
    assert len(text.splitlines()) <= 3


def test_a_downloaded_tokenizer_is_taken_without_a_network(without_network: dict[str, list[Any]]) -> None:
    code, text = without_network["downloaded"]
    assert code == 0, text
    assert "Retry" not in text
    assert "800 with the sentinels" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no source is given"),
        (["nothing.txt"], "'nothing.txt' does not exist"),
        (["embedded", "--validation", "embedded", "--validation-fraction", "0.1"], "exclude each other"),
        (["embedded", "--on-error", "ask"], "on_error='ask' is not known"),
        (["embedded", "--validation-fraction", "1.5"], "validation_fraction=1.5"),
        (["embedded", "--workers", "0"], "workers=0"),
        (["embedded", "--workers", "10000000"], "the most is 1,000"),
        (["embedded", "--tokenizer", "nobody/nothing", "--workers", "1"], "and the hub is not asked"),
    ],
)
def test_mistakes_get_one_clear_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run(*arguments, "--out", tmp_path / "data")
    assert message in str(caught.value)


def interrupt_once_begun(folder: Path) -> None:
    """Ctrl-C when the vocabulary is there, in the process itself."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and str(arguments[1]) == str(folder / "tokenizer"):
            os.kill(os.getpid(), signal.SIGINT)

    sys.addaudithook(watch)


def test_ctrl_c_says_how_to_go_on(options: list[str], out: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = ["prepare", *options, "--out", data]
    stopped = start(tmp_path / "log", *command, before=functools.partial(interrupt_once_begun, data))
    assert stopped.wait() == 130, stopped.text
    assert "Run the same command again" in stopped.text
    assert "Traceback" not in stopped.text
    assert not list(data.glob("*.bin"))
    assert altup(tmp_path / "log", *command)[0] == 0
    for path in out.glob("*.bin"):
        assert path.read_bytes() == (data / path.name).read_bytes()


def test_a_terminal_gets_a_bar(options: list[str], tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {"TERM": "xterm", "COLUMNS": "80"}
    files = (None, tmp_path / "printed", Path(os.ttyname(theirs)))
    running = _start(files, ("prepare", *options, "--out", tmp_path / "data"), environment)
    shown = b""
    while running.process.is_alive():
        if select.select([ours], [], [], 0.1)[0]:
            shown += os.read(ours, 4096)
    assert running.wait() == 0
    os.close(theirs)
    with contextlib.suppress(OSError):  # a terminal without anyone at it
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert "training a vocabulary" in shown.decode()
    assert "…" not in shown.decode()
    assert "tokenising train" in shown.decode()
    assert "100%" in shown.decode()


def test_without_validation_text_the_next_step_is_to_have_some(options: list[str], tmp_path: Path) -> None:
    result = run(*options[:-1], "0.0000001", "--out", tmp_path / "data")
    assert result.exit_code == 0
    assert "No validation text" in result.output
    assert "Next:" not in result.output


@pytest.mark.parametrize("flag", ["--max-document-mb", "--max-unpack-ratio", "--max-unpacked-mb", "--sample-mb"])
def test_a_limit_of_nothing_is_named(tmp_path: Path, flag: str) -> None:
    result = CliRunner().invoke(app, ["--embedded", "--out", str(tmp_path / "data"), flag, "0"])
    assert f"{flag}=0 makes no sense" in str(result.exception)

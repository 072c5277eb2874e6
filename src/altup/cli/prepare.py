"""`altup prepare`: text → tokenizer and hashed token shards."""

from __future__ import annotations

import shlex
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from altup.core.text import number_of
from altup.data import RAW_LENGTH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from altup.data.bad_input import Limits
    from altup.data.prepare import Recipe, Watch
    from altup.data.shards import Manifest

SECONDS_BETWEEN_LINES = 15.0
LENGTHS = (512, 256, 128, 64, 32)  # of inputs; the first is T5's


def command(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE...",
            help="Files or folders (.txt, .md, .jsonl, .parquet; .gz and .zst too), or hf:NAME:CONFIG:SPLIT.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder to make.")] = Path("data"),
    embedded: Annotated[bool, typer.Option("--embedded", help="Use the English that comes with Python.")] = False,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Pieces of the vocabulary to train; 100 sentinels come on top "
            "[default: 32000; fewer where the text cannot fill them].",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Take this one instead: a model's, by its run, folder or hub name; a tokenizer.json."),
    ] = None,
    validation: Annotated[
        list[str] | None, typer.Option(help="A source of validation text; may be repeated.")
    ] = None,
    validation_fraction: Annotated[
        float | None,
        typer.Option(
            help="Hold out this part of the documents [default: 0.01; 0.04 with --embedded; more of little text]."
        ),
    ] = None,
    field: Annotated[
        str, typer.Option(help="The field of .jsonl, .parquet and datasets that holds the text.")
    ] = "text",
    workers: Annotated[int | None, typer.Option(help="Tokenising processes [default: one a core].")] = None,
    on_error: Annotated[str, typer.Option(help="Bad input: `skip` and count it, or `stop`.")] = "skip",
    max_document_mb: Annotated[int, typer.Option(help="Longer documents count as bad input.")] = 16,
    max_unpack_ratio: Annotated[
        int, typer.Option(help="Most that a compressed file may unpack to, as a multiple of its size.")
    ] = 200,
    max_unpacked_mb: Annotated[int, typer.Option(help="Most that a compressed file may unpack to, in MB.")] = 1
    << 20,
    sample_mb: Annotated[int, typer.Option(help="Text to train the vocabulary on, at most.")] = 50,
    shard_tokens: Annotated[int, typer.Option(help="Tokens in a shard file, about.")] = 1 << 25,
    part: Annotated[
        str | None, typer.Option(help="Prepare one part of the files, as 3/16; every part into the same --out.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Make one folder of the parts in --out.")] = False,
) -> None:
    """Turn text into a tokenizer and hashed token shards, ready for `altup pretrain`.

    Run the same command again to continue after an interruption. The result does not depend on the number of
    workers, nor on whether it was made in parts.
    """
    from altup.core.console import outlive_stdout
    from altup.core.errors import UserError
    from altup.data.prepare import Recipe
    from altup.data.sources import open_source

    outlive_stdout()
    if part and merge:
        raise UserError("--part and --merge exclude each other; merge once all parts are there")
    if validation and validation_fraction is not None:
        raise UserError("--validation and --validation-fraction exclude each other; give one of them")
    names = [*(sources or []), *(["embedded"] if embedded else [])]
    if merge and not names:
        _merge(out, None)
        return
    recipe = Recipe(
        sources=[open_source(name, field) for name in names],
        validation=[open_source(name, field) for name in validation or []],
        validation_fraction=0.04 if embedded and validation_fraction is None else validation_fraction,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        sample_bytes=_mebibytes("--sample-mb", sample_mb),
        shard_tokens=shard_tokens,
        on_error=on_error,
        limits=_limits(max_document_mb, max_unpack_ratio, max_unpacked_mb),
    )
    _make(out, recipe, workers, part, merge)


def _make(out: Path, recipe: Recipe, workers: int | None, part: str | None, merge: bool) -> None:
    if part:
        _prepare_part(out, recipe, part, workers)
    elif merge:
        _merge(out, recipe)
    else:
        _prepare(out, recipe, workers)


def _limits(document_mb: int, ratio: int, unpacked_mb: int) -> Limits:
    from altup.core.errors import check_whole
    from altup.data.bad_input import Limits

    check_whole("--max-unpack-ratio", ratio, 1)
    document, unpacked = (
        _mebibytes("--max-document-mb", document_mb),
        _mebibytes("--max-unpacked-mb", unpacked_mb),
    )
    return Limits(document, ratio, unpacked)


def _mebibytes(name: str, value: int) -> int:
    from altup.core.errors import check_whole
    from altup.data.bad_input import MEBIBYTE

    check_whole(name, value, 1)
    return value * MEBIBYTE


def _prepare_part(out: Path, recipe: Recipe, text: str, workers: int | None) -> None:
    from altup.data.parts import parse_part, prepare_part
    from altup.data.shards import SPLITS

    part = parse_part(text)
    with _goes_on(), _display() as watch:
        manifest = prepare_part(out, recipe, part, workers, watch)
    shards = [shard for split in SPLITS for shard in manifest.shards(split)]
    documents, tokens = sum(s.documents for s in shards), sum(s.tokens for s in shards)
    typer.echo(f"Part {part} is done: {number_of(documents, 'document')}, {number_of(tokens, 'token')}.")
    if not manifest.segments:
        typer.echo("No file fell to this part: there are fewer files than parts.")
    typer.echo(f"Once all {part.count} are: altup prepare --merge --out {shlex.quote(str(out))}")


def _merge(out: Path, recipe: Recipe | None) -> None:
    from altup.data.parts import merge_parts

    with _goes_on(), _display() as watch:
        manifest = merge_parts(out, recipe.for_folder(out).settings() if recipe else None, watch)
    _tell(out, manifest, recipe)


@contextmanager
def _goes_on() -> Iterator[None]:
    """Ctrl-C ends with the advice to continue."""
    try:
        yield
    except KeyboardInterrupt:
        typer.secho("Stopped. Run the same command again to continue from the last finished shard.", err=True)
        raise typer.Exit(130) from None


def _prepare(out: Path, recipe: Recipe, workers: int | None) -> None:
    """Prepare with a display of the progress, and say what came of it."""
    from altup.core.errors import UserError
    from altup.core.interrupts import raise_on_interrupt
    from altup.data.prepare import prepare
    from altup.data.shards import Manifest

    raise_on_interrupt()
    finished_before = False
    with suppress(UserError):  # what is wrong with the folder is for `prepare` to say
        finished_before = Manifest.load(out).finished
    with _goes_on(), _display() as watch:
        manifest = prepare(out, recipe, workers, watch)
    if finished_before:
        typer.echo(f"{out} is finished and whole: every shard was compared with its hash.")
    _tell(out, manifest, recipe)


def _tell(out: Path, manifest: Manifest, recipe: Recipe | None) -> None:
    """What was prepared, and what to do next."""
    _report(manifest, recipe)
    if length := _fitting_length(manifest):  # without one the next step would be refused
        shorter = f" --inputs-length {length}" if length < LENGTHS[0] else ""
        typer.echo(f"Next: altup pretrain --data {shlex.quote(str(out))} --out runs/NAME{shorter}")


def _fitting_length(manifest: Manifest) -> int | None:
    """The longest usual input of which both splits hold a sequence."""
    from altup.data.shards import SPLITS

    tokens = min(sum(shard.tokens for shard in manifest.shards(split)) for split in SPLITS)
    return next((length for length in LENGTHS if tokens >= length * RAW_LENGTH / LENGTHS[0]), None)


@contextmanager
def _display() -> Iterator[Watch]:
    """A progress bar with the time left in a terminal; a plain line now and then in a log."""
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    from altup.core.terminal import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _log_lines()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),  # as wide as the others leave it
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[counts]}"),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        bar = progress.add_task("starting", total=None, counts="")

        def watch(stage: str, fraction: float | None, documents: int, tokens: int) -> None:
            if progress.tasks[0].description != stage:
                progress.reset(bar, total=None, description=stage)
            counts = [number_of(documents, "document")] if documents else []
            counts += [f"{tokens / 1e6:,.1f} M tokens"] if tokens else []
            progress.update(
                bar,
                total=None if fraction is None else 1.0,
                completed=fraction or 0.0,
                counts=", ".join(counts),
            )

        yield watch


def _log_lines() -> Watch:
    stage_now, began, last = "", 0.0, 0.0

    def watch(stage: str, fraction: float | None, documents: int, tokens: int) -> None:
        nonlocal stage_now, began, last
        now = time.monotonic()
        if stage != stage_now:
            stage_now, began = stage, now
        elif now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        left = f", {(now - began) * (1 - fraction) / fraction:.0f} s left" if fraction and now > began else ""
        done = "" if fraction is None else f" {fraction:.0%}{left}"
        typer.echo(f"{stage}{done}: {number_of(documents, 'document')}, {number_of(tokens, 'token')}", err=True)

    return watch


def _report(manifest: Manifest, recipe: Recipe | None) -> None:
    from rich.table import Table

    from altup.core.terminal import Console
    from altup.data.held_out import FRACTION
    from altup.data.shards import SPLITS
    from altup.data.tokenizer import PIECES, SENTINELS

    table = Table("split", *("documents", "characters", "tokens", f"sequences of {RAW_LENGTH}"))
    for column in table.columns[1:]:
        column.justify = "right"
    for split in SPLITS:
        shards = manifest.shards(split)
        tokens = sum(shard.tokens for shard in shards)
        numbers = (
            sum(s.documents for s in shards),
            sum(s.characters for s in shards),
            tokens,
            tokens // RAW_LENGTH,
        )
        table.add_row(split, *(f"{number:,}" for number in numbers))
    console = Console()
    console.print(table)
    assert manifest.vocabulary is not None
    size, padded = manifest.vocabulary.size, manifest.vocabulary.padded_size
    typer.echo(f"Vocabulary: {size:,} with the sentinels; a model's tables have {padded:,} rows.")
    chosen = []
    pieces, held_out = size - len(SENTINELS), manifest.settings["validation"]
    if recipe and recipe.vocab_size is None and not recipe.tokenizer and pieces < PIECES:
        chosen.append(f"{pieces:,} pieces and not {PIECES:,} (--vocab-size)")
    if recipe and recipe.validation_fraction is None and isinstance(held_out, float) and held_out > FRACTION:
        chosen.append(f"{held_out:.0%} held out and not {FRACTION:.0%} (--validation-fraction)")
    if chosen:
        typer.echo(f"There is little text, hence {', '.join(chosen)}.")
    if not manifest.shards("validation"):
        typer.echo(
            "No validation text: give more text or --validation, or hold out more with --validation-fraction."
        )
    for reason, count in manifest.skipped().items():
        typer.echo(f"Skipped: {count:,} × {reason} (the first of them are in manifest.json)")

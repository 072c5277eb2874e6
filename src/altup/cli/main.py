"""`altup` and `python -m altup`: collects the verbs and turns user errors into one clear line."""

from __future__ import annotations

import errno
import faulthandler
import importlib
import os
import sys
import threading
from typing import Annotated

import typer

import altup
from altup.cli.verb import Verb
from altup.core.console import guard_stdout, outlive_stderr, outlive_stdout
from altup.core.errors import UserError, disk_remedy, is_out_of_memory
from altup.core.interrupts import end_on_interrupt, end_on_termination
from altup.core.text import is_unicode, printable, shorten
from altup.training.preemption import STOPPED

# In the order of a model's life. Each module has a function `command`, or an `app` of several; heavy imports
# live inside them.
VERBS = (
    "demo",
    "params",
    "prepare",
    "pretrain",
    "generate",
    "compare",
    "tasks",
    "finetune",
    "evaluate",
    "widen",
    "narrow",
    "upcycle",
    "study",
    "bench",
    "doctor",
)

RESUMABLE = {"pretrain", "finetune", "study"}  # verbs that go on where a scheduler stopped them
NO_ROOM = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EPIPE)

app = typer.Typer(
    name="altup",
    help="Wider transformers for a little more time: Alternating Updates for T5 and friends.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # verbs inherit it
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"altup {altup.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for _verb in VERBS:
    _module = importlib.import_module(f"altup.cli.{_verb}")
    if hasattr(_module, "app"):
        for _command in _module.app.registered_commands:
            _command.cls = Verb
        app.add_typer(_module.app, name=_verb)
    else:
        app.command(name=_verb, cls=Verb)(_module.command)


def main() -> None:
    end_on_interrupt()
    if "".join(sys.argv[1:2]) in RESUMABLE:
        end_on_termination(STOPPED)
    outlive_stderr()
    guard_stdout()
    threading.excepthook = _tell_of_thread
    faulthandler.enable()  # a crash inside a library says where it happened
    code = _run()
    if code == STOPPED:
        from altup.training.preemption import ignore_signals

        ignore_signals()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from altup.training.parallel import leave

        leave(code)
    sys.exit(code)


def _run() -> int:
    """The exit code of the verb."""
    try:
        for word in sys.argv:
            if not is_unicode(word):  # libraries that write files take no such name
                raise UserError(f"{word!r} is not UTF-8; give another name, or type it as such")
        app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        text = _explain(error)
        if os.environ.get("ALTUP_TRACEBACK") or not text:
            raise
        typer.secho(f"altup: {printable(text)}", err=True, fg="red")
        if isinstance(error, OSError):
            outlive_stdout()  # or Python would try once more on its way out, and take another exit code
        return 2
    return 0


def _tell_of_thread(failed: threading.ExceptHookArgs) -> None:
    """A line for a library's thread that ended, such as TensorBoard's on a full disk."""
    error = failed.exc_value or failed.exc_type()
    name = failed.thread.name if failed.thread else "a thread"
    typer.secho(f"altup: {name} ended: {printable(shorten(str(error) or type(error).__name__, 300))}", err=True)


def _explain(error: BaseException) -> str:
    """What to say of an error instead of a traceback; empty where only that helps."""
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        text = shorten(str(error) or type(error).__name__, 300)
        return f"out of memory: {text}; give a smaller batch, shorter sequences or a smaller model"
    if isinstance(error, OSError) and (error.filename is not None or error.errno in NO_ROOM):
        where = error.filename or "what it writes or prints was not taken"
        return f"{where}: {error.strerror}; {disk_remedy(error)}"
    if type(error).__name__ == "PanicException":  # of a library in Rust; no Exception
        return f"a library gave up on a file or a text: {shorten(str(error), 300)}; check the tokenizer"
    return ""

"""The command line's options: made from the settings of a config, and what verbs that train share beside them."""

from __future__ import annotations

import functools
import inspect
import os
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from altup.core.schema import Setting, Settings, describe_settings, parse_pairs
from altup.core.text import number_of
from altup.training.preemption import STOPPED

if TYPE_CHECKING:
    from altup.training.loop import TrainOutcome

PANELS = ("Options", "Run", "Model", "Training", "Speed", "Watching")  # in the order of the help


def option(name: str, text: str, panel: str = "Run") -> Any:
    """An option that is None unless given."""
    return typer.Option(name, help=text, rich_help_panel=panel, show_default=False)


Out = Annotated[Path, option("--out", "Folder of the run.")]
Resume = Annotated[bool, option("--resume", "Continue from the newest whole checkpoint in --out, if any.")]
ConfigFile = Annotated[Path | None, option("--config", "YAML with the names of a saved config.yaml; flags win.")]
Suites = Annotated[list[str] | None, option("--suite", "glue or super_glue. Repeat it.")]
PushToHub = Annotated[
    str | None, option("--push-to-hub", "Upload the final model as this Hugging Face repository.")
]


def with_settings(config: type[Settings], only: Collection[str] = ()) -> Callable[[Any], Callable[..., None]]:
    """Decorate a verb's function: it gets an option for every setting of `config` that has a panel, or for `only`
    these. What a user gives comes as its `**settings`. A setting that the function names itself is left to it.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        named = {one.name for one in own}
        made = {
            name: one
            for name, one in describe_settings(config).items()
            if one.panel and name not in named and (not only or name in only)
        }

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {name: values.pop(name) for name in made}
            command(**values, **{name: _read(made[name], v) for name, v in given.items() if v not in (None, [])})

        parameters = _ordered([one.replace(kind=one.KEYWORD_ONLY) for one in own], list(made.values()))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.late = {name: one for name, one in made.items() if one.is_late}  # type: ignore[attr-defined]
        return run

    return decorate


def _ordered(own: list[inspect.Parameter], made: list[Setting]) -> list[inspect.Parameter]:
    """A verb's own options, then the settings by panel; one with an `after` follows the option of that name."""
    found = list(own)
    for one in sorted((one for one in made if not one.after), key=lambda one: PANELS.index(one.panel or "")):
        found.append(_parameter(one))
    for one in (one for one in made if one.after):
        names = [parameter.name for parameter in found]
        found.insert(names.index(one.after) + 1 if one.after in names else len(names), _parameter(one))
    return found


def _parameter(one: Setting) -> inspect.Parameter:
    name = one.name.replace("_", "-")
    flag = one.flag or (f"--{name}/--no-{name}" if one.kind is bool else f"--{name}")
    kind = list[str] if typing.get_origin(one.kind) in (list, dict) else one.kind
    text = "" if one.is_late else one.help_text()  # `Verb.complete_help` fills it in
    annotation = Annotated[kind | None, option(flag, text, one.panel or "")]  # type: ignore[valid-type]
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _read(one: Setting, value: Any) -> Any:
    return parse_pairs(one.flag or one.name, value) if typing.get_origin(one.kind) is dict else value


def tell(outcome: TrainOutcome, verb: str, out: Path, finished: str) -> None:
    """How the run ended, once, however many processes there are; one that was stopped exits with STOPPED."""
    from altup.training.metrics import FAILED, read_records
    from altup.training.model_card import resume_command
    from altup.training.run_folder import RunFolder

    skipped = f" ({outcome.skipped:,} skipped: gradients that are not finite)" if outcome.skipped else ""
    if outcome.finished:
        text = f"finished {number_of(outcome.step, 'step')}{skipped}; {finished}"
        if failed := [r for r in read_records(RunFolder(out).metrics) if r.get("split") == FAILED]:
            text += f"\n{number_of(len(failed), 'evaluation')} failed, the last with: {failed[-1].get('error')}"
    else:
        again = f"Continue with:\n  {resume_command(verb, out)}"
        text = f"stopped after step {outcome.step:,}{skipped}; everything is saved. {again}"
    if os.environ.get("RANK", "0") == "0":
        typer.echo(text)
    if not outcome.finished:
        raise typer.Exit(STOPPED)

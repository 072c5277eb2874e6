"""What all verbs share: an option given twice or an empty path is refused, and errors name options as they were
typed."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from altup.core.errors import UserError, settings_typed
from altup.core.schema import parse_pairs

# Options whose values have another name in a model's config.
ALSO_CALLED = {"k": ("num_blocks",), "dropout": ("dropout_rate", "attention_dropout")}


ADVANCED = [f"Advanced: {panel}" for panel in ("run", "model", "training", "speed", "watching", "other")]
# Of verbs with many options those that come first in the help, by their names in Python; the rest is advanced.
FIRST = {
    "params": ("model", "size", "method", "k", "vocab_size", "inputs", "batch_size", "gpu", "config", "as_json"),
    "prepare": (
        "out",
        "embedded",
        "field",
        "validation",
        "validation_fraction",
        "vocab_size",
        "tokenizer",
        "workers",
    ),
    "pretrain": (
        *("data", "out", "resume", "from_model", "model", "size", "method", "k"),
        *("steps", "batch_size", "inputs_length"),
    ),
    "finetune": (
        *("tasks", "suite", "data", "out", "resume", "steps", "batch_size", "lr"),
        *("inputs_length", "targets_length"),
    ),
    "evaluate": ("task", "suite", "data", "out", "limit", "batch_size", "split", "predict_only", "as_json"),
    "bench": ("quick", "sizes", "only", "out", "plot", "show", "time_limit", "repeat"),
    "run": ("everything", "scale", "data", "tasks", "results", "out", "seeds", "only", "jobs", "dry_run"),
}


class Verb(TyperCommand):
    """The class of every command."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if first := FIRST.get(str(self.name)):
            self.params = _advanced_last(self.params, first)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        typed, _, given = self.make_parser(ctx).parse_args(args=list(args))
        options: Counter[Any] = Counter(one for one in given if one.param_type_name == "option")
        for option, times in options.items():
            if times > 1 and not (option.multiple or option.is_flag):
                often = "twice" if times == 2 else f"{times} times"
                raise UserError(f"{_flag(option)} is given {often}, and takes one value; remove all but one")
        found = super().parse_args(ctx, args)
        for one in given:
            words, values = _listed(typed[one.name]), _listed(ctx.params[one.name])
            if "" in words and any(isinstance(value, Path) for value in values):  # it would be this folder
                name = _flag(one) if one in options else str(one.name).upper()
                raise UserError(f"{name} '' is empty; give a path, as . for the folder that you are in")
        return found

    def invoke(self, ctx: Any) -> Any:
        typed: dict[str, list[tuple[Any, str]]] = {}
        for setting, value, shown in _typed(self, ctx):
            typed.setdefault(setting, []).append((value, shown))
        with settings_typed(typed):
            return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.complete_help()
        super().format_help(ctx, formatter)

    def complete_help(self) -> None:
        """Fill in help that names what is registered: it needs imports that take seconds."""
        late = getattr(self.callback, "late", {})
        for parameter in self.params:
            if parameter.name in late:
                parameter.help = late[parameter.name].help_text()  # type: ignore[attr-defined]


def _advanced_last(parameters: list[Any], first: tuple[str, ...]) -> list[Any]:
    """Arguments, the first options in their order, and the others by panel, as far as they have one."""
    options = {one.name: one for one in parameters if one.param_type_name == "option"}
    found = [options[name] for name in first if name in options]
    for one in found:
        one.rich_help_panel = None
    others = [one for name, one in options.items() if name not in first]
    for one in others:
        panel = f"Advanced: {(one.rich_help_panel or '').lower()}"
        one.rich_help_panel = panel if panel in ADVANCED else ADVANCED[-1]
    others.sort(key=lambda one: ADVANCED.index(one.rich_help_panel))
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    return [*arguments, *found, *others]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _typed(command: TyperCommand, ctx: Any) -> Iterator[tuple[str, Any, str]]:
    """Settings that were typed: the name and the value that an error has, and what was typed: `k`, 0, `--k 0`."""
    for one in command.params:
        source, value = ctx.get_parameter_source(one.name), ctx.params.get(one.name)
        if source is None or source.name != "COMMANDLINE":
            continue
        if one.param_type_name == "argument":
            yield from ((str(one.name), each, repr(each)) for each in _listed(value))
            continue
        flag = _flag(one, value)
        for name in (str(one.name), *ALSO_CALLED.get(str(one.name), ())):
            for each in _listed(value):
                yield name, each, flag if isinstance(each, bool) else f"{flag} {shlex.quote(str(each))}"
                if isinstance(each, str) and "=" in each:
                    yield from _pair(name, flag, each)


def _pair(name: str, flag: str, typed: str) -> Iterator[tuple[str, Any, str]]:
    """The same for one of several `--set d_ff=0`: an error may name the setting, the key, or both."""
    with suppress(UserError):
        ((key, value),) = parse_pairs(flag, [typed]).items()
        yield name, key, f"{flag} {key}"
        for setting in (key, f"{name}.{key}"):
            yield setting, value, f"{flag} {typed}"
            if isinstance(value, int) and not isinstance(value, bool):  # a setting may hold it as a float
                yield setting, float(value), f"{flag} {typed}"


def _flag(option: Any, value: Any = None) -> str:
    """An option's long name, or the one that turns it off."""
    names = option.secondary_opts if value is False and option.secondary_opts else option.opts
    return max(names, key=len)

"""What all verbs share: an option given twice or an empty path is refused, and errors name options as they were
typed."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from altup.core.errors import UserError

# Options whose values have another name further inside.
ALSO_CALLED = {"k": ("num_blocks",), "dropout": ("dropout_rate", "attention_dropout"), "steps": ("total_steps",)}


class Verb(TyperCommand):
    """The class of every command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        typed, _, given = self.make_parser(ctx).parse_args(args=list(args))
        options: Counter[Any] = Counter(one for one in given if one.param_type_name == "option")
        for option, times in options.items():
            if times > 1 and not (option.multiple or option.is_flag):
                told = "twice" if times == 2 else f"{times} times"
                raise UserError(f"{_flag(option)} is given {told}, and takes one value; leave all but one out")
        found = super().parse_args(ctx, args)
        for one in given:
            words, values = _listed(typed[one.name]), _listed(ctx.params[one.name])
            if "" in words and any(isinstance(value, Path) for value in values):  # it would be this folder
                name = _flag(one) if one in options else str(one.name).upper()
                raise UserError(f"{name} '' is empty; give a path, as . for the folder that you are in")
        return found

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            typed: dict[str, str] = {}
            for field, value, shown in _typed(self, ctx):
                typed.setdefault(f"{field}={value}", shown)
            if typed:
                # All at once: what was typed, `--set d_ff=0`, is named like a setting itself.
                names = "|".join(map(re.escape, sorted(typed, key=len, reverse=True)))
                named = rf"(?<![\w.'\"=-])({names})(?![\w.])"
                error.args = (re.sub(named, lambda found: typed[found[1]], str(error)),)
            raise


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _typed(command: TyperCommand, ctx: Any) -> Iterator[tuple[str, str, str]]:
    """How an error names what was typed, `k` and `0`, and what was typed: `--k 0`."""
    for one in command.params:
        source, value = ctx.get_parameter_source(one.name), ctx.params.get(one.name)
        if source is None or source.name != "COMMANDLINE":
            continue
        values = _listed(value)
        if one.param_type_name == "argument":
            yield from ((str(one.name), repr(each), repr(each)) for each in values)
            continue
        flag = _flag(one, value)
        for name in (str(one.name), *ALSO_CALLED.get(str(one.name), ())):
            for each in values:
                yield name, repr(each), flag if isinstance(each, bool) else f"{flag} {shlex.quote(str(each))}"
                if "=" in str(each):
                    yield from _pair(name, flag, str(each))


def _pair(name: str, flag: str, typed: str) -> Iterator[tuple[str, str, str]]:
    """The same for one of several `--set d_ff=0`: an error may name the setting, the key, or both."""
    key, _, text = typed.partition("=")
    yield name, repr(key), f"{flag} {key}"
    for field in (key, f"{name}.{key}"):
        yield field, text, f"{flag} {typed}"
        with suppress(ValueError):
            yield field, repr(float(text)), f"{flag} {typed}"


def _flag(option: Any, value: Any = None) -> str:
    """An option's long name, or the one that turns it off."""
    names = option.secondary_opts if value is False and option.secondary_opts else option.opts
    return max(names, key=len)

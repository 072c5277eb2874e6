"""What a YAML file holds, compared with the types of the class that it describes."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

from altup.core.errors import UserError

NAMES = {
    dict: "a mapping",
    list: "a list",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def check_kinds(source: str, values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """`kinds` are type hints by name; a tuple is written as a list."""
    for name, value in values.items():
        if name in kinds and not fits(value, kinds[name]):
            raise UserError(f"{source}: {name}={value!r} is of the wrong kind; give {describe(kinds[name])}")


def fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if isinstance(hint, types.UnionType):
        return any(fits(value, choice) for choice in typing.get_args(hint))
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is dict:
        return isinstance(value, dict) and all(fits(v, inner[1]) for v in value.values())
    if origin in (list, tuple):
        return isinstance(value, list) and all(fits(v, inner[0]) for v in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def describe(hint: Any) -> str:
    """`a list of text`, `a mapping to lists`: what to write."""
    if isinstance(hint, types.UnionType):
        return " or ".join(describe(choice) for choice in typing.get_args(hint))
    if hint in (None, type(None)):
        return "null"
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is dict:
        return f"a mapping to {describe(inner[1])}" if inner[1] is not Any else "a mapping"
    if origin in (list, tuple):
        return f"a list of {describe(inner[0])}" if inner[0] is not Any else "a list"
    return NAMES.get(hint, "something else")

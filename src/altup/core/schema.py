"""Settings: one line of a dataclass says all there is to know of one.

    @dataclass(kw_only=True)
    class TrainConfig(Settings):
        steps: int = setting(10_000, "Updates.", panel="Training", at_least=1)

From this line are made the check of type and range, the key that YAML files may hold, the comparison of two
configs, and the command line's option `--steps` with its help and default (altup/cli/options.py). A subclass that
changes the default alone, `steps: int = 50_000`, inherits the rest.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from altup.core.errors import UserError, check_choice, did_you_mean, named
from altup.core.files import check_regular
from altup.core.text import any_of, shorten

MANY = 60  # names, more than an error lists
LONG = 200  # characters, more than an error shows of a value
MOST_TEXT = 1 << 22  # characters of a YAML file
MOST_VALUES = 100_000  # values in one, each counted wherever an alias repeats it
METADATA = "setting"  # the key of a field's metadata
KINDS = {
    dict: "a mapping",
    list: "a list",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def setting(default: Any, help: str | Callable[[], str] | None = None, **about: Any) -> Any:
    """A field of a `Settings` class. `about` holds fields of `Setting`; those not given come from a base class."""
    metadata = {METADATA: about if help is None else {"help": help, **about}}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """All that a class and its bases say of a field.

    - `help`: one sentence; `{choices}` in it stands for the choices.
    - `panel`: where the command line's help shows it. Without one it is no option: only files and Python set it.
    - `flag`: the option's name where it is not the field's. `after`: the option that it follows in the help.
    - `shown`: the default in words, where its value is None.
    - `at_least`, `above`, `at_most`, `below`: the range of a number, or of the numbers in a mapping.
    - `choices`: the values it may have, the elements of a list, or the keys of a mapping. A function that returns
      them is called when they are needed, as `help` may be one: what other modules register need not be imported
      before.
    - `may_change`: whether a resumed run may have another value.
    """

    name: str
    kind: Any  # the field's type hint
    default: Any
    help: str | Callable[[], str] = ""
    panel: str | None = None
    flag: str | None = None
    after: str | None = None
    shown: str | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: Collection[str] | Callable[[], Collection[str]] | None = None
    may_change: bool = False

    def read(self, value: Any) -> Any:
        """The value as the field holds it; UserError if it is of another type, out of range or no choice."""
        value = _as_number(value, self.kind)
        if not fits(value, self.kind):
            shown = shorten(named(self.name, value), LONG)
            raise UserError(f"{shown} is of the wrong kind; give {describe_kind(self.kind)}")
        if self.choices is not None and value is not None:
            for one in value if isinstance(value, list | dict) else [value]:
                check_choice(self.name, one, self.allowed)
        for name, one in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(one, int | float) and not isinstance(one, bool):
                self._check_range(f"{self.name}.{name}" if name else self.name, one)
        return value

    def _check_range(self, name: str, value: float) -> None:
        inside = (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )
        if not inside:
            words = {"of at least": self.at_least, "above": self.above, "up to": self.at_most, "below": self.below}
            limits = " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)
            kind = KINDS[type(value)]
            raise UserError(f"{named(name, value)} makes no sense; give {kind} {limits}".rstrip())

    @property
    def allowed(self) -> Collection[str]:
        """The choices."""
        return (self.choices() if callable(self.choices) else self.choices) or ()

    @property
    def is_late(self) -> bool:
        """Whether its help is made when it is asked for."""
        return callable(self.help) or callable(self.choices)

    def description(self, choices: str) -> str:
        """What it does, with these words for its choices."""
        return (self.help() if callable(self.help) else self.help).replace("{choices}", choices)

    def help_text(self) -> str:
        """What it does, and its default in words."""
        allowed = self.allowed
        text = self.description(any_of(allowed, mark=self.default) if allowed else "")
        one_way = self.flag and self.default is False  # an option such as --quick, which can only turn it on
        shown = self.shown if self.default is None or one_way else _in_words(self.default)
        return f"{text} Default: {shown}." if shown and "(default)" not in text else text


class Settings:
    """What a config dataclass inherits: when it is made, its fields are checked by their types and settings, and
    then it is completed. So a config is the same however it was made: by the command line, Python or a file."""

    def __post_init__(self) -> None:
        for name, one in describe_settings(type(self)).items():
            setattr(self, name, one.read(getattr(self, name)))
        self.complete()

    def complete(self) -> None:
        """Fill in the defaults that depend on other fields, and refuse fields that do not go together.

        A config that is complete stays unchanged, so that `dataclasses.replace` may be used on it.
        """

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> Self:
        """A config from the names of its fields; an unknown name is refused with the nearest known one."""
        refuse_unknown(source, values, describe_settings(cls))
        return cls(**values)

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False)  # type: ignore[call-overload]

    @classmethod
    def may_change(cls) -> frozenset[str]:
        """The fields in which a config may differ when its run resumes."""
        return frozenset(name for name, one in describe_settings(cls).items() if one.may_change)


def describe_settings(cls: type[Any]) -> dict[str, Setting]:
    """The fields of a `Settings` dataclass by name, in order. Found once: configs are made by the thousand."""
    if cls not in _DESCRIBED:
        _DESCRIBED[cls] = _describe_settings(cls)
    return _DESCRIBED[cls]


_DESCRIBED: dict[Any, dict[str, Setting]] = {}


def _describe_settings(cls: type[Any]) -> dict[str, Setting]:
    hints = typing.get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        about: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            fields = getattr(base, "__dataclass_fields__", {})
            about |= fields[field.name].metadata.get(METADATA, {}) if field.name in fields else {}
        found[field.name] = Setting(field.name, hints[field.name], default, **about)
    return found


def refuse_unknown(source: str, values: Iterable[object], known: Iterable[str]) -> None:
    """Every name must be known; the error suggests the nearest known one."""
    known = list(known)
    for name in values:
        if name not in known:
            listed = f"known are {', '.join(sorted(known))}" if len(known) <= MANY else "remove it"
            hint = did_you_mean(name, known) or listed
            raise UserError(f"{source}: unknown key {name!r}; {hint}")


def differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The leaves in which two nested values differ, by their paths: `batches.tasks.cola.examples`, `files[3]`."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else str(key))
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for index, (before, now) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, now, f"{name}[{index}]")
    elif old != new:
        yield name, old, new


# --- types of values, as a YAML file or a Python caller gives them ---


def check_kinds(source: str, values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """`kinds` are type hints by name; a tuple is written as a list."""
    for name, value in values.items():
        if name in kinds and not fits(value, kinds[name]):
            shown = shorten(repr(value), LONG)
            raise UserError(f"{source}: {name}={shown} is of the wrong kind; give {describe_kind(kinds[name])}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type such as `int | None`, `list[str]` or `dict[str, Any]`."""
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


def describe_kind(hint: Any) -> str:
    """`a list of text`, `a mapping to lists`: what to write."""
    if isinstance(hint, types.UnionType):
        return " or ".join(describe_kind(choice) for choice in typing.get_args(hint))
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is dict:
        return f"a mapping to {describe_kind(inner[1])}" if inner[1] is not Any else "a mapping"
    if origin in (list, tuple):
        return f"a list of {describe_kind(inner[0])}" if inner[0] is not Any else "a list"
    return KINDS.get(hint, "something else")


def _as_number(value: Any, hint: Any) -> Any:
    """For a field that holds floats: a whole number, and text such as 1e-3, which YAML 1.1 does not read."""
    if typing.get_origin(hint) is dict and isinstance(value, dict):
        return {name: _as_number(one, typing.get_args(hint)[1]) for name, one in value.items()}
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float not in kinds or isinstance(value, bool) or not isinstance(value, int | str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _in_words(default: Any) -> str:
    """A default as the help shows it; an empty text, list or mapping says nothing."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int | float):
        return f"{default:g}" if isinstance(default, float) else str(default)
    return str(default) if default else ""


# --- YAML ---


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, with clear errors for what is not one."""
    try:
        text = check_regular(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give a YAML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    return parse_yaml(text, str(path))


def read_settings(path: Path, remedy: str) -> dict[str, Any]:
    """The settings in a YAML file; one that holds nothing is refused, or its first missing setting would be."""
    if values := read_yaml(path):
        return values
    raise UserError(f"{path} is empty; {remedy}")


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """The mapping that a YAML text holds; nothing at all is an empty one."""
    try:
        values = _load_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{source}: not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(
            f"{source}: expected `name: value` lines, found {KINDS.get(type(values), 'something else')}"
        )
    return values


EXAMPLES = {"--lr-factor": "embeddings=4"}


def parse_pairs(flag: str, pairs: Iterable[str]) -> dict[str, Any]:
    """`["d_ff=1024"]` → {"d_ff": 1024}, each value read as YAML."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UserError(
                f"{flag} {pair}: expected NAME=VALUE, for example {flag} {EXAMPLES.get(flag, 'd_ff=1024')}"
            )
        try:
            found[name.strip()] = _load_yaml(value)
        except (yaml.YAMLError, ValueError):
            shown = shorten(pair, LONG)
            raise UserError(f"{flag} {shown}: this is not a value; quote text that looks like YAML") from None
    return found


def _load_yaml(text: str) -> Any:
    """As `yaml.safe_load`, with a ValueError for what is too large once every alias stands for its values.

    A few lines of aliases to aliases hold more values than any memory. They are counted before any is made.
    """
    if len(text) > MOST_TEXT:
        raise ValueError(f"{len(text):,} characters are more than {MOST_TEXT:,}")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if (number := _count_values(node, {})) > MOST_VALUES:
            raise ValueError(f"it holds {number:.2g} values, more than {MOST_VALUES:,}")
        return loader.construct_document(node)
    except (RecursionError, OverflowError):
        raise ValueError("it is nested too deeply, or has a number that is too large") from None
    finally:
        loader.dispose()


def _count_values(node: yaml.Node, counted: dict[int, float]) -> float:
    """The values in a node; one that holds itself has no end."""
    if id(node) not in counted:
        counted[id(node)] = math.inf  # until its own parts are counted
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = (part if isinstance(part, tuple) else (part,) for part in parts)
        counted[id(node)] = 1.0 + sum(_count_values(one, counted) for pair in pairs for one in pair)
    return counted[id(node)]

"""One line of a dataclass makes the check, the YAML key, the help and the comparison (options: tests/cli)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from altup.core import schema
from altup.core.errors import UserError
from altup.core.schema import (
    Settings,
    describe_settings,
    differences,
    parse_pairs,
    parse_yaml,
    read_yaml,
    refuse_unknown,
    setting,
)


@dataclass(kw_only=True)
class Base(Settings):
    steps: int = setting(10_000, "Updates.", panel="Training", at_least=1)
    rate: float | None = setting(None, "Learning rate.", shown="by optimizer", panel="Training", above=0)
    part: float = setting(0.5, "A part.", at_least=0, at_most=1)
    optimizer: str = setting("adamw", "{choices}.", panel="Training", choices=("adafactor", "adamw", "muon"))
    fast: bool = setting(True, "Quickly.", panel="Speed", may_change=True)
    trackers: list[str] = setting([], "Where to.", panel="Run", flag="--track", choices=("here", "there"))
    overrides: dict[str, Any] = setting({}, "Any field.", panel="Run", flag="--set")
    factors: dict[str, float] = setting({}, "Factors of {choices}.", choices=("head", "body"), at_least=0)


@dataclass(kw_only=True)
class Derived(Base):
    steps: int = 50
    rate: float | None = setting(1e-3, may_change=True)
    length: int = setting(512, "Tokens.", panel="Training", after="steps", below=1000)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps=0 makes no sense; give a whole number of at least 1"),
        ({"steps": True}, "steps=True is of the wrong kind; give a whole number"),
        ({"steps": 3.0}, "steps=3.0 is of the wrong kind"),
        ({"steps": None}, "steps=None is of the wrong kind"),
        ({"rate": 0}, "rate=0.0 makes no sense; give a number above 0"),
        ({"rate": "fast"}, "rate='fast' is of the wrong kind; give a number or null"),
        ({"rate": math.inf}, "rate=inf makes no sense"),
        ({"rate": math.nan}, "rate=nan makes no sense"),
        ({"part": 1.5}, "part=1.5 makes no sense; give a number of at least 0 and up to 1"),
        ({"fast": 1}, "fast=1 is of the wrong kind; give true or false"),
        (
            {"optimizer": "adamv"},
            "optimizer='adamv' is not known; did you mean 'adamw'[?] Choose one of",
        ),
        ({"optimizer": "sgd"}, "optimizer='sgd' is not known; choose one of 'adafactor', 'adamw', 'muon'"),
        ({"trackers": ["here", "where"]}, "trackers='where' is not known"),
        ({"trackers": "here"}, "trackers='here' is of the wrong kind; give a list of text"),
        ({"overrides": [1]}, "give a mapping"),
        ({"factors": {"tail": 1}}, "factors='tail' is not known"),
        ({"factors": {"head": -1}}, "factors.head=-1.0 makes no sense; give a number of at least 0"),
        ({"stepps": 1}, "run.yaml: unknown key 'stepps'; did you mean 'steps'[?]"),
        (
            {"wings": 1},
            "run.yaml: unknown key 'wings'; known are factors, fast, optimizer, overrides",
        ),
        ({"length": 1000}, "length=1000 makes no sense; give a whole number below 1000"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    kind = Derived if "length" in values else Base
    with pytest.raises(UserError, match=message):
        kind.from_dict(values, "run.yaml")


def test_numbers_that_yaml_reads_as_something_else() -> None:
    assert Base(rate="1e-3").rate == 0.001  # type: ignore[arg-type]
    assert isinstance(Base(part=1).part, float)
    assert Base(factors={"head": "1e-1", "body": 2}).factors == {"head": 0.1, "body": 2.0}  # type: ignore[dict-item]


def test_lists_and_mappings_are_not_shared() -> None:
    Base().trackers.append("here")
    assert Base().trackers == []


def test_a_subclass_changes_a_default_and_inherits_the_rest() -> None:
    base, derived = describe_settings(Base), describe_settings(Derived)
    assert base["steps"].help_text() == "Updates. Default: 10000."
    assert derived["steps"].help_text() == "Updates. Default: 50."
    assert base["rate"].help_text() == "Learning rate. Default: by optimizer."
    assert derived["rate"].help_text() == "Learning rate. Default: 0.001."
    assert base["optimizer"].help_text() == "adafactor, adamw (default) or muon."
    assert base["fast"].help_text() == "Quickly. Default: on."
    assert base["trackers"].help_text() == "Where to."
    assert (Base.may_change(), Derived.may_change()) == ({"fast"}, {"fast", "rate"})
    with pytest.raises(UserError, match="steps=0 makes no sense"):
        Derived(steps=0)


def test_unknown_names_among_many_are_not_listed() -> None:
    with pytest.raises(UserError, match="here: unknown key 'x'; remove it"):
        refuse_unknown("here", ["x"], [f"name_{i}" for i in range(100)])


def test_differences_of_nested_values() -> None:
    old = {"a": {"b": [1, {"c": 2}], "gone": 1}, "same": [1]}
    new = {"a": {"b": [1, {"c": 3}], "new": 2}, "same": [1]}
    assert list(differences(old, new)) == [("a.b[1].c", 2, 3), ("a.gone", 1, None), ("a.new", None, 2)]
    assert list(differences([1, 2], [1], "tasks")) == [("tasks", [1, 2], [1])]


def test_pairs() -> None:
    assert parse_pairs("--set", ["d_ff=1024", "gated=true", "x=[1, 2]"]) == {
        "d_ff": 1024,
        "gated": True,
        "x": [1, 2],
    }
    for wrong in ("d_ff", "x=[1"):
        with pytest.raises(UserError, match="--set"):
            parse_pairs("--set", [wrong])


def test_files_that_are_no_mapping(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for content, message in (("a: [", "not valid YAML"), ("- 1\n", "expected `name: value`"), ("\x00", "YAML")):
        path.write_text(content)
        with pytest.raises(UserError, match=f"run.yaml: .*{message}"):
            read_yaml(path)
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match="not valid YAML"):
        read_yaml(path)
    with pytest.raises(UserError, match="no such file"):
        read_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(tmp_path)
    path.write_text("# nothing\n")
    assert read_yaml(path) == {}


def aliases(levels: int, width: int = 10, merged: bool = False) -> str:
    """A few lines that stand for width^levels values; as merge keys they multiply while they are read."""
    lines = ["a0: &a0 {x: 1}" if merged else "a0: &a0 [x]"]
    for level in range(1, levels):
        inner = ", ".join([f"*a{level - 1}"] * width)
        lines.append(
            f"a{level}: &a{level} {{<<: [{inner}], y{level}: 1}}" if merged else f"a{level}: &a{level} [{inner}]"
        )
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        aliases(12),
        aliases(12, merged=True),
        "a: &a [*a]",
        "a: " + "[" * 5_000,
        "a: " + "9" * 5_000,
        "a: 2024-13-45",
        "a: " + "x" * 5_000_000,
    ],
    ids=["aliases", "merge keys", "itself", "deep", "digits", "no date", "long"],
)
def test_small_files_that_have_no_end(tmp_path: Path, text: str) -> None:
    """A sentence at once, by a file and by an option."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"run\.yaml: not valid YAML") as told:
        read_yaml(path)
    assert len(str(told.value)) < 2_000
    value = text.removeprefix("a: ")
    if "\n" not in value:
        with pytest.raises(UserError, match=r"--set a=.*this is not a value"):
            parse_pairs("--set", [f"a={value}"])


def test_aliases_that_a_config_of_ours_may_have() -> None:
    shared = [1, 2]
    assert parse_yaml(yaml.safe_dump({"a": shared, "b": shared}), "run.yaml") == {"a": shared, "b": shared}


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(UserError, match=r"steps=.*… is of the wrong kind") as told:
        Base(steps=["x"] * 50_000)  # type: ignore[arg-type]
    assert len(str(told.value)) < 500


def test_yaml_is_read_in_one_place() -> None:
    source = Path(schema.__file__).parents[1]
    found = [path.name for path in source.rglob("*.py") if "import yaml" in path.read_text()]
    assert found == ["schema.py"]
    assert "safe_load(" not in Path(schema.__file__).read_text()

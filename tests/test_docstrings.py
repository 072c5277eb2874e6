"""Every public name says what its arguments are, and shows an example that runs."""

from __future__ import annotations

import doctest
import inspect

import pytest

import altup

NAMES = [name for name in altup.__all__ if not name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    thing = getattr(altup, name)
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(thing), {}, name, None, None)
    assert examples.examples, "no example"
    written = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(examples, out=written.append)
    assert not written, "".join(written)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_told(name):
    """All arguments of a function or a module stand under "Args:"; the fields of a config are settings."""
    thing = getattr(altup, name)
    if name.endswith(("Config", "Error")):
        return
    told = inspect.getdoc(thing).partition("Args:\n")[2]
    for argument in inspect.signature(thing).parameters:
        assert f"    {argument}: " in told, argument

"""Options that are made from the settings of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.testing import CliRunner

from altup.cli.options import with_settings
from tests.core.test_schema import Derived


def run(*arguments: str) -> tuple[dict[str, Any], str]:
    """What a command made from `Derived` is given, and what it prints."""
    seen: dict[str, Any] = {}
    app = typer.Typer()

    @app.command()
    @with_settings(Derived)
    def command(
        out: Annotated[Path, typer.Option(help="Folder.")],
        rate: Annotated[float | None, typer.Argument()] = None,
        **settings: Any,
    ) -> None:
        """Do it."""
        seen.update(settings, out=out, own_rate=rate)

    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})
    return seen, result.output


def test_a_command_gets_what_was_given_and_nothing_else() -> None:
    given, _ = run("--out", "x", "--steps", "7", "--no-fast", "--track", "here", "--set", "a=1", "0.5")
    assert given == {
        "out": Path("x"),
        "own_rate": 0.5,
        "steps": 7,
        "fast": False,
        "trackers": ["here"],
        "overrides": {"a": 1},
    }
    assert run("--out", "x")[0] == {"out": Path("x"), "own_rate": None}


def test_the_help_is_made_from_the_settings() -> None:
    text = run("--help")[1]
    assert "Do it." in text
    assert "Updates. Default: 50." in text
    assert "adafactor, adamw (default) or muon." in text
    assert "--part" not in text  # no panel
    order = [text.index(name) for name in ("--track", "--set", "--steps", "--length", "--optimizer", "--fast")]
    assert order == sorted(order)

"""What a user types wrong, and what every verb answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from altup.cli.main import app
from altup.cli.verb import FIRST
from altup.core.errors import UserError

ALTUP: Any = get_command(app)


def complaint(*arguments: object) -> str:
    """The line that `altup arguments…` ends with."""
    with pytest.raises(UserError) as caught:
        ALTUP([str(one) for one in arguments], standalone_mode=False)
    return str(caught.value)


def commands(group: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, *names, name)
        else:
            yield (*names, name), one


def test_an_option_with_one_value_is_refused_twice_by_every_verb() -> None:
    checked = 0
    for names, one in commands(ALTUP):
        for option in one.params:
            if option.param_type_name == "option" and not option.multiple and not option.is_flag:
                flag = option.opts[0]
                assert complaint(*names, flag, "1", flag, "2").startswith(f"{flag} is given twice"), names
                checked += 1
    assert checked > 100


def test_every_verb_explains_itself_with_one_letter() -> None:
    for names, _ in commands(ALTUP):
        shown = CliRunner().invoke(app, [*names, "-h"])
        assert shown.exit_code == 0, names
        assert "Usage:" in shown.stdout


def test_what_matters_comes_first() -> None:
    """At most eleven options, in a panel of their own; nothing is lost, and all others are advanced."""
    for names, one in commands(ALTUP):
        options = [option for option in one.params if option.param_type_name == "option"]
        first = [option for option in options if option.rich_help_panel in (None, "Options")]
        assert 0 < len(first) <= 11 or not options, names
        assert options[: len(first)] == first, names
        assert all(option.rich_help_panel.startswith("Advanced: ") for option in options[len(first) :]), names
        assert {option.name for option in options} >= set(FIRST.get(names[-1], ())), names
    shown = CliRunner().invoke(app, ["pretrain", "--help"], env={"COLUMNS": "100"}).stdout
    assert (
        shown.index("--data") < shown.index("--steps") < shown.index("Advanced: training") < shown.index("--beta1")
    )


def test_an_empty_path_is_refused_by_every_verb() -> None:
    """It would be the folder that one is in."""
    checked = 0
    for names, one in commands(ALTUP):
        for option in one.params:
            if option.param_type_name == "option" and option.opts[0] in (
                "--out",
                "--config",
                "--results",
                "--show",
            ):
                others = [other for other in one.params if other.required and other is not option]
                needed = [w for o in others for w in (*o.opts[:1] * (o.param_type_name == "option"), "x")]
                told = complaint(*names, *needed, option.opts[0], "")
                assert told.startswith(f"{option.opts[0]} '' is empty; give a path"), names
                checked += 1
    assert checked > 15
    assert complaint("compare", "runs/a", "").startswith("RUNS '' is empty")


def test_options_that_may_be_repeated_still_may() -> None:
    told = complaint("pretrain", "--data", "x", "--out", "y", "--set", "d_ff=8", "--set", "d_model=0")
    assert told.startswith("--set d_model=0 makes no sense")


PRETRAIN = ("pretrain", "--data", "nowhere", "--out", "x")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((*PRETRAIN, "--method", "altup", "--k", 0), "--k 0 makes no sense; give a whole number of at least 1"),
        (("params", "--method", "altup", "--k", 2000), "--k 2000 makes no sense"),
        ((*PRETRAIN, "--steps", 0), "--steps 0 makes no sense"),
        ((*PRETRAIN, "--lr", "-1"), "--lr -1.0 makes no sense"),
        ((*PRETRAIN, "--dropout", 1), "--dropout 1.0 makes no sense"),
        ((*PRETRAIN, "--micro-batch", 3, "--batch-size", 8), "--micro-batch 3 does not divide --batch-size 8"),
        ((*PRETRAIN, "--micro-batch", 3), "--micro-batch 3 does not divide batch_size=128"),
        ((*PRETRAIN, "--set", "d_fff=1"), "--set d_fff is not known; did you mean 'd_ff'?"),
        ((*PRETRAIN, "--lr-factor", "embeddings=-1"), "--lr-factor embeddings=-1 makes no sense"),
        ((*PRETRAIN, "--method", "dense", "--stride", 2), "--stride 2 does not fit --method dense"),
        (("generate", "x", "--prompt", "a", "--beams", 0), "--beams 0 makes no sense"),
        (("prepare", ".", "--vocab-size", 3), "--vocab-size 3 makes no sense"),
        (("tasks", "show", "squad", "--count", 0), "--count 0 makes no sense"),
        ((*PRETRAIN, "--size", r"\1"), r"--size '\1' is not known"),
        (("bench", "stepp"), "'stepp' is not known; did you mean 'step'?"),
    ],
)
def test_errors_name_options_as_they_were_typed(arguments: tuple[object, ...], told: str) -> None:
    assert told in complaint(*arguments)


def test_what_was_typed_is_named_once() -> None:
    """-0.1 is how it was typed and how Python writes the number."""
    assert complaint(*PRETRAIN, "--lr-factor", "embeddings=-0.1").count("--lr-factor") == 1


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ((*PRETRAIN, "--method", "altpu"), "altup"),
        ((*PRETRAIN, "--method", "altup+meo"), "moe"),
        ((*PRETRAIN, "--model", "brt"), "bert"),
        ((*PRETRAIN, "--size", "bsae"), "base"),
        ((*PRETRAIN, "--optimizer", "moun"), "muon"),
        (("study", "run", "varyingk"), "varying-k"),
        (("study", "run", "varying-k", "--scale", "smokey"), "smoke"),
        (("tasks", "show", "squat"), "squad"),
    ],
)
def test_a_name_mistyped_brings_the_right_one(arguments: tuple[object, ...], meant: str) -> None:
    assert f"did you mean {meant!r}?" in complaint(*arguments)


def test_a_verb_mistyped_brings_the_right_one() -> None:
    assert "'pretrain'" in CliRunner(env={"COLUMNS": "80"}).invoke(app, ["pretrian"]).output


def test_what_a_file_says_keeps_its_name(tmp_path: Any) -> None:
    """Only what was typed is written as typed."""
    (tmp_path / "run.yaml").write_text("batch_size: 0\n")
    told = complaint(*PRETRAIN, "--config", tmp_path / "run.yaml", "--steps", 3)
    assert told.startswith("batch_size=0 makes no sense")

"""Mistyped models: told at once and by name, with what lies beside them, whether or not there is a network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from altup.cli.main import app
from altup.core.errors import UserError
from altup.core.hub import find_pretrained

VERBS = {
    "finetune": ["--task", "sst2", "--out", "out"],
    "evaluate": ["--task", "mine.jsonl"],
    "generate": ["--prompt", "I <extra_id_0> tea."],
    "upcycle": ["--out", "wide"],
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with runs, where the user stands."""
    for name in ("small", "small-altup", "notes"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "mine.jsonl").write_text('{"input": "a", "target": "b"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_names_the_path_and_its_neighbours(home: Path, verb: str) -> None:
    done = CliRunner().invoke(app, [verb, "runs/smal", *VERBS[verb]])
    assert isinstance(done.exception, UserError)
    text = str(done.exception)
    assert "'runs/smal': no such folder" in text
    assert "did you mean 'runs/small'" in text
    assert "notes" not in text


@pytest.mark.parametrize("name", ["./runs/smal", "/nowhere/model", "~/runs/smal", "runs/small/fina", ".hidden"])
def test_what_can_only_be_a_path_is_not_asked_of_the_hub(home: Path, name: str) -> None:
    with pytest.raises(UserError, match="no such folder") as told:
        find_pretrained(name)
    assert "hub" not in str(told.value)
    assert ("did you mean" in str(told.value)) == ("smal" in name and "fina" not in name)


def test_an_empty_name_is_not_the_folder_that_one_is_in(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home / "runs" / "small")
    with pytest.raises(UserError, match="the name '' is empty; give a run or a model folder"):
        find_pretrained("")


@pytest.mark.parametrize("name", ["runs/smal", "flan-t5", "google/t5-v1_1-small", "no model!"])
def test_other_names_tell_of_the_hub_too(home: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"{name}': no such folder, and .* hub"):
        find_pretrained(name)


def test_what_is_there_is_found(home: Path) -> None:
    assert find_pretrained("runs/small") == "runs/small"
    assert find_pretrained("~/runs/small") == str(home / "runs" / "small")


def test_a_downloaded_model_is_found_without_a_network(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a folder has the name of its owner."""
    from huggingface_hub import constants

    commit = "0" * 40
    cache = home / "cache" / "models--runs--t5"
    (cache / "snapshots" / commit).mkdir(parents=True)
    (cache / "snapshots" / commit / "config.json").write_text("{}")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", os.fspath(home / "cache"))
    assert find_pretrained("runs/t5") == "runs/t5"


def test_a_link_that_leads_nowhere_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"model' is a link to '.*gone', which does not exist"):
        find_pretrained(str(tmp_path / "model"))

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import altup
from altup.cli import doctor as doctor_module
from altup.core.hardware import installed

RUN = "import typer; from altup.cli.doctor import command; typer.run(command)"


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def report(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert "Traceback" not in done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_this_machine_is_healthy_and_a_compiler_that_is_missing_is_named(tmp_path: Path) -> None:
    done = doctor("--quick", "--json", PATH=str(tmp_path), CC="")
    checks = report(done)
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"] is True
    assert checks["Python"]["detail"].startswith(".".join(map(str, sys.version_info[:3])))
    assert checks["altup"]["detail"] == altup.__version__
    for name in ("torch", "transformers"):
        assert checks[name]["status"] == checks[f"import {name}"]["status"] == "ok"
        assert checks[name]["detail"] in checks[f"import {name}"]["detail"]
    assert all(check["remedy"] for check in checks.values() if check["status"] != "ok")
    for name in ("scikit-learn", "sentencepiece", "datasets"):
        assert (checks[name]["status"] == "ok") == (installed(name) is not None)
    assert checks["Gemma 3n"]["status"] == "ok"
    assert checks["transformers"]["detail"] in checks["Gemma 3n"]["detail"]
    assert checks["C compiler"]["status"] == "missing"
    assert "gcc" in checks["C compiler"]["remedy"]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
        ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "No module named 'torch'"),
        ("import os; os.abort()", "crashed with signal 6"),
        ("import sys; sys.exit(3)", "exit code 3"),
    ],
    ids=["broken", "missing", "crashing", "exiting"],
)
def test_a_torch_that_does_not_load_is_a_line_of_the_report(tmp_path: Path, code: str, told: str) -> None:
    (tmp_path / "torch.py").write_text(code)
    done = doctor("--json", PYTHONPATH=str(tmp_path))
    checks = report(done)
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False
    assert checks["import torch"]["status"] == "broken"
    assert told in checks["import torch"]["detail"]
    assert "pip install" in checks["import torch"]["remedy"]
    assert "disk" in checks


def test_a_transformers_with_another_gemma3n_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"refused": ["Gemma3nTextMLP"], "tested": "5.15 to 5.23"}
    monkeypatch.setattr(doctor_module, "probe", lambda code: (found, None))
    check = doctor_module.check_gemma3n("9.1.0")
    assert check.status == "missing"
    assert "transformers 9.1.0" in check.detail
    assert "Gemma3nTextMLP" in check.detail
    assert "install a transformers from 5.15 to 5.23" in check.remedy


def test_an_old_package_is_named_with_the_version_to_install(tmp_path: Path) -> None:
    old = tmp_path / "matplotlib-3.1.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: matplotlib\nVersion: 3.1.0\n")
    (tmp_path / "torch.py").write_text("raise ImportError('not needed here, and quick')")
    done = doctor(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "3.1.0, needed is >=3.9" in done.stdout
    assert "pip install 'matplotlib>=3.9'" in done.stdout
    assert "altup cannot run here" in done.stdout


def test_optional_packages_are_installed_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra of altup would be looked for on the package index."""
    from altup.cli import doctor as module

    monkeypatch.setattr(module, "installed", lambda name: None)
    checks = {check.name: check.remedy for check in module.check_optional()}
    assert checks["datasets"].startswith("pip install datasets   (")
    assert "altup[" not in "".join(checks.values())


@pytest.mark.slow
def test_compiling_is_tried_for_real(tmp_path: Path) -> None:
    assert report(doctor("--json"))["torch.compile"]["status"] == "ok"
    without = report(doctor("--json", PATH=str(tmp_path), CC="", CXX=""))["torch.compile"]
    assert without["status"] == "missing"
    assert "gcc" in without["remedy"]

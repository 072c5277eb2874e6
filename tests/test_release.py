"""The wheel alone, in an environment with nothing but what it asks for: the README's commands and Python run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.docs.pages import blocks, shrink

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("sklearn", "datasets", "accelerate", "tensorboard", "pytest", "peft", "zstandard")
pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path, **environment: str) -> str:
    """What the command printed; it must succeed, without the packages of the environment that runs the tests."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The one that `make release-check` has just built, or else a new one."""
    built = sorted((ROOT / "dist").glob("altup-*.whl"))
    if built:
        return built[0]
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module", params=["tested versions", "newest versions"])
def python(request, wheel, tmp_path_factory) -> Path:
    """That of an environment with the wheel and what it asks for; torch, which is large, is the tested one."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    if request.param == "newest versions":
        torch = re.findall(r"^(?:torch|triton)==.*$", constraints.read_text(), re.MULTILINE)
        constraints = folder / "torch.txt"
        constraints.write_text("\n".join(torch))
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", constraints, wheel, cwd=folder)
    return python


def test_wheel_is_complete(wheel):
    """Every file of the package is in it, and nothing else."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/altup").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == files


def test_sdist_builds_the_wheel():
    """It has what a build needs, and the licence."""
    for path in (ROOT / "dist").glob("altup-*.tar.gz"):
        with tarfile.open(path) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        assert {"pyproject.toml", "README.md", "LICENSE", "src/altup/py.typed"} <= names


def test_nothing_of_the_extras_is_there(python, tmp_path):
    code = f"import importlib.util as u; print([n for n in {EXTRAS} if u.find_spec(n)])"
    assert run(python, "-c", code, cwd=tmp_path) == "[]\n"


def test_readme(python, tmp_path):
    """Its shell blocks at toy size, its Python as it stands; a study, whose report needs data of the package."""
    names = "\n".join(block.text for block in blocks("../README.md"))
    assert "altup prepare" in names
    program = python.parent / "altup"
    for block in blocks("../README.md"):
        if block.language == "python":
            assert run(python, "-c", block.text, cwd=tmp_path).strip()
        elif block.language == "sh":
            for command in block.commands():
                _, *arguments = shlex.split(shrink(command, tmp_path))
                run(program, *arguments, cwd=tmp_path, HF_HUB_OFFLINE="1")
    for command in ("altup study run varying-k --scale smoke", "altup study report --out report.html"):
        _, *arguments = shlex.split(shrink(command, tmp_path))
        run(program, *arguments, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert (tmp_path / "report.html").exists()
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["loss"] > 0


def test_what_needs_an_extra_says_which(python, tmp_path):
    """Before it starts: nothing is trained first."""
    folder = tmp_path / "glue/mrpc"
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        record = {"sentence1": "a b", "sentence2": "c d", "label": 1, "idx": 0}
        (folder / f"{split}.jsonl").write_text(json.dumps(record) + "\n")
    program, model = python.parent / "altup", tmp_path / "model"
    make = "from altup.models import AltUpT5Config as C, AltUpT5ForConditionalGeneration as M"
    run(python, "-c", f"{make}; M(C.from_preset('tiny')).save_pretrained({str(model)!r})")
    for command, remedy in (
        ("prepare hf:somebody/something --out data", "pip install datasets"),
        (f"finetune {model} --task mrpc --data . --out run", "pip install scikit-learn"),
        (f"evaluate {model} --task mrpc --data . --out scores", "pip install scikit-learn"),
    ):
        done = subprocess.run(
            [str(program), *command.split()], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        words = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == 2, words
        assert remedy in words
        assert "Traceback" not in words
    assert not (tmp_path / "run").exists()

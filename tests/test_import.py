"""`import altup` is light, and every public name is really there."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import altup
from tests.processes import PATIENCE, server


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


COUNT = "print(len(sys.modules), *(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"


def test_import_is_light():
    """Few modules: that decides how long it takes, on a busy machine too. PyTorch has thousands."""
    count, *others = python(f"import sys, altup\n{COUNT}").split()
    assert int(count) < 200
    assert others == ["False"] * 3


def test_help_is_light():
    code = f"import sys\nfrom altup.cli.main import app\ntry: app(['--help'])\nexcept SystemExit: pass\n{COUNT}"
    count, *others = python(code).splitlines()[-1].split()
    assert int(count) < 600
    assert others == ["False"] * 3


def test_threads_that_wait_may_sleep_before_torch_is_there(monkeypatch):
    """Unless the user has said how they wait."""
    from altup.__main__ import spin_briefly

    for given in ({}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}):
        monkeypatch.setattr("os.environ", dict(given))
        spin_briefly()
        assert os.environ == (given or {"GOMP_SPINCOUNT": "1000"})


@pytest.mark.parametrize("name", altup.__all__)
def test_public_names_load(name):
    assert getattr(altup, name) is not None
    assert name in dir(altup)


def test_dir_lists_public_names_only():
    assert dir(altup) == sorted(altup.__all__)


def test_type_checkers_see_the_same_names():
    """What `altup/__init__.py` imports for type checkers is what it loads when used."""
    tree = ast.parse(Path(altup.__file__).read_text())
    typed = {
        alias.asname: (one.module, alias.name)
        for one in ast.walk(tree)
        if isinstance(one, ast.ImportFrom) and one.module.startswith("altup.")
        for alias in one.names
        if not str(alias.asname).startswith("_")
    }
    assert typed == {name: (home, name) for name, home in altup._HOMES.items()}


def test_mypy_reads_a_user_of_every_name():
    user = (Path(__file__).parent / "typed_user.py").read_text()
    assert set(altup.__all__) <= set(re.findall(r"altup\.(\w+)", user))


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="AltUpT5Config"):
        altup.AltUpp  # noqa: B018


ROOT = Path(altup.__file__).parent


@functools.cache
def imports(file):
    """Modules of altup that a file imports, now or later, but for types."""
    return list(_imports(file))


def _imports(file):
    tree = ast.parse(file.read_text())
    for_types = [
        one for one in ast.walk(tree) if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.dump(one.test)
    ]
    left_out = {id(inner) for one in for_types for inner in ast.walk(one)}
    for one in ast.walk(tree):
        if id(one) in left_out:
            continue
        if isinstance(one, ast.Import):
            yield from (alias.name for alias in one.names if alias.name.startswith("altup"))
        elif isinstance(one, ast.ImportFrom) and str(one.module).startswith("altup"):
            yield from (f"{one.module}.{alias.name}" for alias in one.names)


def test_imports_go_one_way():
    """A folder imports only from those before it in CONTRIBUTING's list; evaluation knows nothing of training."""
    order = re.search(r"`core` →[^.]*", (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text())
    layers = re.findall(r"`(\w+)`", order[0])
    assert sorted(layers) == sorted(path.name for path in ROOT.iterdir() if (path / "__init__.py").exists())
    for place, layer in enumerate(layers):
        later = {*layers[place + 1 :], *(["training"] if layer == "evaluation" else [])}
        for file in (ROOT / layer).rglob("*.py"):
            assert not [name for name in imports(file) if name.split(".")[1:2] and name.split(".")[1] in later], (
                file
            )


def test_no_module_imports_itself_in_a_circle():
    files = {
        ".".join(("altup", *file.relative_to(ROOT).with_suffix("").parts)): file for file in ROOT.rglob("*.py")
    }
    files = {name.removesuffix(".__init__"): file for name, file in files.items()}
    graph = {
        name: {found if found in files else found.rpartition(".")[0] for found in imports(file)} - {name}
        for name, file in files.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the circle


def build_and_tell(results):
    """In a process forked from one that has imported the package and nothing else."""
    import torch

    altup.AltUpT5ForConditionalGeneration(altup.AltUpT5Config.from_preset("tiny", vocab_size=50))
    results.put(torch.cuda.is_initialized())


def test_models_never_touch_cuda():
    results = server.SimpleQueue()
    process = server.Process(target=build_and_tell, args=(results,))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert results.get() is False

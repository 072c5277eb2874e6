"""`altup doctor`: what this machine can do, and what is missing.

Nothing heavy is imported here: torch and the compiler are tried in processes of their own, so that a missing,
broken or crashing one is a line of the report and not the end of it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import altup
from altup.core.errors import UserError
from altup.core.hardware import ISA_VARIABLE, SAFE_ISA, installed, make_bf16_safe, usable_cores
from altup.core.packages import OPTIONAL

OLDEST_PYTHON = (3, 11)
LOW_DISK_GB = 5

TORCH_PROBE = """
import json, torch
report = {"version": torch.__version__, "cuda_build": torch.version.cuda, "gpus": []}
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    report["gpus"].append({"name": p.name, "gib": p.total_memory / 2**30, "capability": [p.major, p.minor]})
d = torch.distributed
report["backends"] = [b for b in ("gloo", "nccl") if d.is_available() and d.is_backend_available(b)]
print(json.dumps(report))
"""

TRANSFORMERS_PROBE = """
import json, transformers
transformers.PreTrainedModel
print(json.dumps({"version": transformers.__version__}))
"""

GEMMA3N_PROBE = """
import json, warnings
warnings.simplefilter("ignore")
from altup.models.gemma3n import classes, recognition
print(json.dumps({"refused": [base.__name__ for base in classes.differences()], "tested": recognition.TESTED}))
"""

COMPILE_PROBE = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(64, device=device)
torch.testing.assert_close(torch.compile(lambda x: x.sin() + 1)(x), x.sin() + 1)
print('null')
"""


@dataclass(frozen=True)
class Check:
    """One line of the report. `status` is ok, missing (something optional) or broken (something essential)."""

    group: str
    name: str
    status: str
    detail: str
    remedy: str = ""


def command(
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the trial of torch.compile.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what this machine can do and what is missing; exit code 1 if something essential is broken."""
    from altup.core.terminal import Console

    with Console(stderr=True).status("looking at this machine"):
        checks = examine(quick)
    healthy = all(check.status != "broken" for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": healthy, "checks": [asdict(check) for check in checks]}))
    else:
        _print(checks, healthy)
    raise typer.Exit(0 if healthy else 1)


def examine(quick: bool = False) -> list[Check]:
    """Every check, essential things first."""
    if installed("packaging") is None:  # without which no version can be compared
        return [Check("essential", "packaging", "broken", "not installed", "pip install packaging")]
    torch, torch_error = probe(TORCH_PROBE)
    checks = [check_python(), *check_packages(), check_import("torch", torch, torch_error)]
    if torch is not None:
        transformers, transformers_error = probe(TRANSFORMERS_PROBE)
        checks.append(check_import("transformers", transformers, transformers_error))
        if transformers is not None:
            checks.append(check_gemma3n(transformers["version"]))
        checks += check_devices(torch)
        checks += check_compiler(torch, quick)
        checks.append(check_bf16())
    return checks + check_optional() + check_machine()


def check_python() -> Check:
    found, wanted = platform.python_version(), ".".join(map(str, OLDEST_PYTHON))
    fine = sys.version_info >= OLDEST_PYTHON
    return Check(
        "essential",
        "Python",
        "ok" if fine else "broken",
        f"{found} at {sys.executable}",
        "" if fine else f"make a virtual environment with Python {wanted} or newer",
    )


def check_packages() -> list[Check]:
    """The packages that altup's own metadata requires, by version; nothing is imported."""
    requirements = _requirements()
    if requirements is None:
        remedy = "pip install -e . in the repository, or pip install altup"
        return [Check("essential", "altup", "missing", "runs from its source folder, not installed", remedy)]
    checks = [Check("essential", "altup", "ok", altup.__version__)]
    for requirement in requirements:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):  # under the optional packages
            continue
        name, wanted = requirement.name, requirement.specifier
        found = installed(name)
        fine = found is not None and wanted.contains(found, prereleases=True)
        detail = (found or "not installed") + ("" if fine or found is None else f", needed is {wanted}")
        remedy = "" if fine else f"pip install '{name}{wanted}'"
        checks.append(Check("essential", name, "ok" if fine else "broken", detail, remedy))
    return checks


def check_import(name: str, found: dict[str, Any] | None, error: str | None) -> Check:
    """Whether a package that is there can really be loaded."""
    if found is not None:
        return Check("essential", f"import {name}", "ok", f"loads {found['version']}")
    remedy = f"pip install --force-reinstall {name}" if installed(name) else f"pip install {name}"
    return Check("essential", f"import {name}", "broken", error or "", remedy)


def check_devices(torch: dict[str, Any]) -> list[Check]:
    """GPUs with their memory and number formats, and the ways processes can talk to each other."""
    checks = []
    for i, gpu in enumerate(torch["gpus"]):
        major, minor = gpu["capability"]
        bf16 = major >= 8
        detail = f"{gpu['name']}, {gpu['gib']:.0f} GiB, compute capability {major}.{minor}"
        remedy = "" if bf16 else "no fast bfloat16 here: train with --precision fp32"
        checks.append(Check("speed", f"GPU {i}", "ok" if bf16 else "missing", detail, remedy))
    if not checks:
        if not shutil.which("nvidia-smi"):
            remedy = "small models train on the CPU; for more, use a machine with an NVIDIA GPU"
        elif torch["cuda_build"] is None:
            remedy = "this torch is built for CPUs; install a CUDA build (pytorch.org/get-started)"
        else:
            remedy = f"compare the driver in nvidia-smi with torch's CUDA {torch['cuda_build']}"
        checks.append(Check("speed", "GPU", "missing", "torch sees none", remedy))
    backends = torch["backends"]
    wanted = "nccl" if torch["gpus"] else "gloo"
    fine = wanted in backends
    remedy = "" if fine else f"install a torch build with {wanted} to train with several processes"
    detail = ", ".join(backends) or "none"
    checks.append(Check("speed", "several processes", "ok" if fine else "missing", detail, remedy))
    return checks


def check_gemma3n(version: str) -> Check:
    """Whether `altup.accelerate` knows every part of Gemma 3n as this transformers computes it."""
    found, error = probe(GEMMA3N_PROBE)
    if found is not None and not found["refused"]:
        return Check("speed", "Gemma 3n", "ok", f"altup.accelerate knows every part of transformers {version}")
    detail = error or f"transformers {version}: unknown to altup.accelerate are {', '.join(found['refused'])}"
    tested = f"install a transformers from {found['tested']}" if found else "pip install --upgrade transformers"
    return Check("speed", "Gemma 3n", "missing", detail, f"{tested}; these parts run the original code")


def check_compiler(torch: dict[str, Any], quick: bool) -> list[Check]:
    """The C compiler that torch.compile and Triton call, Triton itself, and a real compilation."""
    tools = "gcc, g++ and Python's headers (Debian: apt install build-essential python3-dev)"
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None)
    checks = [
        Check(
            "speed",
            "C compiler",
            "ok" if compiler else "missing",
            compiler or "none found",
            "" if compiler else f"install {tools}",
        )
    ]
    triton = installed("triton") or installed("pytorch-triton")
    if torch["gpus"] or triton:
        remedy = "" if triton else "pip install triton: the fused kernels need it"
        checks.append(Check("speed", "triton", "ok" if triton else "missing", triton or "not installed", remedy))
    if not quick:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
            _, error = probe(COMPILE_PROBE, caches)
        detail = error or f"works on the {'GPU' if torch['gpus'] else 'CPU'}"
        remedy = f"install {tools}, or train with --no-compile" if error else ""
        checks.append(Check("speed", "torch.compile", "missing" if error else "ok", detail, remedy))
    return checks


def check_bf16() -> Check:
    """Whether bf16 products on the CPU work; only trying shows it."""
    try:
        limited = make_bf16_safe()
    except UserError as error:
        return Check("speed", "bf16 on the CPU", "missing", str(error), "train with --precision fp32")
    limit = os.environ.get(ISA_VARIABLE)
    detail = limited or ("works" + (f" ({ISA_VARIABLE}={limit})" if limit else ""))
    remedy = f"altup sets it by itself; elsewhere: export {ISA_VARIABLE}={SAFE_ISA}" if limited else ""
    return Check("speed", "bf16 on the CPU", "missing" if limited else "ok", detail, remedy)


def check_optional() -> list[Check]:
    """Packages that only some work needs."""
    checks = []
    for name, purpose in OPTIONAL.items():
        found = installed(name)
        remedy = "" if found else f"pip install {name}   ({purpose})"
        checks.append(Check("optional", name, "ok" if found else "missing", found or "not installed", remedy))
    return checks


def check_machine() -> list[Check]:
    memory = ""
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB of memory"
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    roomy = free >= LOW_DISK_GB
    remedy = "" if roomy else "a run keeps several checkpoints: free some space, or choose --out elsewhere"
    return [
        Check(
            "machine", "system", "ok", f"{platform.system()} {platform.machine()}, {usable_cores()} cores{memory}"
        ),
        Check("machine", "disk", "ok" if roomy else "missing", f"{free:,.0f} GB free here", remedy),
    ]


def probe(code: str, environment: dict[str, str] | None = None) -> tuple[Any, str | None]:
    """Run `code` in a Python process of its own: (what it printed as JSON, None) or (None, what went wrong)."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, "no answer within 3 minutes"
    if done.returncode < 0:
        return None, f"crashed with signal {-done.returncode}"
    lines = done.stderr.strip().splitlines()
    if done.returncode:
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return None, (errors or lines or [f"stopped with exit code {done.returncode}"])[-1]
    try:
        return json.loads(done.stdout.splitlines()[-1]), None
    except (ValueError, IndexError):
        return None, "gave no readable answer"


def _requirements() -> list[Any] | None:
    """What altup's own metadata requires; None where it runs from its source folder, not installed."""
    from packaging.requirements import Requirement

    try:
        return [Requirement(text) for text in importlib.metadata.requires("altup") or []]
    except importlib.metadata.PackageNotFoundError:
        return None


def _print(checks: list[Check], healthy: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from altup.core.terminal import Console

    marks = {"ok": ("✓", "green"), "missing": ("✗", "yellow"), "broken": ("✗", "bold red")}
    view = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        view.add_column()
    group = None
    for check in checks:
        if check.group != group:
            group = check.group
            view.add_row("", Text(group, style="bold"), "")
        mark, style = marks[check.status]
        # Text, because a detail may hold square brackets, which rich would read as markup.
        text = Text(check.detail) + Text(f"\n→ {check.remedy}" if check.remedy else "", style=style)
        view.add_row(Text(mark, style=style), check.name, text)
    console = Console()
    console.print(view)
    broken = ", ".join(check.name for check in checks if check.status == "broken")
    console.print("altup can run here" if healthy else f"altup cannot run here: repair {broken}", style="bold")

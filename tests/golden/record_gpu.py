"""Losses and gradient norms of a few steps on a GPU, where compiled, fused, fp8 and recorded code runs.

    python -m tests.golden.record_gpu --out before.json                         train every case
    python -m tests.golden.record_gpu --out after.json --compare before.json    train and compare with a recording
    python -m tests.golden.record_gpu --compare before.json after.json          compare two recordings

Each family × method is trained in four ways: `altup pretrain` in bf16 and in fp8 (layers compiled, steps recorded
as CUDA graphs), in bf16 with recomputed layers (launched), and in a hand-written loop through `altup.accelerate`
(passes recorded). A family is a process; all share the GPU. Without a GPU the models are narrow, nothing is
compiled and fp8 is skipped: that shows that the script works.

Sums on a GPU are made in an order that a change may alter, so recordings are compared within `TOLERANCES`.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 6
FAMILIES = ("t5", "bert", "decoder")
METHODS = ("dense", "altup", "recycled")
WAYS: dict[str, tuple[str, ...]] = {
    "bf16": ("--precision", "bf16"),
    "fp8": ("--precision", "fp8"),
    "recomputed": ("--precision", "bf16", "--activation-checkpointing"),
    "accelerate": (),
}
# Of losses and of gradient norms, relative: in the first step, where weights are still equal, and in later ones,
# where rounding has grown (on an H200 two orders of a T5's sums were 1.3e-3 and 2.4 % apart within six steps).
TOLERANCES = {
    "fp8": {"train": (2e-3, 2e-2), "grad_norm": (0.05, 0.25)},
    "others": {"train": (5e-4, 1e-2), "grad_norm": (0.02, 0.15)},
}
# Wide enough for products in fp8 to pay, at most as wide as norms are fused with updates.
ON_GPU = {"d_model": 768, "d_ff": 2048, "d_kv": 64, "num_heads": 12, "num_layers": 3}
ON_CPU = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2}
RUN = (
    *("--steps", STEPS, "--log-every", 1, "--eval-every", STEPS, "--eval-sequences", 8, "--save-every", STEPS),
    *("--optimizer", "adafactor", "--lr", 0.02, "--schedule", "constant", "--track", "none"),
)


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def fields_of(family: str) -> dict[str, int]:
    fields = dict(ON_GPU if on_gpu() else ON_CPU)
    return {**fields, "num_kv_heads": fields["num_heads"] // 2} if family == "decoder" else fields


def ways() -> list[str]:
    return [way for way in WAYS if way != "fp8" or on_gpu()]


def pretrain(family: str, method: str, way: str, data: Path, out: Path) -> dict[str, list[float]]:
    from tests.golden.record import altup

    shape = [part for name, value in fields_of(family).items() for part in ("--set", f"{name}={value}")]
    size = ("--batch-size", 8, "--inputs-length", 256 if on_gpu() else 32)
    model = ("--model", family, "--method", method, "--size", "tiny")
    altup("pretrain", "--data", data, "--out", out, *model, *shape, *size, *RUN, *WAYS[way])
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["split"] == "train"]
    return {"train": [r["loss"] for r in steps], "grad_norm": [r["grad_norm"] for r in steps]}


def train_by_hand(family: str, method: str) -> dict[str, list[float]]:
    import torch

    import altup
    from altup.models.families import FAMILIES as KNOWN
    from altup.nn import coefficient_names

    torch.manual_seed(0)
    device, known = torch.device("cuda" if on_gpu() else "cpu"), KNOWN[family]
    config = known.config_class.from_preset(
        "tiny", method, k=2 if method != "dense" else None, vocab_size=512, **fields_of(family)
    )
    model = known.model_class(config).to(device, torch.bfloat16).train()
    with torch.no_grad():  # fresh coefficients hide a mistake between blocks that are still equal
        for name in sorted(coefficient_names(model)):
            parameter = model.get_parameter(name)
            parameter.add_(0.1 * torch.randn(parameter.shape).to(device))
    model = altup.accelerate(model, record=True)
    ids = torch.randint(3, 512, (STEPS, 8, 256 if on_gpu() else 32), generator=torch.Generator().manual_seed(1))
    found: dict[str, list[float]] = {"train": [], "grad_norm": []}
    for batch in ids.to(device):
        labels = batch[:, :64] if family == "t5" else batch
        loss = model(input_ids=batch, labels=labels).loss
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        found["train"].append(loss.item())
        found["grad_norm"].append(norm.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.5 / norm.item())
        model.zero_grad()
    return found


def record_family(family: str, folder: Path) -> dict[str, Any]:
    """Every case of one family; a case that fails is recorded as its error."""
    cases: dict[str, Any] = {}
    for method in METHODS:
        for way in ways():
            name, begun = f"{family} {method} {way}", time.monotonic()
            try:
                out = folder / name.replace(" ", "-")
                cases[name] = (
                    train_by_hand(family, method)
                    if way == "accelerate"
                    else pretrain(family, method, way, folder / "data", out)
                )
            except Exception as error:
                cases[name] = {"error": f"{type(error).__name__}: {error}"[-2000:]}
            print(f"{name}: {cases[name]} in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return cases


def record(families: tuple[str, ...] = FAMILIES) -> dict[str, Any]:
    import torch

    from tests.golden.record import prepare

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        parts = {family: folder / f"{family}.json" for family in families}
        this = [sys.executable, "-m", "tests.golden.record_gpu", "--folder", str(folder)]
        children = [
            subprocess.Popen([*this, "--family", name, "--out", str(part)]) for name, part in parts.items()
        ]
        codes = [child.wait() for child in children]
        if any(codes):
            raise RuntimeError(f"processes of {families} ended with {codes}")
        device = torch.cuda.get_device_name() if on_gpu() else "cpu"
        cases = {name: case for part in parts.values() for name, case in json.loads(part.read_text()).items()}
        return {"device": device, "torch": torch.__version__, "cases": cases}


def compare(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Every case that differs by more than `TOLERANCES`, with the largest difference of all."""
    found = [f"{name}: only in one recording" for name in sorted(before["cases"].keys() ^ now["cases"].keys())]
    for name in sorted(before["cases"].keys() & now["cases"].keys()):
        old, new = before["cases"][name], now["cases"][name]
        if "error" in old or "error" in new:
            found.append(f"{name}: {old.get('error') or new.get('error')}")
            continue
        for kind, (first, later) in TOLERANCES["fp8" if name.endswith("fp8") else "others"].items():
            if len(old[kind]) != len(new[kind]):
                found.append(f"{name}: {len(old[kind])} steps before, {len(new[kind])} now")
                continue
            for step, (a, b) in enumerate(zip(old[kind], new[kind], strict=True), 1):
                if not math.isclose(a, b, rel_tol=first if step == 1 else later):
                    found.append(f"{name}: {kind} of step {step}: {a!r} before, {b!r} now ({b / a - 1:+.2%})")
                    break
    return found


def largest_differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """By way and kind, relative: what is usual between two recordings."""
    most: dict[str, float] = {}
    for name in before["cases"].keys() & now["cases"].keys():
        old, new = before["cases"][name], now["cases"][name]
        for kind in old.keys() & new.keys() - {"error"}:
            key = f"{name.split()[-1]} {kind}"
            apart = (abs(b / a - 1) for a, b in zip(old[kind], new[kind], strict=False))
            most[key] = max(most.get(key, 0.0), *apart)
    return ", ".join(f"{key} {value:.1e}" for key, value in sorted(most.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="train every case and write losses and norms to this file")
    parser.add_argument("--compare", type=Path, nargs="+", help="with this recording; or two recordings")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--family", choices=FAMILIES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.family:
        given.out.write_text(json.dumps(record_family(given.family, given.folder)))
        return 0
    if given.out is None and len(given.compare or ()) != 2:
        parser.error("give --out FILE, or --compare with two files")
    if given.out is not None:
        now = record(tuple(given.families))
        given.out.write_text(json.dumps(now, indent=1))
        if failed := [f"{name}: {case['error']}" for name, case in now["cases"].items() if "error" in case]:
            print("\n".join(failed))
            return 1
        if not given.compare:
            return 0
    else:
        now = json.loads(given.compare[1].read_text())
    before = json.loads(given.compare[0].read_text())
    found = compare(before, now)
    print(f"largest relative differences: {largest_differences(before, now)}")
    print("\n".join(found) or f"{len(now['cases'])} cases: no difference beyond tolerances")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

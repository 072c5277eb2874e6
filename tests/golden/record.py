"""Losses of 50 steps of every family and method: a change that should not alter numbers proves it to the last bit.

    python tests/golden/record.py --out new.json                    train every case and write the losses
    python tests/golden/record.py --compare tests/golden/losses.json    train every case and compare bit by bit
    python tests/golden/record.py --add tests/golden/losses.json    train the cases that are new, and add them

It uses the command line alone, so that it runs with the code of any commit (`PYTHONPATH=…/src`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import random
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

STEPS = 50
RELATIVE = 1e-4  # of a loss, on another kind of machine; AVX2 instead of AVX-512 gave at most 2.3e-7


@dataclass(frozen=True)
class Case:
    """A run: `altup pretrain --model family --method method options…`."""

    family: str
    method: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.family, self.method, *self.options))


SHAPE = (
    *("--size", "tiny", "--set", "d_model=16", "--set", "d_ff=32", "--set", "d_kv=8", "--set", "num_heads=2"),
    *("--set", "num_layers=3", "--inputs-length", "32", "--batch-size", "8"),
)
RUN = (
    *("--steps", str(STEPS), "--log-every", "1", "--eval-every", str(STEPS), "--eval-sequences", "9"),
    *("--save-every", str(STEPS), "--deterministic", "--precision", "fp32", "--track", "none"),
)
EXPERTS = ("--experts", "4", "--set", "expert_hidden=4")
STRIDE = ("--stride", "2")
# Every method, with T5's optimizer at a rate that moves the weights within 50 steps.
METHODS: dict[str, tuple[tuple[str, ...], ...]] = {
    "dense": ((),),
    "altup": ((), ("--k", "4")),
    "sameup": ((),),
    "recycled": ((),),
    "sum": ((),),
    "dense-wide": ((),),
    "sequence-altup": (STRIDE,),
    "stride-and-skip": (STRIDE,),
    "average-pooling": (STRIDE,),
    "moe": (EXPERTS,),
    "altup+moe": (EXPERTS,),
}
SHORTENED = ("sequence-altup", "stride-and-skip", "average-pooling")
UNRECORDED = ("x0",)  # came after the recording, which is of one kind of machine
NOT_FOR = {"t5": UNRECORDED, "bert": ("average-pooling", *UNRECORDED), "decoder": (*SHORTENED, *UNRECORDED)}
# One option each beside the method: other optimizers and schedules, dropout, accumulation, recomputation.
VARIANTS: tuple[tuple[str, ...], ...] = (
    ("--optimizer", "adamw", "--lr", "0.01", "--clip-norm", "1"),
    ("--optimizer", "adamw-rms", "--warmup-steps", "5"),
    ("--dropout", "0.1", "--micro-batch", "4", "--activation-checkpointing"),
    ("--set", "coefficients=dynamic", "--seed", "1"),
)


def cases() -> list[Case]:
    found = []
    for family in ("t5", "bert", "decoder"):
        for method, choices in METHODS.items():
            if method not in NOT_FOR.get(family, ()):
                found += [Case(family, method, options) for options in choices]
        found += [Case(family, "altup", options) for options in VARIANTS]
    return found


def altup(*arguments: object) -> str:
    """`altup arguments…` in this process: what it prints to stdout."""
    from typer.testing import CliRunner

    from altup.cli.main import app

    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exit_code:
        raise RuntimeError(f"altup {' '.join(map(str, arguments))}\n{result.output}") from result.exception
    return result.stdout


def made_up_text(sentences: int = 4000) -> str:
    """Sentences of 300 made-up words, about 10 tokens each."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abdeiklmnorstu", k=draw.randint(2, 6))) for _ in range(300)]
    return "\n\n".join(" ".join(draw.choices(words, k=8)) + "." for _ in range(sentences))


def prepare(folder: Path) -> Path:
    """The prepared data that all cases train on."""
    text = folder / "text.txt"
    text.write_text(made_up_text(), encoding="utf-8")
    altup(
        *("prepare", text, "--out", folder / "data", "--vocab-size", 600, "--validation-fraction", 0.05),
        *("--workers", 1),
    )
    return folder / "data"


def digest_of_data(data: Path) -> str:
    """Of the tokenizer and the token shards."""
    whole = hashlib.sha256()
    for path in [*sorted(data.rglob("tokenizer.json")), *sorted(data.rglob("*.bin"))]:
        whole.update(path.name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def digest_of_weights(model: Path) -> str:
    from safetensors.numpy import load_file

    whole = hashlib.sha256()
    for name, tensor in sorted(load_file(model / "model.safetensors").items()):
        whole.update(f"{name} {tensor.dtype} {tensor.shape}\0".encode() + tensor.tobytes())
    return whole.hexdigest()


def run(case: Case, data: Path, out: Path) -> dict[str, Any]:
    """The loss of every step, the held-out loss and a digest of the weights after the last one."""
    method = ("--model", case.family, "--method", case.method)
    shape = (*SHAPE, "--set", "num_kv_heads=1") if case.family == "decoder" else SHAPE
    optimizer = () if "--optimizer" in case.options else ("--optimizer", "adafactor")
    altup("pretrain", "--data", data, "--out", out, *method, *shape, *RUN, *optimizer, *case.options)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "train": [record["loss"] for record in records if record["split"] == "train"],
        "validation": [record["loss"] for record in records if record["split"] == "validation"],
        "weights": digest_of_weights(out / "final"),
    }


def fingerprint() -> dict[str, Any]:
    """What decides the last bits of a product on a CPU."""
    import torch

    torch.set_num_threads(1)
    cpu: dict[str, str] = {}
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            cpu[name.strip()] = value.strip()
    instructions = [flag for flag in cpu.get("flags", "").split() if flag.startswith(("avx", "amx", "fma"))]
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": " ".join(cpu.get(name, "?") for name in ("vendor_id", "cpu family", "model")),
        "instructions": " ".join(sorted(instructions)),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        **{name: version(name) for name in ("torch", "numpy", "tokenizers")},
    }


def differences(before: dict[str, Any], now: dict[str, Any], same_machine: bool) -> list[str]:
    """What changed in one case: any bit on the same kind of machine, more than rounding on another."""
    found = []
    for split in ("train", "validation"):
        pairs = list(zip(before[split], now[split], strict=True))
        for step, (old, new) in enumerate(pairs, 1):
            if (same_machine and old != new) or not math.isclose(old, new, rel_tol=RELATIVE):
                found.append(f"{split} loss {step} of {len(pairs)}: {old!r} before, {new!r} now")
                break
    if same_machine and before["weights"] != now["weights"]:
        found.append("the weights after the last step differ")
    return found


def record(chosen: list[Case]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = prepare(folder)
        losses = {}
        for number, case in enumerate(chosen):
            losses[case.name] = run(case, data, folder / str(number))
            print(f"{case.name}: {losses[case.name]['train'][-1]:.6f}", file=sys.stderr)
        return {"fingerprint": fingerprint(), "data": digest_of_data(data), "cases": losses}


def one_case_a_line(recording: dict[str, Any]) -> str:
    head = json.dumps({**recording, "cases": {}}, indent=1).removesuffix("{}\n}")
    lines = (f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in recording["cases"].items())
    return head + "{\n" + ",\n".join(lines) + "\n }\n}\n"


def compare(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Every difference between two recordings, one line each."""
    if before["data"] != now["data"]:
        return ["the prepared data differ"]
    same = before["fingerprint"] == now["fingerprint"]
    return [f"{name}: not recorded yet" for name in now["cases"] if name not in before["cases"]] + [
        f"{name}: {line}"
        for name, of_now in now["cases"].items()
        if name in before["cases"]
        for line in differences(before["cases"][name], of_now, same)
    ]


def add(path: Path) -> int:
    """Train what a file of losses does not have yet. Its machine and data must be the same: it tells of one."""
    before = json.loads(path.read_text())
    if before["fingerprint"] != fingerprint():
        print("another kind of machine: write all cases anew with --out")
        return 1
    now = record([case for case in cases() if case.name not in before["cases"]])
    known = {**before["cases"], **now["cases"]}
    path.write_text(one_case_a_line({**before, "cases": {case.name: known[case.name] for case in cases()}}))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the losses to this file")
    parser.add_argument("--compare", type=Path, help="compare with the losses in this file")
    parser.add_argument("--add", type=Path, help="add the losses of new cases to this file")
    arguments = parser.parse_args()
    if arguments.add:
        return add(arguments.add)
    now = record(cases())
    if arguments.out:
        arguments.out.write_text(one_case_a_line(now))
    if not arguments.compare:
        return 0
    before = json.loads(arguments.compare.read_text())
    if before["fingerprint"] != now["fingerprint"]:
        print(f"another kind of machine: compared to {RELATIVE:g} and not bit by bit")
    found = compare(before, now)
    print("\n".join(found) or f"{len(now['cases'])} cases: no difference")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

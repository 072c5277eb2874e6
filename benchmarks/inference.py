"""Forward passes without gradients of dense, AltUp and Recycled T5s: launched, and recorded by `altup.accelerate`.

    python benchmarks/inference.py --size small --rows 8

512 input and 114 target tokens, teacher-forced, bf16 weights, compiled layers. Milliseconds by the host's clock,
the median of several rounds in which all take turns; the device is waited for after each round.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import altup

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
METHODS = ("dense", "altup", "recycled")
WAYS = {"launched": False, "recorded": True}  # whether calls are recorded


def build(size: str, method: str, record: bool) -> Any:
    torch.manual_seed(0)
    with DEVICE:
        model = altup.AltUpT5ForConditionalGeneration(altup.AltUpT5Config.from_preset(size, method))
    return altup.accelerate(model.to(DTYPE).eval(), record=record)


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def add_row(path: Path, row: dict[str, Any]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tokens", type=int, nargs=2, default=[512, 114])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--csv", type=Path, help="add a row for each model and way to this file")
    options = parser.parse_args()
    chosen = [WAYS[way] for way in options.ways]
    ways = {(method, record): build(options.size, method, record) for method in METHODS for record in chosen}
    for rows in options.rows:
        ids, labels = (torch.randint(3, 32_000, (rows, n), device=DEVICE) for n in options.tokens)
        inputs = {"input_ids": ids, "labels": labels, "return_logits": False}
        losses = {way: [float(model(**inputs).loss) for _ in range(5)][-1] for way, model in ways.items()}
        times: dict[Any, list[float]] = {way: [] for way in ways}
        for _ in range(5):
            for way, model in ways.items():
                synchronize()
                begun = time.perf_counter()
                for _ in range(10):
                    model(**inputs)
                synchronize()
                times[way].append(100 * (time.perf_counter() - begun))
        for (method, record), found in times.items():
            dense = statistics.median(times["dense", record])
            middle = statistics.median(found)
            how = "recorded" if record else "launched"
            text = f"{options.size}, {rows} rows, {method} {how}: {middle:.2f} ms"
            loss = losses[method, record]
            print(f"{text}, {middle / dense - 1:+.1%} over dense, loss {loss:.4f}", flush=True)
            if options.csv:
                add_row(
                    options.csv,
                    {
                        "size": options.size, "rows": rows, "method": method, "way": how, "ms": f"{middle:.3f}",
                        "over_dense": f"{middle / dense - 1:.3f}", "loss": f"{loss:.4f}",
                        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
                        "torch": torch.__version__, "transformers": transformers.__version__,
                        "command": "python benchmarks/inference.py", "date": datetime.now(UTC).date(),
                    },
                )  # fmt: skip


if __name__ == "__main__":
    main()

"""docs/images/gemma3n.svg, from measured steps: `python tools/gemma3n_figure.py`."""

from __future__ import annotations

import csv

from figure import GREY, ROOT, drawn

ROWS = ROOT / "benchmarks/results/gemma3n_h200.csv"
WORKLOADS = {"full fine-tuning": "all weights", "lora": "LoRA"}
MODELS = {  # a provider in the rows: what the figure calls it, its colour
    "hf eager": ("Hugging Face, eager", "#b9bfcc"),
    "hf flex layers compiled": ("Hugging Face, compiled, with FlexAttention", "#e08a2b"),
    "altup recorded": ("altup.accelerate(model, record=True)", "#4b7bd1"),
}


def milliseconds(provider: str, workload: str) -> float:
    """The median of a step of 4 × 2,048 tokens in the newest run, whole or else its forward and backward pass."""
    with ROWS.open(newline="") as file:
        found = [
            (row["mode"] == "step", row["date"], float(row["p50"]))
            for row in csv.DictReader(file)
            if (row["provider"], row["method"], row["metric"]) == (provider, workload, "ms")
            and (row["size"], row["batch"], row["inputs"]) == ("E2B", "4", "2048")
            and row["mode"] in ("step", "both")
        ]
    return max(found)[-1]


def main() -> None:
    with drawn("gemma3n", 2.6) as axes:
        for i, workload in enumerate(WORKLOADS):
            for j, (provider, (label, colour)) in enumerate(MODELS.items()):
                ms, y = milliseconds(provider, workload), -(4 * i + j)
                axes.barh(y, ms, height=0.9, color=colour)
                axes.text(ms + 8, y, f"{ms:.0f} ms  {label}", color=GREY, va="center", fontsize=10)
        axes.set_yticks([-1, -5], WORKLOADS.values())
        axes.set_xlabel("one training step of Gemma 3n E2B's shape, 8,192 tokens, one H200, ms")
        axes.set_xlim(0, 1130)
        axes.set_xticks(range(0, 801, 200))


if __name__ == "__main__":
    main()

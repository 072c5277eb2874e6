"""Does `altup.widen` help a decoder that trains on? A byte-level Llama of 0.2 million parameters, on a CPU.

    python benchmarks/widen_small_decoder.py run --text corpus-train.jsonl.zst    # {"text": …} a line
    python benchmarks/widen_small_decoder.py run --study late --text corpus-train.jsonl.zst
    python benchmarks/widen_small_decoder.py report

It is pretrained for 600 steps on the first 3 MB of the text (kept in build/), then goes on for 200 steps with a
fresh optimizer: as it is or widened. In the study `late` it is pretrained for 5,000 steps, so that more steps
bring little, goes on for 800, and has a head of its own from the start. A run is one line of
benchmarks/results/widen_small_decoder.csv; those that stand there already are not run again. Models of one seed
see the same batches.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import widen_real_weights as shared
from torch import Tensor

import altup

RESULTS = Path(__file__).parent / "results" / "widen_small_decoder.csv"
LENGTH, BATCH, WARMUP = 64, 16, 20
UNTIED = "original, head untied"  # which AltUp does as well, so that it may be what helps
# AltUp cuts a head into K shares. Adam moves each as far as it would have moved the whole: K times as far in all.
HEAD_RATES = {
    "original, head untied, at twice the rate": 2.0,
    "altup, factor 1, head at half the rate": 0.5,
    "altup K=4, factor 1, head at a quarter of the rate": 0.25,
}
MODELS = {
    **shared.MODELS,
    "altup K=4, factor 1": shared.Model("altup", k=4),
    "altup, noise 0.3, factor 1": shared.Model("altup", noise=0.3),
    "altup, factor 1, head at half the rate": shared.Model("altup"),
    "altup K=4, factor 1, head at a quarter of the rate": shared.Model("altup", k=4),
}


@dataclass(frozen=True)
class Study:
    pretrained: Path
    pretraining_steps: int
    tied: bool
    rate: float
    plan: list[tuple[str, int]]  # the model and its steps


STUDIES = {
    # 230 steps of the original take about the time of 200 of AltUp.
    "text": Study(
        Path("build/widen_small_decoder.pt"),
        600,
        True,
        2e-3,
        [
            ("original", 200),
            ("altup, factor 1", 200),
            ("recycled, factor 1", 200),
            ("original", 230),
            (UNTIED, 200),
            ("recycled, factor 100", 200),
            ("altup, factor 100", 200),
            ("altup, factor 1, head at half the rate", 200),
            ("original, head untied, at twice the rate", 200),
        ],
    ),
    # 2.5 and 8 % more steps: what a large Llama pays on a GPU for Recycled and for AltUp.
    "late": Study(
        Path("build/widen_small_decoder_late.pt"),
        5000,
        False,
        2e-3,
        [
            ("original", 800),
            ("altup, factor 1", 800),
            ("original", 864),
            ("recycled, factor 1", 800),
            ("original", 820),
            ("altup K=4, factor 1", 800),
            ("altup, factor 10", 800),
            ("recycled, factor 10", 800),
            ("altup, noise 0.3, factor 1", 800),
            ("altup, factor 1, head at half the rate", 800),
            ("altup K=4, factor 1, head at a quarter of the rate", 800),
        ],
    ),
}


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


def train(
    model: Any, rows: Tensor, steps: int, rate: float, factor: float, seed: int, head_rate: float = 1.0
) -> float:
    """Seconds of the processor that training took."""
    draw = torch.Generator().manual_seed(seed)
    groups = altup.parameter_groups(model, lr=rate, coefficient_factor=factor)
    if head_rate != 1:
        head = model.lm_head.weight
        for group in groups:
            group["params"] = [p for p in group["params"] if p is not head]
        groups.append({"params": [head], "lr": rate * head_rate, "weight_decay": 0.0})
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


def pretrained(study: Study, rows: Tensor) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=study.tied, **sizes))
    if study.pretrained.exists():
        model.load_state_dict(torch.load(study.pretrained))
    else:
        train(model, rows, study.pretraining_steps, 4e-3, 1.0, 0)
        study.pretrained.parent.mkdir(exist_ok=True)
        torch.save(model.state_dict(), study.pretrained)
    return model


def run(path: Path, task: str) -> None:
    rows, held_out = load(path)
    study = STUDIES[task]
    original = pretrained(study, rows)
    print("before", loss_of(original, held_out))
    done = {tuple(row[field] for field in shared.KEY) for row in shared.read(RESULTS)}
    for name, steps in study.plan:
        for seed in (1, 2, 3):
            key = (task, name, f"{study.rate:g}", str(steps), str(seed), "report")
            if key not in done:
                chosen = MODELS.get(name, shared.Model())
                model = copy.deepcopy(original)
                if name.startswith(UNTIED):
                    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
                if chosen.method:
                    altup.widen(model, chosen.method, chosen.k)
                    chosen.add_noise(model, seed)
                head_rate = HEAD_RATES.get(name, 1.0)
                seconds = train(model, rows, steps, study.rate, chosen.factor, seed, head_rate)
                loss = f"{loss_of(model, held_out):.5f}"
                far = f"{shared.moved(model):.4g}"
                shared.append(RESULTS, (*key, len(held_out), loss, "", far, f"{seconds:.1f}", torch.__version__))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--study", choices=STUDIES, default="text")
    parser.add_argument("--text", type=Path, help="documents, one JSON object a line, zstd")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "run":
        run(options.text, options.study)
    else:
        shared.report(RESULTS, {task: study.plan[0][1] for task, study in STUDIES.items()})


if __name__ == "__main__":
    main()

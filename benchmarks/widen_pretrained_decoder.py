"""Does a decoder that goes on training learn more when it is widened? On a GPU, with a decoder pretrained there.

    altup prepare TEXT… --vocab-size 4000 --out DATA
    python benchmarks/widen_pretrained_decoder.py run --data DATA
    python benchmarks/widen_pretrained_decoder.py report            # the table of docs/widen.md
    python benchmarks/widen_pretrained_decoder.py run --data DATA --tiny --csv tiny.csv --jobs 2     # on a CPU

A dense decoder (8 layers 256 wide, 64 × 256 tokens a step, Muon) is pretrained with each seed, and goes on with a
fresh optimizer and the text in another order: as it is, or widened as by `altup upcycle`, so that it computes the
same at first. It also goes on as it is for as many steps as fit into the time of each widened one, by steps that
were timed in turns, alone on the GPU.

Each model has its own rate, and each widened one its own rate of the coefficients: those with the lowest loss on
one half of the held-out text, after fewer steps, with a seed of their own (part `choose`). What is reported comes
from the other half and from other seeds (part `report`).

All runs share a few processes, which build and record each model once and then give it other weights, so that no
run waits for a compiler. A run is a line of the file; those that stand there already are not run again. With
`--seconds` the reported runs have as many steps as fit, and nothing is begun that would end later. Under NVIDIA's
MPS several processes are faster than one.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import csv
import math
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import widen_real_weights as shared

RESULTS = Path(__file__).parent / "results" / "widen_pretrained_decoder_h200.csv"
METHODS = {
    "dense": ("dense", 1),
    "recycled": ("recycled", 2),
    "altup": ("altup", 2),
    "recycled K=4": ("recycled", 4),
    "altup K=4": ("altup", 4),
}
TUNED = ("dense", "recycled", "altup")  # the others have what was best with two blocks
RATES = (0.0015, 0.003, 0.006, 0.012, 0.024, 0.048, 0.096)
FIRST_RATES = (0.006, 0.012, 0.024)
FACTORS = (0.3, 3.0)  # beside 1, of the coefficients' rate
PRETRAINING_RATE = 0.03
CHOOSING_SEED, SEEDS = 0, (1, 2, 3)
OTHER_ORDER = 1000  # added to a seed where a model goes on, which else would see the same batches again
SHAPES = {
    "small": {"d_model": 256, "d_ff": 768, "d_kv": 32, "num_heads": 8, "num_kv_heads": 4, "num_layers": 8},
    "tiny": {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2},
}
KEY = ("part", "model", "seed", "steps", "rate", "factor")
FIELDS = (
    *KEY, "pretrained", "loss", "accuracy", "before", "moved", "ms", "ratio", "parameters", "seconds", "device",
    "torch",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What all runs share."""

    data: str
    shape: str
    batch: int
    tokens: int
    held_out: int | None  # sequences, half of them to choose by
    weights: Path  # where pretrained ones are kept
    until: float  # a time of `time.time`

    def pretrained(self, seed: int, steps: int) -> Path:
        return self.weights / f"seed-{seed}-steps-{steps}.pt"

    def config(self, method: str, steps: int, rate: float) -> Any:
        """With a factor for the coefficients of its own, so that they have a rate of their own to be changed."""
        import altup

        name, k = METHODS[method]
        return altup.PretrainConfig(
            data=self.data, model="decoder", size="small", method=name, k=None if k == 1 else k,
            model_overrides=SHAPES[self.shape], batch_size=self.batch, inputs_length=self.tokens,
            optimizer="muon", steps=steps, lr=rate, decay_fraction=0.3, eval_sequences=10**6,
            precision="bf16" if torch.cuda.is_available() else "fp32",
            lr_factors={} if k == 1 else {"coefficients": 0.5},
        )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Of one model: `begins` is how many steps the dense model that it goes on from was trained, 0 for none."""

    part: str
    model: str
    seed: int
    steps: int
    rate: float
    factor: float = 1.0
    begins: int = 0

    @property
    def key(self) -> tuple[str, ...]:
        return (self.part, self.model, str(self.seed), str(self.steps), f"{self.rate:g}", f"{self.factor:g}")

    @property
    def cost(self) -> float:
        """In steps of the dense model, roughly."""
        return self.steps * {"dense": 1.0, "recycled": 1.1, "altup": 1.2}.get(METHODS[self.model][0], 1.0)


class Worker:
    """A process with every model, built, compiled and recorded once."""

    def __init__(self, setting: Setting, models: tuple[str, ...]) -> None:
        from altup.data.batches import ShardBatches
        from altup.data.shards import TokenStream
        from altup.studies.jobs import objective_of
        from altup.training.engine import numerics
        from altup.training.parallel import join_process_group
        from altup.training.prefetch import assemble

        torch.set_num_threads(1)
        self.setting = setting
        around = contextlib.ExitStack()  # to the end of the process
        self.group = around.enter_context(join_process_group())
        around.enter_context(numerics(deterministic=False, low_precision=torch.cuda.is_available()))
        atexit.register(around.close)
        self.text, self.unseen = (TokenStream(setting.data, split) for split in ("train", "validation"))
        config = setting.config("dense", 10, 0.01)
        self.objective = objective_of(config, self.text.vocabulary)
        batches = ShardBatches(self.text, self.objective, setting.batch, 0)
        self.batch = assemble(batches, setting.batch, self.group, 0)
        self.engines = {model: self._build(model) for model in models}

    def _build(self, model: str) -> Any:
        from altup.training.engine import Engine

        engine = Engine(self._widened(model, self._fresh(0), 0), self.setting.config(model, 10, 0.01), self.group)
        for _ in range(2):
            engine.step(0, self.batch, self.batch.tokens)
        self._wait()
        return engine

    def _wait(self) -> None:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize()

    def _fresh(self, seed: int) -> Any:
        from altup.studies.jobs import fresh_model

        torch.manual_seed(seed)
        return fresh_model(self.setting.config("dense", 10, 0.01), self.text.vocabulary)

    def _widened(self, model: str, dense: Any, seed: int) -> Any:
        import altup

        method, k = METHODS[model]
        return altup.upcycle(dense, method, k, seed).float()

    def start(self, run: Run) -> Any:
        """The engine of a run's model as a fresh one: its first weights, and an optimizer that has done nothing.

        Everything is changed in place, where recorded graphs find it.
        """
        from altup.training.optimizers import build_optimizer

        dense = self._fresh(run.seed)
        if run.begins:
            dense.load_state_dict(torch.load(self.setting.pretrained(run.seed, run.begins)))
        engine = self.engines[run.model]
        config = self.setting.config(run.model, run.steps, run.rate)
        engine.plain.load_state_dict(self._widened(run.model, dense, run.seed).state_dict())
        fresh = build_optimizer("muon", engine.plain, lr=0.0, lr_factors=config.lr_factors)
        for p, state in fresh.state.items():
            for name, tensor in state.items():
                engine.optimizer.state[p][name].copy_(tensor)
        coefficients = self._coefficients(engine)
        for group in engine.optimizer.param_groups:
            if group["params"][0] in coefficients:
                group["lr_factor"] = run.factor
        engine.schedule = config.rate()
        return engine

    def _coefficients(self, engine: Any) -> set[Any]:
        from altup.nn import coefficient_names

        names = coefficient_names(engine.plain)
        return {p for name, p in engine.plain.named_parameters() if name in names}

    def do(self, run: Run) -> dict[str, Any] | None:
        """A row of the results; None if time was over first."""
        from altup.data.batches import ShardBatches
        from altup.training.prefetch import prefetch

        engine = self.start(run)
        part = "tuning" if run.part == "choose" else "reporting"
        before = f"{self.evaluate(engine, part)['loss']:.5f}" if run.part == "choose" else ""
        seed = run.seed + (OTHER_ORDER if run.begins else 0)
        batches = ShardBatches(self.text, self.objective, self.setting.batch, seed)
        begun = time.perf_counter()
        data = prefetch(batches, range(run.steps), self.setting.batch, self.group)
        for step, batch in enumerate(data):
            engine.step(step, batch, batch.tokens)
            if step % 50 == 49:
                self._wait()  # so that the host does not run far ahead
                if time.time() > self.setting.until:
                    data.close()
                    return None
        self._wait()
        seconds = time.perf_counter() - begun
        if run.part == "pretrain":
            weights = {name: tensor.cpu() for name, tensor in engine.plain.state_dict().items()}
            self.setting.weights.mkdir(parents=True, exist_ok=True)
            torch.save(weights, self.setting.pretrained(run.seed, run.steps))
        found = self.evaluate(engine, part)
        return self._row(
            run, pretrained=run.begins, loss=f"{found['loss']:.5f}", accuracy=f"{found['accuracy']:.5f}",
            before=before, moved=f"{self._moved(engine):.4g}", seconds=f"{seconds:.2f}",
        )  # fmt: skip

    def _row(self, run: Run, **measured: Any) -> dict[str, Any]:
        cuda = self.group.device.type == "cuda"
        return {
            **dict(zip(KEY, run.key, strict=True)),
            **measured,
            "parameters": sum(p.numel() for p in self.engines[run.model].plain.parameters()),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "torch": torch.__version__,
        }

    def evaluate(self, engine: Any, part: str) -> dict[str, float]:
        """On one half of the held-out text; not compiled, for that would compile once more."""
        from altup.data.batches import HeldOut
        from altup.training.metrics import held_out_loss

        held_out = HeldOut(self.unseen, self.objective, self.setting.held_out, part=part)
        with torch.compiler.set_stance("force_eager"):
            found = held_out_loss(held_out, self.setting.batch, self.group, engine.autocast)(engine.plain, 0)
        return found if math.isfinite(found.get("loss", math.nan)) else {"loss": math.inf, "accuracy": 0.0}

    def _moved(self, engine: Any) -> float:
        """How far the coefficients went from P = I, g = 1, at most."""
        far = [0.0]
        for p in self._coefficients(engine):
            start = torch.eye(len(p), device=p.device) if p.ndim == 2 else torch.ones_like(p)
            far.append(float((p.detach() - start).abs().max()))
        return max(far)

    def time(self, rounds: int) -> list[dict[str, Any]]:
        """Milliseconds of a step of each model, in turns."""
        from altup.bench.problem import Work
        from altup.bench.timing import time_in_turns

        def work(engine: Any) -> Work:
            return Work(lambda i: engine.step(i, self.batch, self.batch.tokens), mode="train", together=True)

        works = {model: work(engine) for model, engine in self.engines.items()}
        times = time_in_turns(works, self.group.device, rounds, 8)
        return [
            self._row(
                Run("time", model, 0, 0, 0.0),
                ms=f"{statistics.median(own):.4f}",
                ratio=f"{statistics.median(a / b for a, b in zip(own, times['dense'], strict=True)):.4f}",
            )
            for model, own in times.items()
        ]


WORKER: Worker | None = None


def begin_worker(setting: Setting, models: tuple[str, ...], built: Any) -> None:
    global WORKER
    WORKER = Worker(setting, models)
    built.release()


def do(run: Run) -> dict[str, Any] | None:
    assert WORKER is not None
    return WORKER.do(run)


def time_all(rounds: int) -> list[dict[str, Any]]:
    assert WORKER is not None
    return WORKER.time(rounds)


def nothing() -> None:
    """What lets a pool start a process."""


def wait_until_built(pool: ProcessPoolExecutor, jobs: int, built: Any) -> None:
    started = [pool.submit(nothing) for _ in range(jobs)]
    for _ in range(jobs):
        while not built.acquire(timeout=1):
            for one in started:
                if one.done():
                    one.result()  # which raises where a process could not begin


@dataclass
class Study:
    """The runs in their order, and the file of their results."""

    pool: ProcessPoolExecutor
    jobs: int
    csv: Path
    until: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    steps_a_second: float = math.inf  # of the dense model, all processes together

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        fresh = not self.csv.exists()
        with self.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            if fresh:
                writer.writeheader()
            writer.writerow(row)
        print(f"{time.strftime('%H:%M:%S')} {[row[name] for name in (*KEY, 'loss') if name in row]}", flush=True)

    def done(self, run: Run) -> bool:
        return any(tuple(row[name] for name in KEY) == run.key for row in self.rows)

    def fits(self, run: Run) -> bool:
        return time.time() + self.jobs * run.cost / self.steps_a_second < self.until

    def do(self, runs: list[Run]) -> None:
        """All that is not done and fits into the time, the first ones first; tells how fast they were."""
        begun, made = time.time(), 0.0
        waiting, running = [run for run in dict.fromkeys(runs) if not self.done(run)], {}
        while waiting or running:
            while waiting and len(running) < self.jobs:
                if self.fits(run := waiting.pop(0)):
                    running[self.pool.submit(do, run)] = run
                else:
                    print("left out for lack of time:", *run.key, flush=True)
            if running:
                ended = next(as_completed(running))
                run = running.pop(ended)
                if row := ended.result():
                    self.add(row)
                    made += run.cost
        if made and len(runs) >= self.jobs:
            self.steps_a_second = made / (time.time() - begun)

    def loss(self, run: Run) -> float:
        found = [float(row["loss"]) for row in self.rows if tuple(row[name] for name in KEY) == run.key]
        return found[0] if found else math.inf

    def ratio(self, model: str) -> float:
        """Time of a step over the dense model's."""
        return next(float(r["ratio"]) for r in self.rows if (r["part"], r["model"]) == ("time", model))

    def measure_times(self, rounds: int) -> None:
        """Of every model, while nothing else runs."""
        if not any(row["part"] == "time" for row in self.rows):
            for row in self.pool.submit(time_all, rounds).result():
                self.add(row)

    def pretrain(self, steps: int, setting: Setting) -> None:
        """A run whose weights are gone is made again."""
        runs = [Run("pretrain", "dense", seed, steps, PRETRAINING_RATE) for seed in (CHOOSING_SEED, *SEEDS)]
        lost = {run.key for run in runs if not setting.pretrained(run.seed, steps).exists()}
        self.rows = [row for row in self.rows if tuple(row[name] for name in KEY) not in lost]
        self.do(runs)

    def choose(self, begins: int, steps: int) -> dict[str, Run]:
        """The best rate of each model, then the best factor of its coefficients."""

        def tried(model: str, rate: float, factor: float = 1.0) -> Run:
            return Run("choose", model, CHOOSING_SEED, steps, rate, factor, begins)

        rates = {model: set(FIRST_RATES) for model in TUNED}
        while True:
            self.do([tried(model, rate) for rate in FIRST_RATES for model in TUNED])
            self.do([tried(model, rate) for model in TUNED for rate in sorted(rates[model] - {*FIRST_RATES})])
            best = {model: min((tried(model, rate) for rate in rates[model]), key=self.loss) for model in TUNED}
            beyond = {model: self._beyond(rates[model], best[model].rate) for model in TUNED}
            if not any(beyond.values()):
                break
            for model in TUNED:
                rates[model] |= beyond[model]
        others = {m: [replace(best[m], factor=factor) for factor in FACTORS] for m in TUNED if m != "dense"}
        self.do([run for runs in others.values() for run in runs])
        return {model: min((run, *others.get(model, ())), key=self.loss) for model, run in best.items()}

    @staticmethod
    def _beyond(tried: set[float], best: float) -> set[float]:
        """The next rate, where the best is the first or the last of those that were tried."""
        at = RATES.index(best)
        found = {RATES[at - 1]} if best == min(tried) and at else set()
        return found | ({RATES[at + 1]} if best == max(tried) and at + 1 < len(RATES) else set())

    def steps_that_fit(self) -> int:
        """Of a reported run, so that all seeds of all models with two blocks end in time."""
        ratios = [self.ratio(model) for model in TUNED]
        units = len(SEEDS) * (sum(ratios) + sum(ratios[1:]))
        fit = 0.85 * (self.until - time.time()) * self.steps_a_second / units
        return max(20, min(5000, int(fit) // 20 * 20))

    def report(self, best: dict[str, Run], steps: int, models: tuple[str, ...]) -> None:
        """At equal steps and in equal time, seed by seed."""

        def runs(seed: int, own: str, tuned: str) -> list[Run]:
            chosen = replace(best[tuned], part="report", seed=seed, steps=steps, model=own)
            longer = replace(best["dense"], part="report", seed=seed, steps=round(steps * self.ratio(own)))
            return [chosen] if own == "dense" else [chosen, longer]

        self.do([run for seed in SEEDS for own in TUNED for run in runs(seed, own, own)])
        more = [own for own in models if own not in TUNED]
        self.do([run for own in reversed(more) for seed in SEEDS for run in runs(seed, own, own.split()[0])])


def run_all(options: argparse.Namespace) -> None:
    begun = time.time()
    models = tuple(METHODS if not options.only else ("dense", *options.only))
    if options.until == "pretrain":
        models = ("dense",)
    setting = Setting(
        data=str(options.data), shape="tiny" if options.tiny else "small", batch=8 if options.tiny else 64,
        tokens=32 if options.tiny else 256, held_out=64 if options.tiny else None, weights=options.weights,
        until=begun + options.seconds if options.seconds else math.inf,
    )  # fmt: skip
    context = multiprocessing.get_context("spawn")
    built = context.Semaphore(0)
    with ProcessPoolExecutor(options.jobs, context, begin_worker, (setting, models, built)) as pool:
        wait_until_built(pool, options.jobs, built)
        print(f"built after {time.time() - begun:.1f} s", flush=True)
        study = Study(pool, options.jobs, options.csv, setting.until, read(options.csv))
        study.pretrain(options.pretrain_steps, setting)
        if options.until == "pretrain":
            return
        best = study.choose(options.pretrain_steps, options.choose_steps)
        if options.until == "choose":
            return
        study.measure_times(3 if options.tiny else 12)
        steps = options.steps if math.isinf(setting.until) else study.steps_that_fit()
        told = {name: (run.rate, run.factor) for name, run in best.items()}
        print(f"{steps} steps; {study.steps_a_second:.1f} steps a second; rates and factors {told}", flush=True)
        study.report(best, steps, models)
        print(f"ended after {time.time() - begun:.1f} s", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    return list(shared.read(path))


def report(path: Path) -> None:
    """Means over the seeds, and by seed the difference from the dense decoder that went on."""
    rows = read(path)
    ratios = {row["model"]: float(row["ratio"]) for row in rows if row["part"] == "time"}
    reported: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["part"] == "report":
            reported.setdefault((row["model"], int(row["steps"])), {})[row["seed"]] = row
    if not reported:
        raise SystemExit(f"{path} has no run that is reported yet")

    def difference(own: dict[str, dict[str, Any]], base: dict[str, dict[str, Any]]) -> str:
        both = sorted(own.keys() & base.keys())
        return shared.interval([float(own[s]["loss"]) - float(base[s]["loss"]) for s in both]) if both else ""

    print("| model | time a step | steps | rate | factor | seeds | loss | as many steps | as much time |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (model, steps), seeds in sorted(reported.items(), key=lambda item: list(METHODS).index(item[0][0])):
        loss = statistics.fmean(float(row["loss"]) for row in seeds.values())
        first = next(iter(seeds.values()))
        as_many = as_long = ""
        if model != "dense":
            as_many = difference(seeds, reported.get(("dense", steps), {}))
            as_long = difference(seeds, reported.get(("dense", round(steps * ratios[model])), {}))
        cells = (model, f"{ratios[model]:.3f}", steps, first["rate"], first["factor"], len(seeds), f"{loss:.4f}")
        print(f"| {' | '.join(map(str, (*cells, as_many, as_long)))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--data", type=Path, help="folder made by `altup prepare`")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--weights", type=Path, default=Path("build/widen_pretrained_decoder"))
    parser.add_argument("--jobs", type=int, default=4, help="processes that train at once")
    parser.add_argument("--pretrain-steps", type=int, default=1000)
    parser.add_argument("--choose-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=500, help="of the runs that are reported")
    parser.add_argument("--seconds", type=float, help="for all of it, starts included; decides the steps")
    parser.add_argument("--until", choices=("pretrain", "choose", "report"), default="report")
    parser.add_argument("--only", nargs="+", choices=[name for name in METHODS if name != "dense"])
    parser.add_argument("--tiny", action="store_true", help="a toy, to see it work")
    options = parser.parse_args()
    if options.what == "run":
        run_all(options)
    else:
        report(options.csv)


if __name__ == "__main__":
    main()

"""Would the tests notice? The code is broken in fifty places, one at a time, and the tests beside each are run.

    python -m tests.chaos.mutations            # all; prints who noticed, and ends with 1 if nobody did
    python -m tests.chaos.mutations seal 17    # those with a word in their name, or a number

A break is a file, what stands in it once, and what takes its place. It is made in a copy of the package.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "altup"
REFERENCE = "tests/models/test_reference.py"
SECONDS = 900


@dataclass(frozen=True)
class Mutation:
    """`tests` are those at the mirror path, unless others are named."""

    what: str
    file: str
    old: str
    new: str
    tests: str = ""

    def run(self) -> str:
        path = Path(self.file)
        return self.tests or f"tests/{path.parent}/test_{path.stem}.py"

    def apply(self, package: Path) -> None:
        path = package / self.file
        text = path.read_text(encoding="utf-8")
        if (number := text.count(self.old)) != 1:
            raise ValueError(f"{self.what}: {self.file} holds {number} times {self.old!r}; say where it is now")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


M = Mutation
CORE, DATA, SHARDS = "core/sealed_folders.py", "data/batches.py", "data/shards.py"
SEALED = "tests/core/test_sealed_folders.py tests/training/test_checkpoints.py"
DISK = "tests/core/test_forgetting_disk.py"
MUTATIONS = [
    # Formulas of the rules
    M("altup predicts with P transposed", "nn/altup.py", '"ij,j...->i..."', '"ji,j...->i..."'),
    M(
        "altup corrects twice as far",
        "nn/altup.py",
        "(x + g * (computed - predicted[self.active]))",
        "(x + 2 * g * (computed - predicted[self.active]))",
    ),
    M(
        "altup corrects by block 0",
        "nn/altup.py",
        "(x + g * (computed - predicted[self.active]))",
        "(x + g * (computed - predicted[0]))",
    ),
    M(
        "alternating takes block 0 twice",
        "nn/altup.py",
        "i % num_blocks if selection",
        "i // 2 % num_blocks if selection",
    ),
    M(
        "equal blocks stay equal",
        "nn/altup.py",
        "return self.num_blocks - len(set(self.active)) > 1",
        "return False",
    ),
    M(
        "noise of equal blocks changes the function",
        "nn/altup.py",
        "step - step.mean(dim=1, keepdim=True)",
        "step - step.mean(dim=0, keepdim=True)",
    ),
    M(
        "recycled is averaged where it is summed",
        "nn/altup.py",
        '("sum" if recycled else "concat")',
        '("mean" if recycled else "concat")',
        f"tests/nn/test_altup.py {REFERENCE}",
    ),
    M("sequence-altup starts with b = 0", "nn/sequence.py", "self.b.fill_(1.0)", "self.b.fill_(0.0)"),
    M(
        "pooling counts padding",
        "nn/sequence.py",
        "number = self._windows(real).sum(dim=2).clamp(min=1)",
        "number = self._windows(torch.ones_like(real)).sum(dim=2).clamp(min=1)",
    ),
    M(
        "left padding is not refused",
        "nn/sequence.py",
        "only_right = (real[:, 1:] <= real[:, :-1]).all()",
        "only_right = (real[:, 1:] <= real[:, 1:]).all()",
    ),
    M(
        "experts without the router's weight",
        "nn/experts.py",
        "* weights.unsqueeze(-1).to(outputs.dtype)",
        "* torch.ones_like(weights).unsqueeze(-1).to(outputs.dtype)",
    ),
    M(
        "experts all take the last row",
        "nn/experts.py",
        "of_row = expert[order]",
        "of_row = expert[order].sort().values * 0",
    ),
    M(
        "dynamic coefficients are not clipped",
        "nn/dynamic.py",
        "self.A.data.clamp_(-self.clip, self.clip)",
        "pass",
    ),
    M(
        "dynamic g is made of x",
        "nn/dynamic.py",
        "P, g = self.prediction(state[self.active]), self.correction(y)",
        "P, g = self.prediction(state[self.active]), self.correction(state[self.active])",
        f"tests/nn/test_dynamic.py {REFERENCE}",
    ),
    M(
        "coefficients are rounded",
        "nn/coefficients.py",
        "return tensor.to(moved.device, torch.float32)",
        "return moved",
    ),
    # Models
    M(
        "the first layer is strided",
        "models/config.py",
        "range(1, self.num_layers - 1)",
        "range(0, self.num_layers - 1)",
        REFERENCE,
    ),
    M(
        "the sum's epsilon is that of one block",
        "models/t5/model.py",
        "config.layer_norm_epsilon * scale",
        "config.layer_norm_epsilon",
        REFERENCE,
    ),
    M(
        "the future is seen",
        "models/masks.py",
        "torch.arange(keys, device=device) <= positions[:, None]",
        "torch.arange(keys, device=device) <= positions[:, None] + 1",
        "tests/models/test_decoder.py",
    ),
    M(
        "widen's last comparison is off",
        "models/widening/widen.py",
        "if not error <= tolerance(output):",
        "if False:",
        "tests/models/widening/test_structure.py",
    ),
    M(
        "widen's tolerance is a million times as large",
        "models/widening/probe.py",
        "return 1e-3 if output.dtype",
        "return 1e3 if output.dtype",
        "tests/models/widening/test_structure.py",
    ),
    M("upcycle's comparison is off", "models/upcycling.py", "if not found <= tolerance(before):", "if False:"),
    M(
        "models that are not finite are taken",
        "models/widening/probe.py",
        "and not weight.isfinite().all():",
        "and False:",
        "tests/models/test_upcycling.py",
    ),
    M(
        "narrow does not look at coefficients",
        "models/widening/widen.py",
        "    _check_coefficients(model, plan)\n",
        "",
        "tests/models/widening/test_load_and_narrow.py",
    ),
    # Data: order, masks, seeds
    M("the order does not depend on the seed", DATA, "keys(self.seed, ORDER, epoch)", "keys(0, ORDER, epoch)"),
    M(
        "every epoch has the same order",
        DATA,
        "keys(self.seed, ORDER, epoch)",
        "keys(self.seed, ORDER, 0 * epoch)",
    ),
    M(
        "masks do not depend on the epoch",
        DATA,
        "keys(self.seed, MASKS, epoch, sequence)",
        "keys(self.seed, MASKS, 0, sequence)",
    ),
    M(
        "the batch is counted from the process",
        DATA,
        "np.divmod(step * self.batch_size + np.arange(start, stop)",
        "np.divmod(step * self.batch_size + np.arange(stop - start)",
    ),
    M(
        "held-out parts overlap",
        "data/__init__.py",
        "slice(1, None, 2)",
        "slice(0, None, 2)",
        "tests/data/test_batches.py",
    ),
    M("one mixing step less", "data/randomness.py", "x *= np.uint64(0x94D049BB133111EB)", "pass"),
    M(
        "a sentinel stands behind its span",
        "data/objectives.py",
        "positions = before + np.arange(self.spans)",
        "positions = before + np.arange(self.spans) + 1",
    ),
    M(
        "masked tokens are never random",
        "data/objectives.py",
        "np.where(fate == 8, random, asked)",
        "np.where(fate == 18, random, asked)",
    ),
    # Schedules and steps
    M(
        "the last step has the rate of the one before",
        "training/optimizers/config.py",
        "remaining, decay_steps = steps - step,",
        "remaining, decay_steps = steps - step + 1,",
        "tests/training/test_schedules.py",
    ),
    M(
        "rsqrt forgets its warm-up",
        "training/optimizers/config.py",
        "1 / math.sqrt(max(step, warmup_steps))",
        "1 / math.sqrt(max(step, 1))",
        "tests/training/test_schedules.py",
    ),
    M("a spike is never one", "training/spikes.py", "return loss > usual +", "return loss > 1e9 + usual +"),
    # Seals and checks
    M("checkpoints: hashes are not compared", CORE, "if digest != digests[file]:", "if False:", SEALED),
    M(
        "checkpoints: sizes are not compared",
        CORE,
        "if (found := file.stat().st_size) != size:",
        "if (found := file.stat().st_size) < 0:",
        SEALED,
    ),
    M("files are not flushed", CORE, "list(pool.map(flush, files.values()))", "list(files.values())", DISK),
    M(
        "a rename is not flushed",
        CORE,
        "    finished.rename(target)\n    flush(target.parent)\n",
        "    finished.rename(target)\n",
        DISK,
    ),
    M("a new folder is not flushed into its parent", "core/files.py", "flush(one.parent)", "pass", DISK),
    M("an atomic write is not flushed", "core/files.py", "        flush(temporary)\n", "", DISK),
    M(
        "manifest: its own hash is not compared",
        CORE,
        "if content.pop(SEAL, None) != _digest(content):",
        "if content.pop(SEAL, None) is None:",
        "tests/data/test_shards.py",
    ),
    M(
        "manifest: the tokenizer is not asked",
        SHARDS,
        "if tokenizers.vocabulary(folder / TOKENIZER) != vocabulary:",
        "if False:",
    ),
    M("shards: hashes are not compared", SHARDS, "if hashed and sha256_of(path) != shard.sha256:", "if False:"),
    M(
        "a run continues with other roles of tokens",
        DATA,
        '            "vocabulary": self.stream.vocabulary.seal,\n',
        "",
        "tests/data/test_shards.py",
    ),
    M(
        "metrics: links are not compared",
        "training/metrics.py",
        "link == _link(last, record)",
        "True",
        "tests/training/test_resume.py",
    ),
    M(
        "a state of another step is taken",
        "training/checkpoints.py",
        "if state.step != step_of(checkpoint):",
        "if False:",
    ),
    M(
        "a checkpoint of other settings is taken",
        "training/run_folder.py",
        "            self._check_seal(checkpoint, config)\n",
        "            pass\n",
    ),
    M(
        "a lost folder is not noticed",
        "training/run_folder.py",
        "if self.lock is not None and self.lock.lost:",
        "if False:",
    ),
    M("two conversions write to one folder", CORE, "if any(target.iterdir()):", "if False:", SEALED),
    M(
        "weights of whole numbers are taken",
        "core/pretrained.py",
        "and not kind.startswith(FLOATS):",
        "and False:",
    ),
    M(
        "an index may name pickles",
        "core/pretrained.py",
        "if not check_file_name(name, str(path)).endswith(SAFETENSORS):",
        "if False:",
    ),
    M(
        "tokenizers are not tried",
        "core/tokenizer_trial.py",
        "if reason := _tried(",
        "if reason := False and _tried(",
    ),
    M("names lead elsewhere", "core/files.py", "if not FILE_NAME.fullmatch(name):", "if False:"),
    M(
        "a removed lock is not lost",
        "core/files.py",
        "return not os.path.samestat(self.path.stat(), os.fstat(self._descriptor))",
        "return False",
    ),
    M(
        "a terminal obeys",
        "core/console.py",
        "if self.isatty() and CONTROL.search(text):",
        "if False:",
        "tests/cli/test_hostile_text.py",
    ),
]


@dataclass(frozen=True)
class Outcome:
    mutation: Mutation
    noticed_by: str  # a test; empty if none did
    problem: str = ""  # why there is no answer
    seconds: float = 0.0

    def __str__(self) -> str:
        told = self.noticed_by or f"NOBODY ({self.mutation.run()})"
        return f"{self.seconds:4.0f} s  {self.mutation.what}: {self.problem or told}"


def run_tests(tests: list[str], package: Path, *options: str) -> tuple[int, list[str], str]:
    """pytest with a package: its exit code, the tests that failed, and what it said last."""
    environment = {**os.environ, "PYTHONPATH": f"{package.parent}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *options, *tests]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=SECONDS)
    failed = re.findall(r"^FAILED (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode, failed, "".join((done.stdout + done.stderr).strip().splitlines()[-1:])


def try_one(mutation: Mutation, place: Path, failing: list[str]) -> Outcome:
    """Break a copy of the package, and run the tests until one fails that is not `failing` anyway."""
    package = Path(shutil.copytree(PACKAGE, Path(tempfile.mkdtemp(dir=place)) / "src" / "altup"))
    mutation.apply(package)
    began = time.monotonic()
    try:
        skipped = [word for test in failing for word in ("--deselect", test)]
        code, failed, said = run_tests(mutation.run().split(), package, "-x", *skipped)
    except subprocess.TimeoutExpired:
        return Outcome(mutation, "", f"its tests take more than {SECONDS} s")
    finally:
        shutil.rmtree(package.parents[1])
    seconds = time.monotonic() - began
    if code == 1 and failed:
        return Outcome(mutation, failed[0], seconds=seconds)
    return Outcome(mutation, "", "" if code == 0 else f"the tests did not run ({code}): {said}", seconds)


def try_all(mutations: Iterable[Mutation], jobs: int = 2) -> Iterator[Outcome]:
    """Each of them, after the same tests with the code as it is: what fails there has noticed nothing."""
    mutations = list(mutations)
    tests = sorted({test for one in mutations for test in one.run().split()})
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda test: run_tests([test], PACKAGE), tests)
        failing = [test for _, failed, _ in found for test in failed]
        if failing:
            print("these fail without a break, and are left out:", *failing, sep="\n  ")
        yield from pool.map(partial(try_one, place=Path(place), failing=failing), mutations)


def main(words: list[str]) -> int:
    chosen = [
        one for number, one in enumerate(MUTATIONS) if not words or {str(number)} & {*words}
        or any(word in one.what for word in words if not word.isdigit())
    ]  # fmt: skip
    outcomes = []
    for outcome in try_all(chosen):
        outcomes.append(outcome)
        print(outcome, flush=True)
    noticed = sum(bool(outcome.noticed_by) for outcome in outcomes)
    print(f"{noticed} of {len(outcomes)} breaks were noticed")
    return int(noticed < len(outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Whether `altup.widen` is right on every model type of the installed transformers, each at toy size on a CPU.

    PYTHONPATH=src python3 experiments/widen-every-type/widen_types.py --csv ROWS    # continues where it stopped
    … --csv ROWS llama qwen3_vl    # these alone, again
    … --csv ROWS --summary         # the table

Every type is built (`tiny_models.py`), run with each of its modalities, widened by `recycled` and by `altup`
(K = 2), and asked for the same outputs on other inputs, the same hidden states, gradients and greedy text, for the
same outputs from disk, and for the original weights when narrowed. It is also widened without an example, as most
people would, and then run with all modalities. What the original cannot do either is not asked.

Each type has a process of its own, forked from one that has imported everything, with limits on time and memory.

| outcome | means |
|---|---|
| same | all that was asked for holds |
| refused | `widen` said why not, before anything was changed |
| different | accepted, and computes something else: an error in altup |
| crashed | accepted and then fails where the original does not, or fails without a reason: an error in altup |
| not built | no toy config or no inputs were found without a network |
| too slow | the limits on time or memory |
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from tiny_models import build, classes_of, tiny_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from widen_checks import DifferentError, Sweep

from altup.core.errors import UserError

METHODS = ("recycled", "altup")
FIELDS = ("type", "class", "method", "outcome", "why", "inputs", "asked", "seconds", "transformers", "torch")
REASONS = {
    "found no stack of layers": "no list of layers that hand on one state (convolutions, pyramids, shared layers)",
    "may be too narrow": "an image or sound tower that the inputs found do not run",
    "hands on its state before|does not hand the widened": "its state is read or replaced between its layers",
    "AltUp of its own": "it has AltUp already",
    "computes something else": "widened, it would compute something else",
    "widened it fails|does not fit the layer": "something reads the wide state that is not made wide",
    "returns no numbers": "it returns nothing to compare",
    "does not run with the example": "it does not run with the inputs found",
    "layerdrop": "it skips layers at random",
}
SECONDS, GIBIBYTES = 60, 4


def results(model_type: str) -> Iterator[dict[str, Any]]:
    """One row for each method."""
    start = time.process_time()
    row: dict[str, Any] = {"type": model_type, "class": "", "inputs": "", "asked": ""}
    sweep, why = first_that_runs(model_type)
    if sweep is None:
        for method in METHODS:
            seconds = time.process_time() - start
            yield row | {"method": method, "outcome": "not built", "why": why, "seconds": seconds}
        return
    row |= {"class": type(sweep.model).__name__, "inputs": "+".join(sweep.inputs)}
    for method in METHODS:
        outcome, why = "same", ""
        try:
            sweep.run(method)
        except UserError as error:
            outcome, why = "refused", told(error)
            if sweep.asked and sweep.asked != ["without an example"]:
                outcome = "crashed"
        except DifferentError as error:
            outcome, why = "different", f"{notes(error)}{told(error)}"
        except MemoryError as error:
            outcome, why = "too slow", f"memory: {told(error)}"
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            outcome = "crashed"
            why = f"{notes(error)}{told(error)} ({Path(place.filename).name}:{place.lineno})"
        asked = ", ".join(sweep.asked)
        yield row | {
            "method": method,
            "outcome": outcome,
            "why": why,
            "asked": asked,
            "seconds": time.process_time() - start,
        }
        start = time.process_time()


def first_that_runs(model_type: str) -> tuple[Sweep | None, str]:
    """The richest class of a type that can be built and run at some size, or what the first attempt said."""
    errors: list[str] = []
    try:
        classes = classes_of(model_type)[:4]
    except ImportError as error:
        return None, told(error)
    for cls in classes:
        for factor in (16, 8, 4, 2, 1):
            try:
                model = build(cls, tiny_config(model_type, factor))
            except Exception as error:
                errors.append(f"{cls.__name__}: {told(error)}")
                continue
            try:
                return Sweep(model), ""
            except Exception as error:
                errors.append(f"{cls.__name__}: no inputs: {told(error)}")
    return None, errors[0] if errors else "no model has this config"


def told(error: BaseException) -> str:
    text = " ".join(str(error).split("Looked for lists of layers")[0].split())
    return f"{'' if isinstance(error, UserError | DifferentError) else type(error).__name__ + ': '}{text}"[:400]


def notes(error: BaseException) -> str:
    return "".join(f"{note}: " for note in getattr(error, "__notes__", []))


def in_a_process(model_type: str) -> list[dict[str, Any]]:
    """The rows of a type, made by a fork with limits; "too slow" for those that it did not come to."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        limit = GIBIBYTES << 30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        signal.alarm(10 * SECONDS)
        with os.fdopen(writer, "w") as pipe:
            try:
                for row in results(model_type):
                    print(json.dumps(row), file=pipe, flush=True)
            except BaseException as error:
                print(json.dumps({"fatal": told(error)}), file=pipe, flush=True)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        found = [json.loads(line) for line in pipe]
    _, status = os.waitpid(child, 0)
    rows = [row for row in found if "fatal" not in row]
    fatal = next((row["fatal"] for row in found if "fatal" in row), f"ended by {status}")
    blank = {"type": model_type, "class": "", "inputs": "", "asked": "", "seconds": SECONDS}
    missing = [method for method in METHODS if method not in {row["method"] for row in rows}]
    return rows + [blank | {"method": method, "outcome": "too slow", "why": fatal} for method in missing]


def read(path: Path) -> list[dict[str, str]]:
    """The newest row of each type and method."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list({(row["type"], row["method"]): row for row in csv.DictReader(file)}.values())


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    fresh = not path.exists()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if fresh:
            writer.writeheader()
        for row in rows:
            writer.writerow(row | versions | {"seconds": round(row["seconds"], 1)})


def summary(rows: list[dict[str, str]]) -> str:
    """Types by outcome, and what was refused by reason."""
    outcomes = ("same", "refused", "different", "crashed", "not built", "too slow")
    lines = [f"| method | {' | '.join(outcomes)} |", f"|---|{'---|' * len(outcomes)}"]
    for method in METHODS:
        counts = collections.Counter(row["outcome"] for row in rows if row["method"] == method)
        lines.append(f"| `{method}` | {' | '.join(str(counts[outcome]) for outcome in outcomes)} |")
    lines += ["", f"| refused, because | {' | '.join(f'`{method}`' for method in METHODS)} |", "|---|---|---|"]
    refused = [(row["method"], reason(row["why"])) for row in rows if row["outcome"] == "refused"]
    for why, _ in collections.Counter(why for _, why in refused).most_common():
        lines.append(f"| {why} | {' | '.join(str(refused.count((method, why))) for method in METHODS)} |")
    return "\n".join(lines)


def reason(why: str) -> str:
    return next((meaning for pattern, meaning in REASONS.items() if re.search(pattern, why)), why)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types to do again; by default all that have no rows yet")
    parser.add_argument("--csv", type=Path, required=True, help="where rows are appended")
    parser.add_argument("--again", nargs="*", default=[], metavar="OUTCOME", help="do types with these again")
    parser.add_argument("--summary", action="store_true", help="print the table, run nothing")
    options = parser.parse_args()
    if options.summary:
        print(summary(read(options.csv)))
        return
    done = {row["type"] for row in read(options.csv) if row["outcome"] not in options.again}
    several, whole = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
    in_order = sorted(CONFIG_MAPPING_NAMES, key=lambda name: (name not in several, name not in whole))
    todo = options.types or [name for name in in_order if name not in done]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    for name in ("llama", "bert", "vit", "whisper", "clip", "t5"):  # what others import, the forks find imported
        classes_of(name)
    for i, model_type in enumerate(todo, 1):
        rows = in_a_process(model_type)
        append(options.csv, rows)
        told_rows = "; ".join(f"{row['method']} {row['outcome']} {row['why']}".strip() for row in rows)
        print(f"{i}/{len(todo)} {model_type}: {told_rows}", file=sys.stderr, flush=True)
    print(summary(read(options.csv)))


if __name__ == "__main__":
    main()

"""Compact tables of the runs, and the contrasts written down in README.md.

python analyse.py collect RESULTS    RESULTS of `probe.py` → runs.csv, curves.csv, held_out.parquet
python analyse.py                    writes the tables of README.md (behind its `<!-- … -->`) from these files
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
from scipy import stats

HERE = Path(__file__).resolve().parent
STEPS = "1800"
DECIDING = (
    ("AltUp − dense, equal steps", "altup", "dense"),
    ("AltUp − dense of 2,296 steps, equal FLOPs", "altup", "dense-2296"),
    ("AltUp − wider feed-forward, equal FLOPs and steps", "altup", "f1224"),
    ("light AltUp − dense, equal steps", "altup+sub+reduce", "dense"),
    ("light AltUp − value embeddings, equal steps", "altup+sub+reduce", "ve"),
    ("light AltUp with value embeddings − value embeddings, equal steps", "ve+altup+sub+reduce", "ve"),
)


def collect(results: Path) -> None:
    """Adds to what stands in the tables; a run of the same model and length replaces it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables: dict[str, list[dict]] = {"runs": [], "curves": []}
    rows: dict[str, np.ndarray] = {}
    for file in sorted(results.glob("*-*.json")):
        record = json.loads(file.read_text())
        run = {"model": record["model"], "steps": record["steps"]}
        seeds = [seed for _, seed in record["pairs"]]
        shared = {"parameters": record["parameters"], "flops_a_token": record["flops"]}
        tables["runs"] += [
            run | {"seed": s, "loss": x} | shared for s, x in zip(seeds, record["final"], strict=True)
        ]
        for step, losses in record["curve"]:
            point = zip(seeds, losses, strict=True)
            tables["curves"] += [run | {"seed": s, "step": step, "loss": round(x, 4)} for s, x in point]
        losses = np.load(file.with_suffix(".npy"))
        rows |= {f"{file.stem}/{s}": x.astype(np.float32) for s, x in zip(seeds, losses, strict=True)}
    for name, new in tables.items():
        path = HERE / f"{name}.csv"
        made = {(str(x["model"]), str(x["steps"])) for x in new}
        old = list(csv.DictReader(path.open())) if path.exists() else []
        kept = [x for x in old if (x["model"], x["steps"]) not in made]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, new[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept + new)
    path = HERE / "held_out.parquet"
    old_rows = pq.read_table(path).to_pydict() if path.exists() else {}
    pq.write_table(pa.table({**old_rows, **rows}), path, compression="zstd")


def finals() -> dict[str, dict[str, float]]:
    """Loss of each seed by model; a model of another length has it in its name."""
    found: dict[str, dict[str, float]] = {}
    for run in csv.DictReader((HERE / "runs.csv").open()):
        name = run["model"] if run["steps"] == STEPS else f"{run['model']}-{run['steps']}"
        found.setdefault(name, {})[run["seed"]] = float(run["loss"])
    return found


def difference(model: dict[str, float], other: dict[str, float]) -> tuple[float, float, float]:
    """Mean of the paired differences, half of its 95 % interval, p."""
    seeds = sorted(model.keys() & other.keys())
    d = np.array([model[seed] - other[seed] for seed in seeds])
    half = stats.t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / len(d) ** 0.5
    return d.mean(), half, stats.ttest_1samp(d, 0).pvalue


def holm(p: list[float]) -> list[float]:
    order = np.argsort(p)
    adjusted = np.maximum.accumulate([(len(p) - i) * p[j] for i, j in enumerate(order)])
    return [min(1.0, adjusted[list(order).index(j)]) for j in range(len(p))]


def signed(x: float, half: float) -> str:
    return f"{x:+.4f} ± {half:.4f}".replace("-", "−")


def contrasts(losses: dict) -> str:
    made = [(name, difference(losses[a], losses[b])) for name, a, b in DECIDING if a in losses and b in losses]
    missing = len(DECIDING) - len(made)
    # A contrast without its runs counts as the least significant one: Holm's factor is that of all six.
    adjusted = holm([result[2] for _, result in made] + [1.0] * missing)
    lines = ["| contrast | difference in loss, 95 % interval | p, after Holm |", "|---|---|---|"]
    for (name, (mean, half, _)), p in zip(made, adjusted, strict=False):
        lines.append(f"| {name} | {signed(mean, half)} | {p:.1g} |")
    lines += [f"| {name} | not run yet | |" for name, a, b in DECIDING if a not in losses or b not in losses]
    return "\n".join(lines)


def models(losses: dict) -> str:
    runs = {(r["model"], r["steps"]): r for r in csv.DictReader((HERE / "runs.csv").open())}
    base = float(runs["dense", STEPS]["flops_a_token"]) * int(STEPS)
    lines = [
        "| model | parameters, M | FLOPs, dense = 1 | loss (standard deviation) | to dense of 1,800 steps |",
        "|---|---|---|---|---|",
    ]
    for (model, steps), run in sorted(runs.items(), key=lambda item: -float(item[1]["loss"])):
        name = model if steps == STEPS else f"{model}-{steps}"
        values = list(losses[name].values())
        cost = float(run["flops_a_token"]) * int(steps) / base
        mean, half, _ = difference(losses[name], losses["dense"])
        to_dense = "" if name == "dense" else signed(mean, half)
        deviation = np.std(values, ddof=1)
        lines.append(
            f"| `{model}`, {int(steps):,} steps | {float(run['parameters']) / 1e6:.2f} | {cost:.3f} "
            f"| {np.mean(values):.4f} ({deviation:.4f}) | {to_dense} |"
        )
    return "\n".join(lines)


def write() -> None:
    losses, path = finals(), HERE / "README.md"
    text = path.read_text()
    for name, made in (("contrasts", contrasts(losses)), ("models", models(losses))):
        text = re.sub(rf"(<!-- {name} -->\n)(\|.*\n)*", lambda found, made=made: f"{found[1]}{made}\n", text)
    path.write_text(text)


if __name__ == "__main__":
    collect(Path(sys.argv[2])) if sys.argv[1:2] == ["collect"] else write()

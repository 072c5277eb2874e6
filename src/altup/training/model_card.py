"""The model card of a run (what was trained on what, how it went, how to go on), and the way to the hub."""

from __future__ import annotations

import html
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.core.files import atomic_write
from altup.core.hardware import versions
from altup.core.text import fenced, markdown, printable
from altup.models.families import family
from altup.training.config import TrainConfig
from altup.training.metrics import read_records
from altup.training.run_folder import RunFolder

CURVES = "curves.png"


def write_card(
    folder: RunFolder,
    config: TrainConfig,
    *,
    title: str,
    data: str,
    verb: str,
    example: str,
    model: str = "t5",
    auto_class: str = "",
    widened: bool = False,
) -> None:
    """README.md and the curves, in the run's folder. `example` is a command that uses the model, of the family
    `model`, which `auto_class` loads, by default the family's; `widened` says that `altup.widen` made it."""
    auto_class = auto_class or family(model).auto_class.__name__
    imports = "from altup import load_widened\nfrom transformers import AutoTokenizer"
    load = "load_widened"
    if not widened:
        imports = f"import altup.models\nfrom transformers import {auto_class}, AutoTokenizer"
        load = f"{auto_class}.from_pretrained"
    place = json.dumps(str(folder.final))
    records = read_records(folder.metrics)
    plotted = draw_curves(records, folder.path / CURVES)
    held_out = [r for r in records if r["split"] == "validation"]
    parts = [
        f"---\nlibrary_name: transformers\ntags: [altup, {model}]\n---\n",
        f"# {markdown(title)}\n",
        html.escape(" ".join(printable(data).split()), quote=False) + "\n",
        _results([r for r in held_out if None not in (r.get("loss"), r.get("accuracy"))]),
        _scores([r for r in held_out if r.get("score") is not None], folder),
        f"![Loss and accuracy]({CURVES})\n" if plotted else "",
        "## Use\n",
        fenced(
            f"{imports}\n\nmodel = {load}({place})\ntokenizer = AutoTokenizer.from_pretrained({place})", "python"
        ),
        fenced(f"{example}\n{resume_command(verb, folder.path)}  # go on, if it was stopped", "sh"),
        "## Config\n",
        fenced(config.to_yaml(), "yaml"),
        "## Versions\n",
        "".join(f"- {name} {version}\n" for name, version in versions().items()),
    ]
    atomic_write(folder.card, "\n".join(part for part in parts if part))


def resume_command(verb: str, path: Path) -> str:
    return f"altup {verb} --out {shlex.quote(str(path))} --resume"


def _results(held_out: list[dict[str, Any]]) -> str:
    if not held_out:
        return ""
    best = min(held_out, key=lambda r: r["loss"])
    rows = [("last", held_out[-1]), ("best", best)]
    lines = ["| held-out | step | loss | accuracy |", "|---|---|---|---|"]
    for name, record in rows:
        lines.append(f"| {name} | {record['step']:,} | {record['loss']:.4f} | {record['accuracy']:.2%} |")
    return "\n".join(lines) + "\n"


def _scores(held_out: list[dict[str, Any]], folder: RunFolder) -> str:
    """Task scores: the last and the best of each, where the best was, and whether its checkpoint is kept."""
    if not held_out:
        return ""
    lines = ["| held-out, % | last | best | at step | kept as |", "|---|---|---|---|---|"]
    for name in (n for n, value in held_out[-1].items() if n not in ("step", "split") and value is not None):
        best = max((r for r in held_out if r.get(name) is not None), key=lambda r: r[name])
        kept = f"step-{best['step']}" if (folder.checkpoints / f"step-{best['step']}").is_dir() else "not kept"
        lines.append(
            f"| {markdown(name)} | {held_out[-1][name]:.2f} | {best[name]:.2f} | {best['step']:,} | {kept} |"
        )
    return "\n".join(lines) + "\n"


def draw_curves(records: list[dict[str, Any]], path: Path) -> bool:
    """Loss and accuracy over the steps, training and held-out, side by side; False if there is nothing to draw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2))
    margins = {"left": 0.06, "right": 0.97, "bottom": 0.15, "top": 0.91, "wspace": 0.15}
    drawn = False
    for axes, name in zip(figure.subplots(1, 2, gridspec_kw=margins), ("loss", "accuracy"), strict=True):
        for split, style in (("train", {"lw": 1, "alpha": 0.7}), ("validation", {"lw": 1.8, "marker": "."})):
            points = [(r["step"], r[name]) for r in records if r["split"] == split and r.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=split, **style)
                drawn = True
        axes.set(xlabel="step", title=name)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    if drawn:
        atomic_write(path, lambda file: figure.savefig(file, dpi=120, format="png"))
    return drawn


def create_repository(name: str) -> None:
    """Check before training, so that a wrong name or a missing login does not come up after it."""
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(name, exist_ok=True)
    except Exception as error:  # the library raises its own, its HTTP client's and OSError
        raise UserError(
            f"--push-to-hub {name}: {error}; log in with `hf auth login`, check the name, or leave it out"
        ) from error


def upload(folder: RunFolder, name: str) -> None:
    from huggingface_hub import HfApi

    for file in (folder.card, folder.path / CURVES):
        if file.exists():
            shutil.copy(file, folder.final / file.name)
    try:
        HfApi().upload_folder(repo_id=name, folder_path=folder.final)
    except Exception as error:  # as above
        raise UserError(
            f"--push-to-hub {name}: {error}; the model is whole in {folder.final}, upload it with "
            f"`hf upload {name} {folder.final}`"
        ) from error

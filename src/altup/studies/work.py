"""Does one job: trains, fine-tunes or compares speeds, and records what came out.

A run that does not start from fresh weights (other coefficients, or another run's model) gets a checkpoint of
step 0, from which `pretrain(config, out, resume=True)` continues as from any other.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.core.errors import DivergedError, UserError
from altup.studies.jobs import Job, count_costs, deciding_fields, find_run, fresh_model
from altup.studies.results import LARGEST, RUNS, Record, forget_failure, origin, write_record
from altup.studies.study import FINETUNED

if TYPE_CHECKING:
    from torch import Tensor, nn

    from altup.training.loop import TrainOutcome
    from altup.training.pretraining import PretrainConfig

NOISE = 0.1
POINTS = 120  # of a training curve, at most


def do_job(job: Job, out: Path, results: Path, alone: bool) -> bool:
    """Run or resume a job and write its record; False if a signal stopped it first. Its times are recorded only if
    it runs `alone`."""
    for record in {"pretrain": _pretrain, "finetune": _finetune, "speed": _speed}[job.kind](job, out, alone):
        if record is None:
            return False
        if job.kind == "speed" and (results / RUNS / f"{record['key']}.json").exists():
            continue  # a dense model keeps the speed that others were compared with first
        write_record(results, {"kind": job.kind, "title": job.title, **origin(), **record})
    forget_failure(results, job.key)  # a comparison of speed has records under other keys
    return True


def _pretrain(job: Job, out: Path, alone: bool) -> Iterable[Record | None]:
    from altup.training.pretraining import PretrainConfig, pretrain
    from altup.training.spikes import has_collapsed

    config, folder = PretrainConfig.from_dict(job.settings["config"], job.title), job.folder(out)
    begin(job, config, out)
    kept = ("start", "continues", "data", "sweep", "sweep_key", "chosen")
    common = {"key": job.key, "config": deciding_fields(config)}
    common |= {name: job.settings[name] for name in kept if name in job.settings}
    try:
        outcome = pretrain(config, folder, resume=True, stop_collapsed=True)
        if not _has_ended(job, outcome):
            yield None
            return
        found = describe_run(config, folder, alone)
        losses = [loss for _, loss, _ in found["curves"]["held_out"]]
        if "loss" not in found["measures"] or has_collapsed(losses):
            raise DivergedError("its last held-out loss is not finite, or more than a nat above its lowest")
    except DivergedError as error:
        found = {**_where_it_ended(folder), "diverged": str(error)}
    yield {**common, **found}
    if "sweep" in job.settings:  # nothing is made of its model
        for path in (*folder.glob("final/*.safetensors"), *folder.glob("checkpoints/*")):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _finetune(job: Job, out: Path, alone: bool) -> Iterable[Record | None]:
    from altup.finetuning.config import FinetuneConfig
    from altup.finetuning.finetune import finetune

    settings, folder = job.settings, job.folder(out)
    model = trained_folder(job, settings["of"], out)
    config = FinetuneConfig.from_dict({**settings["config"], "model": str(model)}, job.title)
    common = {"key": job.key, **{name: settings[name] for name in ("of", "column", "data")}}
    try:
        outcome = finetune(config, folder, resume=True)
        yield {**common, **_describe_finetuning(job, folder)} if _has_ended(job, outcome) else None
    except DivergedError as error:
        yield {**common, **_where_it_ended(folder), "diverged": str(error)}


def _speed(job: Job, out: Path, alone: bool) -> Iterable[Record]:
    from altup.studies.speed import measure_speed
    from altup.training.pretraining import PretrainConfig

    settings = dict(job.settings)
    configs = {key: PretrainConfig.from_dict(values, job.title) for key, values in settings.pop("configs").items()}
    for key, measures in measure_speed(configs, **settings).items():
        yield {"key": key, "measures": measures, "settings": settings}


def _has_ended(job: Job, outcome: TrainOutcome) -> bool:
    """Whether a run has ended; one whose last evaluation failed has no result."""
    if outcome.finished and (not outcome.evaluation or outcome.evaluation["step"] != outcome.step):
        raise UserError(
            f"{job.title}: its last evaluation failed, so it has no result; its metrics.jsonl says why"
        )
    return outcome.finished


# --- what a finished run measured ---


def describe_run(config: PretrainConfig, folder: Path, alone: bool) -> Record:
    """What a finished pretraining run in `folder` measured, its curves and its learned coefficients."""
    from altup.data.shards import TokenStream

    held_out, train = _read_run(folder, config.steps)
    last = held_out[-1]
    costs = count_costs(config, TokenStream(config.data, "train").vocabulary)
    measures = {"accuracy": 100 * last["accuracy"], "steps": last["step"]}
    measures["run_flops"] = costs["flops_train"] * config.batch_size * last["step"]
    if last["loss"] is not None:  # metrics.jsonl has null for a number that is not finite
        measures["loss"] = last["loss"]
    if alone:
        measures["train_seconds"] = sum(r["seconds"] for r in train)
    has_weights = any(folder.glob("final/*.safetensors"))
    return {
        "step": last["step"],
        "measures": {**measures, **costs},
        "curves": _curves(held_out, train),
        "coefficients": read_coefficients(folder / "final") if has_weights else {},
    }


def _describe_finetuning(job: Job, folder: Path) -> Record:
    """The scores of the best evaluation, as T5 reports them, with those of every task."""
    held_out, _ = _read_run(folder, job.steps)
    best = max(held_out, key=lambda r: r["score"])
    scores = folder / "evaluation" / f"step-{best['step']}" / "scores.json"
    tasks = json.loads(scores.read_text(encoding="utf-8"))["tasks"]
    measures = {
        name: best["score"] if metric is None else tasks[0]["metrics"][metric]
        for name, metric in FINETUNED[job.settings["column"]].measures.items()
    }
    return {
        "step": best["step"],
        "measures": measures,
        "tasks": {task["task"]: task["metrics"] for task in tasks},
        "missing": [f"{task['task']}: {part}" for task in tasks for part in task["missing"]],
    }


def _where_it_ended(folder: Path) -> Record:
    """A run that diverged has no measure: where it ended, and its curves as far as they can be drawn."""
    held_out, train = _read_metrics(folder)
    last = max((r["step"] for r in (*held_out, *train)), default=0)
    return {"step": last, "measures": {}, "curves": _curves(held_out, train), "coefficients": {}}


def _read_run(folder: Path, steps: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The evaluations of a finished run, and its records of training. UserError where the evaluation of the last
    step is missing: an earlier one must not replace it."""
    held_out, train = _read_metrics(folder)
    if not held_out or held_out[-1]["step"] != steps:
        raise UserError(
            f"{folder / 'metrics.jsonl'} has no evaluation of the last step, {steps:,}: it failed, or the file "
            f"was cut; put a whole copy in its place, or remove {folder} and run it again"
        )
    return held_out, train


def _read_metrics(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    from altup.training.metrics import read_records

    records = read_records(folder / "metrics.jsonl")
    held_out, train = ([r for r in records if r.get("split") == split] for split in ("validation", "train"))
    return held_out, train


def _curves(held_out: list[dict[str, Any]], train: list[dict[str, Any]]) -> dict[str, list[Any]]:
    def finite(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [r for r in records if r.get("loss") is not None and abs(r["loss"]) < LARGEST]

    every = max(1, -(-len(train) // POINTS))
    return {
        "held_out": [
            [r["step"], round(r["loss"], 5), round(100 * r["accuracy"], 3)]
            for r in finite(held_out) if "accuracy" in r
        ],
        "train": [[r["step"], round(r["loss"], 4)] for r in finite(train[every - 1 :: every])],
    }  # fmt: skip


def read_coefficients(model: Path) -> dict[str, Any]:
    """What the rules learned: `blocks` are P, g and the active block of each layer; `sequence` a₁, a₂, b."""
    from altup.training.tensor_files import TensorFiles

    patterns = {
        "blocks": re.compile(r"(?:.*\.)?(\w+)\.rule\.updates\.(\d+)\.(P|g)"),
        "sequence": re.compile(r"(?:.*\.)?(\w+)\.layers\.(\d+)\.update\.(a|b)"),
    }
    found: dict[str, dict[tuple[bool, int], dict[str, Any]]] = {kind: {} for kind in patterns}
    for name, stored in TensorFiles(model, "model").items():
        for kind, pattern in patterns.items():
            if match := pattern.fullmatch(name):
                stack, layer, which = match[1], int(match[2]), match[3]
                value = stored[...].float()
                if not value.isfinite().all():
                    return {}  # of a model that diverged nothing can be drawn
                entry = found[kind].setdefault((stack != "encoder", layer), {"stack": stack, "layer": layer})
                entry[which] = _rounded(value.tolist())
    selection = json.loads((model / "config.json").read_text(encoding="utf-8")).get("selection")
    for entry in found["blocks"].values():
        layer, blocks = entry["layer"], len(entry["g"])
        usual = 0 if selection == "same" else layer % blocks
        entry["active"] = selection[layer] if isinstance(selection, list) else usual
    return {kind: [entries[place] for place in sorted(entries)] for kind, entries in found.items() if entries}


def _rounded(value: Any) -> Any:
    return [_rounded(v) for v in value] if isinstance(value, list) else round(value, 4)


# --- how a run starts ---


def _average(P: Tensor, active: int) -> None:
    """Every block is predicted as the mean of all."""
    P.fill_(1 / len(P))


def _noisy(P: Tensor, active: int) -> None:
    """The identity and noise whose rows sum to zero."""
    import torch

    noise = NOISE * torch.randn_like(P)
    P.add_(noise - noise.mean(dim=1, keepdim=True))


def _active(g: Tensor, active: int) -> None:
    """Only the block that was computed is corrected."""
    g.zero_()
    g[active] = 1


STARTERS: dict[tuple[str, str], Callable[[Tensor, int], None]] = {
    ("P", "average"): _average,
    ("P", "noisy"): _noisy,
    ("g", "active"): _active,
}


def set_coefficients(model: nn.Module, start: dict[str, str]) -> None:
    """Change P and g of every update of a fresh model."""
    import torch

    from altup.nn.altup import AltUpUpdate

    updates = [module for module in model.modules() if isinstance(module, AltUpUpdate)]
    if not updates:
        raise UserError(f"start={start!r} needs a method with coefficients, such as altup")
    with torch.no_grad():
        for update in updates:
            for name, value in start.items():
                STARTERS[name, value](getattr(update, name), update.active)


def widened_model(config: PretrainConfig, trained: Path) -> nn.Module:
    """The dense model of the run folder `trained`, widened to the method of `config`; it computes the same."""
    from altup.core.runs import newest_model
    from altup.data.shards import TokenStream
    from altup.models.upcycling import upcycle

    wide = config.model_config(TokenStream(config.data, "train").vocabulary)
    model: nn.Module = upcycle(
        newest_model(trained), str(config.method), wide.num_blocks, config.seed, wide.coefficients
    )
    return model.float()


def begin(job: Job, config: PretrainConfig, out: Path) -> None:
    """Give a pretraining job its own starting weights, if it has some and has not begun yet."""
    start, continues = job.settings["start"], job.settings.get("continues")
    if not start and not continues:
        return
    from altup.core.pretrained import load_tokenizer
    from altup.data.shards import TOKENIZER, TokenStream
    from altup.training import checkpoints
    from altup.training.engine import Engine
    from altup.training.parallel import join_process_group
    from altup.training.run_folder import RunFolder

    folder = RunFolder(job.folder(out))
    if folder.started:
        return
    with join_process_group() as group:
        if continues:
            model = widened_model(config, trained_folder(job, continues, out))
        else:
            model = fresh_model(config, TokenStream(config.data, "train").vocabulary)
        if start:
            set_coefficients(model, start)
        engine = Engine(model, config, group)
        state = checkpoints.TrainingState(meter=engine.meter.read(group))
        tokenizer = load_tokenizer(f"{config.data}/{TOKENIZER}")
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        checkpoints.save_checkpoint(engine, folder.checkpoints, tokenizer, state)


def trained_folder(job: Job, key: str, out: Path) -> Path:
    """The finished run that a job needs."""
    found = find_run(out / "runs", key)
    if found is None or not (found / "final").is_dir():
        raise UserError(
            f"{job.title}: its pretrained model is not in {out / 'runs'}; run the study without --only"
        )
    return found

"""Does one job of a study: a pretraining run, a fine-tuning run, or a comparison of speed."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.core.files import atomic_write
from altup.studies.plan import Job, run_folder
from altup.studies.speed import Measured

SPEED = "speed"


def work(job: Job, out: Path) -> bool:
    """Do it, or go on with it; False if a signal asked to stop first."""
    return {"pretrain": _pretrain, "finetune": _finetune, "speed": _speed}[job.kind](job, out)


def is_done(job: Job, out: Path) -> bool:
    if job.kind == "speed":
        return all(speed_file(out, key).exists() for key in job.settings["configs"])
    return (run_folder(out, job) / "final").is_dir()


def speed_file(out: Path, key: str) -> Path:
    return out / SPEED / f"{key}.json"


def read_speed(out: Path, key: str) -> dict[str, Any] | None:
    path = speed_file(out, key)
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and {f.name for f in fields(Measured)} <= found.keys():
            return found
    except ValueError:
        pass
    raise UserError(f"{path} is not a whole measurement; remove it, and it is made again")


def _pretrain(job: Job, out: Path) -> bool:
    from altup.studies.starts import begin_with
    from altup.training.pretraining import PretrainConfig, pretrain

    config = PretrainConfig.from_dict(job.settings["config"], job.title)
    folder = run_folder(out, job)
    if job.settings["start"]:
        begin_with(config, job.settings["start"], folder)
    return pretrain(config, folder, resume=True).finished


def _finetune(job: Job, out: Path) -> bool:
    from altup.finetuning.config import FinetuneConfig
    from altup.finetuning.finetune import finetune

    found = list((out / "runs").glob(f"*-{job.settings['of']}"))
    if not found:
        raise UserError(
            f"{job.title}: its pretrained model is not in {out / 'runs'}; run the study without --only"
        )
    config = FinetuneConfig.from_dict({**job.settings["config"], "model": str(found[0])}, job.title)
    return finetune(config, run_folder(out, job), resume=True).finished


def _speed(job: Job, out: Path) -> bool:
    from altup.studies.machine import hardware, now, versions_text
    from altup.studies.speed import measure_speed
    from altup.training.pretraining import PretrainConfig

    settings = dict(job.settings)
    configs = {key: PretrainConfig.from_dict(values, job.title) for key, values in settings.pop("configs").items()}
    measured = measure_speed(configs, **settings)
    base = next(iter(configs))
    for key, found in measured.items():
        content = {
            **asdict(found), "base": base, "hardware": hardware(), "versions": versions_text(),
            "date": now(), "settings": settings,
        }  # fmt: skip
        path = speed_file(out, key)
        if key == base and path.exists():
            continue  # what it was first measured as is what others were compared with
        atomic_write(path, json.dumps(content, indent=1) + "\n")
    return True

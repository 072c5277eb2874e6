"""What the jobs of a queue are doing: a bar for each in a terminal, a line an evaluation elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from altup.studies.jobs import Job

LINES = 5  # of a run, where there are no bars


@contextmanager
def watch_jobs(out: Path) -> Iterator[Callable[[Sequence[Job]], None]]:
    """What `Queue.watch` may be; the folder is that of the studies."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from altup.core.terminal import Console
    from altup.training.metrics import VALIDATION, read_records

    console, live = Console(stderr=True), sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, disable=not live) as bars:
        tasks: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        said: dict[str, int] = {}

        def watch(jobs: Sequence[Job]) -> None:
            for key in [key for key in tasks if key not in {job.key for job in jobs}]:
                bars.remove_task(tasks.pop(key))
            for job in (job for job in jobs if job.kind != "speed"):
                if job.key not in tasks:
                    tasks[job.key] = bars.add_task(job.title, total=job.steps)
                metrics = job.folder(out) / "metrics.jsonl"
                size = metrics.stat().st_size if metrics.exists() else 0
                if size == sizes.get(job.key, 0):
                    continue
                sizes[job.key] = size
                records = [r for r in read_records(metrics) if r.get("loss") is not None]
                if not records:
                    continue
                last = f"{job.title} · loss {records[-1]['loss']:.3f}"
                bars.update(tasks[job.key], description=last, completed=records[-1]["step"])
                for one in (r for r in records if not live and r["split"] == VALIDATION):
                    if one["step"] >= said.get(job.key, 0) + job.steps / LINES:
                        said[job.key] = one["step"]
                        line = f"{job.title}: step {one['step']:,}, held-out loss {one['loss']:.3f}"
                        console.print(line, highlight=False)

        yield watch

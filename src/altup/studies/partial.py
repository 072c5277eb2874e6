"""What the scores of a table leave out: tasks of a suite, or a part of the held-out examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from altup.studies.evidence import Evidence
from altup.studies.study import Study

NAMES = {"glue": "GLUE", "superglue": "SuperGLUE", "squad": "SQuAD", "triviaqa": "TriviaQA"}


def partial_note(study: Study, evidence: Evidence, record: Callable[[str], dict[str, Any] | None]) -> str:
    """A sentence on the fine-tuned columns whose numbers are no whole suite's; empty if there are none."""
    from altup.data.tasks import SUITES

    told: dict[str, None] = {}  # in order, each once
    for result in evidence.results:
        kept = record(result.run) if result.study == study.name and result.seed else None
        if kept is None or kept["kind"] != "finetune" or result.metric not in study.measures:
            continue
        tasks, name = list(kept["tasks"]), NAMES[kept["column"]]
        left_out = [task for task in SUITES.get(tasks[0].split("/")[0], ()) if task not in tasks]
        if left_out:
            told[f"{name} is the mean of {', '.join(task.split('/')[-1] for task in tasks)} alone"] = None
        if kept["missing"]:
            told[f"{name} counts a part of the examples ({', '.join(kept['missing'])})"] = None
    return f" Our numbers are partial: {'; '.join(told)}." if told else ""

"""SuperGLUE's eight tasks."""

from __future__ import annotations

from typing import Any

from altup.data.tasks import formats
from altup.data.tasks.task import Task

TRUTH = ("False", "True")


def _super_glue(
    name: str,
    metrics: tuple[str, ...],
    sizes: tuple[int, int],
    description: str,
    keys: tuple[str, ...] = (),
    labels: tuple[str, ...] = (),
    write: formats.Write | None = None,
    layout: str = "",
) -> Task:
    more: dict[str, Any] = {"labels": labels} if labels else {}
    return Task(
        name=f"super_glue/{name}",
        write=write or formats.classification(name, keys, labels),
        metrics=metrics,
        description=description,
        layout=layout or formats.layout(name, keys),
        targets_length=62,
        folder=f"super_glue/{name}",
        hub=("aps/super_glue", name),
        published=dict(zip(("train", "validation"), sizes, strict=True)),
        **more,
    )


TASKS = (
    _super_glue(
        *("boolq", ("accuracy",), (9_427, 3_270), "does the passage say yes to the question?"),
        keys=("passage", "question"),
        labels=TRUTH,
    ),
    _super_glue(
        *("cb", ("macro_f1", "accuracy"), (250, 56), "does the premise commit its speaker to the hypothesis?"),
        keys=("hypothesis", "premise"),
        labels=("entailment", "contradiction", "neutral"),
    ),
    _super_glue(
        *("copa", ("accuracy",), (400, 100), "which choice is the cause or the effect of the premise?"),
        keys=("choice1", "choice2", "premise", "question"),
        labels=("choice1", "choice2"),
    ),
    _super_glue(
        *("multirc", ("f1a", "question_exact_match"), (27_243, 4_848), "does this answer the question?"),
        write=formats.multirc(TRUTH),
        layout=formats.layout("multirc", ("question", "answer", "paragraph")),
        labels=TRUTH,
    ),
    _super_glue(
        *("record", ("exact_match", "f1_words"), (100_730, 10_000), "which entity stands at @placeholder?"),
        write=formats.record,
        layout=formats.layout("record", ("query", "entities", "passage")),
    ),
    _super_glue(
        *("rte", ("accuracy",), (2_490, 277), "does the premise entail the hypothesis?"),
        keys=("hypothesis", "premise"),
        labels=("entailment", "not_entailment"),
    ),
    _super_glue(
        *("wic", ("accuracy",), (5_428, 638), "has the word the same sense in both sentences?"),
        keys=("sentence1", "sentence2", "word"),
        labels=TRUTH,
    ),
    _super_glue(
        *("wsc", ("referent_accuracy",), (554, 104), "what does the *pronoun* stand for?"),
        write=formats.wsc,
        layout="wsc: {text, its *pronoun* marked}",
    ),
)

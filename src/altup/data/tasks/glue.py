"""GLUE's eight tasks, and WNLI, which counts in no average."""

from __future__ import annotations

from typing import Any

from altup.data.tasks.formats import classification, layout, similarity
from altup.data.tasks.task import Task

ENTAILMENT = ("entailment", "not_entailment")


def _glue(name: str, metrics: tuple[str, ...], sizes: tuple[int, int], **fields: Any) -> Task:
    defaults: dict[str, Any] = {
        "name": f"glue/{name}",
        "folder": f"glue/{name}",
        "hub": ("nyu-mll/glue", name),
        "metrics": metrics,
        "targets_length": 84,
        "published": dict(zip(("train", "validation"), sizes, strict=True)),
    }
    return Task(**{**defaults, **fields})


def _labelled(
    name: str,
    keys: tuple[str, ...],
    labels: tuple[str, ...],
    metrics: tuple[str, ...],
    sizes: tuple[int, int],
    description: str,
    **fields: Any,
) -> Task:
    write = classification(name, keys, labels)
    shown = {"description": description, "layout": layout(name, keys)}
    return _glue(name, metrics, sizes, write=write, labels=labels, **shown, **fields)


TASKS = (
    _labelled(
        *("cola", ("sentence",), ("unacceptable", "acceptable"), ("matthews",), (8_551, 1_043)),
        "is this sentence grammatical?",
    ),
    _labelled(
        *("sst2", ("sentence",), ("negative", "positive"), ("accuracy",), (67_349, 872)),
        "is this review's sentence positive?",
    ),
    _labelled(
        *("mrpc", ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), ("f1", "accuracy"), (3_668, 408)),
        "do two sentences of the news mean the same?",
    ),
    _labelled(
        "qqp",
        ("question1", "question2"),
        ("not_duplicate", "duplicate"),
        ("f1", "accuracy"),
        (363_846, 40_430),
        "are two questions the same?",
    ),
    _glue(
        *("stsb", ("pearson", "spearman"), (5_749, 1_500)),
        write=similarity("stsb", ("sentence1", "sentence2")),
        description="how alike are two sentences, 0 to 5?",
        layout=layout("stsb", ("sentence1", "sentence2")),
    ),
    _labelled(
        *("mnli", ("hypothesis", "premise"), ("entailment", "neutral", "contradiction"), ("accuracy",)),
        (392_702, 9_815),
        "does the premise entail the hypothesis?",
        held_out=("validation_matched", "validation_mismatched"),
        published={"train": 392_702, "validation_matched": 9_815, "validation_mismatched": 9_832},
    ),
    _labelled(
        *("qnli", ("question", "sentence"), ENTAILMENT, ("accuracy",), (104_743, 5_463)),
        "does the sentence answer the question?",
    ),
    _labelled(
        *("rte", ("sentence1", "sentence2"), ENTAILMENT, ("accuracy",), (2_490, 277)),
        "does the first sentence entail the second?",
    ),
    _labelled(
        *("wnli", ("sentence1", "sentence2"), ("not_entailment", "entailment"), ("accuracy",), (635, 71)),
        "Winograd schemas as entailment; in no average",
    ),
)

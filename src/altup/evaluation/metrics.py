"""Metrics of predictions, in percent: classification, similarity, question answering.

A metric takes predictions (text) and the examples they belong to. Text that is no label of the task is wrong: it
never counts as any label, and in a binary F1 it counts as the wrong one of the two.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from altup.core.errors import UserError, check_choice
from altup.core.packages import require
from altup.data.tasks.task import Example, Task

Metric = Callable[[Task, Sequence[str], Sequence[Example]], float]

TRIVIA_PUNCTUATION = string.punctuation + "‘’´`_"
DETERMINERS = frozenset(
    {"a", "an", "few", "her", "his", "each", "every", "many", "much", "my", "our", "some", "that", "the", "their"}
    | {"these", "this", "those", "which", "whose", "your"}
)
UNKNOWN = -1
SCORE_METRICS = frozenset(("pearson", "spearman"))  # of tasks whose answer is a number
# Packages that not every installation has, by the metrics that import them.
NEEDS = dict.fromkeys(("matthews", "f1", "f1a", "macro_f1"), "scikit-learn")
# How many labels a metric compares, at least and at most.
LABELS = {"accuracy": (1, 999), "matthews": (2, 999), "macro_f1": (1, 999), "f1": (2, 2), "f1a": (2, 2)}


def check_metrics(task: Task) -> None:
    """Check before hours of training that the metrics are known, can be computed here, and have the labels that
    they compare."""
    if not task.metrics:
        raise UserError(f"task {task.name}: no metric; give some of {', '.join(METRICS)}")
    for name in task.metrics:
        check_choice(f"task {task.name}: metric", name, METRICS)
        if name in NEEDS:
            require(NEEDS[name], f"task {task.name}: {name}")
        least, most = LABELS.get(name, (0, 999))
        if not least <= len(task.labels) <= most:
            wanted = f"{'exactly' if least == most else 'at least'} {least}"
            raise UserError(f"task {task.name}: {name} compares {wanted} labels, and it has {len(task.labels)}")


def compute_metrics(task: Task, predictions: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
    """Every metric of a task by its name."""
    if not examples or len(predictions) != len(examples):
        raise UserError(f"task {task.name}: {len(predictions)} predictions for {len(examples)} examples")
    return {name: METRICS[name](task, predictions, examples) for name in task.metrics}


def _numbers(task: Task, predictions: Sequence[str], examples: Sequence[Example]) -> tuple[list[int], list[int]]:
    """Targets and predictions as numbers of labels."""
    number = {label: i for i, label in enumerate(task.labels)}
    return [number[e.target] for e in examples], [number.get(p.strip(), UNKNOWN) for p in predictions]


def accuracy(task: Task, predictions: Sequence[str], examples: Sequence[Example]) -> float:
    targets, guesses = _numbers(task, predictions, examples)
    return 100 * sum(t == g for t, g in zip(targets, guesses, strict=True)) / len(targets)


def matthews(task: Task, predictions: Sequence[str], examples: Sequence[Example]) -> float:
    """Matthews correlation; unknown text is a third class that no example has. 0 where it is undefined."""
    from sklearn.metrics import matthews_corrcoef

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one class alone: 0, as T5 has it
        return 100 * float(matthews_corrcoef(*_numbers(task, predictions, examples)))


def f1(task: Task, predictions: Sequence[str], examples: Sequence[Example]) -> float:
    """Binary F1 of label 1 over all examples."""
    from sklearn.metrics import f1_score

    targets, guesses = _numbers(task, predictions, examples)
    guesses = [1 - t if g == UNKNOWN else g for t, g in zip(targets, guesses, strict=True)]
    return 100 * float(f1_score(targets, guesses, zero_division=0))


def macro_f1(task: Task, predictions: Sequence[str], examples: Sequence[Example]) -> float:
    """The mean over all labels of their F1; a label that neither side has counts 0."""
    from sklearn.metrics import f1_score

    targets, guesses = _numbers(task, predictions, examples)
    labels = range(len(task.labels))
    return 100 * float(f1_score(targets, guesses, labels=list(labels), average="macro", zero_division=0))


def question_exact_match(task: Task, predictions: Sequence[str], examples: Sequence[Example]) -> float:
    """The share of questions all of whose answers are judged rightly (MultiRC's EM)."""
    right: dict[str, bool] = defaultdict(lambda: True)
    for prediction, example in zip(predictions, examples, strict=True):
        right[example.group] &= prediction.strip() == example.target
    return 100 * sum(right.values()) / len(right)


def pearson(task: Task, predictions: Sequence[str], examples: Sequence[Example]) -> float:
    from scipy.stats import pearsonr

    return _correlation(pearsonr, predictions, examples)


def spearman(task: Task, predictions: Sequence[str], examples: Sequence[Example]) -> float:
    from scipy.stats import spearmanr

    return _correlation(spearmanr, predictions, examples)


def _correlation(correlate: Callable, predictions: Sequence[str], examples: Sequence[Example]) -> float:
    """0 where it is undefined: all predictions alike, or a single one."""
    guesses, scores = [parse_score(p) for p in predictions], [e.references[0] for e in examples]
    if len(set(guesses)) < 2 or len(set(scores)) < 2:
        return 0.0
    return 100 * float(correlate(guesses, scores).statistic)


def parse_score(text: str) -> float:
    """The number a prediction says; −1 where it says none, or one that is too large to be a number here."""
    found = re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)\s*", text, re.ASCII)
    return float(text) if found and math.isfinite(float(text)) else -1.0


def referent_accuracy(task: Task, predictions: Sequence[str], examples: Sequence[Example]) -> float:
    """WSC: is the prediction the candidate, and should it be? `references` = (candidate, label)."""
    right = 0
    for prediction, example in zip(predictions, examples, strict=True):
        candidate, label = example.references
        right += is_referent(prediction, candidate) == label
    return 100 * right / len(examples)


def is_referent(prediction: str, candidate: str) -> bool | None:
    """Whether a prediction means the candidate: all words of one are in the other. None if it says nothing.

    With an apostrophe in one of them alone they differ: "father" is not "Larry's father".
    """
    words, wanted = _content_words(prediction), _content_words(candidate)
    if not words:
        return None
    return ("'" in prediction) == ("'" in candidate) and (words <= wanted or wanted <= words)


def _content_words(text: str) -> set[str]:
    return {word for word in text.lower().split() if word not in DETERMINERS}


def predicted_label(task: Task, prediction: str, example: Example) -> dict[str, int | float | None]:
    """`{"label": …}` as the task's data would have it, None where a prediction is no label; `{}` for free text."""
    if task.labels:
        text = prediction.strip()
        return {"label": task.labels.index(text) if text in task.labels else None}
    if "referent_accuracy" in task.metrics:
        found = is_referent(prediction, example.references[0])
        return {"label": None if found is None else int(found)}
    if SCORE_METRICS & set(task.metrics):
        score = parse_score(prediction)
        return {"label": None if score == UNKNOWN else score}
    return {}


def normalise(text: str, punctuation: str = string.punctuation, replacement: str = "") -> str:
    """Lower case, without punctuation and articles, white space collapsed."""
    text = re.sub(f"[{re.escape(punctuation)}]", replacement, text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def normalise_trivia(text: str) -> str:
    return normalise(text, TRIVIA_PUNCTUATION, " ")


def as_tokenised(text: str) -> str:
    """Characters as vocabularies have them (NFKC: `²` is `2`), white space collapsed."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def same_text(prediction: str, reference: str) -> float:
    return float(prediction == reference)


def shared_words(prediction: str, reference: str) -> float:
    """F1 of the words of two normalised texts, as bags."""
    words, wanted = prediction.split(), reference.split()
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted)) if common else 0.0


def best_match(clean: Callable[[str], str], compare: Callable[[str, str], float]) -> Metric:
    """The mean over examples of the best comparison with any reference."""

    def metric(task: Task, predictions: Sequence[str], examples: Sequence[Example]) -> float:
        total = 0.0
        for prediction, example in zip(predictions, examples, strict=True):
            text = clean(prediction)
            total += max(compare(text, clean(reference)) for reference in example.references)
        return 100 * total / len(examples)

    return metric


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "matthews": matthews,
    "f1": f1,
    "f1a": f1,  # MultiRC's name for the F1 over all answers
    "macro_f1": macro_f1,
    "question_exact_match": question_exact_match,
    "pearson": pearson,
    "spearman": spearman,
    "referent_accuracy": referent_accuracy,
    "exact_match": best_match(normalise, same_text),
    "f1_words": best_match(normalise, shared_words),
    "trivia_exact_match": best_match(normalise_trivia, same_text),
    "trivia_f1_words": best_match(normalise_trivia, shared_words),
    "exact_text": best_match(as_tokenised, same_text),
}

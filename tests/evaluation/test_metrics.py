"""Every metric against a computation written out here, and the edges that real predictions reach."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from altup.core.errors import UserError
from altup.data.tasks import Example, Task, find_task
from altup.evaluation.metrics import (
    METRICS,
    compute_metrics,
    normalise,
    normalise_trivia,
    parse_score,
    predicted_label,
)
from altup.evaluation.scores import score_suites, score_task


def labelled(targets: Sequence[str], groups: Sequence[str] | None = None) -> list[Example]:
    groups = groups or [""] * len(targets)
    return [Example("x", t, (t,), g) for t, g in zip(targets, groups, strict=True)]


def measure(name: str, task: str, predictions: Sequence[str], examples: Sequence[Example]) -> float:
    return METRICS[name](find_task(task), predictions, examples)


def answers(*references: str) -> list[Example]:
    return [Example("q", references[0], references)]


@pytest.mark.parametrize("seed", range(5))
def test_binary_metrics_by_hand(seed: int) -> None:
    draw = random.Random(seed)
    targets = [draw.choice(("not_equivalent", "equivalent")) for _ in range(40)]
    guesses = [
        t if draw.random() < 0.6 else draw.choice(("equivalent", "not_equivalent", "", "xyz")) for t in targets
    ]
    pairs = list(zip(targets, guesses, strict=True))
    hit = sum(t == g == "equivalent" for t, g in pairs)
    # an unknown guess is wrong: a false alarm where the truth is 0, a miss where it is 1
    alarms = sum(t == "not_equivalent" and g != "not_equivalent" for t, g in pairs)
    misses = sum(t == "equivalent" and g != "equivalent" for t, g in pairs)
    found = compute_metrics(find_task("mrpc"), guesses, labelled(targets))
    assert found["f1"] == pytest.approx(100 * 2 * hit / (2 * hit + alarms + misses))
    assert found["accuracy"] == pytest.approx(100 * sum(t == g for t, g in pairs) / 40)


@pytest.mark.parametrize("seed", range(5))
def test_matthews_by_its_determinant_formula(seed: int) -> None:
    draw = random.Random(seed)
    targets = [draw.choice(("unacceptable", "acceptable")) for _ in range(50)]
    guesses = [t if draw.random() < 0.5 else draw.choice(("acceptable", "unacceptable")) for t in targets]
    good = [(t == "acceptable", g == "acceptable") for t, g in zip(targets, guesses, strict=True)]
    tp, tn, fp, fn = (good.count(c) for c in ((True, True), (False, False), (False, True), (True, False)))
    expected = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert measure("matthews", "cola", guesses, labelled(targets)) == pytest.approx(100 * expected)


def test_matthews_at_its_edges() -> None:
    both = labelled(["acceptable", "unacceptable"] * 3)
    assert measure("matthews", "cola", ["acceptable"] * 6, both) == 0
    assert measure("matthews", "cola", ["gibberish"] * 6, both) == 0
    assert measure("matthews", "cola", ["acceptable", "unacceptable"] * 3, both) == pytest.approx(100)
    assert measure("matthews", "cola", ["unacceptable", "acceptable"] * 3, both) == pytest.approx(-100)
    # Of five right answers, one turned into unknown text costs something, and less than a wrong label does.
    right = ["acceptable", "unacceptable"] * 3
    unknown = measure("matthews", "cola", [*right[:5], "?"], both)
    wrong = measure("matthews", "cola", [*right[:5], "acceptable"], both)
    assert wrong < unknown < 100


def test_f1_at_its_edges() -> None:
    examples = labelled(["equivalent", "not_equivalent"])
    assert measure("f1", "mrpc", ["", ""], examples) == 0
    assert measure("f1", "mrpc", ["not_equivalent"] * 2, examples) == 0
    assert measure("f1", "mrpc", ["not_equivalent"] * 2, labelled(["not_equivalent"] * 2)) == 0
    assert measure("f1", "mrpc", [" equivalent ", "not_equivalent"], examples) == 100


def test_macro_f1_counts_a_missing_class_as_nothing() -> None:
    examples = labelled(["entailment", "entailment", "contradiction"])
    assert measure("macro_f1", "cb", ["entailment", "entailment", "contradiction"], examples) == pytest.approx(
        200 / 3
    )
    # entailment: 1 hit of 2, no false alarm: 2/3. contradiction: 1 hit, no false alarm: 1. neutral: 0.
    assert measure("macro_f1", "cb", ["entailment", "what", "contradiction"], examples) == pytest.approx(500 / 9)
    assert measure("macro_f1", "cb", ["neutral", "neutral", ""], examples) == 0


def test_multirc_counts_whole_questions() -> None:
    examples = labelled(["True", "False", "True", "True"], ["a", "a", "b", "c"])
    found = compute_metrics(find_task("multirc"), ["True", "True", "True", "nonsense"], examples)
    assert found["question_exact_match"] == pytest.approx(100 / 3)  # b alone
    # hits: a's first, b; false alarm: a's second; miss: c
    assert found["f1a"] == pytest.approx(100 * 2 * 2 / (2 * 2 + 1 + 1))


def ranks(values: Sequence[float]) -> list[float]:
    return [sum(v < w for v in values) + (sum(v == w for v in values) + 1) / 2 for w in values]


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    x, y = (sum(v) / len(v) for v in (a, b))
    top = sum((p - x) * (q - y) for p, q in zip(a, b, strict=True))
    return top / math.sqrt(sum((p - x) ** 2 for p in a) * sum((q - y) ** 2 for q in b))


def test_similarity_by_hand() -> None:
    scores = [0.0, 1.25, 2.5, 3.8, 5.0, 4.2]
    guesses = ["0.2", "1.2", "four", "3.8", "", "3.8"]
    values = [0.2, 1.2, -1.0, 3.8, -1.0, 3.8]
    examples = [Example("x", f"{s:.1f}", (s,)) for s in scores]
    found = compute_metrics(find_task("stsb"), guesses, examples)
    assert found["pearson"] == pytest.approx(100 * correlation(values, scores))
    assert found["spearman"] == pytest.approx(100 * correlation(ranks(values), ranks(scores)))
    assert compute_metrics(find_task("stsb"), ["3.0"] * 6, examples) == {"pearson": 0, "spearman": 0}
    assert compute_metrics(find_task("stsb"), ["x"] * 6, examples) == {"pearson": 0, "spearman": 0}


@pytest.mark.parametrize(
    ("text", "value"),
    [("3.8", 3.8), (" 2 ", 2), ("-0.5", -0.5), (".5", 0.5)]
    + [(text, -1) for text in ("", "nan", "inf", "1e3", "3.8 of 5", "1_0", "٣", "1" + "0" * 400)],
)
def test_numbers_in_predictions(text: str, value: float) -> None:
    assert parse_score(text) == value


@pytest.mark.parametrize(
    ("prediction", "candidate", "label", "right"),
    [
        ("the old man", "Old Man", True, True),
        ("man", "the old man", True, True),
        ("the old man of the sea", "the man", True, True),
        ("the woman", "the man", True, False),
        ("the woman", "the man", False, True),
        ("the man", "the man", False, False),
        ("", "the man", True, False),
        ("", "the man", False, False),
        ("the", "the man", False, False),
        ("his", "his coat", True, False),
        # Larry's father is not Larry, and not any father; of two with an apostrophe the words decide.
        ("father", "Larry's father", True, False),
        ("Larry", "Larry's father", True, False),
        ("Larry", "Larry's father", False, True),
        ("Emma's mother", "mother", True, False),
        ("Larry's", "Larry's father", True, True),
        ("the Larry's father", "larry's father", True, True),
        ("Amy's parents", "Larry's father", True, False),
        ("'", "Larry's father", False, True),
    ],
)
def test_wsc_compares_leniently(prediction: str, candidate: str, label: bool, right: bool) -> None:
    examples = [Example("wsc: x", candidate, (candidate, label))]
    assert measure("referent_accuracy", "wsc", [prediction], examples) == 100 * right


@pytest.mark.parametrize(
    ("name", "prediction", "label"),
    [
        ("cola", " acceptable", {"label": 1}),
        ("cola", "unacceptable", {"label": 0}),
        ("cola", "maybe", {"label": None}),
        ("stsb", "3.8", {"label": 3.8}),
        ("stsb", "much", {"label": None}),
        ("wsc", "man", {"label": 1}),
        ("wsc", "the woman", {"label": 0}),
        ("wsc", "the", {"label": None}),
        ("squad", "the man", {}),
    ],
)
def test_the_label_that_a_prediction_says(name: str, prediction: str, label: dict[str, Any]) -> None:
    assert predicted_label(find_task(name), prediction, Example("x", "the man", ("the man", False))) == label


@pytest.mark.parametrize(
    ("text", "squad", "trivia"),
    [
        ("The  Broncos!", "broncos", "broncos"),
        ("a U.S. state", "us state", "u s state"),
        ("Rock-n-Roll", "rocknroll", "rock n roll"),
        ("an_other ‘x’", "another ‘x’", "other x"),
        ("theatre and Anna", "theatre and anna", "theatre and anna"),
        ("Zoë's Straße", "zoës straße", "zoë s straße"),
        ("The", "", ""),
    ],
)
def test_normal_forms_of_answers(text: str, squad: str, trivia: str) -> None:
    assert normalise(text) == squad
    assert normalise_trivia(text) == trivia


@pytest.mark.parametrize(
    ("prediction", "references", "exact", "words"),
    [
        ("the Denver Broncos", ("Denver Broncos", "Broncos"), 1, 1),
        ("Broncos team", ("Denver Broncos", "Broncos"), 0, 2 / 3),
        ("Denver Denver Broncos", ("Denver Broncos",), 0, 4 / 5),
        ("", ("Denver",), 0, 0),
        ("", ("the",), 1, 0),  # the official script: equal, but no word in common
        ("Paris", ("Denver", "Oslo"), 0, 0),
        ("24 – 10", ("24–10",), 0, 0),
        ("RÖNTGEN .", ("Röntgen",), 1, 1),
    ],
)
def test_answers_take_the_best_reference(
    prediction: str, references: tuple[str, ...], exact: float, words: float
) -> None:
    found = compute_metrics(find_task("squad"), [prediction], answers(*references))
    assert found == {"exact_match": pytest.approx(100 * exact), "f1_words": pytest.approx(100 * words)}


def test_trivia_splits_where_squad_joins() -> None:
    examples = answers("Rock n Roll", "R&R")
    found = compute_metrics(find_task("trivia_qa"), ["rock-n-roll"], examples)
    assert found == {"trivia_exact_match": 100, "trivia_f1_words": 100}
    assert measure("exact_match", "squad", ["rock-n-roll"], examples) == 0


def test_own_answers_are_compared_as_vocabularies_write_them() -> None:
    """A vocabulary with NFKC can say `E=mc2`, and never `E=mc²`."""
    task = Task("mine", lambda record, training: [], ("exact_text",))
    pairs = [("E=mc2", "E=mc²"), ("cafe\u0301", "café"), ("a  b", "a b"), ("A", "a")]
    examples = [Example("", target, (target,)) for _, target in pairs]
    assert compute_metrics(task, [said for said, _ in pairs], examples) == {"exact_text": 75.0}


def test_numbers_of_predictions_and_examples_must_agree() -> None:
    with pytest.raises(UserError, match="1 predictions for 2 examples"):
        compute_metrics(find_task("cola"), ["acceptable"], labelled(["acceptable"] * 2))


def score_of(name: str, right: int, of: int, **splits: int) -> Any:
    """A score of `right` percent on a classification task."""
    task = find_task(name)
    label, other = task.labels[1], task.labels[0]
    sizes = splits or {task.held_out[0]: of}
    examples = {split: labelled([label] * size) for split, size in sizes.items()}
    guesses = {
        split: [label] * (right * n // 100) + [other] * (n - right * n // 100) for split, n in sizes.items()
    }
    return score_task(task, guesses, examples)


def test_a_suite_is_the_mean_of_its_tasks_means() -> None:
    # copa: 50. cb: all right but without the other labels: macro-F1 1/3, accuracy 1.
    copa = score_of("copa", 50, 100)
    task = find_task("cb")
    cb = score_task(task, {"validation": ["neutral"] * 56}, {"validation": labelled(["neutral"] * 56)})
    assert cb.score == pytest.approx((100 / 3 + 100) / 2)
    assert not copa.partial
    (suite,) = score_suites([copa, cb])
    assert suite.score == pytest.approx((50 + cb.score) / 2)
    assert suite.partial
    assert "super_glue/boolq: not scored" in suite.missing


def test_a_whole_suite_is_not_marked() -> None:
    from altup.data.tasks import SUITES
    from altup.evaluation.scores import TaskScore

    scores = [TaskScore(name, {"m": i}, {}) for i, name in enumerate(SUITES["glue"])]
    (suite,) = score_suites([*scores, TaskScore("glue/wnli", {"m": 1000}, {})])
    assert suite.score == 3.5
    assert not suite.partial


def test_mnli_weighs_its_splits_equally_and_says_what_is_missing() -> None:
    whole = score_of("mnli", 50, 0, validation_matched=10, validation_mismatched=20)
    assert whole.metrics == {"accuracy": 50}
    assert whole.partial  # 10 of 9,815
    one = score_of("mnli", 50, 0, validation_matched=9815)
    assert one.missing == ("validation_mismatched is not there",)

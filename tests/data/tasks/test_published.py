"""Every task's text, against strings written by hand from T5's conventions."""

from __future__ import annotations

from typing import Any

import pytest

from altup.data.tasks import SUITES, TASKS, Example, find_task
from altup.data.tasks.published import as_in_text, mark_pronoun, space_punctuation
from altup.data.tasks.task import BadRecordError

PAIR = {"sentence1": "It rains.", "sentence2": "It is wet."}

# task, record, input, target
GOLDEN: list[tuple[str, dict[str, Any], str, str]] = [
    ("cola", {"sentence": "The the cat.", "label": 0}, "cola sentence: The the cat.", "unacceptable"),
    ("cola", {"sentence": "A cat.", "label": 1}, "cola sentence: A cat.", "acceptable"),
    ("sst2", {"sentence": "a joy .", "label": 1}, "sst2 sentence: a joy .", "positive"),
    ("sst2", {"sentence": "a bore .", "label": 0}, "sst2 sentence: a bore .", "negative"),
    ("mrpc", {**PAIR, "label": 0}, "mrpc sentence1: It rains. sentence2: It is wet.", "not_equivalent"),
    ("mrpc", {**PAIR, "label": 1}, "mrpc sentence1: It rains. sentence2: It is wet.", "equivalent"),
    ("glue/rte", {**PAIR, "label": 0}, "rte sentence1: It rains. sentence2: It is wet.", "entailment"),
    ("glue/rte", {**PAIR, "label": 1}, "rte sentence1: It rains. sentence2: It is wet.", "not_entailment"),
    ("wnli", {**PAIR, "label": 1}, "wnli sentence1: It rains. sentence2: It is wet.", "entailment"),
    ("wnli", {**PAIR, "label": 0}, "wnli sentence1: It rains. sentence2: It is wet.", "not_entailment"),
    (
        "qqp",
        {"question1": "Why?", "question2": "How so?", "label": 1},
        "qqp question1: Why? question2: How so?",
        "duplicate",
    ),
    (
        "qqp",
        {"question1": "A?", "question2": "B?", "label": 0},
        "qqp question1: A? question2: B?",
        "not_duplicate",
    ),
    (
        "qnli",
        {"question": "Who?", "sentence": "She did.", "label": 0},
        "qnli question: Who? sentence: She did.",
        "entailment",
    ),
    # The hypothesis comes first, whatever the order in the record.
    (
        "mnli",
        {"premise": "It pours.", "hypothesis": "It rains.", "label": 1},
        "mnli hypothesis: It rains. premise: It pours.",
        "neutral",
    ),
    (
        "mnli",
        {"premise": "It pours.", "hypothesis": "It is dry.", "label": 2},
        "mnli hypothesis: It is dry. premise: It pours.",
        "contradiction",
    ),
    ("stsb", {**PAIR, "label": 3.25}, "stsb sentence1: It rains. sentence2: It is wet.", "3.2"),
    (
        "boolq",
        {"question": "is it wet", "passage": "Rain -- It falls.", "label": 1},
        "boolq passage: Rain -- It falls. question: is it wet",
        "True",
    ),
    (
        "cb",
        {"premise": "He may come.", "hypothesis": "He comes", "label": 2},
        "cb hypothesis: He comes premise: He may come.",
        "neutral",
    ),
    ("cb", {"premise": "P.", "hypothesis": "H", "label": 1}, "cb hypothesis: H premise: P.", "contradiction"),
    (
        "super_glue/rte",
        {"premise": "It pours.", "hypothesis": "It rains.", "label": 0},
        "rte hypothesis: It rains. premise: It pours.",
        "entailment",
    ),
    (
        "copa",
        {"premise": "I slept.", "choice1": "I was tired.", "choice2": "I ran.", "question": "cause", "label": 0},
        "copa choice1: I was tired. choice2: I ran. premise: I slept. question: cause",
        "choice1",
    ),
    (
        "wic",
        {"word": "bank", "sentence1": "A river bank.", "sentence2": "My bank.", "start1": 8, "label": 0},
        "wic sentence1: A river bank. sentence2: My bank. word: bank",
        "False",
    ),
    (
        "multirc",
        {
            "paragraph": "<b>Sent 1: </b>Force moves.<br><b>Sent 2: </b>It stops.<br>",
            "question": "What moves?",
            "answer": "Force",
            "idx": {"paragraph": 3, "question": 7, "answer": 1},
            "label": 1,
        },
        "multirc question: What moves? answer: Force paragraph: Sent 1: Force moves. Sent 2: It stops. ",
        "True",
    ),
    (
        "wsc",
        {
            "text": "Mark told Pete that he lied.",
            "span1_text": "Mark",
            "span2_text": "he",
            "span2_index": 4,
            "label": 1,
        },
        "wsc: Mark told Pete that *he* lied.",
        "Mark",
    ),
    (
        "squad",
        {
            "question": "What's the Broncos' (2015) title?",
            "context": 'Denver\'s team,\n\nthe "Broncos" won 24–10.',
            "answers": {"text": ["AFC-champion", "champion."], "answer_start": [0, 0]},
        },
        "question: What ' s the Broncos ' ( 2015 ) title ? "
        'context: Denver \' s team , the " Broncos " won 24–10 .',
        "AFC - champion",
    ),
    (
        "trivia_qa",
        {
            "question": "Who wrote 'Emma'?",
            "answer": {"value": "Jane Austen", "aliases": ["J. Austen", "Jane Austen"]},
        },
        "trivia_qa question: Who wrote 'Emma'?",
        "Jane Austen",
    ),
]

RECORD = {
    "passage": "Rain fell in Rome.\n@highlight\nParis stayed dry\n@highlight\n"
    'Oslo asked "why"\n@highlight\nBern too',
    "query": "Sun shone in @placeholder",
    "entities": ["Rome", "Paris", "Oslo", "Rome"],
    "answers": ["Paris", "Oslo", "Paris"],
    "idx": {"passage": 0, "query": 0},
}
RECORD_INPUT = (
    "record query: Sun shone in @placeholder entities: Oslo, Paris, Rome passage: Rain fell in Rome. "
    'Paris stayed dry. Oslo asked "why" Bern too'
)


@pytest.mark.parametrize(("name", "record", "text", "target"), GOLDEN)
def test_text_of_a_record(name: str, record: dict[str, Any], text: str, target: str) -> None:
    for training in (True, False):
        (example,) = find_task(name).write(record, training)
        assert (example.input, example.target) == (text, target)


@pytest.mark.parametrize(("name", "record", "text", "target"), GOLDEN)
def test_the_layout_of_a_task_is_how_it_is_written(
    name: str, record: dict[str, Any], text: str, target: str
) -> None:
    task = find_task(name)
    if task.short_name in ("wsc", "squad", "multirc"):  # which change the fields' text
        assert text.split(": ")[0] == task.layout.split(": ")[0]
    else:
        assert task.layout.format(**record) == text


def test_every_task_has_a_golden_text() -> None:
    named = {find_task(name).name for name, *_ in GOLDEN} | {"super_glue/record"}
    assert named == set(TASKS)
    assert [len(SUITES[suite]) for suite in ("glue", "super_glue")] == [8, 8]


def test_record_trains_on_each_answer_and_is_evaluated_once() -> None:
    task = find_task("record")
    both = ("Oslo", "Paris")
    assert task.write(RECORD, True) == [Example(RECORD_INPUT, answer, both) for answer in both]
    assert task.write(RECORD, False) == [Example(RECORD_INPUT, "Oslo", both)]


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (0, "0.0"),
        (5, "5.0"),
        (2.0, "2.0"),
        (3.75, "3.8"),
        (0.05, "0.0"),
        (0.15, "0.2"),
        (4.857, "4.8"),
        (2.6, "2.6"),
    ],
)
def test_similarity_is_rounded_to_fifths(score: float, text: str) -> None:
    (example,) = find_task("stsb").write({**PAIR, "label": score}, True)
    assert example.target == text
    assert example.references == (float(text),)  # T5 reads both sides of the correlation from text


def test_multirc_groups_the_answers_of_a_question() -> None:
    record: dict[str, Any] = {"paragraph": "P", "question": "Q", "answer": "A", "label": 0}
    groups = [
        find_task("multirc").write({**record, "idx": {"paragraph": p, "question": q, "answer": a}}, False)[0].group
        for p, q, a in ((0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (11, 1, 0), (1, 11, 0))
    ]
    assert groups[0] == groups[1]
    assert len(set(groups)) == 5


def test_wsc_trains_on_true_cases_only() -> None:
    record = {"text": "Mark saw that he lied.", "span1_text": "Mark", "span2_text": "he", "span2_index": 3}
    task = find_task("wsc")
    assert task.write({**record, "label": 0}, True) == []
    (example,) = task.write({**record, "label": 0}, False)
    assert example.references == ("Mark", False)


@pytest.mark.parametrize(
    ("text", "pronoun", "index", "marked"),
    [
        ('John laughed. "Good for him," he said.', "him", 4, 'John laughed. "Good for *him* ," he said.'),
        ("They want to use it , now", "it", 3, "They want to use *it* , now"),  # a neighbour of the word given
        ("He saw that he was he", "he", 3, "He saw that *he* was he"),
        ("the hen saw He", "he", 3, "the hen saw *He*"),
        ("so (she)", "she", 1, "so (*she* )"),
    ],
)
def test_the_pronoun_is_marked(text: str, pronoun: str, index: int, marked: str) -> None:
    assert mark_pronoun(text, pronoun, index) == marked


@pytest.mark.parametrize(
    ("span", "text", "fixed"),
    [
        ("The worm", "The fish ate the worm . It was tasty.", "the worm"),
        ("the lawyer", "The lawyer asked the witness a question.", "The lawyer"),
        ("wide\nopen door", "She saw the wide open door .", "wide open door"),
        ("the door.", "She saw the door , and left.", "the door"),
        ("The art", "The start was the art of it.", "the art"),  # whole words
        ("Ann and Bo", "Ann , and then Bo , left.", "Ann and Bo"),  # words between: nothing to be done
        ("the worm", "The fish ate the worm .", "the worm"),
    ],
)
def test_a_referent_is_written_as_its_text_has_it(span: str, text: str, fixed: str) -> None:
    assert as_in_text(span, text) == fixed
    record = {"text": f"{text} So he said.", "span1_text": span, "span2_text": "he", "span2_index": 9, "label": 1}
    (example,) = find_task("wsc").write(record, True)
    assert (example.target, example.references) == (fixed, (fixed, True))


def test_punctuation_is_spaced_and_unicode_left_alone() -> None:
    assert space_punctuation(" It's  24–10:\t“a_b” $5.0 ") == "It ' s 24–10 : “a _ b” $ 5 . 0"


def test_trivia_answers_need_no_other_names() -> None:
    record = {"question": "Q", "answer": {"value": "A", "aliases": []}}
    assert find_task("trivia_qa").write(record, True)[0].references == ("A",)


@pytest.mark.parametrize(("name", "record", "text", "target"), [*GOLDEN, ("record", RECORD, RECORD_INPUT, "Oslo")])
def test_what_a_record_asks_does_not_depend_on_its_label(
    name: str, record: dict[str, Any], text: str, target: str
) -> None:
    task = find_task(name)
    blanks = {"label": (-1, -1.0, None), "answers": ([], {"text": [], "answer_start": []}, None)}
    blanks["answer"] = ({"value": "<unk>", "aliases": [], "type": ""}, None)
    assert not task.is_unlabelled(record)
    for field in task.answer_fields:
        for blank in blanks[field]:
            assert task.is_unlabelled({**record, field: blank})
        assert task.is_unlabelled({key: value for key, value in record.items() if key != field})
    (example,) = task.write({**record, **task.answer_fields}, False)
    assert example.input == text


@pytest.mark.parametrize(
    ("name", "record", "reason"),
    [
        ("cola", {"label": 0}, "missing field"),
        ("cola", {"sentence": None, "label": 0}, "missing field"),
        ("cola", {"sentence": 3, "label": 0}, "wrong kind of field"),
        ("cola", {"sentence": "A", "label": -1}, "label outside its set"),
        ("cola", {"sentence": "A", "label": 2}, "label outside its set"),
        ("cola", {"sentence": "A", "label": "1"}, "label outside its set"),
        ("cola", {"sentence": "A", "label": 1.0}, "label outside its set"),
        ("stsb", {**PAIR, "label": 5.1}, "label outside its set"),
        ("stsb", {**PAIR, "label": float("nan")}, "label outside its set"),
        ("squad", {"question": "Q", "context": "C", "answers": {"text": []}}, "wrong kind of field"),
        ("squad", {"question": "Q", "context": "C", "answers": ["A"]}, "wrong kind of field"),
        ("trivia_qa", {"question": "Q", "answer": "A"}, "wrong kind of field"),
        ("multirc", {"paragraph": "P", "question": "Q", "answer": "A", "label": 0, "idx": 3}, "missing field"),
        ("record", {**RECORD, "answers": []}, "wrong kind of field"),
        (
            "wsc",
            {"text": "No one", "span1_text": "No", "span2_text": "he", "span2_index": 1, "label": 1},
            "pronoun not in its text",
        ),
    ],
)
def test_records_that_are_no_example(name: str, record: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        find_task(name).write(record, False)
    assert caught.value.reason == reason

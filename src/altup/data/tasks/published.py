"""GLUE, SuperGLUE, SQuAD 1.1 and closed-book TriviaQA: how each task's records become text, then its declaration.

Most inputs are `"{task} {key}: {text} …"`; a task whose text is made otherwise has a function of its own.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import Any

from altup.data.tasks.task import BadRecordError, Example, Record, Task, label_of, text_of, texts_of, value_of

Write = Callable[[Record, bool], list[Example]]


def keyed(prefix: str, keys: tuple[str, ...], record: Record) -> str:
    """`"mnli hypothesis: … premise: …"`."""
    return " ".join([prefix, *(f"{key}: {text_of(record, key)}" for key in keys)])


def keyed_layout(prefix: str, keys: tuple[str, ...]) -> str:
    """`"mnli hypothesis: {hypothesis} premise: {premise}"`: how `keyed` writes."""
    return " ".join([prefix, *(f"{key}: {{{key}}}" for key in keys)])


def classification(prefix: str, keys: tuple[str, ...], labels: tuple[str, ...]) -> Write:
    def write(record: Record, training: bool) -> list[Example]:
        target = label_of(record, labels)
        return [Example(keyed(prefix, keys, record), target, (target,))]

    return write


def similarity(prefix: str, keys: tuple[str, ...]) -> Write:
    """STS-B: the score from 0 to 5 as text, rounded to the nearest 0.2; evaluation compares with this number."""

    def write(record: Record, training: bool) -> list[Example]:
        score = value_of(record, "label")
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 5:
            raise BadRecordError("label outside its set", f"label={score!r}; scores go from 0 to 5")
        rounded = round(score * 5) / 5
        return [Example(keyed(prefix, keys, record), f"{rounded:.1f}", (rounded,))]

    return write


def multirc(labels: tuple[str, ...]) -> Write:
    """One answer at a time. `group` is its question, for the exact match of whole questions."""

    def write(record: Record, training: bool) -> list[Example]:
        text = keyed("multirc", ("question", "answer", "paragraph"), record)
        text = re.sub(r"</?b>", "", text.replace("<br>", " "))
        target = label_of(record, labels)
        place = value_of(record, "idx")
        if not isinstance(place, dict) or not {"paragraph", "question"} <= place.keys():
            raise BadRecordError("missing field", f"idx={place!r} names no paragraph and question")
        return [Example(text, target, (target,), f"{place['paragraph']}-{place['question']}")]

    return write


def record(record: Record, training: bool) -> list[Example]:
    """ReCoRD: `@placeholder` is one of the entities. Training uses every answer, evaluation accepts any."""
    passage = text_of(record, "passage")
    passage = re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", passage)
    passage = passage.replace("\n@highlight\n", ". ")
    entities = ", ".join(sorted(set(texts_of(record, "entities"))))
    text = f"record query: {text_of(record, 'query')} entities: {entities} passage: {passage}"
    answers = tuple(sorted(set(texts_of(record, "answers"))))
    return [Example(text, answer, answers) for answer in (answers if training else answers[:1])]


def wsc(record: Record, training: bool) -> list[Example]:
    """The pronoun stands between asterisks; the target is what it refers to. Only true cases can be trained on.

    Evaluation compares every prediction with the candidate: `references` = (candidate, label).
    """
    label = label_of(record, ("False", "True"))
    if training and label == "False":
        return []
    text = text_of(record, "text")
    candidate = as_in_text(text_of(record, "span1_text"), text)
    marked = mark_pronoun(text, text_of(record, "span2_text"), value_of(record, "span2_index"))
    return [Example(f"wsc: {marked}", candidate, (candidate, label == "True"))]


def as_in_text(span: str, text: str) -> str:
    """A span as its text has it: some are published in another case, with line ends, or with a full stop behind.

    That makes `wsc` the set `wsc.fixed`, which T5 uses. A span whose words are not in the text stays as it is.
    """
    if span in text:
        return span
    found = whole_words(span.rstrip(".").split()).search(text)
    return found[0] if found else span


def whole_words(words: list[str]) -> re.Pattern[str]:
    """Finds these words, one after the other, in any case."""
    joined = r"\s+".join(map(re.escape, words))
    return re.compile(rf"(?<!\w){joined}(?!\w)", re.IGNORECASE)


def mark_pronoun(text: str, pronoun: str, index: int) -> str:
    """Put asterisks around the pronoun, word `index` of the text; a few published records are off by a word.

    Punctuation that follows at once gets a space before it, which nearly all records have there anyway.
    """
    words = text.split(" ")
    whole = whole_words(pronoun.split())
    found = [i for i, word in enumerate(words) if whole.search(word)]
    if not found or not isinstance(index, int):
        raise BadRecordError("pronoun not in its text", f"span2_text={pronoun!r}, span2_index={index!r}")
    place = min(found, key=lambda i: abs(i - index))
    before, said, behind = re.split(f"({whole.pattern})", words[place], maxsplit=1, flags=re.IGNORECASE)
    words[place] = f"{before}*{said}* {behind}".strip()
    return " ".join(words).strip()


def squad(record: Record, training: bool) -> list[Example]:
    """The first answer is the target; predictions are compared with all of them."""
    given = value_of(record, "answers")
    if not isinstance(given, dict):
        raise BadRecordError("wrong kind of field", f"answers={given!r} has no list 'text'")
    answers = tuple(space_punctuation(answer) for answer in texts_of(given, "text"))
    question, context = (space_punctuation(text_of(record, name)) for name in ("question", "context"))
    return [Example(f"question: {question} context: {context}", answers[0], answers)]


def space_punctuation(text: str) -> str:
    """Spaces around every ASCII punctuation mark, white space collapsed."""
    return " ".join(re.sub(f"([{re.escape(string.punctuation)}])", r" \1 ", text).split())


def trivia_qa(record: Record, training: bool) -> list[Example]:
    """Closed book: the question alone. The target is the answer's usual name; all its names are accepted."""
    answer = value_of(record, "answer")
    if not isinstance(answer, dict):
        raise BadRecordError("wrong kind of field", f"answer={answer!r} has no 'value' and 'aliases'")
    value = text_of(answer, "value")
    aliases = texts_of(answer, "aliases") if answer.get("aliases") != [] else []
    accepted = tuple(dict.fromkeys([value, *aliases]))
    return [Example(f"trivia_qa question: {text_of(record, 'question')}", value, accepted)]


def _suite_task(
    suite: str,
    name: str,
    metrics: tuple[str, ...],
    sizes: tuple[int, int],
    description: str,
    keys: tuple[str, ...] = (),
    labels: tuple[str, ...] = (),
    **fields: Any,
) -> Task:
    """A task of a suite: a classification of the fields `keys`, unless `fields` say otherwise."""
    hub, targets_length = {"glue": ("nyu-mll/glue", 84), "super_glue": ("aps/super_glue", 62)}[suite]
    usual: dict[str, Any] = {
        "write": classification(name, keys, labels),
        "layout": keyed_layout(name, keys),
        "answer_fields": {"label": 0},
        "published": dict(zip(("train", "validation"), sizes, strict=True)),
    }
    return Task(
        name=f"{suite}/{name}",
        metrics=metrics,
        description=description,
        labels=labels,
        targets_length=targets_length,
        folder=f"{suite}/{name}",
        hub=(hub, name),
        **{**usual, **fields},
    )


PAIR = ("sentence1", "sentence2")
ENTAILMENT = ("entailment", "not_entailment")
TRUTH = ("False", "True")

GLUE = (
    _suite_task(
        *("glue", "cola", ("matthews",), (8_551, 1_043), "is this sentence grammatical?"),
        keys=("sentence",),
        labels=("unacceptable", "acceptable"),
    ),
    _suite_task(
        *("glue", "sst2", ("accuracy",), (67_349, 872), "is this review's sentence positive?"),
        keys=("sentence",),
        labels=("negative", "positive"),
    ),
    _suite_task(
        *("glue", "mrpc", ("f1", "accuracy"), (3_668, 408), "do two sentences of the news mean the same?"),
        keys=PAIR,
        labels=("not_equivalent", "equivalent"),
    ),
    _suite_task(
        *("glue", "qqp", ("f1", "accuracy"), (363_846, 40_430), "are two questions the same?"),
        keys=("question1", "question2"),
        labels=("not_duplicate", "duplicate"),
    ),
    _suite_task(
        *("glue", "stsb", ("pearson", "spearman"), (5_749, 1_500), "how alike are two sentences, 0 to 5?"),
        keys=PAIR,
        write=similarity("stsb", PAIR),
    ),
    _suite_task(
        *("glue", "mnli", ("accuracy",), (392_702, 9_815), "does the premise entail the hypothesis?"),
        keys=("hypothesis", "premise"),
        labels=("entailment", "neutral", "contradiction"),
        held_out=("validation_matched", "validation_mismatched"),
        published={"train": 392_702, "validation_matched": 9_815, "validation_mismatched": 9_832},
    ),
    _suite_task(
        *("glue", "qnli", ("accuracy",), (104_743, 5_463), "does the sentence answer the question?"),
        keys=("question", "sentence"),
        labels=ENTAILMENT,
    ),
    _suite_task(
        *("glue", "rte", ("accuracy",), (2_490, 277), "does the first sentence entail the second?"),
        keys=PAIR,
        labels=ENTAILMENT,
    ),
    _suite_task(
        *("glue", "wnli", ("accuracy",), (635, 71), "Winograd schemas as entailment; in no average"),
        keys=PAIR,
        labels=("not_entailment", "entailment"),
    ),
)

SUPER_GLUE = (
    _suite_task(
        *("super_glue", "boolq", ("accuracy",), (9_427, 3_270), "does the passage say yes to the question?"),
        keys=("passage", "question"),
        labels=TRUTH,
    ),
    _suite_task(
        *("super_glue", "cb", ("macro_f1", "accuracy"), (250, 56)),
        description="does the premise commit its speaker to the hypothesis?",
        keys=("hypothesis", "premise"),
        labels=("entailment", "contradiction", "neutral"),
    ),
    _suite_task(
        *("super_glue", "copa", ("accuracy",), (400, 100)),
        description="which choice is the cause or the effect of the premise?",
        keys=("choice1", "choice2", "premise", "question"),
        labels=("choice1", "choice2"),
    ),
    _suite_task(
        *("super_glue", "multirc", ("f1a", "question_exact_match"), (27_243, 4_848)),
        description="does this answer the question?",
        keys=("question", "answer", "paragraph"),
        labels=TRUTH,
        write=multirc(TRUTH),
    ),
    _suite_task(
        *("super_glue", "record", ("exact_match", "f1_words"), (100_730, 10_000)),
        description="which entity stands at @placeholder?",
        keys=("query", "entities", "passage"),
        write=record,
        answer_fields={"answers": ["?"]},
    ),
    _suite_task(
        *("super_glue", "rte", ("accuracy",), (2_490, 277), "does the premise entail the hypothesis?"),
        keys=("hypothesis", "premise"),
        labels=ENTAILMENT,
    ),
    _suite_task(
        *("super_glue", "wic", ("accuracy",), (5_428, 638), "has the word the same sense in both sentences?"),
        keys=("sentence1", "sentence2", "word"),
        labels=TRUTH,
    ),
    _suite_task(
        *("super_glue", "wsc", ("referent_accuracy",), (554, 104), "what does the *pronoun* stand for?"),
        write=wsc,
        layout="wsc: {text, its *pronoun* marked}",
    ),
)

QUESTION_ANSWERING = (
    Task(
        name="squad",
        write=squad,
        metrics=("exact_match", "f1_words"),
        description="the answer is a part of the context",
        layout="question: {question} context: {context}, spaces around punctuation",
        answer_fields={"answers": {"text": ["?"]}},
        targets_length=97,
        folder="squad/v1.1",
        hub=("rajpurkar/squad", None),
        published={"train": 87_599, "validation": 10_570},
    ),
    Task(
        name="trivia_qa",
        write=trivia_qa,
        metrics=("trivia_exact_match", "trivia_f1_words"),
        description="questions of quizzes, from memory",
        layout="trivia_qa question: {question}",
        answer_fields={"answer": {"value": "?", "aliases": []}},
        inputs_length=128,
        targets_length=32,
        folder="trivia_qa/unfiltered.nocontext",
        hub=("mandarjoshi/trivia_qa", "unfiltered.nocontext"),
        published={"train": 87_622, "validation": 11_313},
    ),
)

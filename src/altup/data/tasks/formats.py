"""How records become text: `"{task} {key}: {text} …"` for most, a function of its own for the awkward ones."""

from __future__ import annotations

import re
import string
from collections.abc import Callable

from altup.data.tasks.task import BadRecordError, Example, Record, label_of, text_of, texts_of, value_of

Write = Callable[[Record, bool], list[Example]]


def keyed(prefix: str, keys: tuple[str, ...], record: Record) -> str:
    """`"mnli hypothesis: … premise: …"`."""
    return " ".join([prefix, *(f"{key}: {text_of(record, key)}" for key in keys)])


def layout(prefix: str, keys: tuple[str, ...]) -> str:
    """`"mnli hypothesis: {hypothesis} premise: {premise}"`: how `keyed` writes."""
    return " ".join([prefix, *(f"{key}: {{{key}}}" for key in keys)])


def classification(prefix: str, keys: tuple[str, ...], labels: tuple[str, ...]) -> Write:
    def write(record: Record, training: bool) -> list[Example]:
        target = label_of(record, labels)
        return [Example(keyed(prefix, keys, record), target, (target,))]

    return write


def similarity(prefix: str, keys: tuple[str, ...]) -> Write:
    """STS-B: the score from 0 to 5 as text, rounded to the nearest 0.2; evaluation compares with the score."""

    def write(record: Record, training: bool) -> list[Example]:
        score = value_of(record, "label")
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 5:
            raise BadRecordError("label outside its set", f"label={score!r}; scores go from 0 to 5")
        return [Example(keyed(prefix, keys, record), f"{round(score * 5) / 5:.1f}", (float(score),))]

    return write


def multirc(labels: tuple[str, ...]) -> Write:
    """One answer at a time; `group` is its question, for the exact match of whole questions."""

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
    """ReCoRD: `@placeholder` is one of the entities. Trained on every answer, evaluated against all of them."""
    passage = text_of(record, "passage")
    passage = re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", passage)
    passage = passage.replace("\n@highlight\n", ". ")
    entities = ", ".join(sorted(set(texts_of(record, "entities"))))
    text = f"record query: {text_of(record, 'query')} entities: {entities} passage: {passage}"
    answers = tuple(sorted(set(texts_of(record, "answers"))))
    return [Example(text, answer, answers) for answer in (answers if training else answers[:1])]


def wsc(record: Record, training: bool) -> list[Example]:
    """The pronoun between asterisks; the target is what it stands for. Only true cases can be trained on.

    Evaluation asks of every case whether the prediction is the candidate: `references` = (candidate, label).
    """
    label = label_of(record, ("False", "True"))
    if training and label == "False":
        return []
    candidate = text_of(record, "span1_text")
    text = mark_pronoun(text_of(record, "text"), text_of(record, "span2_text"), value_of(record, "span2_index"))
    return [Example(f"wsc: {text}", candidate, (candidate, label == "True"))]


def mark_pronoun(text: str, pronoun: str, index: int) -> str:
    """Asterisks around the pronoun, word `index` of the text; in a few published records it is a neighbour."""
    words = text.split(" ")
    whole = re.compile(rf"(?<!\w){re.escape(pronoun)}(?!\w)", re.IGNORECASE)
    places = [i for i, word in enumerate(words) if whole.search(word)]
    if not places or not isinstance(index, int):
        raise BadRecordError("pronoun not in its text", f"span2_text={pronoun!r}, span2_index={index!r}")
    place = min(places, key=lambda i: abs(i - index))
    words[place] = whole.sub(lambda match: f"*{match[0]}*", words[place], count=1)
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


def plain(record: Record, training: bool) -> list[Example]:
    """A user's own task: `input` and `target` as they are."""
    target = text_of(record, "target")
    return [Example(text_of(record, "input"), target, (target,))]

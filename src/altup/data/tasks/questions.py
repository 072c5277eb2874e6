"""Question answering: SQuAD 1.1 with its context, TriviaQA without (closed book)."""

from __future__ import annotations

from altup.data.tasks import formats
from altup.data.tasks.task import Task

TASKS = (
    Task(
        name="squad",
        write=formats.squad,
        metrics=("exact_match", "f1_words"),
        description="the answer is a part of the context",
        layout="question: {question} context: {context}, spaces around punctuation",
        targets_length=97,
        folder="squad/v1.1",
        hub=("rajpurkar/squad", None),
        published={"train": 87_599, "validation": 10_570},
    ),
    Task(
        name="trivia_qa",
        write=formats.trivia_qa,
        metrics=("trivia_exact_match", "trivia_f1_words"),
        description="questions of quizzes, from memory",
        layout="trivia_qa question: {question}",
        inputs_length=128,
        targets_length=32,
        folder="trivia_qa/unfiltered.nocontext",
        hub=("mandarjoshi/trivia_qa", "unfiltered.nocontext"),
        published={"train": 87_622, "validation": 11_313},
    ),
)

"""Settings of an evaluation, and those of all that reads tasks."""

from __future__ import annotations

from dataclasses import dataclass

from altup.core.errors import MOST_EXAMPLES, MOST_TOKENS
from altup.core.hardware import PRECISIONS
from altup.core.schema import Settings, setting


@dataclass(kw_only=True)
class TaskSettings(Settings):
    """How tasks are read, to train on them or to answer them."""

    data: str | None = setting(
        None, "Folder with SUITE/TASK/SPLIT.jsonl files (.gz, .zst).", shown="the hub", after="suite"
    )
    inputs_length: int | None = setting(None, "Most tokens of an input.", at_least=2, at_most=MOST_TOKENS)
    targets_length: int | None = setting(
        None, "Most tokens of an answer.", after="inputs_length", at_least=2, at_most=MOST_TOKENS
    )
    on_error: str = setting("stop", "Bad records: stop, or skip and count them.", choices=("skip", "stop"))


@dataclass(kw_only=True)
class EvaluateConfig(TaskSettings):
    """How tasks are read and answered, whether the answers are scored or only kept.

    Examples:
        >>> import altup
        >>> altup.EvaluateConfig(data="tasks", limit=100).batch_size
        128
    """

    data: str | None = setting(None, panel="Options")
    limit: int | None = setting(None, "Examples a split.", shown="all", panel="Options", after="out", at_least=1)
    inputs_length: int | None = setting(None, shown="as fine-tuned, else 512", panel="Options", after="out")
    targets_length: int | None = setting(None, shown="as fine-tuned, else 128", panel="Options")
    batch_size: int = setting(
        128, "Examples decoded together.", panel="Options", after="targets_length",
        at_least=1, at_most=MOST_EXAMPLES,
    )  # fmt: skip
    precision: str | None = setting(
        None, "{choices}.", shown="bf16 on GPUs, else fp32",
        panel="Options", after="batch_size", choices=PRECISIONS,
    )  # fmt: skip
    on_error: str = setting("stop", panel="Options", after="split")

"""Settings of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from altup.core.schema import Settings, setting
from altup.training.config import MOST_EXAMPLES, MOST_TOKENS, PRECISIONS


@dataclass(kw_only=True)
class EvaluateConfig(Settings):
    """How tasks are read and answered, whether the answers are scored or only kept.

    Examples:
        >>> import altup
        >>> altup.EvaluateConfig(data="tasks", limit=100).batch_size
        128
    """

    data: str | None = setting(
        None, "Folder with SUITE/TASK/SPLIT.jsonl files (.gz, .zst).", shown="the hub",
        panel="Options", after="suite",
    )  # fmt: skip
    limit: int | None = setting(None, "Examples a split.", shown="all", panel="Options", after="out", at_least=1)
    inputs_length: int | None = setting(
        None, "Most tokens of an input.", shown="as fine-tuned, else 512",
        panel="Options", after="limit", at_least=2, at_most=MOST_TOKENS,
    )  # fmt: skip
    targets_length: int | None = setting(
        None, "Most tokens of an answer.", shown="as fine-tuned, else 128",
        panel="Options", after="inputs_length", at_least=2, at_most=MOST_TOKENS,
    )  # fmt: skip
    batch_size: int = setting(
        128, "Examples decoded together.", panel="Options", after="targets_length",
        at_least=1, at_most=MOST_EXAMPLES,
    )  # fmt: skip
    precision: str | None = setting(
        None, "{choices}.", shown="bf16 on GPUs, else fp32",
        panel="Options", after="batch_size", choices=PRECISIONS,
    )  # fmt: skip
    on_error: str = setting(
        "stop", "Bad records: stop, or skip and count them.",
        panel="Options", after="split", choices=("skip", "stop"),
    )  # fmt: skip

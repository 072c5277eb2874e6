"""What the figures of a run were measured on, and whether those of two runs compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from altup.studies.jobs import identify_text

# Of a pretraining run: with the text they decide its held-out examples and the objective.
DECIDING = ("model", "inputs_length", "noise_density", "mean_span", "eval_sequences", "eval_part")


@dataclass(frozen=True)
class HeldOutExamples:
    """As far as a folder or a record tells them.

    - `described`: a folder's own description of them; a study's record has none.
    - `identity`: of the prepared text, training and held-out together, or of a fine-tuning's tasks.
    - `settings`: those that decide which examples are made of it.
    """

    described: Mapping[str, Any] | None = None
    identity: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, config: Mapping[str, Any]) -> HeldOutExamples:
        """From a run's whole config."""
        tunes = "tasks" in config
        settings = {"kind": "finetune"} if tunes else _pretraining(config)
        batches = config.get("batches")
        if not isinstance(batches, Mapping) or not batches:
            return cls(settings=settings)
        described = {part: batches.get(part) for part in ("validation", "tasks")}
        validation = batches.get("validation")
        unseen = validation.get("data") if isinstance(validation, Mapping) else None
        hashes = [one for one in (batches.get("data"), unseen, batches.get("tokenizer")) if isinstance(one, str)]
        identity = identify_text(*hashes) if len(hashes) == 3 else None
        return cls({**described, "eval_limit": config.get("eval_limit")}, identity, settings)

    @classmethod
    def of_record(cls, record: Mapping[str, Any], config: Mapping[str, Any]) -> HeldOutExamples:
        if record["kind"] == "pretrain":
            return cls(None, record.get("data"), _pretraining(config))
        return cls(None, record.get("data"), {"kind": "finetune", "column": record.get("column")})

    def same_as(self, other: HeldOutExamples) -> bool | None:
        """Whether figures compare; None where it is not known. Other training text does not mean other held-out
        text, so unequal identities tell nothing."""
        if self.described is not None and other.described is not None:
            return self.described == other.described
        both = self.settings.keys() & other.settings.keys()
        if any(self.settings[name] != other.settings[name] for name in both):
            return False
        return True if self.identity is not None and self.identity == other.identity else None


def _pretraining(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "pretrain", **{name: config[name] for name in DECIDING if name in config}}

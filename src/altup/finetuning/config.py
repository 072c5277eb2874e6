"""Settings of a fine-tuning run; the defaults are the paper's recipe, which is T5's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from altup.core.errors import MOST_EXAMPLES, UserError
from altup.core.schema import setting
from altup.data.tasks.task import INPUTS_LENGTH, TARGETS_LENGTH
from altup.evaluation.config import TaskSettings
from altup.training.config import TrainConfig

# What the command line begins with for all models but T5s, whose rate spoils others (docs/finetuning.md).
T5_TYPES = ("altup_t5", "t5", "mt5", "umt5", "longt5", "switch_transformers")
NOT_T5 = {"optimizer": "adamw", "lr": 1e-4}


@dataclass(kw_only=True)
class FinetuneConfig(TaskSettings, TrainConfig):
    """A model, tasks, their data, and how to train: Adafactor at a constant 1e-3, dropout 0.1, batch 256.

    These are T5's. For other models give `optimizer="adamw", lr=1e-4`, as `altup finetune` does by itself.
    `model` is a run, a model folder or a name on the hub. `tasks` holds names of tasks or suites, or a user's own
    files, each with a weight (`squad=2`) or none of them. `data` is a folder of task files; None is the hub.
    `pack` puts several examples into a row; models that would mix them pad.
    A checkpoint is saved with every evaluation unless `save_every` says otherwise, so that the best can be kept.
    `data` may be moved: what counts is `batches`, the description of the data, which is filled in at the start
    and compared when a run goes on.

    Examples:
        >>> import altup
        >>> config = altup.FinetuneConfig(model="runs/altup", tasks=["squad=2", "glue=1"], data="tasks")
        >>> config.batch_size
        256
    """

    model: str = setting("", "A run, a model folder, or a name on the hub.")
    tasks: list[str] = setting(
        [], "A task, a suite, or your own .jsonl file, folder or .py file (my.py:NAME of several); with a weight: "
        "squad=2. Repeat it.",
        panel="Run", flag="--task", after="out",
    )  # fmt: skip
    data: str | None = setting(None, panel="Run", may_change=True)
    steps: int = 50_000
    batch_size: int = 256
    optimizer: str | None = setting("adafactor", "{choices}; encoders and causal models: adamw.")
    lr: float | None = setting(
        1e-3, "Learning rate; for rsqrt its numerator. Encoders and causal models with adamw: 0.0001."
    )
    schedule: str | None = "constant"
    decay_fraction: float | None = 0.0
    dropout: float = setting(0.1, "Dropout.", panel="Model", at_least=0, below=1)
    z_loss: float = setting(1e-4, "Weight of the squared log-sum-exp of the logits in the loss.", at_least=0)
    inputs_length: int = setting(INPUTS_LENGTH, panel="Training", after="micro_batch")
    targets_length: int = setting(TARGETS_LENGTH, panel="Training")
    pack: bool = setting(True, "Several short examples in a row.", panel="Speed", may_change=True)
    eval_every: int = 1_000
    save_every: int | None = setting(None, shown="as --eval-every")  # type: ignore[assignment]
    eval_batch_size: int = setting(
        128, "Examples decoded together.", panel="Watching", after="eval_every",
        at_least=1, at_most=MOST_EXAMPLES, may_change=True,
    )  # fmt: skip
    eval_limit: int | None = setting(
        None, "Held-out examples a split.", shown="all",
        panel="Watching", after="eval_every", at_least=1, may_change=True,
    )  # fmt: skip
    on_error: str = setting("stop", panel="Run", after="data")
    batches: dict[str, Any] = setting({})

    SHAPES_VARY: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.save_every is None:
            self.save_every = self.eval_every
        super().__post_init__()
        if not self.model:
            raise UserError(
                "model is not set; give a run, a model folder or a name on the hub "
                "(the first argument: altup finetune MODEL --task …)"
            )
        if not self.tasks:
            raise UserError("tasks is not set; give names: --task squad, --suite glue, --task my.jsonl")
        self.weighted_names()

    @classmethod
    def resolve(cls, saved: dict[str, Any], file: Path | None, flags: dict[str, Any]) -> Self:
        """A new run of a widened model gives the coefficients the rate that `altup.parameter_groups` does."""
        config = super().resolve(saved, file, flags)
        if saved or "coefficients" in config.lr_factors or not config.lr:
            return config
        factor = _coefficient_factor(config.model, config.lr)
        return replace(config, lr_factors={**config.lr_factors, "coefficients": factor}) if factor else config

    @classmethod
    def of_values(cls, values: dict[str, Any]) -> Self:
        """Models that are no T5s have their own optimizer, unless one is given, and with it their own rate."""
        own = {name: value for name, value in NOT_T5.items() if values.get(name) is None}
        if not own or values.get("optimizer") not in (None, NOT_T5["optimizer"]):
            return cls(**values)
        other = cls(**{**values, **own})  # says what is wrong before the model is looked for
        return cls(**values) if _is_t5(other.model) else other

    def weighted_names(self) -> list[tuple[str, float | None]]:
        """`["squad=2", "glue"]` → [("squad", 2.0), ("glue", None)]."""
        return [_read_weight(entry) for entry in self.tasks]


def _is_t5(model: str) -> bool:
    """Imported when it is used: the command line's help is made from the config above, and needs no torch."""
    from altup.core.pretrained import load_config
    from altup.core.runs import find_model
    from altup.evaluation.answering import kind_at

    place = find_model(model)
    return kind_at(place) == "t5" and load_config(place).model_type in T5_TYPES


def _coefficient_factor(model: str, lr: float) -> float | None:
    """That of a model which `altup.widen` has widened."""
    from altup.core.pretrained import load_config
    from altup.core.runs import find_model
    from altup.models.widening.training import factor_for
    from altup.transformers_hooks import is_widened

    return factor_for(lr) if is_widened(load_config(find_model(model))) else None


def _read_weight(entry: str) -> tuple[str, float | None]:
    name, equals, text = entry.rpartition("=")
    if not equals:
        return entry, None
    try:
        weight = float(text)
    except ValueError:
        return entry, None
    if not 0 < weight < float("inf"):
        raise UserError(f"task {entry!r}: a weight must be a number above 0, and not infinite")
    return name, weight

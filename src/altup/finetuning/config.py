"""Settings of a fine-tuning run; the defaults are the paper's recipe, which is T5's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from altup.core.errors import MOST_EXAMPLES, UserError
from altup.core.schema import setting
from altup.data.tasks.task import INPUTS_LENGTH, TARGETS_LENGTH
from altup.evaluation.config import TaskSettings
from altup.training.config import TrainConfig

# The paper's recipe is T5's; its rate is too high for other models (docs/finetuning.md).
T5_TYPES = ("altup_t5", "t5", "mt5", "umt5", "longt5", "switch_transformers")
T5_RECIPE = {"optimizer": "adafactor", "lr": 1e-3}
OTHERS_RECIPE = {"optimizer": "adamw", "lr": 1e-4}


@dataclass(kw_only=True)
class FinetuneConfig(TaskSettings, TrainConfig):
    """A model, tasks, their data, and how to train, at a constant rate with dropout 0.1 and batches of 256.

    `optimizer` and `lr` depend on the model unless they are set: T5s have Adafactor at 1e-3, all others AdamW at
    1e-4. They are filled in when the model is found (`for_model`); `config.yaml` of the run holds them.
    `model` is a run, a model folder or a name on the hub. `tasks` holds names of tasks or suites, or a user's own
    files, each with a weight (`squad=2`) or none of them. `data` is a folder of task files; None is the hub.
    `pack` puts several examples into a row; models that would mix them pad.
    A checkpoint is saved with every evaluation unless `save_every` says otherwise, so that the best can be kept.
    `data` may be moved: what counts is `batches`, the description of the data, which is filled in at the start
    and compared when a run resumes.

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
    optimizer: str | None = setting(None, shown="adafactor; encoders and causal models: adamw")
    lr: float | None = setting(None, shown="0.001; encoders and causal models with adamw: 0.0001")
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

    def complete(self) -> None:
        if not self.model:
            raise UserError(
                "model is not set; give a run, a model folder or a name on the hub "
                "(the first argument: altup finetune MODEL --task …)"
            )
        if not self.tasks:
            raise UserError("tasks is not set; give names: --task squad, --suite glue, --task my.jsonl")
        self.weighted_names()
        if self.save_every is None:
            self.save_every = self.eval_every
        if self.optimizer is not None and self.lr is not None:  # else `for_model` completes the rest
            super().complete()

    def for_model(self, place: str) -> Self:
        """The complete config for the model at `place`, that of `model` or a checkpoint of it.

        Coefficients of a model that `altup.widen` has widened have the rate of `altup.parameter_groups`.
        """
        from altup.core.pretrained import load_config
        from altup.models.widening.training import factor_for
        from altup.transformers_hooks import is_widened

        found, factors = load_config(place), self.lr_factors
        others = found.model_type not in T5_TYPES and self.optimizer in (None, OTHERS_RECIPE["optimizer"])
        recipe: dict[str, Any] = OTHERS_RECIPE if others else T5_RECIPE
        values = {name: value for name, value in recipe.items() if getattr(self, name) is None}
        lr = values.get("lr", self.lr)
        if is_widened(found) and lr and "coefficients" not in factors:
            factors = {**factors, "coefficients": factor_for(lr)}
        return replace(self, **values, lr_factors=factors)

    def weighted_names(self) -> list[tuple[str, float | None]]:
        """`["squad=2", "glue"]` → [("squad", 2.0), ("glue", None)]."""
        return [_read_weight(entry) for entry in self.tasks]


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

"""The model families by the names that the command line uses.

A family is a folder here, whose `family.py` registers it. Everything that speaks of families asks its entry:
`--model`, pretraining, `altup params`, upcycling, fine-tuning, `altup generate` and model cards.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from altup.core.errors import check_choice
from altup.models.methods.registry import Layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from altup.models.config import AltUpConfig


class Family:
    """All that a family is: its classes, what and how it learns, where it comes from, and its costs.

    - `objective`: what it is pretrained by, a name of `altup.data.objectives.OBJECTIVES`. Models of transformers
      with the head for it learn and answer as the family does.
    - `answering`, `learning`: how it reads and answers tasks, and how it learns them, as `module:class` of a
      package above this one.
    - `hugging_face`, `convert`: the class of transformers that `altup upcycle` converts, and the function for it.
    - `muon_factors`: parts of a new model that Muon trains at other rates.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    default_size: ClassVar[str]
    config_class: ClassVar[Any]
    model_class: ClassVar[Any]
    headless_class: ClassVar[Any]
    auto_class: ClassVar[Any]
    classifier_class: ClassVar[Any] = None  # of one that sees whole texts, with a head for them
    objective: ClassVar[str]
    answering: ClassVar[str]
    learning: ClassVar[str]
    prompt: ClassVar[str]  # an example for `altup generate`
    hugging_face: ClassVar[Any] = None
    convert: ClassVar[Callable[..., PreTrainedModel] | None] = None
    muon_factors: ClassVar[Mapping[str, float]] = {}

    def special_tokens(self, vocabulary: Any) -> dict[str, int]:
        """Config fields that the data's vocabulary decides, beside its size and its padding."""
        return {}

    def run_fields(self, dropout: float, inputs_length: int) -> dict[str, Any]:
        """Config fields that a run's settings decide."""
        most = max(inputs_length, self.config_class().max_position_embeddings)
        return {"dropout_rate": dropout, "attention_dropout": dropout, "max_position_embeddings": most}

    # Costs, as `altup.models.accounting` counts them. Layers are self-attention and a feed-forward.

    feed_forward_maps: ClassVar[int] = 3
    feed_forward_kept: ClassVar[int] = 4  # tensors as wide as its hidden layer that the backward pass needs
    has_biases: ClassVar[bool] = False  # in attention, feed-forward and norms
    keeps_output: ClassVar[bool] = False  # whether a layer's last norm keeps what the layer gives

    def default_targets(self, inputs: int) -> int:
        """How many tokens the head answers for; all unless a family says otherwise."""
        return inputs

    def more_layers(self, config: AltUpConfig, targets: int, memory: int) -> list[Layer]:
        """Layers beside the stack's own `num_layers`; `memory` is how many positions these give."""
        return []

    def end_parameters(self, config: AltUpConfig) -> dict[str, int]:
        """What stands outside of the layers, without the tables: by part."""
        return {"norms": config.output_width}

    def head_flops(self, config: AltUpConfig, targets: int) -> dict[str, int]:
        """What stands between the last layer and the output table: by part."""
        return {}

    def head_activations(self, config: AltUpConfig, targets: int) -> dict[str, int]:
        return {}

    def end_tokens(self, inputs: int, targets: int) -> int:
        """How many tokens go through norms outside of the layers."""
        return inputs


FAMILIES: dict[str, Family] = {}
F = TypeVar("F", bound=Family)


def register_family(cls: type[F]) -> type[F]:
    """Add a family, and tell the Auto classes of it; a class decorator."""
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    if cls.name in FAMILIES:
        raise ValueError(f"there is a family {cls.name!r} already")
    FAMILIES[cls.name] = cls()
    AutoConfig.register(cls.config_class.model_type, cls.config_class, exist_ok=True)
    for auto, model in (
        (AutoModel, cls.headless_class),
        (cls.auto_class, cls.model_class),
        (AutoModelForSequenceClassification, cls.classifier_class),
    ):
        if model is not None:
            auto.register(cls.config_class, model, exist_ok=True)
    return cls


def find_families() -> None:
    """Import every folder's `family.py`; called once, by `altup.models`."""
    here = Path(__file__).parent
    folders = [module.name for module in pkgutil.iter_modules([str(here)]) if module.ispkg]
    shown_first = ("t5", "bert", "decoder")
    for folder in (*shown_first, *(name for name in folders if name not in shown_first)):
        if (here / folder / "family.py").exists():
            importlib.import_module(f"altup.models.{folder}.family")


def family(model: str) -> Family:
    check_choice("model", model, FAMILIES)
    return FAMILIES[model]


def family_name(model_type: object) -> str | None:
    """The name of the family whose saved configs have this `model_type`."""
    names = (name for name, one in FAMILIES.items() if one.config_class.model_type == model_type)
    return next(names, None)


def family_of(config: Any) -> Family | None:
    """The family of a config, if it is one of altup's."""
    return FAMILIES.get(family_name(config.model_type) or "")


def learner(objective: str) -> str:
    """The name of the family that learns by an objective."""
    return next(name for name, one in FAMILIES.items() if one.objective == objective)


def load_part(name: str) -> Any:
    """What a family names as `module:class`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)

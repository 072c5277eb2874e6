"""What a method is: its names on the command line, its settings, module, widths, costs and coefficients.

One file a method in this folder; a file that is here is found. A method elsewhere, in another package or a test,
calls `register` itself. Everything that speaks of methods asks here: `--method` and its help, checks of configs,
`build_rule`, `altup params` and studies. The optimizer knows coefficients by the class of their module
(`altup.nn.CoefficientModule`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from altup.core.errors import UserError, check_whole, choose_one, named
from altup.core.pretrained import MOST_LAYERS

if TYPE_CHECKING:
    from torch import nn

    from altup.models.config import AltUpConfig
    from altup.nn.rule import Rule

# No model is larger in any direction. Beyond this, counting and building it would not end.
MOST = {
    "vocab_size": 10**8,
    "d_model": 10**6,
    "d_kv": 10**6,
    "d_ff": 10**8,
    "num_heads": 10**5,
    "num_layers": MOST_LAYERS,
    "num_decoder_layers": MOST_LAYERS,
    "num_blocks": 1_000,
    "experts": 10**6,
    "expert_hidden": 10**6,
}


@dataclass(frozen=True)
class Preset:
    """A name of `--method`: the config fields that it stands for, and what it is in a few words.

    `upcycles`: whether a pretrained dense model can be made one that computes the same.
    """

    help: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    upcycles: bool = False


@dataclass(frozen=True)
class Layer:
    """One layer of a stack, reduced to the lengths it works on."""

    decoder: bool
    tokens: int  # what the layer itself computes on
    state_tokens: int  # what the rule around it updates; more than `tokens` where the layer is strided
    memory: int  # encoder positions that cross-attention reads; 0 in the encoder
    strided: bool
    keeps_output: bool = False  # whether the layer's last norm keeps what it gives, as BERT's


class Method:
    """A method of any kind: `kind` is the field of `AltUpConfig` that chooses it, `name` that field's value.

    `settings` are config fields of its own with their defaults; a model has them if it has the method. Costs are
    those of one layer (`Layer`) and are shown as `cost_part` and `parameter_part`.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    presets: ClassVar[Mapping[str, Preset]] = {}
    settings: ClassVar[Mapping[str, Any]] = {}
    cost_part: ClassVar[str] = "update_rule"
    parameter_part: ClassVar[str] = "coefficients"

    def check(self, config: AltUpConfig) -> None:
        """UserError for fields of the config that do not fit the method."""

    def parameters(self, config: AltUpConfig, layer: Layer) -> int:
        """How many it adds to a layer."""
        return 0

    def flops(self, config: AltUpConfig, layer: Layer) -> int:
        """Of a layer's forward pass, 2 for each multiply-add."""
        return 0

    def activation_bytes(self, config: AltUpConfig, layer: Layer) -> int:
        """What its backward pass needs kept of a layer, with activations in bfloat16."""
        return 0

    def has_coefficients(self, config: AltUpConfig) -> bool:
        """Whether it learns how to mix blocks or tokens."""
        return False

    def has_scalars(self, config: AltUpConfig) -> bool:
        """Whether some of these coefficients are numbers of their own, and not made from the data."""
        return self.has_coefficients(config)


class Widening(Method):
    """How the representation is wider than the layers: a stack's rule, and the widths of what surrounds it."""

    kind = "widening"
    has_blocks: ClassVar[bool] = True  # whether `num_blocks` may be more than 1
    selects: ClassVar[bool] = False  # whether a layer works on one block, which `selection` chooses

    def check(self, config: AltUpConfig) -> None:
        if config.selection is not None and not self.selects:
            raise UserError(
                f"{named('selection', config.selection)} does not fit {named('widening', self.name)}, which has "
                "no block to select; leave selection unset"
            )
        if config.coefficients != "static" and not (self.selects and config.num_blocks > 1):
            raise UserError(
                f"{named('coefficients', config.coefficients)} does not fit {named('widening', self.name)} with "
                f"{named('num_blocks', config.num_blocks)}, which has no coefficients; leave it unset"
            )

    def build_rule(self, config: AltUpConfig, num_sites: int, lowering: str | None) -> Rule:
        """The rule of a stack where it reads and writes `num_sites` times; `lowering` is how equal blocks are
        joined at its end."""
        raise NotImplementedError

    def layer_width(self, config: AltUpConfig) -> int:
        """Width of a layer's input and output."""
        return config.d_model

    def embedding_width(self, config: AltUpConfig) -> int:
        """Width of a row of the input table."""
        return config.d_model

    def output_width(self, config: AltUpConfig) -> int:
        """Width of a stack's output: what the head (and T5's cross-attention) reads."""
        return config.d_model

    def sites_per_layer(self, config: AltUpConfig, crosses: bool = False) -> int:
        """How often the rule reads and writes in a layer, which has cross-attention if it `crosses`."""
        return 1

    def state_blocks(self, config: AltUpConfig) -> int:
        """How many blocks the state between two layers has."""
        return 1


class Sequence(Method):
    """How layers, or whole stacks, see fewer tokens than there are."""

    kind = "sequence"
    strides_layers: ClassVar[bool] = False  # whether single layers are wrapped (all but the first and the last)
    shortens: ClassVar[bool] = False  # whether the stack's own input is shorter

    def wrap(self, layer: nn.Module, stride: int) -> nn.Module:
        """A layer that sees every `stride`-th token, in the place of `layer`."""
        raise NotImplementedError


WIDENINGS: dict[str, Widening] = {}
SEQUENCES: dict[str, Sequence] = {}
OTHERS: dict[str, Method] = {}  # such as experts, which stand beside the layers' own parts
PRESETS: dict[str, Preset] = {}  # the paper's names; names joined by "+" combine: "altup+moe"
COMBINED = ("altup+moe",)  # beside the presets, where all are listed

M = TypeVar("M", bound=Method)


def _table(kind: str) -> dict[str, Any]:
    tables: dict[str, dict[str, Any]] = {"widening": WIDENINGS, "sequence": SEQUENCES}
    return tables.get(kind, OTHERS)


def register(cls: type[M]) -> type[M]:
    """Add a method; a class decorator."""
    method = cls()
    table = _table(cls.kind)
    taken = [name for name in cls.presets if name in PRESETS]
    if cls.name in table or taken:
        raise ValueError(f"there is a method {cls.kind}={cls.name!r} already, or one with the preset {taken}")
    table[cls.name] = method
    PRESETS.update(cls.presets)
    return cls


def unregister(cls: type[Method]) -> None:
    """Take a method back."""
    _table(cls.kind).pop(cls.name)
    for name in cls.presets:
        PRESETS.pop(name)


def all_methods() -> tuple[Method, ...]:
    return (*WIDENINGS.values(), *SEQUENCES.values(), *OTHERS.values())


def list_presets() -> tuple[str, ...]:
    """The names of `--method`."""
    return (*PRESETS, *COMBINED)


def preset_fields(
    method: str, k: int | None = None, stride: int | None = None, experts: int | None = None
) -> dict[str, Any]:
    """Config fields of a preset such as `altup`, `recycled` or `altup+moe`."""
    if not isinstance(method, str):
        raise UserError(f"{named('method', method)} makes no sense; choose one of {', '.join(list_presets())}")
    fields: dict[str, Any] = {}
    for name in method.split("+"):
        if name not in PRESETS:
            part = "" if name == method else f": {name!r}"
            hint = f"{choose_one(name, PRESETS)}, or join several with '+'"
            raise UserError(f"{named('method', method)}{part} is not known; {hint}")
        clash = fields.keys() & PRESETS[name].fields.keys()
        if clash:
            raise UserError(f"{named('method', method)} sets {', '.join(sorted(clash))} twice; remove one part")
        fields |= PRESETS[name].fields
    if "widening" in fields and WIDENINGS[fields["widening"]].has_blocks:
        fields["num_blocks"] = 2 if k is None else k
        check_whole("k", fields["num_blocks"], 1, MOST["num_blocks"])
    elif k not in (None, 1):
        raise UserError(
            f"{named('k', k)} does not fit {named('method', method)}, which widens nothing; try method 'altup'"
        )
    if "sequence" in fields:
        fields["stride"] = 4 if stride is None else stride
    elif stride not in (None, 1):
        raise UserError(
            f"{named('stride', stride)} does not fit {named('method', method)}; try method 'sequence-altup'"
        )
    if experts is not None:
        if experts == 0 and "experts" in fields:
            raise UserError(
                f"{named('experts', experts)} does not fit {named('method', method)}; give a number, or remove "
                "'moe'"
            )
        fields["experts"] = experts
    return fields

"""What every model family shares: the three choices (widening, sequence, experts), each by a method's entry."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from transformers import PreTrainedConfig

from altup.core.errors import UserError, check_choice, check_range, check_whole, did_you_mean, named
from altup.core.pretrained import MOST_LAYERS
from altup.models.methods import MOST, OTHERS, SEQUENCES, WIDENINGS, Method, Widening, all_methods, preset_fields
from altup.models.methods import Sequence as SequenceMethod


class AltUpConfig(PreTrainedConfig):
    """The fields that say how a stack of layers is widened, strided and given experts.

    - `widening`: a name of `altup.models.methods.WIDENINGS` (`none`, `altup`, `recycled`, `sum`, `wide`, …) with
      `num_blocks` K and, for those that select a block, `selection`: `alternating`, `same` or a list with one
      block a layer. Their `coefficients` are `static`, as in the paper, `dynamic`: computed for each token, as in
      Gemma 3n, or `fixed`: P = I and g = 1 to the end, at nearly a dense model's cost.
    - `sequence`: a name of `SEQUENCES` (`none`, `altup`, `skip`, `pool`) with `stride`.
    - `experts`: 0 or a number of partial experts beside each feed-forward.
    - `shared_dropout`: whether dropout outside of the layers drops the same of all blocks, as in upcycled models.

    A method may have settings beside these (`Method.settings`), which are fields of a config that has the method.
    A family adds its shape, with `d_model` the width of a layer and `num_layers` the depth, and its `SIZES`.
    `extra_layers` adds that many layers to every stack (the paper's T5L+4) and is not stored.
    """

    SIZES: ClassVar[dict[str, dict[str, int]]] = {}
    DEPTHS: ClassVar[tuple[str, ...]] = ("num_layers",)
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "loss_sum",
        "nll_sum",
        "num_correct",
        "num_tokens",
    ]
    if TYPE_CHECKING:
        vocab_size: int
        d_model: int
        d_kv: int
        d_ff: int
        num_heads: int
        num_layers: int
        z_loss: float

    widening: str = "none"
    num_blocks: int = 1
    selection: str | list[int] | None = None
    coefficients: str = "static"
    sequence: str = "none"
    stride: int = 1
    experts: int = 0
    expert_hidden: int = 16
    expert_top_k: int = 1
    expert_jitter: float = 0.01
    expert_balance: float = 0.0
    shared_dropout: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        extra_layers = kwargs.pop("extra_layers", 0)
        own = {field.name for field in fields(AltUpConfig)} - {field.name for field in fields(PreTrainedConfig)}
        for name in kwargs:
            if hint := did_you_mean(name, own, alike=0.85):
                raise UserError(f"{name}={kwargs[name]!r}: there is no such field; {hint}")
        check_choice("widening", self.widening, WIDENINGS)
        check_choice("sequence", self.sequence, SEQUENCES)
        settings = {name: usual for method in self.methods for name, usual in method.settings.items()}
        for name in kwargs.keys() - settings.keys():
            if owners := [f"{one.kind}={one.name!r}" for one in all_methods() if name in one.settings]:
                raise UserError(
                    f"{named(name, kwargs[name])} does not fit {named('widening', self.widening)} with "
                    f"{named('sequence', self.sequence)}; remove it, or choose {' or '.join(owners)}"
                )
        super().__post_init__(**{**settings, **kwargs})
        self.validate_choices()
        check_whole("extra_layers", extra_layers, 0, MOST_LAYERS)
        check_whole("num_layers", self.num_layers, 1)
        self._complete()
        for depth in self.DEPTHS:
            setattr(self, depth, getattr(self, depth) + extra_layers)
        self._validate_shape()

    @property
    def shared_blocks(self) -> int:
        """How many blocks side by side dropout treats as one."""
        return self.num_blocks if self.shared_dropout and self.widening == "altup" else 1

    def _complete(self) -> None:
        """Set the fields of a family whose defaults depend on others."""

    @classmethod
    def from_preset(
        cls,
        size: str = "base",
        method: str = "dense",
        k: int | None = None,
        stride: int | None = None,
        experts: int | None = None,
        **fields_beside: Any,
    ) -> Self:
        """A model by the names of its size and method; any field can be set beside them.

        Args:
            size: A name of the family's `SIZES`, such as `tiny`, `small` or `base`.
            method: A name of `altup.models.methods.PRESETS`, such as `dense`, `altup`, `recycled` or `moe`, or
                several joined with `+`.
            k: Blocks of a widening method; 2 by default.
            stride: Stride of a sequence method; 4 by default.
            experts: Partial experts beside each layer.
            fields_beside: Any other field of the config.
        """
        check_choice("size", size, cls.SIZES)
        known = cls.field_names()
        for name, value in fields_beside.items():
            if name not in known:
                hint = did_you_mean(name, {*known, "size", "method", "k"}) or f"see the fields of {cls.__name__}"
                raise UserError(f"{name}={value!r}: there is no such field; {hint}")
        return cls(**{**cls.SIZES[size], **preset_fields(method, k, stride, experts), **fields_beside})

    @classmethod
    def field_names(cls) -> set[str]:
        """What may be set, with the settings of all methods."""
        own = {name for method in all_methods() for name in method.settings}
        return {*(field.name for field in fields(cls)), *own, "extra_layers"}

    @property
    def widening_method(self) -> Widening:
        return WIDENINGS[self.widening]

    @property
    def sequence_method(self) -> SequenceMethod:
        return SEQUENCES[self.sequence]

    @property
    def methods(self) -> tuple[Method, ...]:
        """The entries of its widening, its sequence method, and of what may stand in a layer."""
        return (self.widening_method, self.sequence_method, *OTHERS.values())

    @property
    def selects_blocks(self) -> bool:
        return self.widening_method.selects

    @property
    def mixes_blocks(self) -> bool:
        """Whether coefficients mix K blocks behind every layer. Fixed ones do not: one block moves for all."""
        return self.widening_method.state_blocks(self) > 1

    @property
    def is_plain(self) -> bool:
        """Whether the rule is that of the dense model: one block, and nothing learned around layers."""
        return self.num_blocks == 1 and not self.widening_method.has_coefficients(self)

    @property
    def by_sublayer(self) -> bool:
        """Whether the rule stands around each sublayer, and not around whole layers."""
        return self.widening_method.sites_per_layer(self) > 1

    @property
    def has_coefficients(self) -> bool:
        """Whether coefficients learn how to mix blocks or tokens."""
        return any(method.has_coefficients(self) for method in self.methods)

    @property
    def has_scalars(self) -> bool:
        """Whether some of these are numbers of their own, and not made from the data."""
        return any(method.has_scalars(self) for method in self.methods)

    @property
    def layer_width(self) -> int:
        """Width of a layer's input and output."""
        return self.widening_method.layer_width(self)

    @property
    def embedding_width(self) -> int:
        """Width of a row of the input table."""
        return self.widening_method.embedding_width(self)

    @property
    def output_width(self) -> int:
        """Width of a stack's output: what the head (and T5's cross-attention) reads."""
        return self.widening_method.output_width(self)

    @property
    def strided_layers(self) -> range:
        """The layers that a strided method wraps: all but the first and the last (of T5 the encoder's)."""
        return range(1, self.num_layers - 1) if self.sequence_method.strides_layers else range(0)

    def validate_choices(self) -> None:
        check_whole("num_blocks", self.num_blocks, 1, MOST["num_blocks"])
        check_whole("stride", self.stride, 1)
        if self.sequence == "none" and self.stride != 1:
            others = ", ".join(repr(name) for name in SEQUENCES if name != "none")
            raise UserError(
                f"{named('stride', self.stride)} needs sequence to be one of {others}; set it, or stride to 1"
            )
        for method in self.methods:
            method.check(self)

    def _validate_shape(self) -> None:
        """What every family's shape must be."""
        for field in ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads", *self.DEPTHS):
            check_whole(field, getattr(self, field), 1, MOST[field])
        check_range("layer_norm_epsilon", getattr(self, "layer_norm_epsilon", None), 1e-30, 1)
        check_range("dropout_rate", getattr(self, "dropout_rate", None), 0, 1)
        check_range("z_loss", self.z_loss, 0, float("inf"))
        check_choice("tie_word_embeddings", self.tie_word_embeddings, (True, False))
        if self.tie_word_embeddings and self.embedding_width != self.output_width:
            raise UserError(
                f"tie_word_embeddings=True does not fit {named('widening', self.widening)}: the input table is "
                f"{self.embedding_width} wide and the head {self.output_width}; set tie_word_embeddings=False"
            )
        if self.sequence_method.strides_layers and self.stride > 1 and not self.strided_layers:
            raise UserError(
                f"{named('sequence', self.sequence)} strides all layers but the first and the last, and "
                f"{named('num_layers', self.num_layers)} leaves none; give at least 3 layers"
            )

    def _validate_tokens(self, *names: str) -> None:
        """Special tokens that must be there."""
        for field in names:
            check_whole(field, getattr(self, field), 0)
            if getattr(self, field) >= self.vocab_size:
                raise UserError(
                    f"{named(field, getattr(self, field))} is not below {named('vocab_size', self.vocab_size)}"
                )

    def _validate_selection_length(self, **layers: int) -> None:
        """A list of blocks must fit every stack it is used in."""
        for field, number in layers.items():
            if isinstance(self.selection, list) and len(self.selection) != number:
                raise UserError(
                    f"selection has {len(self.selection)} blocks but {field}={number}; give one block a layer"
                )

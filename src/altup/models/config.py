"""What every model family shares: the three choices (widening, sequence, experts) and their presets."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from transformers import PreTrainedConfig

from altup.core.errors import UserError, check_choice, check_range, check_whole, choose_one, did_you_mean, named
from altup.core.pretrained import MOST_LAYERS

WIDENINGS = ("none", "altup", "recycled", "sum", "wide")
SEQUENCES = ("none", "altup", "skip", "pool")
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
SELECTIONS = ("alternating", "same")
COEFFICIENTS = ("static", "dynamic", "fixed")

# The paper's names over the three choices. Names joined by "+" combine: "altup+moe".
PRESETS: dict[str, dict[str, Any]] = {
    "dense": {},
    "altup": {"widening": "altup", "selection": "alternating"},
    "sameup": {"widening": "altup", "selection": "same"},
    "recycled": {"widening": "recycled", "selection": "alternating"},
    "sum": {"widening": "sum"},
    "dense-wide": {"widening": "wide"},
    "sequence-altup": {"sequence": "altup"},
    "stride-and-skip": {"sequence": "skip"},
    "average-pooling": {"sequence": "pool"},
    "moe": {"experts": 128},
}
METHODS = (*PRESETS, "altup+moe")


def preset_fields(
    method: str, k: int | None = None, stride: int | None = None, experts: int | None = None
) -> dict[str, Any]:
    """Config fields of a preset such as `altup`, `recycled` or `altup+moe`."""
    if not isinstance(method, str):
        raise UserError(f"{named('method', method)} makes no sense; choose one of {', '.join(METHODS)}")
    fields: dict[str, Any] = {}
    for name in method.split("+"):
        if name not in PRESETS:
            part = "" if name == method else f": {name!r}"
            told = f"{choose_one(name, PRESETS)}, or join several with '+'"
            raise UserError(f"{named('method', method)}{part} is not known; {told}")
        clash = fields.keys() & PRESETS[name].keys()
        if clash:
            raise UserError(f"{named('method', method)} sets {', '.join(sorted(clash))} twice; leave one part out")
        fields |= PRESETS[name]
    if "widening" in fields:
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
                f"{named('experts', experts)} does not fit {named('method', method)}; give a number, or leave "
                "'moe' out"
            )
        fields["experts"] = experts
    return fields


class AltUpConfig(PreTrainedConfig):
    """The fields that say how a stack of layers is widened, strided and given experts.

    - `widening`: `none`, `altup`, `recycled`, `sum` or `wide`, with `num_blocks` K and, for the two that
      select a block, `selection`: `alternating`, `same` or a list with one block a layer. Their `coefficients` are
      `static`, as in the paper, `dynamic`: computed for each token, as in Gemma 3n, or `fixed`: P = I and g = 1 to
      the end, at nearly a dense model's cost.
    - `sequence`: `none`, `altup`, `skip` or `pool` with `stride`.
    - `experts`: 0 or a number of partial experts beside each feed-forward.
    - `shared_dropout`: whether dropout outside of the layers drops the same of all blocks, as in upcycled models.

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
        super().__post_init__(**kwargs)
        check_whole("num_blocks", self.num_blocks, 1, MOST["num_blocks"])
        if self.selects_blocks and self.num_blocks > 1 and self.selection is None:
            self.selection = "alternating"
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
            method: `dense`, `altup`, `sameup`, `recycled`, `sum`, `dense-wide`, `sequence-altup`,
                `stride-and-skip`, `average-pooling`, `moe`, or several joined with `+`.
            k: Blocks of a widening method; 2 by default.
            stride: Stride of a sequence method; 4 by default.
            experts: Partial experts beside each layer.
            fields_beside: Any other field of the config.
        """
        check_choice("size", size, cls.SIZES)
        known = {*(field.name for field in fields(cls)), "extra_layers"}
        for name, value in fields_beside.items():
            if name not in known:
                hint = did_you_mean(name, {*known, "size", "method", "k"}) or f"see the fields of {cls.__name__}"
                raise UserError(f"{name}={value!r}: there is no such field; {hint}")
        return cls(**{**cls.SIZES[size], **preset_fields(method, k, stride, experts), **fields_beside})

    @property
    def selects_blocks(self) -> bool:
        return self.widening in ("altup", "recycled")

    @property
    def mixes_blocks(self) -> bool:
        """Whether coefficients mix K blocks behind every layer. Fixed ones do not: one block moves for all."""
        return self.selects_blocks and self.num_blocks > 1 and self.coefficients != "fixed"

    @property
    def has_coefficients(self) -> bool:
        """Whether coefficients learn how to mix blocks or tokens."""
        return self.mixes_blocks or self.has_scalars

    @property
    def has_scalars(self) -> bool:
        """Whether some of these are numbers of their own, and not made from the data."""
        mixes_tokens = self.sequence == "altup" and bool(self.strided_layers)
        return mixes_tokens or (self.mixes_blocks and self.coefficients == "static")

    @property
    def layer_width(self) -> int:
        """Width of a layer's input and output."""
        return self.d_model * self.num_blocks if self.widening == "wide" else self.d_model

    @property
    def embedding_width(self) -> int:
        """Width of a row of the input table."""
        return self.d_model if self.widening in ("none", "recycled") else self.d_model * self.num_blocks

    @property
    def output_width(self) -> int:
        """Width of a stack's output: what the head (and T5's cross-attention) reads."""
        return self.d_model * self.num_blocks if self.widening in ("altup", "wide") else self.d_model

    @property
    def strided_layers(self) -> range:
        """The layers that a strided method wraps: all but the first and the last (of T5 the encoder's)."""
        return range(1, self.num_layers - 1) if self.sequence in ("altup", "skip") else range(0)

    def validate_choices(self) -> None:
        check_choice("widening", self.widening, WIDENINGS)
        if self.widening == "none" and self.num_blocks != 1:
            raise UserError(
                f"{named('num_blocks', self.num_blocks)} needs a widening; set widening to one of "
                f"{', '.join(map(repr, WIDENINGS[1:]))}, or num_blocks to 1"
            )
        if self.selection is not None:
            if not self.selects_blocks:
                raise UserError(
                    f"{named('selection', self.selection)} does not fit {named('widening', self.widening)}, "
                    "which has no block "
                    "to select; leave selection unset"
                )
            if isinstance(self.selection, str):
                check_choice("selection", self.selection, SELECTIONS)
            else:
                self._validate_block_list()
        check_choice("coefficients", self.coefficients, COEFFICIENTS)
        if self.coefficients != "static" and not (self.selects_blocks and self.num_blocks > 1):
            raise UserError(
                f"{named('coefficients', self.coefficients)} does not fit {named('widening', self.widening)} with "
                f"{named('num_blocks', self.num_blocks)}, which has no coefficients; leave it unset"
            )
        if self.coefficients == "fixed" and self.widening == "recycled":
            raise UserError(
                "coefficients='fixed' does not fit widening='recycled': its blocks start equal and would stay so, "
                "which is the dense model; take widening='altup', or 'none'"
            )
        check_choice("sequence", self.sequence, SEQUENCES)
        check_whole("stride", self.stride, 1)
        if self.sequence == "none" and self.stride != 1:
            raise UserError(
                f"{named('stride', self.stride)} needs sequence to be one of "
                f"{', '.join(map(repr, SEQUENCES[1:]))}; "
                "set it, or stride to 1"
            )
        check_whole("experts", self.experts, 0, MOST["experts"])
        check_whole("expert_hidden", self.expert_hidden, 1, MOST["expert_hidden"])
        check_whole("expert_top_k", self.expert_top_k, 1)
        if 0 < self.experts < self.expert_top_k:
            raise UserError(
                f"{named('expert_top_k', self.expert_top_k)} is more than {named('experts', self.experts)}; "
                "lower one"
            )
        check_range("expert_jitter", self.expert_jitter, 0, 1)
        check_range("expert_balance", self.expert_balance, 0, float("inf"))

    def _validate_block_list(self) -> None:
        blocks = self.selection if isinstance(self.selection, list | tuple) else [-1]
        if not all(type(block) is int and 0 <= block < self.num_blocks for block in blocks):
            raise UserError(
                f"{named('selection', self.selection)} must be 'alternating', 'same' or a list of blocks from 0 "
                "to "
                f"{self.num_blocks - 1}, one a layer"
            )
        self.selection = list(blocks)

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
        if self.sequence in ("altup", "skip") and self.stride > 1 and not self.strided_layers:
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

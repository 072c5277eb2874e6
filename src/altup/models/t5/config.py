"""The configuration of T5 1.1 with every update rule."""

from __future__ import annotations

from typing import ClassVar

from altup.core.errors import UserError, check_choice, check_whole
from altup.models.config import AltUpConfig

# The shapes behind the paper's parameter tables. `small` is the paper's own, shallower than T5 1.1's;
# `tiny` is ours, for tests and for machines without a GPU.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 128, "d_ff": 256, "d_kv": 32, "num_heads": 4, "num_layers": 4},
    "small": {"d_model": 512, "d_ff": 2048, "d_kv": 64, "num_heads": 8, "num_layers": 4},
    "base": {"d_model": 768, "d_ff": 2048, "d_kv": 64, "num_heads": 12, "num_layers": 12},
    "large": {"d_model": 1024, "d_ff": 2816, "d_kv": 64, "num_heads": 16, "num_layers": 24},
    "xl": {"d_model": 2048, "d_ff": 5120, "d_kv": 64, "num_heads": 32, "num_layers": 24},
}


class AltUpT5Config(AltUpConfig):
    """T5 1.1: gated GELU, RMS pre-norm, no biases, relative-position bias, untied head.

    `d_model` is the width of a layer. With `widening="wide"` (the paper's Dense2X) the layers themselves are
    `num_blocks` times as wide; with `altup` only the representation between them is.

    `sequence_dropout`: dropout decides once for all tokens of a sequence, and in attention for all queries of a
    head, as T5's own code does; else for each number, as Hugging Face's does.

    Examples:
        >>> from altup import AltUpT5Config
        >>> config = AltUpT5Config.from_preset("tiny", "altup", k=2, vocab_size=1000)
        >>> config.d_model, config.embedding_width, config.output_width
        (128, 256, 256)
    """

    model_type = "altup_t5"
    SIZES: ClassVar[dict[str, dict[str, int]]] = SIZES
    DEPTHS: ClassVar[tuple[str, ...]] = ("num_layers", "num_decoder_layers")
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_decoder_layers",  # what generation builds its caches for
        "head_dim": "d_kv",
    }

    vocab_size: int = 32128
    d_model: int = 768
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 12
    num_decoder_layers: int = 0  # 0: as many as the encoder has
    num_heads: int = 12
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout_rate: float = 0.0
    sequence_dropout: bool = False
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "gated-gelu"
    tie_word_embeddings: bool = False
    scale_decoder_outputs: bool = False
    z_loss: float = 0.0
    is_encoder_decoder: bool = True
    use_cache: bool = True
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    decoder_start_token_id: int | None = 0

    def _complete(self) -> None:
        if self.num_decoder_layers in (0, None):
            self.num_decoder_layers = self.num_layers
        check_whole("num_decoder_layers", self.num_decoder_layers, 1)

    def _validate_shape(self) -> None:
        super()._validate_shape()
        for field in ("scale_decoder_outputs", "use_cache", "sequence_dropout"):
            check_choice(field, getattr(self, field), (True, False))
        self._validate_tokens("pad_token_id", "decoder_start_token_id")
        check_whole("relative_attention_num_buckets", self.relative_attention_num_buckets, 1)
        check_whole("relative_attention_max_distance", self.relative_attention_max_distance, 1)
        if self.relative_attention_num_buckets < 4 or self.relative_attention_num_buckets % 2:
            raise UserError(
                f"relative_attention_num_buckets={self.relative_attention_num_buckets} makes no sense; "
                "give an even number of at least 4"
            )
        if self.relative_attention_max_distance <= self.relative_attention_num_buckets // 2:
            raise UserError(
                f"relative_attention_max_distance={self.relative_attention_max_distance} must be more than half "
                f"of relative_attention_num_buckets={self.relative_attention_num_buckets}"
            )
        check_choice("feed_forward_proj", self.feed_forward_proj, ("gated-gelu",))
        self._validate_selection_length(num_layers=self.num_layers, num_decoder_layers=self.num_decoder_layers)

"""The configuration of a modern decoder with every widening rule."""

from __future__ import annotations

from typing import ClassVar

from altup.core.errors import UserError, check_choice, check_range, check_whole, named
from altup.models.config import AltUpConfig

# Shapes in the manner of Llama; `xl` has the layers of a Llama 3.2 1B. `tiny` is for tests.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 128, "d_ff": 384, "d_kv": 32, "num_heads": 4, "num_kv_heads": 2, "num_layers": 4},
    "small": {"d_model": 512, "d_ff": 1536, "d_kv": 64, "num_heads": 8, "num_kv_heads": 4, "num_layers": 8},
    "base": {"d_model": 768, "d_ff": 2048, "d_kv": 64, "num_heads": 12, "num_kv_heads": 4, "num_layers": 12},
    "large": {"d_model": 1024, "d_ff": 2816, "d_kv": 64, "num_heads": 16, "num_kv_heads": 4, "num_layers": 24},
    "xl": {"d_model": 2048, "d_ff": 8192, "d_kv": 64, "num_heads": 32, "num_kv_heads": 8, "num_layers": 16},
}


class AltUpDecoderConfig(AltUpConfig):
    """RMS pre-norm, rotary positions, SwiGLU, grouped-query attention, no biases, untied head.

    `d_model` is the width of a layer; with `altup` the representation between the layers, the table and the head
    are `num_blocks` times as wide, with `wide` the layers too.

    Examples:
        >>> from altup import AltUpDecoderConfig
        >>> config = AltUpDecoderConfig.from_preset("tiny", "altup", k=2, vocab_size=1000)
        >>> config.d_model, config.embedding_width, config.output_width
        (128, 256, 256)
    """

    model_type = "altup_decoder"
    SIZES: ClassVar[dict[str, dict[str, int]]] = SIZES
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }

    vocab_size: int = 32128
    d_model: int = 768
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 4
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048
    dropout_rate: float = 0.0
    attention_dropout: float = 0.0
    layer_norm_epsilon: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    z_loss: float = 0.0
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 1

    def _validate_shape(self) -> None:
        super()._validate_shape()
        check_whole("num_kv_heads", self.num_kv_heads, 1)
        check_whole("max_position_embeddings", self.max_position_embeddings, 1)
        check_range("rope_theta", self.rope_theta, 1, float("inf"))
        check_range("attention_dropout", self.attention_dropout, 0, 1)
        check_range("initializer_range", self.initializer_range, 0, 1)
        check_choice("use_cache", self.use_cache, (True, False))
        self._validate_selection_length(num_layers=self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{named('num_heads', self.num_heads)} is not a multiple of "
                f"{named('num_kv_heads', self.num_kv_heads)}; each of these "
                "serves an equal group of those"
            )
        if self.d_kv % 2:
            raise UserError(f"{named('d_kv', self.d_kv)} is odd; rotary positions turn pairs of numbers")
        if self.sequence != "none":
            raise UserError(
                f"{named('sequence', self.sequence)} shortens what an encoder reads; a decoder writes every "
                "token: leave "
                "sequence at 'none'"
            )

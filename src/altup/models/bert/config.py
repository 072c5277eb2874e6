"""The configuration of BERT with every update rule."""

from __future__ import annotations

from typing import ClassVar

from altup.core.errors import UserError, check_range, check_whole
from altup.models.config import AltUpConfig

# `light` is the paper's lightweight BERT, `base` and `large` are BERT's own; `tiny` is ours, for tests.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 128, "d_ff": 512, "d_kv": 32, "num_heads": 4, "num_layers": 4},
    "light": {"d_model": 256, "d_ff": 1024, "d_kv": 64, "num_heads": 4, "num_layers": 12},
    "base": {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12, "num_layers": 12},
    "large": {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": 24},
}


class AltUpBertConfig(AltUpConfig):
    """BERT: learned positions, token types, LayerNorm after each sublayer, GELU, biases, a head with a transform.

    `d_model` is the width of a layer; with `altup` the representation between the layers, the embeddings and
    the head are `num_blocks` times as wide, with `wide` the layers too.
    `tie_word_embeddings` is true wherever table and head are of one width, unless told otherwise.

    Examples:
        >>> from altup import AltUpBertConfig
        >>> config = AltUpBertConfig.from_preset("tiny", "altup", k=2, vocab_size=1000)
        >>> config.d_model, config.embedding_width, config.output_width
        (128, 256, 256)
    """

    model_type = "altup_bert"
    SIZES: ClassVar[dict[str, dict[str, int]]] = SIZES
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }

    vocab_size: int = 30522
    d_model: int = 768
    d_kv: int = 64
    d_ff: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    dropout_rate: float = 0.0
    attention_dropout: float = 0.0
    layer_norm_epsilon: float = 1e-12
    initializer_range: float = 0.02
    tie_word_embeddings: bool | None = None
    z_loss: float = 0.0
    pad_token_id: int | None = 0

    def _complete(self) -> None:
        if self.tie_word_embeddings is None:
            self.tie_word_embeddings = self.embedding_width == self.output_width

    def _validate_shape(self) -> None:
        super()._validate_shape()
        check_whole("max_position_embeddings", self.max_position_embeddings, 1)
        check_whole("type_vocab_size", self.type_vocab_size, 1)
        check_range("attention_dropout", self.attention_dropout, 0, 1)
        check_range("initializer_range", self.initializer_range, 0, 1)
        self._validate_selection_length(num_layers=self.num_layers)
        if self.sequence == "pool":
            raise UserError(
                "sequence='pool' leaves fewer outputs than tokens, and a masked-language model answers for every "
                "token; take 'altup' or 'skip' (methods sequence-altup, stride-and-skip)"
            )

"""The result of counting: costs of one configuration, by part and in sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from altup.models.config import AltUpConfig

EMBEDDING_PARTS = ("input_table", "output_head")
RULE = "update_rule"
TOTALS = (
    *("embedding", "non_embedding", "total", "flops_forward", "flops_matrix", "flops_train"),
    *("activation_bytes", "activation_bytes_paper", "inputs", "targets"),
)
SHAPE_FIELDS = (
    *("vocab_size", "d_model", "d_ff", "d_kv", "num_heads", "num_kv_heads", "num_layers", "num_decoder_layers"),
    *("tie_word_embeddings", "widening", "num_blocks", "selection", "sequence", "stride"),
    *("experts", "expert_hidden", "expert_top_k"),
)


@dataclass(frozen=True)
class Accounting:
    """Costs of one configuration; FLOPs and bytes are those of one training sequence.

    `targets` are the tokens that the head answers for: T5's decoder's, BERT's masked ones, all of a decoder's.

    `flops_forward` counts 2 for each multiply-add; `flops_train` is three times that (each product has two in
    the backward pass). `activation_bytes` is what the backward pass needs kept, in bfloat16; beside it stands
    `activation_bytes_paper`, the paper's own formula.
    """

    inputs: int
    targets: int
    parameters: dict[str, int]
    flops: dict[str, int]
    activations: dict[str, int]
    activation_bytes_paper: int
    config: AltUpConfig = field(repr=False)

    @property
    def embedding(self) -> int:
        """Input table and output head, as the paper's tables count them."""
        return sum(self.parameters[part] for part in EMBEDDING_PARTS)

    @property
    def non_embedding(self) -> int:
        return self.total - self.embedding

    @property
    def total(self) -> int:
        return sum(self.parameters.values())

    @property
    def flops_forward(self) -> int:
        return sum(self.flops.values())

    @property
    def flops_matrix(self) -> int:
        """The forward pass without the element-wise update rules: matrix products alone."""
        return self.flops_forward - self.flops[RULE]

    @property
    def flops_train(self) -> int:
        return 3 * self.flops_forward

    @property
    def activation_bytes(self) -> int:
        return sum(self.activations.values())

    def to_json(self) -> dict[str, Any]:
        """One flat object with the totals, then the parts and the shape they belong to."""
        return {
            **{name: getattr(self, name) for name in TOTALS},
            "parameter_parts": self.parameters,
            "flops_forward_parts": self.flops,
            "activation_bytes_parts": self.activations,
            "config": {name: getattr(self.config, name) for name in SHAPE_FIELDS if hasattr(self.config, name)},
        }

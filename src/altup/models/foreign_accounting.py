"""What a model of transformers costs: built and run with fake tensors, which have shapes and no numbers.

So every class of transformers is counted alike, in seconds, whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedConfig
from transformers.models.auto import modeling_auto

from altup.core.errors import UserError
from altup.core.text import shorten

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch's own counter has those of GPUs


@dataclass(frozen=True)
class ForeignCosts:
    """Of one training sequence, as `altup.models.accounting.Accounting` has them."""

    parameters: dict[str, int]
    flops: dict[str, int]
    activations: dict[str, int]


def count_foreign(config: PreTrainedConfig, inputs: int, targets: int) -> ForeignCosts:
    """Parameters, forward FLOPs and kept activations; UserError for a model that cannot be run on tokens alone."""
    config = getattr(config, "text_config", config)  # of a model that also sees and hears
    auto, seq2seq = _auto_class(config)
    try:
        with FakeTensorMode():
            model = auto.from_config(config, dtype=torch.float32).eval()  # without dropout
            ids = {"input_ids": torch.zeros(1, inputs, dtype=torch.long)}
            ids["labels"] = torch.zeros(1, targets if seq2seq else inputs, dtype=torch.long)
            if seq2seq:
                ids["decoder_input_ids"] = ids["labels"]
            flops = FlopCounterMode(display=False, custom_mapping={ATTENTION: _attention_flops})
            # The CPU's autocast, as fake tensors of a GPU need one. Products are in bf16 as they are there.
            with _kept(model) as kept, torch.autocast("cpu", torch.bfloat16), flops:
                model(**ids, use_cache=False)
    except Exception as error:  # models raise many types for inputs that they do not take
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        raise UserError(
            f"{type(config).__name__}: the model does not run on input_ids alone ({reason})"
        ) from error
    bytes_kept = sum(storage.nbytes() for storage in kept.values())
    logits = 4 * ids["labels"].numel() * _vocabulary(model)
    return ForeignCosts(
        _parameters(model),
        _flops(flops.get_flop_counts()["Global"]),
        {"saved_tensors": bytes_kept - logits, "logits": logits},
    )


def _auto_class(config: PreTrainedConfig) -> tuple[Any, bool]:
    """The Auto class that builds it with a head, and whether it has an encoder and a decoder."""
    kinds: tuple[tuple[Any, Any], ...] = (
        (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, AutoModelForSeq2SeqLM),
        (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM),
        (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, AutoModelForMaskedLM),
    )
    name = (config.architectures or [""])[0]
    fitting = [(names, auto) for names, auto in kinds if config.model_type in names]
    named = [(names, auto) for names, auto in fitting if names[config.model_type] == name]
    masked = [(names, auto) for names, auto in fitting if auto is AutoModelForMaskedLM]
    if masked and not named and not getattr(config, "is_decoder", False) and not config.is_encoder_decoder:
        named = masked  # an encoder's causal head comes first in the table
    for _, auto in named or fitting:
        return auto, auto is AutoModelForSeq2SeqLM
    raise UserError(
        f"{type(config).__name__} is of no language model; give one with a causal, masked or seq2seq head"
    )


@contextmanager
def _kept(model: nn.Module) -> Iterator[dict[int, Any]]:
    """Memory that the backward pass reads, beside the weights and their copies in bf16: each piece once."""
    found: dict[int, Any] = {}
    weights = {tuple(sorted(p.shape)) for p in model.parameters() if p.ndim == 2}
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        copy = tensor.dtype is torch.bfloat16 and tuple(sorted(tensor.shape)) in weights
        if storage._cdata not in own and not copy:
            found[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def _vocabulary(model: Any) -> int:
    head = model.get_output_embeddings()
    return head.weight.shape[0] if head is not None else model.get_input_embeddings().weight.shape[0]


def _parameters(model: Any) -> dict[str, int]:
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    total = sum(p.numel() for p in model.parameters())
    found = {"input_table": table.weight.numel(), "output_head": 0}
    if head is not None and head.weight is not table.weight:
        found["output_head"] = head.weight.numel()
    return {**found, "layers": total - sum(found.values())}


def _attention_flops(queries: Any, keys: Any, values: Any, *_: Any, **__: Any) -> int:
    batch, heads, length, width = queries
    return 2 * batch * heads * length * keys[2] * (width + values[-1])


def _flops(counts: dict[Any, int]) -> dict[str, int]:
    attention = sum(number for op, number in counts.items() if "attention" in str(op))
    return {"matrix_products": sum(counts.values()) - attention, "attention": attention}

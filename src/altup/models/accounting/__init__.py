"""What a configuration costs, from the configuration alone: parameters, FLOPs and activation memory.

Nothing is built: every number is a closed form over the layers, so XL takes as long as tiny. The parts are
kept apart, because where a cost comes from matters as much as its sum. docs/accounting.md explains each item.
"""

from __future__ import annotations

from altup.core.errors import check_whole
from altup.models.accounting import single_stack, t5
from altup.models.accounting.result import Accounting
from altup.models.accounting.rules import activation_formula
from altup.models.accounting.t5 import list_layers
from altup.models.config import AltUpConfig
from altup.models.decoder.config import AltUpDecoderConfig
from altup.models.t5.config import AltUpT5Config

__all__ = ["INPUTS", "TARGETS", "Accounting", "account", "list_layers"]

# One pretraining example of T5: 568 raw tokens after span corruption. BERT is asked for 15 % of its tokens.
INPUTS, TARGETS, MASKED = 512, 114, 0.15


def account(config: AltUpConfig, inputs: int = INPUTS, targets: int | None = None) -> Accounting:
    """Everything about `config`, for sequences of `inputs` tokens.

    `targets` are T5's decoder tokens (114 unless given), or the tokens that BERT's head answers for (15 %
    unless given). A decoder answers for all of its inputs, whatever `targets` says.
    """
    check_whole("inputs", inputs, 1)
    if isinstance(config, AltUpT5Config):
        targets = TARGETS if targets is None else targets
        check_whole("targets", targets, 1)
        layers = t5.list_layers(config, inputs, targets)
        parts = (
            t5.count_parameters(config, layers),
            t5.count_flops(config, layers, targets),
            t5.count_activations(config, layers, targets),
        )
    else:
        if isinstance(config, AltUpDecoderConfig):
            targets = inputs
        elif targets is None:
            targets = max(1, round(inputs * MASKED))
        check_whole("targets", targets, 1)
        layers = single_stack.list_layers(config, inputs)
        parts = single_stack.count(config, layers, targets)
    return Accounting(inputs, targets, *parts, activation_formula(config, layers), config)

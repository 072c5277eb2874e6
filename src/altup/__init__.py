"""Wider transformers for a little more time: Alternating Updates (AltUp) for PyTorch and Hugging Face.

The public names are loaded when they are first used, so `import altup` is quick and touches no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from altup.transformers_hooks import install as _install

__version__ = "0.2.0"

if TYPE_CHECKING:  # what type checkers and editors see; `X as X` makes a name public for them
    from altup.core.errors import UserError as UserError
    from altup.evaluation.config import EvaluateConfig as EvaluateConfig
    from altup.evaluation.evaluate import evaluate as evaluate
    from altup.finetuning.config import FinetuneConfig as FinetuneConfig
    from altup.finetuning.finetune import finetune as finetune
    from altup.models import AltUpBertConfig as AltUpBertConfig
    from altup.models import AltUpBertForMaskedLM as AltUpBertForMaskedLM
    from altup.models import AltUpBertForSequenceClassification as AltUpBertForSequenceClassification
    from altup.models import AltUpBertModel as AltUpBertModel
    from altup.models import AltUpDecoderConfig as AltUpDecoderConfig
    from altup.models import AltUpDecoderForCausalLM as AltUpDecoderForCausalLM
    from altup.models import AltUpDecoderModel as AltUpDecoderModel
    from altup.models import AltUpT5Config as AltUpT5Config
    from altup.models import AltUpT5EncoderModel as AltUpT5EncoderModel
    from altup.models import AltUpT5ForConditionalGeneration as AltUpT5ForConditionalGeneration
    from altup.models import upcycle as upcycle
    from altup.models.accelerate import accelerate as accelerate
    from altup.models.accelerate import decelerate as decelerate
    from altup.models.accounting import account as account
    from altup.models.explain import explain as explain
    from altup.models.gemma3n.small_maps import skip_modules as skip_modules
    from altup.models.widening import Structure as Structure
    from altup.models.widening import WideTrainerMixin as WideTrainerMixin
    from altup.models.widening import parameter_groups as parameter_groups
    from altup.models.widening import register_handler as register_handler
    from altup.models.widening.description import describe as describe
    from altup.models.widening.loading import load_widened as load_widened
    from altup.models.widening.widen import narrow as narrow
    from altup.models.widening.widen import widen as widen
    from altup.nn import AltUp as AltUp
    from altup.nn import AveragePooling as AveragePooling
    from altup.nn import DynamicAltUp as DynamicAltUp
    from altup.nn import FixedAltUp as FixedAltUp
    from altup.nn import PartialExperts as PartialExperts
    from altup.nn import SequenceAltUp as SequenceAltUp
    from altup.nn import StrideAndSkip as StrideAndSkip
    from altup.training.loop import Loop as Loop
    from altup.training.pretraining import PretrainConfig as PretrainConfig
    from altup.training.pretraining import pretrain as pretrain

# The same names for Python itself, each with the module that it is loaded from.
_HOMES = {
    "AltUp": "altup.nn",
    "AltUpBertConfig": "altup.models",
    "AltUpBertForMaskedLM": "altup.models",
    "AltUpBertForSequenceClassification": "altup.models",
    "AltUpBertModel": "altup.models",
    "AltUpDecoderConfig": "altup.models",
    "AltUpDecoderForCausalLM": "altup.models",
    "AltUpDecoderModel": "altup.models",
    "AltUpT5Config": "altup.models",
    "AltUpT5EncoderModel": "altup.models",
    "AltUpT5ForConditionalGeneration": "altup.models",
    "AveragePooling": "altup.nn",
    "DynamicAltUp": "altup.nn",
    "EvaluateConfig": "altup.evaluation.config",
    "FinetuneConfig": "altup.finetuning.config",
    "FixedAltUp": "altup.nn",
    "Loop": "altup.training.loop",
    "PartialExperts": "altup.nn",
    "PretrainConfig": "altup.training.pretraining",
    "SequenceAltUp": "altup.nn",
    "StrideAndSkip": "altup.nn",
    "Structure": "altup.models.widening",
    "UserError": "altup.core.errors",
    "WideTrainerMixin": "altup.models.widening",
    "accelerate": "altup.models.accelerate",
    "account": "altup.models.accounting",
    "decelerate": "altup.models.accelerate",
    "describe": "altup.models.widening.description",
    "evaluate": "altup.evaluation.evaluate",
    "explain": "altup.models.explain",
    "finetune": "altup.finetuning.finetune",
    "load_widened": "altup.models.widening.loading",
    "narrow": "altup.models.widening.widen",
    "parameter_groups": "altup.models.widening",
    "pretrain": "altup.training.pretraining",
    "register_handler": "altup.models.widening",
    "skip_modules": "altup.models.gemma3n.small_maps",
    "upcycle": "altup.models",
    "widen": "altup.models.widening.widen",
}

__all__ = ["__version__", *_HOMES]

if not TYPE_CHECKING:  # a type checker that saw it would take any name for granted

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'altup' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
        import importlib

        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


_install()  # a folder of a widened model is loaded wide from here on

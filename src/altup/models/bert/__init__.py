"""BERT with every update rule of the paper."""

from altup.models.bert.classification import AltUpBertForSequenceClassification
from altup.models.bert.config import AltUpBertConfig
from altup.models.bert.model import AltUpBertForMaskedLM, AltUpBertModel

__all__ = ["AltUpBertConfig", "AltUpBertForMaskedLM", "AltUpBertForSequenceClassification", "AltUpBertModel"]

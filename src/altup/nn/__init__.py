"""The paper's ideas as modules that fit any transformer, and the parts our own models are built from."""

from altup.nn.altup import AltUp, Sum
from altup.nn.attention import Attention
from altup.nn.coefficients import CoefficientModule, coefficient_names
from altup.nn.dynamic import DynamicAltUp
from altup.nn.experts import PartialExperts
from altup.nn.feed_forward import GatedFeedForward
from altup.nn.norm import RMSNorm
from altup.nn.relative_bias import RelativeBias
from altup.nn.sequence import AveragePooling, SequenceAltUp, StrideAndSkip

__all__ = [
    "AltUp",
    "Attention",
    "AveragePooling",
    "CoefficientModule",
    "DynamicAltUp",
    "GatedFeedForward",
    "PartialExperts",
    "RMSNorm",
    "RelativeBias",
    "SequenceAltUp",
    "StrideAndSkip",
    "Sum",
    "coefficient_names",
]

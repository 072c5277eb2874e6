"""The paper's ideas as modules that fit any transformer, and the parts our own models are built from."""

from altup.nn.altup import AltUp, Sum
from altup.nn.attention import Attention, GroupedAttention
from altup.nn.coefficients import CoefficientModule, coefficient_names
from altup.nn.dynamic import DynamicAltUp
from altup.nn.experts import PartialExperts
from altup.nn.fixed import FixedAltUp
from altup.nn.layers import GatedFeedForward, LayerNorm, RMSNorm, SwiGLU
from altup.nn.positions import RelativeBias
from altup.nn.sequence import AveragePooling, SequenceAltUp, StrideAndSkip

__all__ = [
    "AltUp",
    "Attention",
    "AveragePooling",
    "CoefficientModule",
    "DynamicAltUp",
    "FixedAltUp",
    "GatedFeedForward",
    "GroupedAttention",
    "LayerNorm",
    "PartialExperts",
    "RMSNorm",
    "RelativeBias",
    "SequenceAltUp",
    "StrideAndSkip",
    "Sum",
    "SwiGLU",
    "coefficient_names",
]

"""Links that change the target's logits before a token is chosen, and `warps(...)`, which chains them."""

from dspark.stages.warp.base import AbstractWarp, Context
from dspark.stages.warp.chain import Warps, warps
from dspark.stages.warp.penalties import FrequencyPenalty, LogitBias, PresencePenalty, RepetitionPenalty
from dspark.stages.warp.truncate import MinP, Temperature, TopK, TopP

temperature = Temperature
top_k = TopK
top_p = TopP
min_p = MinP
logit_bias = LogitBias
repetition_penalty = RepetitionPenalty
presence_penalty = PresencePenalty
frequency_penalty = FrequencyPenalty

__all__ = [
    "AbstractWarp",
    "Context",
    "FrequencyPenalty",
    "LogitBias",
    "MinP",
    "PresencePenalty",
    "RepetitionPenalty",
    "Temperature",
    "TopK",
    "TopP",
    "Warps",
    "frequency_penalty",
    "logit_bias",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "warps",
]

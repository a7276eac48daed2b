"""Drafter networks: one backbone, whose options cover DSpark, DFlash and DFlash 2 as published."""

from dspark.models.heads.config import HeadConfig, LayerConfig, RopeConfig
from dspark.models.heads.context import Context
from dspark.models.heads.drafting import Draft, Sampling, draft, draft_rows, kept_prefix, noise_shape, previous_tokens
from dspark.models.heads.head import Head
from dspark.models.heads.packed import packed_hidden

__all__ = [
    "Context",
    "Draft",
    "Head",
    "HeadConfig",
    "LayerConfig",
    "RopeConfig",
    "Sampling",
    "draft",
    "draft_rows",
    "kept_prefix",
    "noise_shape",
    "packed_hidden",
    "previous_tokens",
]

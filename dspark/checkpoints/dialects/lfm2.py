"""LiquidAI's DSpark heads for LFM2.5: SpecForge's keys without its tag, and a rope that turns neighbours
(rope_is_neox_style false; read as halves it loses half the acceptance)."""

from __future__ import annotations

from dspark.checkpoints.dialects import specforge
from dspark.checkpoints.dialects.base import Dialect, architecture

DIALECT = Dialect(
    "LiquidAI LFM2.5 DSpark", lambda source: architecture(source) == "Lfm2DSparkDraftModel", specforge.read
)

"""Muse-Glimmer's assistant: a DFlash drafter with flat keys and two names of its own."""

from __future__ import annotations

from dspark.checkpoints.dialects import dflash
from dspark.checkpoints.dialects.base import Dialect, Reading, architecture
from dspark.checkpoints.dialects.source import Source

NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def read(source: Source) -> Reading:
    return dflash.read(source, lambda name: NAMES.get(name, name))


DIALECT = Dialect(
    "Muse-Glimmer assistant (DFlash)", lambda source: architecture(source) == "MuseGlimmerAssistantModel", read
)

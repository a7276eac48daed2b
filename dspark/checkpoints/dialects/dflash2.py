"""DFlash 2 (Inco AI, z-lab): DFlash with block convolutions and a candidate selector."""

from __future__ import annotations

import attrs

from dspark.checkpoints.dialects import backbone, dflash
from dspark.checkpoints.dialects.base import Dialect, Reading, architecture, keys_of
from dspark.checkpoints.dialects.source import Source

ARCHITECTURES = ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")


def read(source: Source) -> Reading:
    reading = dflash.read(source)
    fields = backbone.selector(keys_of(source), reading.weights, reading.config.hidden_size)
    return reading._replace(config=attrs.evolve(reading.config, kind="dflash2", **fields))


DIALECT = Dialect("DFlash 2", lambda source: architecture(source) in ARCHITECTURES, read)

"""How much memory a drafter's weights will take, read from its headers."""

from __future__ import annotations

import math
from pathlib import Path

from dspark.checkpoints.dialects import open_source, recognise
from dspark.checkpoints.drafter import KEPT, READ_WHOLE


def weigh_drafter(path: Path, bits: int | None, group_size: int, itemsize: int) -> int:
    """Bytes once loaded by `load_drafter` with these options, computing in numbers of `itemsize` bytes.

    Raises CheckpointError or SourceError for what is no drafter.
    """
    source = open_source(path)
    total = 0
    for name, weight in recognise(source).read(source).weights.items():
        numbers = math.prod(weight.shape)
        if weight.encoding == "nvfp4":
            total += numbers // 2 + numbers // 16
        elif weight.encoding == "mlx":
            total += numbers * weight.bits // 8 + 2 * itemsize * numbers // weight.group_size
        elif bits and _is_packed(name, weight.shape):
            size = next(g for g in (group_size, 32) if weight.shape[-1] % g == 0)
            total += numbers * bits // 8 + 2 * itemsize * numbers // size
        else:
            total += numbers * itemsize
    return total


def _is_packed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether loading packs a plain weight: large ones of linears and tables, whose rows divide into groups."""
    kept = any(part in name for part in KEPT) and READ_WHOLE not in name
    return name.endswith(".weight") and len(shape) == 2 and shape[-1] % 32 == 0 and not kept

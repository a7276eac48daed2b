"""How a drafter's weights are best held on this machine, and how much memory they will take, read from its headers."""

from __future__ import annotations

import math
from pathlib import Path

from dspark.checkpoints.dialects import open_source, recognise
from dspark.checkpoints.drafter import KEPT, READ_WHOLE
from dspark.platform import FLOAT32_SHARE, backend, memory_available, open_blas

# What a GPU gets unless a recipe says otherwise.
PACKED_BITS = 4
# Bytes below which an NVIDIA GPU gets all unpacked: they are read in well under 0.1 ms, and each packed format has MLX compile
# kernels of half a minute.
SMALL = 256 << 20


def packing(asked: int | None, path: Path, group_size: int) -> tuple[int, bool]:
    """What `load_drafter` is to do on this machine, (bits, dense), where a recipe says `asked` (None: nothing).

    A GPU packs to 4 bits, since it reads weights, but for small drafters on an NVIDIA GPU. A CPU with a real BLAS unpacks: MLX's
    quantised product there costs the same again for each row, and a block is one product of all its rows. Not where float32
    weights would fill the memory.
    """
    if asked is not None:
        return asked, False
    if (kind := backend()) != "cpu":
        small = kind == "cuda" and weigh_drafter(path, 0, group_size, 2, dense=True) <= SMALL
        return (0, True) if small else (PACKED_BITS, False)
    if not open_blas().real:
        return PACKED_BITS, False
    fits = weigh_drafter(path, 0, group_size, 4, dense=True) <= FLOAT32_SHARE * memory_available()
    return (0, True) if fits else (PACKED_BITS, False)


def weigh_drafter(path: Path, bits: int | None, group_size: int, itemsize: int, *, dense: bool = False) -> int:
    """Bytes once loaded by `load_drafter` with these options, computing in numbers of `itemsize` bytes.

    Raises CheckpointError or SourceError for what is no drafter.
    """
    source = open_source(path)
    total = 0
    for name, weight in recognise(source).read(source).weights.items():
        numbers = math.prod(weight.shape)
        if dense:
            total += numbers * itemsize
        elif weight.encoding == "nvfp4":
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

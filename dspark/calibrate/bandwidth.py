"""The floor under a step: every weight must be read once, and memory is only so fast."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

# Large enough not to fit into any cache.
COPY_NBYTES = {"cpu": 1 << 27, "metal": 1 << 28, "cuda": 1 << 30}
REPEATS = 4


def floor_ms(target: Any, kind: str) -> float | None:
    """Milliseconds to read all weights once at this machine's bandwidth; None where a step does not read them all
    (experts), or what is read cannot be told. Reads 128 MB to 1 GB a few times."""
    nbytes = read_nbytes(target)
    return None if nbytes is None else nbytes / nbytes_s(kind) * 1000


def read_nbytes(target: Any) -> int | None:
    """Bytes of weights that a plain step reads: all but those of an embedding table that is no head as well."""
    core = getattr(target, "core", None)
    if not isinstance(core, nn.Module) or any("switch" in type(m).__name__.lower() for m in core.modules()):
        return None
    total, table = _nbytes(core), target.embedding
    return total if table is None or target.lm_head_raw is table else total - _nbytes(table)


def nbytes_s(kind: str) -> float:
    """Bytes a second: read and written by a large copy, or on a CPU, where new pages are most of what a copy takes, read by a
    product with one vector."""
    source = mx.zeros((COPY_NBYTES[kind] // 16384, 4096), mx.float32)
    vector = mx.zeros((4096,), mx.float32)
    mx.eval(source, vector)
    times = []
    for _ in range(REPEATS):
        start = perf_counter()
        mx.eval(source @ vector if kind == "cpu" else mx.abs(source))
        times.append(perf_counter() - start)
    return source.nbytes * (1 if kind == "cpu" else 2) / min(times)


def _nbytes(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))

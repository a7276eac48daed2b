"""The small-M quantised matmul for Apple GPUs: the kernel's text for a shape.

Its arithmetic is tested on a CPU, through stand-ins for the Metal types that it names. Its speed was never measured here:
on a Mac the probe decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.kernels.text import defines, made_from, shortened, unsuited

TILE, COLUMN = 8, 8
MAX_ROWS = 2 * COLUMN


class Variant(NamedTuple):
    """What a kernel is compiled for. `columns`: rows of x in eights; `tiles`: of 8 weight rows in a threadgroup; `simds`:
    simdgroups that share K; `parts`: matrices that share x."""

    bits: int
    group: int
    columns: int
    tiles: int
    simds: int
    half: bool
    parts: int = 1


def why_not(rows: int, out: Sequence[int], k: int, bits: int, group: int, dtype: mx.Dtype) -> str | None:
    """Why the kernel cannot multiply `rows` rows by matrices [out, k], None where it can."""
    return unsuited(rows, MAX_ROWS, out, TILE, bits, group, dtype) or (
        f"{k} columns of weights are no multiple of {group}" if k % group else None
    )


def variant(rows: int, out: Sequence[int], k: int, bits: int, group: int, dtype: mx.Dtype) -> Variant:
    """The kernel for `rows` of x and matrices [out, k]."""
    tiles = next(n for n in (4, 2, 1) if n == 1 or (sum(out) >= 1024 * n and all(o // TILE % n == 0 for o in out)))
    simds = 8 if k // group >= 16 else 4
    return Variant(bits, group, 1 if rows <= COLUMN else 2, tiles, simds, dtype == mx.float16, len(out))


def blocks(kind: Variant, out: Sequence[int]) -> int:
    return sum(out) // (TILE * kind.tiles)


@lru_cache(None)
def kernel(kind: Variant) -> Any:
    return mx.fast.metal_kernel(**made_from(kind.parts, *texts(kind)))


def texts(kind: Variant) -> tuple[str, str]:
    """(header, body) of a kernel."""
    constants = {
        "BITS": kind.bits,
        "GROUP": kind.group,
        "COLS": kind.columns,
        "TILES": kind.tiles,
        "SIMDS": kind.simds,
        "HALF": int(kind.half),
    }
    return "#include <metal_simdgroup_matrix>\nusing namespace metal;\n" + defines(constants) + shortened(
        "qmm.metal"
    ), body(kind.parts)


def body(parts: int) -> str:
    """Which matrix a threadgroup works on, and where."""
    lines = [
        "threadgroup float shared[SIMDS * TILES * COLS * 64];",
        "int m = 1, k = x_shape[x_ndim - 1];",
        "for (int i = 0; i < x_ndim - 1; ++i) m *= x_shape[i];",
        "int row = int(threadgroup_position_in_grid.x) * TILES * 8;",
        "int simd = int(simdgroup_index_in_threadgroup), lane = int(thread_index_in_simdgroup);",
    ]
    for i in range(parts):
        arrays = f"w{i}, (const device ushort*)s{i}, (const device ushort*)b{i}, (device ushort*)y{i}"
        call = f"dspark_qmm::run(shared, {arrays}, (const device ushort*)x, row, n{i}, m, k, simd, lane);"
        lines += [f"int n{i} = w{i}_shape[0];", f"if (row >= 0 && row < n{i}) {{ {call} }}", f"row -= n{i};"]
    return "\n".join(lines)

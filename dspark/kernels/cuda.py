"""The small-M quantised matmul for NVIDIA GPUs: the kernel's text for a shape, and its call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.kernels.precompiled import Kernel, Program
from dspark.kernels.precompiled import kernel as precompiled
from dspark.kernels.text import defines, made_from, shortened, unsuited

# Rows of the tensor cores' two operands.
TILE, COLUMN = 16, 8
STAGES = 4
# Weight rows and x rows of one call.
MAX_ROWS = 2 * COLUMN


class Variant(NamedTuple):
    """What a kernel is compiled for. `columns`: rows of x in eights; `tiles`: of 16 weight rows in a block; `piece`: bytes
    of scales copied at once; `parts`: matrices that share x."""

    bits: int
    group: int
    columns: int
    tiles: int
    warps: int
    piece: int
    half: bool
    parts: int = 1

    @property
    def stage_bytes(self) -> int:
        return 2048 + 32 * self.scale_bytes

    @property
    def scale_bytes(self) -> int:
        """Scales of one weight row in a stage: 128 bytes of weights."""
        return 2 * (1024 // self.bits // self.group)

    @property
    def shared_bytes(self) -> int:
        return max(STAGES * self.warps * self.stage_bytes, self.warps * self.tiles * self.columns * 512)


def why_not(rows: int, out: Sequence[int], k: int, bits: int, group: int, dtype: mx.Dtype) -> str | None:
    """Why the kernel cannot multiply `rows` rows by matrices [out, k], None where it can."""
    if reason := unsuited(rows, MAX_ROWS, out, TILE, bits, group, dtype):
        return reason
    # Scales are copied 4 bytes at a time at least.
    return f"{k} columns of weights do not divide into pairs of groups" if k % 64 or k // group % 2 else None


def variant(
    rows: int, out: Sequence[int], k: int, bits: int, group: int, dtype: mx.Dtype, tiles: int = 0, warps: int = 0
) -> Variant:
    """The kernel for `rows` of x and matrices [out, k]; `tiles` and `warps` are chosen where they are 0."""
    chosen_tiles, chosen_warps = shape_of_block(out, k, bits)
    scale_bytes, row_bytes = 2 * (1024 // bits // group), 2 * (k // group)
    piece = next(size for size in (16, 8, 4) if size <= scale_bytes and row_bytes % size == 0)
    columns = 1 if rows <= COLUMN else 2
    tiles, warps = tiles or chosen_tiles, warps or chosen_warps
    return Variant(bits, group, columns, tiles, warps, piece, dtype == mx.float16, len(out))


def shape_of_block(out: Sequence[int], k: int, bits: int) -> tuple[int, int]:
    """(tiles of 16 weight rows, warps) of a block: as many rows as leave a block for every multiprocessor, since a block
    reads all of x once; more warps, each with less of K, where blocks are few. 4 bits take 130 registers a thread, of which
    a block of 16 warps has 128."""
    tiles = sum(out) // TILE
    per_block = next(n for n in (4, 2, 1) if n == 1 or (tiles // n >= 128 and all(o // TILE % n == 0 for o in out)))
    chunks = -(-k * bits // 1024)
    warps = 16 if tiles // per_block < 128 and chunks >= 16 and bits == 8 else 8 if chunks > 4 else 4
    return per_block, warps


def blocks(kind: Variant, out: Sequence[int]) -> int:
    return sum(out) // (TILE * kind.tiles)


@lru_cache(None)
def compiled(kind: Variant) -> Kernel | None:
    """The kernel without MLX's compilation, None where this machine has none. Its scalars: rows of x, K, rows of each matrix."""
    return precompiled(program(kind))


def program(kind: Variant) -> Program:
    parts = range(kind.parts)
    inputs = ["const void* x", *(f"const void* {name}{i}" for i in parts for name in ("w", "s", "b"))]
    shapes = ["const int x_ndim = 2, x_shape[] = {rows, columns};"]
    shapes += [f"const int w{i}_shape[] = {{rows{i}}};" for i in parts]
    return Program(
        "dspark_qmm",
        *texts(kind),
        tuple(inputs),
        tuple(f"void* y{i}" for i in parts),
        ("rows", "columns", *(f"rows{i}" for i in parts)),
        "\n".join(shapes),
        kind.shared_bytes,
    )


@lru_cache(None)
def kernel(kind: Variant) -> Any:
    """The kernel as MLX compiles it, once a process."""
    return mx.fast.cuda_kernel(**made_from(kind.parts, *texts(kind)), shared_memory=kind.shared_bytes)


def texts(kind: Variant) -> tuple[str, str]:
    """(header, body) of a kernel. Short, for MLX copies them at each call."""
    constants = {
        "BITS": kind.bits,
        "GROUP": kind.group,
        "COLS": kind.columns,
        "TILES": kind.tiles,
        "WARPS": kind.warps,
        "STAGES": STAGES,
        "PIECE": kind.piece,
        "HALF": int(kind.half),
    }
    return defines(constants) + shortened("qmm.cu"), body(kind.parts)


def body(parts: int) -> str:
    """Which matrix a block works on, and where."""
    lines = ["extern __shared__ uint4 shared[];", "int m = 1, k = x_shape[x_ndim - 1];"]
    lines += ["for (int i = 0; i < x_ndim - 1; ++i) m *= x_shape[i];", "int row = dspark_qmm::block_id() * TILES * 16;"]
    for i in range(parts):
        job = (
            f"dspark_qmm::Job{{(const dspark_qmm::u32*)w{i}, (const dspark_qmm::u16*)s{i}, (const dspark_qmm::u16*)b{i}, "
            f"(dspark_qmm::u16*)y{i}, row, n{i}}}"
        )
        call = f"dspark_qmm::run((char*)shared, {job}, (const dspark_qmm::u16*)x, m, k);"
        lines += [f"int n{i} = w{i}_shape[0];", f"if (row < n{i}) {{ {call} return; }}", f"row -= n{i};"]
    return "\n".join(lines)

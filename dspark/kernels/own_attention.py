"""Causal attention of a verify's rows for NVIDIA GPUs, one launch a layer: the kernel's text for a shape, and its calls.

The kernel reads the buffers of a plain KV cache in place, for MLX hands such a kernel no strides and would copy the part in use.
"""

from __future__ import annotations

from functools import lru_cache
from math import e, log2
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.kernels.precompiled import Kernel, Program
from dspark.kernels.precompiled import kernel as precompiled
from dspark.kernels.text import defines, shortened

WARPS, MOST_ROWS, WIDEST = 8, 16, 128
# One block walks over all keys of a head: behind more of them most of a large GPU would wait for a few blocks.
MOST_KEYS = 8192
TEXT = "attention.cu"
SCALARS = ("heads", "kv_heads", "length", "seen", "room")


class Attention(NamedTuple):
    """What a way is chosen for: query rows, heads, heads of keys, head_dim; causal: a row sees keys up to its own, else all."""

    rows: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool
    dtype: mx.Dtype

    def __str__(self) -> str:
        kind, dtype = "causal" if self.causal else "all keys", str(self.dtype).removeprefix("mlx.core.")
        return f"{self.rows} rows, attention of {self.heads} and {self.kv_heads} heads of {self.dim}, {kind}, {dtype}"


class Variant(NamedTuple):
    """What a kernel is compiled for: whatever the heads and rows. `scale`: what scores are multiplied by."""

    dim: int
    half: bool
    scale: float


def why_not(kind: Attention) -> str | None:
    """Why the kernel is not written for a shape, None where it is."""
    if not kind.causal:
        return "rows that see all keys, where causal rows are written"
    if kind.rows > MOST_ROWS:
        return f"{kind.rows} rows, where {MOST_ROWS} is the most"
    if kind.dim % 32 or not 0 < kind.dim <= WIDEST:
        return f"{kind.dim} columns a head, where multiples of 32 up to {WIDEST} are written"
    if kind.heads % kind.kv_heads:
        return f"{kind.heads} heads are no multiple of {kind.kv_heads}"
    if kind.dtype not in (mx.float16, mx.bfloat16):
        return f"{str(kind.dtype).removeprefix('mlx.core.')} input, where floats of 16 bits are written"
    return None


def fits(kind: Attention, keys: mx.array, values: mx.array, cache: Any) -> bool:
    """Whether keys and values are the front of the buffers of a plain cache, and few enough. mlx-lm and mlx-vlm have a class of
    the same name and layout each; a ring, a packed or a ragged cache is none of them."""
    if type(cache).__name__ != "KVCache" or cache.keys is None:
        return False
    seen, whole = keys.shape[2], cache.keys.shape
    return (
        cache.offset == seen
        and kind.rows <= seen <= MOST_KEYS
        and seen <= whole[2]
        and whole == (keys.shape[0], kind.kv_heads, whole[2], kind.dim)
        and cache.values.shape == whole
        and cache.keys.dtype == cache.values.dtype == kind.dtype
        and values.shape == keys.shape
    )


def attend(kernel: Kernel, queries: mx.array, keys: mx.array, values: mx.array, seen: int) -> mx.array:
    """Attention [B, heads, rows, head_dim] of queries of that shape, rows side by side in memory as a layer's output wants them.

    keys, values: whole buffers [B, kv_heads, capacity, head_dim], of which `seen` keys count, the rows' own among them. Sums are
    float32; a row's bits do not depend on the rows that came with it. One launch.
    """
    batch, heads, rows, dim = queries.shape
    out = kernel(
        inputs=[queries, keys, values],
        output_shapes=[(batch, rows, heads, dim)],
        output_dtypes=[queries.dtype],
        scalars=[heads, keys.shape[1], rows, seen, keys.shape[2]],
        grid=(batch * heads * 32 * WARPS, 1, 1),
        threadgroup=(32 * WARPS, 1, 1),
    )[0]
    return out.transpose(0, 2, 1, 3)


def usual_scale(kind: Attention) -> float:
    """What nearly every model multiplies scores by."""
    return kind.dim**-0.5


def variant(kind: Attention, scale: float) -> Variant:
    return Variant(kind.dim, kind.dtype == mx.float16, scale)


@lru_cache(None)
def compiled(kind: Variant) -> Kernel | None:
    """The kernel ready to be called, None where this machine has none."""
    return precompiled(program(kind))


def program(kind: Variant) -> Program:
    constants: dict[str, int | str] = {
        "D": kind.dim,
        "WARPS": WARPS,
        "HALF": int(kind.half),
        "SCALE": f"{kind.scale * log2(e):.9e}f",
    }
    arrays = ", ".join(f"({'u16' if name == 'y' else 'const u16'}*){name}" for name in ("q", "k", "v", "y"))
    return Program(
        "dspark_attention",
        defines(constants) + shortened(TEXT),
        f"using dspark_attention::u16;\ndspark_attention::run({{{arrays}, {', '.join(SCALARS)}}});",
        ("const void* q", "const void* k", "const void* v"),
        ("void* y",),
        SCALARS,
        # Without heads there is nothing to divide by.
        "if (heads < 1) return;",
    )

"""Attention of the few rows of a verify or of a draft, by MLX's kernel for single rows.

MLX's CUDA build has a kernel for up to 3 query rows; from 4 rows on attention is a chain of a product, a mask, a softmax and
another product. Rows may be computed a few at a time: a causal row sees the keys up to its own, whoever shares its call, so
each piece gets the keys that its last row sees. Where all rows see all keys, they are so many heads of one row.

Each row's sum is then the one that a plain step computes, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import attrs
import mlx.core as mx

from dspark.kernels.measure import MARGIN, TOLERANCE, Finding

# Rows of a piece: what MLX's kernels for few rows take on CUDA and on Metal.
WIDTHS = (3, 8)
# Keys behind which ways are compared: each must be faster or as fast.
DEPTHS = (512, 4096)
CALLS, REPEATS = 16, 5

Call = Callable[..., mx.array]


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


def kind_of(queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> Attention | None:
    """The shape of a call of mx.fast.scaled_dot_product_attention with queries [B, heads, rows, head_dim] and keys and values
    [B, kv_heads, S, head_dim]; None where the mask is an array, or values are of another size."""
    _, heads, rows, dim = queries.shape
    if isinstance(mask, mx.array) or mask not in (None, "causal") or values.shape[-1] != dim:
        return None
    return Attention(rows, heads, keys.shape[1], dim, mask is not None, queries.dtype)


def split(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None, width: int
) -> mx.array:
    """Causal attention, `width` rows a call. Costs a call for each piece and one to put them together."""
    rows, seen, pieces = queries.shape[2], keys.shape[2], []
    for piece in mx.split(queries, list(range(width, rows, width)), axis=2):
        seen_here = seen - rows + sum(p.shape[2] for p in pieces) + piece.shape[2]
        last = seen_here == seen
        pieces.append(
            mx.fast.scaled_dot_product_attention(
                piece,
                keys if last else keys[:, :, :seen_here],
                values if last else values[:, :, :seen_here],
                scale=scale,
                mask="causal" if piece.shape[2] > 1 else None,
                sinks=sinks,
            )
        )
    return mx.concatenate(pieces, axis=2)


def fold(queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
    """Attention to all keys, the rows as heads of one row: heads that share keys stay neighbours. Costs one call."""
    batch, heads, rows, dim = queries.shape
    if sinks is not None:
        sinks = mx.repeat(sinks, rows)
    flat = mx.fast.scaled_dot_product_attention(
        queries.reshape(batch, heads * rows, 1, dim), keys, values, scale=scale, mask=None, sinks=sinks
    )
    return flat.reshape(batch, heads, rows, -1)


def way_of(kind: Attention, finding: Finding) -> Call | None:
    """(queries, keys, values, scale, sinks) -> the same as MLX's own call; None for that."""
    if finding.way == "fold":
        return fold
    if finding.way == "split" and finding.width < kind.rows:
        return lambda q, k, v, scale, sinks: split(q, k, v, scale, sinks, finding.width)
    return None


# ---- what is faster here ------------------------------------------------------------------------------------------------


def measure(kind: Attention) -> Finding:
    """Try the ways on one shape, right behind a few keys and at several depths. Costs some hundred calls; nothing is compiled."""
    best, wrong = Finding("stock"), 0.0
    for found in [Finding("split", w) for w in WIDTHS if w < kind.rows] if kind.causal else [Finding("fold")]:
        way = way_of(kind, found)
        assert way is not None
        worst = error(kind, way)
        if not worst <= 1:
            wrong = max(wrong, worst)
            continue
        took = [timed(kind, depth, way) for depth in DEPTHS]
        us, stock_us = took[0]
        if all(own <= MARGIN * other for own, other in took) and (best.way == "stock" or us < best.us):
            best = attrs.evolve(found, us=us, stock_us=stock_us, worst=worst)
    if best.way == "stock" and wrong:
        return Finding("stock", worst=wrong, why=f"wrong on this machine: {wrong:.3g} times the tolerance off")
    return best


def error(kind: Attention, way: Call) -> float:
    """The largest difference from float32 arithmetic on the CPU, in tolerances; infinite where something is no number. Behind few
    keys, so that one key too many or too few shows."""
    worst = 0.0
    for behind in (0, 5):
        drawn = arrays(kind, behind)
        made = way(*drawn, kind.dim**-0.5, None).astype(mx.float32)
        with mx.stream(mx.cpu):
            mask = "causal" if kind.causal else None
            exact = mx.fast.scaled_dot_product_attention(
                *[a.astype(mx.float32) for a in drawn], scale=kind.dim**-0.5, mask=mask
            )
            room = TOLERANCE * (mx.abs(exact) + mx.sqrt(mx.mean(mx.square(exact))))
            far = mx.abs(made - exact) / room
            largest: Any = mx.max(far).item()
            worst = float("inf") if mx.isnan(far).any().item() else max(worst, largest)
    return worst


def arrays(kind: Attention, behind: int) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values as a layer hands them on: keys and values are the front of longer buffers."""
    drawn = []
    for i, (heads, rows) in enumerate([(kind.heads, kind.rows)] + [(kind.kv_heads, behind + kind.rows + 16)] * 2):
        drawn.append(mx.random.normal((1, heads, rows, kind.dim), key=mx.random.key(i)).astype(kind.dtype))
    queries, keys, values = drawn
    seen = behind + kind.rows
    return queries, keys[:, :, :seen], values[:, :, :seen]


def timed(kind: Attention, depth: int, way: Call) -> tuple[float, float]:
    """Microseconds a call, the host's part included: this way's, and those of MLX's own call, in turn."""
    queries, keys, values = arrays(kind, depth)
    mask, scale = "causal" if kind.causal else None, kind.dim**-0.5

    def own(q: mx.array, k: mx.array, v: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

    def once(call: Call) -> float:
        began, x = time.perf_counter(), queries
        for _ in range(CALLS):
            # One after the other, as the layers of a model are.
            x = call(x, keys, values, scale, None)
        mx.eval(x)
        return (time.perf_counter() - began) / CALLS * 1e6

    took = [(once(way), once(own)) for _ in range(REPEATS + 1)]
    # The first ones warm up.
    return median(ours for ours, _ in took[1:]), median(theirs for _, theirs in took[1:])

"""Attention of the few rows of a verify or of a draft, by MLX's kernel for single rows or by one of ours.

MLX's CUDA build has a kernel for up to 3 query rows; from 4 rows on attention is a chain of a product, a mask, a softmax and
another product. Rows may be computed a few at a time: a causal row sees the keys up to its own, whoever shares its call, so
each piece gets the keys that its last row sees. Where all rows see all keys, they are so many heads of one row. Each row's sum
is then the one that a plain step computes, bit for bit.

Our kernel takes all rows in one launch, from the buffers of a plain cache; its sums are rounded in another order.

On a CPU MLX multiplies each head by itself; heads that share keys may be one product, of which a real BLAS starts a third as many.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from statistics import median
from typing import Any

import attrs
import mlx.core as mx

from dspark.kernels import own_attention
from dspark.kernels.measure import MARGIN, TOLERANCE, Finding
from dspark.kernels.own_attention import Attention

# Rows of a piece: what MLX's kernels for few rows take on CUDA and on Metal.
WIDTHS = (3, 8)
# Keys behind which ways are compared: each must be faster or as fast.
DEPTHS, CPU_DEPTHS = (512, 4096), (256, 1024)
CALLS, REPEATS = 16, 5

# (queries, keys, values, scale, sinks, cache) -> attention, None for MLX's own call after all.
Call = Callable[..., mx.array | None]


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


def joined(queries: mx.array, keys: mx.array, values: mx.array, scale: float, causal: bool) -> mx.array:
    """Attention with the rows of all heads that share keys as rows of one product. Costs the operations of MLX's own on a CPU."""
    batch, heads, rows, dim = queries.shape
    shared, seen = keys.shape[1], keys.shape[2]
    together = (queries * scale).reshape(batch, shared, heads // shared * rows, dim)
    scores = together @ keys.swapaxes(-1, -2)
    if causal:
        scores = mx.where(_seen(rows, seen, heads // shared), scores, -mx.inf)
    return (mx.softmax(scores, axis=-1, precise=True) @ values).reshape(batch, heads, rows, -1)


@lru_cache(8)
def _seen(rows: int, seen: int, repeats: int) -> mx.array:
    """bool [repeats * rows, seen]: which keys each row sees. Shared by all layers of a forward."""
    mask = mx.arange(seen)[None] <= mx.arange(seen - rows, seen)[:, None]
    mask = mx.concatenate([mask] * repeats)
    mx.eval(mask)
    return mask


def way_of(kind: Attention, finding: Finding) -> Call | None:
    """The way of a finding; None for MLX's own call."""
    if finding.way == "joined":
        return lambda q, k, v, scale, sinks, cache=None: joined(q, k, v, scale, kind.causal) if sinks is None else None
    if finding.way == "fold":
        return lambda q, k, v, scale, sinks, cache=None: fold(q, k, v, scale, sinks)
    pieces: Call | None = None
    if finding.way in ("split", "cuda") and 0 < finding.width < kind.rows:
        pieces = lambda q, k, v, scale, sinks, cache=None: split(q, k, v, scale, sinks, finding.width)
    # Fewer rows are one launch of MLX's own.
    return owned(kind, pieces) if finding.way == "cuda" and kind.rows > WIDTHS[0] else pieces


def owned(kind: Attention, otherwise: Call | None) -> Call:
    """Our kernel, and `otherwise` where it is not written for what a call brings: another cache, sinks, many keys."""

    def way(
        q: mx.array, k: mx.array, v: mx.array, scale: float, sinks: mx.array | None, cache: Any = None
    ) -> mx.array | None:
        if sinks is None and isinstance(scale, float) and own_attention.fits(kind, k, v, cache):
            kernel = own_attention.compiled(own_attention.variant(kind, scale))
            if kernel is not None:
                return own_attention.attend(kernel, q, cache.keys, cache.values, cache.offset)
        return None if otherwise is None else otherwise(q, k, v, scale, sinks)

    return way


# ---- what is faster here ------------------------------------------------------------------------------------------------


def measure(kind: Attention) -> Finding:
    """Try the ways on one shape, right behind a few keys and at several depths. Costs some hundred calls, and the compilation of
    our kernel where it is on no disk."""
    best, wrong = {"stock": Finding("stock")}, 0.0
    for found in candidates(kind):
        way = way_of(kind, found)
        assert way is not None
        worst = error(kind, way)
        if not worst <= 1:
            wrong = max(wrong, worst)
            continue
        took = [timed(kind, depth, way) for depth in (CPU_DEPTHS if on_cpu() else DEPTHS)]
        us, stock_us = took[0]
        before = best.get(found.way)
        if all(own <= MARGIN * other for own, other in took) and (before is None or us < before.us):
            best[found.way] = attrs.evolve(found, us=us, stock_us=stock_us, worst=worst)
    pieces = best.get("split")
    if len(best) == 1 and wrong:
        return Finding("stock", worst=wrong, why=f"wrong on this machine: {wrong:.3g} times the tolerance off")
    chosen = min(best.values(), key=lambda found: (found.way == "stock", found.us))
    # What our kernel is not for goes the next best way.
    return attrs.evolve(chosen, width=pieces.width) if chosen.way == "cuda" and pieces else chosen


def candidates(kind: Attention) -> list[Finding]:
    if on_cpu():
        return [Finding("joined")] if kind.heads > kind.kv_heads else []
    if not kind.causal:
        return [Finding("fold")]
    ways = [Finding("split", width) for width in WIDTHS if width < kind.rows]
    if kind.rows > WIDTHS[0] and not own_attention.why_not(kind):
        usual = own_attention.variant(kind, own_attention.usual_scale(kind))
        ways += [Finding("cuda")] * (own_attention.compiled(usual) is not None)
    return ways


def on_cpu() -> bool:
    return mx.default_device().type == mx.DeviceType.cpu


def error(kind: Attention, way: Call) -> float:
    """The largest difference from float32 arithmetic on the CPU, in tolerances; infinite where something is no number. Behind few
    keys, so that one key too many or too few shows, and behind some more, which a kernel shares out."""
    worst = 0.0
    for behind in (0, 5, 300):
        queries, cache = filled(kind, behind)
        drawn = queries, *cache.keys_and_values()
        attended = way(*drawn, own_attention.usual_scale(kind), None, cache)
        if attended is None:
            return float("inf")
        made = attended.astype(mx.float32)
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
    queries, cache = filled(kind, behind)
    return queries, *cache.keys_and_values()


def filled(kind: Attention, behind: int) -> tuple[mx.array, Any]:
    """Queries, and a cache with the keys of `behind` tokens and of their own, in buffers that go on with what is no number."""
    from mlx_lm.models.cache import KVCache

    seen, drawn = behind + kind.rows, []
    for i, (heads, rows) in enumerate([(kind.heads, kind.rows)] + [(kind.kv_heads, seen)] * 2):
        drawn.append(mx.random.normal((1, heads, rows, kind.dim), key=mx.random.key(i)).astype(kind.dtype))
    cache = KVCache()
    cache.keys, cache.values = (mx.pad(a, [(0, 0), (0, 0), (0, 16), (0, 0)], constant_values=mx.nan) for a in drawn[1:])
    cache.offset = seen
    return drawn[0], cache


def timed(kind: Attention, depth: int, way: Call) -> tuple[float, float]:
    """Microseconds a call, the host's part included: this way's, and those of MLX's own call, in turn."""
    queries, cache = filled(kind, depth)
    (keys, values), scale = cache.keys_and_values(), own_attention.usual_scale(kind)
    mask = "causal" if kind.causal else None
    mx.eval(queries, cache.keys, cache.values)

    def own(q: mx.array, k: mx.array, v: mx.array, scale: float, sinks: mx.array | None, cache: Any) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

    def once(call: Call) -> float:
        began, x = time.perf_counter(), queries
        for _ in range(CALLS):
            # One after the other, and rows side by side, as the layers of a model have it.
            made = call(x, keys, values, scale, None, cache)
            assert made is not None
            x = made.transpose(0, 2, 1, 3).reshape(queries.shape)
        mx.eval(x)
        return (time.perf_counter() - began) / CALLS * 1e6

    took = [(once(way), once(own)) for _ in range(REPEATS + 1)]
    # The first ones warm up.
    return median(ours for ours, _ in took[1:]), median(theirs for _, theirs in took[1:])

"""Contexts that nobody prefilled: caches whose first columns are repeated until they are as deep as asked.

What they hold makes no sense as text and costs as much as if it did.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from dspark.buffers.leaves import is_recurrent, is_rotating
from dspark.errors import DsparkError
from dspark.records import Settled, Tokens

# Tokens that are really fed; the rest are their copies.
SEED = 8
GROWING = ("KVCache", "QuantizedKVCache", "ConcatenateKVCache")
CHUNK = 512


class Unfillable(DsparkError):
    """A cache of a kind that is not known how to fill; names it."""


def fill(buffers: Any, target: Any, prompt: Tokens, target_layer_ids: tuple[int, ...]) -> mx.array | None:
    """Make empty single-row buffers hold all of `prompt` but its last token. Returns the taps of the tokens really fed.

    Costs one forward of at most 8 tokens. Raises Unfillable.
    """
    depth = len(prompt) - 1
    seed = min(SEED, depth)
    _, taps = buffers.forward(target, mx.array([prompt[:seed]]), target_layer_ids)
    buffers.settle((seed,), (prompt[:seed],))
    if depth > seed:
        for cache in buffers.leaves:
            _stretch(cache, seed, depth)
        buffers.held = (depth,)
    mx.eval(buffers.state, *(() if taps is None else (taps,)))
    return taps


def chunks(prompt: Tokens, taps: mx.array | None) -> Iterator[Settled]:
    """What a prefill of `prompt` would hand to a drafter, chunk by chunk, with copies of `taps` for its taps."""
    depth, at, known = len(prompt) - 1, 0, 0
    while at < depth:
        end = min(at + CHUNK, depth)
        piece = None if taps is None else _repeated(taps, end - at, axis=1)
        yield Settled(mx.array([[prompt[end]]]), (prompt[known : end + 1],), piece, (end - at,), (end,))
        at, known = end, end + 1


def _stretch(cache: Any, seed: int, depth: int) -> None:
    if is_recurrent(cache):
        return
    spare = 0
    if type(cache).__name__ in GROWING:
        rows, step = depth, getattr(cache, "step", 1)
        spare = -depth % step
    elif is_rotating(cache):
        rows = min(depth, cache.max_size)
        cache._idx = rows
    else:
        raise Unfillable(f"a {type(cache).__name__} cannot be filled without a prefill")
    # Caches grow in steps and write into what is spare; without any the next token would cost a copy.
    grow = lambda array: mx.pad(
        _repeated(array[..., :seed, :], rows, axis=-2), [(0, 0)] * (array.ndim - 2) + [(0, spare), (0, 0)]
    )
    cache.keys, cache.values = tree_map(grow, cache.keys), tree_map(grow, cache.values)
    cache.offset = depth


def _repeated(array: mx.array, length: int, axis: int) -> mx.array:
    return mx.take(array, mx.arange(length) % array.shape[axis], axis=axis)

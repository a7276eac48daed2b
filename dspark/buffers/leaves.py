"""Telling caches apart by what they are and do: mlx-lm and mlx-vlm define unrelated classes of the same names."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx


def leaves(caches: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every cache of a model's list, members of a cache list one by one, with its index ("3", or "3.1" for a member)."""
    for i, cache in enumerate(caches):
        if hasattr(cache, "caches"):
            yield from leaves(cache.caches, f"{prefix}{i}.")
        elif cache is not None:
            yield f"{prefix}{i}", cache


def all_leaves(caches: Sequence[Any]) -> list[Any]:
    """The same without indices."""
    return [cache for _, cache in leaves(caches)]


def caches_among(values: Sequence[Any]) -> list[Any]:
    """The caches among the arguments of a call."""
    return all_leaves([v for v in values if hasattr(v, "caches") or is_cache(v)])


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of mlx-lm's or mlx-vlm's, or behaves like one."""
    return _is_cache_class(type(value)) or hasattr(value, "update_and_fetch")


@functools.cache
def _is_cache_class(kind: type) -> bool:
    return any(base.__name__ == "_BaseCache" for base in kind.__mro__)


def is_recurrent(cache: Any) -> bool:
    """Whether a cache holds a list of slots (ArraysCache)."""
    return isinstance(getattr(cache, "cache", None), list)


def is_append_only(cache: Any) -> bool:
    """Whether moving the position back restores the cache (KVCache, QuantizedKVCache, ChunkedKVCache)."""
    return type(cache).__name__ in ("KVCache", "QuantizedKVCache", "ChunkedKVCache")


def is_rotating(cache: Any) -> bool:
    """Whether a cache keeps the last rows of a window only (RotatingKVCache)."""
    return type(cache).__name__ == "RotatingKVCache"


def is_concatenating(cache: Any) -> bool:
    """Whether a cache appends to the whole of its arrays, wherever its position stands (ConcatenateKVCache)."""
    return type(cache).__name__ == "ConcatenateKVCache"


def copied(array: mx.array) -> mx.array:
    """The same numbers in bytes of their own. MLX shares them until somebody writes; kernels that write in place do not ask."""
    return mx.take(array, mx.arange(array.shape[0]), axis=0)


def own_buffers(caches: Sequence[Any]) -> None:
    """Give plain KV caches buffers that nobody else holds, now: what they are copied from may be written next."""
    own = [cache for cache in caches if type(cache).__name__ == "KVCache" and cache.keys is not None]
    for cache in own:
        cache.keys, cache.values = copied(cache.keys), copied(cache.values)
    mx.eval([(cache.keys, cache.values) for cache in own])

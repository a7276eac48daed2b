"""Telling caches apart by what they are and do: mlx-lm and mlx-vlm define unrelated classes of the same names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def leaves(caches: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every cache that holds arrays, members of a cache list one by one, with its index ("3", or "3.1" for a member)."""
    for i, cache in enumerate(caches):
        if hasattr(cache, "caches"):
            yield from leaves(cache.caches, f"{prefix}{i}.")
        elif is_cache(cache):
            yield f"{prefix}{i}", cache


def all_leaves(values: Sequence[Any]) -> list[Any]:
    """The caches among `values`, without their indices."""
    return [cache for _, cache in leaves(values)]


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of mlx-lm's or mlx-vlm's, or behaves like one."""
    return any(base.__name__ == "_BaseCache" for base in type(value).__mro__) or hasattr(value, "update_and_fetch")


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

"""What caches take in memory for a context of any length, from their shapes; nothing is computed for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from dspark.buffers.leaves import all_leaves, is_recurrent
from dspark.buffers.quantize import KVBits
from dspark.platform import size_text


class Footprint(NamedTuple):
    """Bytes that one row's caches hold.

    token_nbytes: for each token of context; windows: (bytes a token, tokens at most) of layers that keep a window;
    fixed_nbytes: whatever the length. Buffers grow in steps of some hundred tokens, which is not counted.
    """

    token_nbytes: int
    windows: tuple[tuple[int, int], ...] = ()
    fixed_nbytes: int = 0

    def nbytes(self, tokens: int) -> int:
        """For a context of so many tokens."""
        windowed = sum(nbytes * min(tokens, most) for nbytes, most in self.windows)
        return self.token_nbytes * tokens + windowed + self.fixed_nbytes

    def most_tokens(self, room_nbytes: int) -> int | None:
        """The longest context that fits into so many bytes; None where the caches do not grow."""
        if not self.token_nbytes:
            return None
        whole = self.fixed_nbytes + sum(nbytes * most for nbytes, most in self.windows)
        return max(0, (room_nbytes - whole) // self.token_nbytes)

    def text(self) -> str:
        """`46,080 bytes a token of context`, and what does not grow."""
        parts = [f"{self.token_nbytes:,} bytes a token of context"]
        parts += [f"{nbytes:,} for each of the last {most:,} tokens" for nbytes, most in self.windows]
        if self.fixed_nbytes:
            parts.append(f"{size_text(self.fixed_nbytes)} whatever its length")
        return ", ".join(parts)


def footprint(caches: Sequence[Any], kv: KVBits | None = None, itemsize: int | None = None) -> Footprint:
    """Of one row's caches that have been fed at least a token, evaluated or not.

    kv: as if KV caches were quantised so; itemsize: as if keys and values had so many bytes a number.
    """
    growing = fixed = 0
    windows: dict[int, int] = {}
    for cache in all_leaves(caches):
        if is_recurrent(cache):
            fixed += sum(slot.nbytes for slot in cache.cache if slot is not None)
        elif getattr(cache, "keys", None) is not None:
            nbytes = _token_nbytes(cache, kv, itemsize)
            most = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
            if most is None:
                growing += nbytes
            else:
                windows[most] = windows.get(most, 0) + nbytes
        elif not hasattr(cache, "keys"):
            fixed += int(getattr(cache, "nbytes", 0))
    return Footprint(growing, tuple((nbytes, most) for most, nbytes in sorted(windows.items())), fixed)


def _token_nbytes(cache: Any, kv: KVBits | None, itemsize: int | None) -> int:
    """Bytes a token of keys and values, whose token axis is the last but one."""
    arrays = [a for _, a in tree_flatten((cache.keys, cache.values)) if isinstance(a, mx.array)]
    if type(cache).__name__ == "KVCache" and kv is not None:
        size = itemsize or arrays[0].itemsize
        numbers = sum(a.size // a.shape[-2] for a in arrays)
        # A scale and a bias for each group.
        return numbers * kv.bits // 8 + 2 * size * numbers // kv.group_size
    return sum(a.size // a.shape[-2] * (itemsize or a.itemsize) for a in arrays)

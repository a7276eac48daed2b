"""KV caches of several rows, each with its own length: going back is a subtraction from a row's length.

Models need no change. They read `offset` (an array of one position a row), ask for `make_mask` and call `update_and_fetch`.
Rows are padded on the right. A sliding window is kept as a ring of window + slack columns, so that rows which are rolled
back, or overwritten by a block that is, are still there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache

from dspark.buffers.leaves import is_rotating
from dspark.errors import DsparkError

STEP = 256


class RaggedKVCache(_BaseCache):
    """`lengths`: tokens held per row. `window`: None, or how many tokens back a row looks, itself included; `slack`: rows of a
    block, at most, less one. `keys` and `values` are [B, heads, columns, numbers], None while empty; some models replace
    them."""

    def __init__(self, rows: int, window: int | None = None, slack: int = 0):
        self.lengths = [0] * rows
        self.window, self.slack = window, slack
        self.keys: Any = None
        self.values: Any = None
        self._offset: Any = None

    # ---- what models use --------------------------------------------------------------------------------------------

    @property
    def offset(self) -> Any:
        """The position of the next token: a number for one row, else int32 [B]."""
        if self._offset is None:
            self._offset = self.lengths[0] if len(self.lengths) == 1 else mx.array(self.lengths, dtype=mx.int32)
        return self._offset

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        new = self._stored(keys, values)
        width = new[0].shape[2]
        self._reserve(new, max(self.lengths) + width)
        self._write(new, width)
        self._move([n + width for n in self.lengths])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the rows may look at, padding included: the first columns, as many as the longest row holds."""
        top = min(max(self.lengths), self.columns)
        return self._unpack([a if top == a.shape[2] else a[..., :top, :] for a in self._held_arrays()])

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """For a block of N rows that is about to be written. None and "causal" keep the fused kernels."""
        top = max(self.lengths) + N
        reach = min((w for w in (self.window, window_size) if w is not None), default=None)
        if self.ring is not None and top > self.ring:
            return self._ring_mask(N, reach)
        even = len(set(self.lengths)) == 1
        if even and (reach is None or top <= reach) and not return_array:
            return None if N == 1 else "causal"
        query = self._positions(N)[..., None]
        key = mx.arange(top)[None, None]
        mask = key <= query
        if reach is not None:
            mask = mask & (key > query - reach)
        return mask[:, None]

    # ---- rows -------------------------------------------------------------------------------------------------------

    @classmethod
    def adopt(cls, cache: Any, slack: int) -> RaggedKVCache:
        """One row from a filled KVCache, QuantizedKVCache or RotatingKVCache. Costs a copy of its tokens."""
        if hasattr(cache, "bits"):
            row: RaggedKVCache = QuantizedRaggedKVCache(1, bits=cache.bits, group_size=cache.group_size)
        else:
            row = cls(1, cache.max_size if is_rotating(cache) else None, slack)
        if getattr(cache, "keep", 0):
            raise DsparkError("a rotating cache that always keeps its first tokens cannot be batched")
        if cache.keys is None:
            return row
        length, held = cache.offset, cache.offset
        keys, values = cache.keys, cache.values
        if is_rotating(cache):
            keys, values = cache._temporal_order(keys), cache._temporal_order(values)
            held = min(keys.shape[2], length, cache.max_size)
        arrays = [*keys, *values] if isinstance(keys, tuple | list) else [keys, values]
        last = cache.keys if not isinstance(cache.keys, tuple | list) else cache.keys[0]
        end = arrays[0].shape[2] if is_rotating(cache) else min(length, last.shape[2])
        row._fill([a[..., end - held : end, :] for a in arrays], length - held, length)
        return row

    def extend(self, other: RaggedKVCache) -> None:
        """Put another cache's rows behind these."""
        if (self.window, type(self)) != (other.window, type(other)):
            raise DsparkError("rows of different cache kinds cannot share a batch")
        slack = max(self.slack, other.slack)
        self.widen(slack)
        other.widen(slack)
        size = max(self.columns, other.columns)
        if size:
            mine, its = self._padded(size, other._held_arrays()), other._padded(size, self._held_arrays())
            self._hold([mx.concatenate([a, b]) for a, b in zip(mine, its, strict=True)])
        self._move(self.lengths + other.lengths)

    def take(self, rows: Sequence[int]) -> RaggedKVCache:
        """A cache of the rows named, in that order. Costs a copy of them."""
        twin = self._like(len(rows))
        if self.keys is not None:
            twin._hold([mx.take(a, mx.array(list(rows)), axis=0) for a in self._held_arrays()])
        twin._move([self.lengths[r] for r in rows])
        return twin

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Go back (or forward again) to these lengths. Costs nothing."""
        self._move(list(lengths))

    def widen(self, slack: int) -> None:
        """Make room for blocks of slack + 1 rows. Costs a copy where a window has to move."""
        if self.window is None or slack <= self.slack:
            self.slack = max(self.slack, slack)
            return
        ring, self.slack = self.ring, slack
        if max(self.lengths) <= ring:
            return
        held = self._held(mx.array(self.lengths)[:, None] - 1, self.ring)
        source = mx.maximum(held, 0) % ring
        self._hold([mx.take_along_axis(a, source[:, None, :, None], axis=2) for a in self._held_arrays()])

    # ---- the cache protocol -----------------------------------------------------------------------------------------

    @property
    def ring(self) -> Any:
        return None if self.window is None else self.window + self.slack

    @property
    def columns(self) -> int:
        return self._held_arrays()[0].shape[2] if self.keys is not None else 0

    def size(self) -> int:
        return max(self.lengths)

    def empty(self) -> bool:
        return self.keys is None

    @property
    def state(self) -> Any:
        return self._held_arrays()

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._held_arrays())

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _like(self, rows: int) -> RaggedKVCache:
        return RaggedKVCache(rows, self.window, self.slack)

    def _stored(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """New rows as they are kept."""
        return [keys, values]

    def _pack(self, keys: Any, values: Any) -> list[mx.array]:
        return [keys, values]

    def _unpack(self, arrays: list[mx.array]) -> tuple[Any, Any]:
        return arrays[0], arrays[1]

    def _move(self, lengths: list[int]) -> None:
        self.lengths, self._offset = lengths, None

    def _held_arrays(self) -> list[mx.array]:
        return [] if self.keys is None else self._pack(self.keys, self.values)

    def _hold(self, arrays: list[mx.array]) -> None:
        self.keys, self.values = self._unpack(arrays)

    def _reserve(self, like: list[mx.array], top: int) -> None:
        need = top if self.ring is None else min(top, self.ring)
        if need <= self.columns:
            return
        size = -(-need // STEP) * STEP
        self._hold(self._padded(size if self.ring is None else min(size, self.ring), like))

    def _padded(self, columns: int, like: list[mx.array]) -> list[mx.array]:
        """The arrays with that many columns, zeros behind what is held; shaped as `like` where nothing is."""
        held = self._held_arrays()
        if not held:
            return [mx.zeros((len(self.lengths), a.shape[1], columns, a.shape[3]), a.dtype) for a in like]
        more = columns - self.columns
        return [mx.pad(a, [(0, 0), (0, 0), (0, more), (0, 0)]) for a in held] if more else held

    def _write(self, new: list[mx.array], width: int) -> None:
        ring = self.ring or self.columns + width
        held = self._held_arrays()
        if width > 1 and self.ring is not None and width > self.slack + 1:
            raise DsparkError(
                f"a block of {width} rows needs a slack of {width - 1} behind the window, not {self.slack}"
            )
        first = self.lengths[0] % ring
        if len(set(self.lengths)) == 1 and first + width <= self.columns:
            for array, rows in zip(held, new, strict=True):
                array[..., first : first + width, :] = rows
            return
        at = (self._positions(width) % ring)[:, None, :, None]
        self._hold(
            [
                # Some models keep no values at all; MLX divides by their width here.
                array
                if array.size == 0
                else mx.put_along_axis(array, mx.broadcast_to(at, rows.shape), rows.astype(array.dtype), axis=2)
                for array, rows in zip(held, new, strict=True)
            ]
        )

    def _fill(self, arrays: list[mx.array], start: int, length: int) -> None:
        """Hold one row's last tokens, whose first one stands at position `start`."""
        held = length - start
        size = -(-length // STEP) * STEP
        if self.ring is not None:
            size = min(size, self.ring)
        at = mx.arange(start, length) % size if self.ring is not None else mx.arange(held)
        rooms = []
        for rows in arrays:
            room = mx.zeros((*rows.shape[:2], size, rows.shape[3]), rows.dtype)
            if rows.size:
                room[:, :, at] = rows
            rooms.append(room)
        self._hold(rooms)
        self._move([length])

    def _positions(self, width: int) -> mx.array:
        """[B, width]: where the next `width` tokens of each row stand."""
        return mx.array(self.lengths)[:, None] + mx.arange(width)[None]

    @staticmethod
    def _held(last: mx.array, ring: int) -> mx.array:
        """[B, ring]: the position that each column holds when the newest one is `last` [B, 1]; negative: none."""
        return last - (last - mx.arange(ring)[None]) % ring

    def _ring_mask(self, width: int, reach: int | None) -> mx.array:
        query = self._positions(width)
        held = self._held(query[:, -1:], self.ring)[:, None, :]
        query = query[..., None]
        mask = (held <= query) & (held >= 0)
        if reach is not None:
            mask = mask & (held > query - reach)
        return mask[:, None]


class QuantizedRaggedKVCache(RaggedKVCache):
    """The same with quantised rows: keys and values are triples (packed, scales, biases)."""

    def __init__(self, rows: int, *, bits: int, group_size: int):
        super().__init__(rows)
        self.bits, self.group_size = bits, group_size

    def _like(self, rows: int) -> RaggedKVCache:
        return QuantizedRaggedKVCache(rows, bits=self.bits, group_size=self.group_size)

    def _stored(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        options: dict[str, Any] = {"group_size": self.group_size, "bits": self.bits}
        return [*mx.quantize(keys, **options), *mx.quantize(values, **options)]

    def _pack(self, keys: Any, values: Any) -> list[mx.array]:
        return [*keys, *values]

    def _unpack(self, arrays: list[mx.array]) -> tuple[Any, Any]:
        return tuple(arrays[:3]), tuple(arrays[3:])

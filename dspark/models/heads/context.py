"""What a drafter remembers of the committed tokens: keys and values of context rows, layer by layer.

Rows stand in order from a row's own origin. A block's keys are written right behind them and read from there; the next
context rows overwrite them. So nothing is concatenated or moved in a round, and what a rejected draft left behind is never
seen: only positions below `starts` count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.buffers.leaves import copied
from dspark.models.heads.config import LayerConfig
from dspark.models.heads.layers import Mask

# Rows of slack behind what a limited layer can see: the buffer is compacted once in so many rows.
SLACK = 256


class Context(NamedTuple):
    """A drafter's carry. `rows` are the buffers, one a layer, written in place: of two contexts that share them only the
    later may be used (`copy` parts them). `starts`: a row's committed tokens, which is the next block's position."""

    rows: tuple[LayerRows, ...]
    starts: tuple[int, ...]

    def copy(self) -> Context:
        """An independent context. Costs its bytes."""
        return Context(tuple(layer.copy() for layer in self.rows), self.starts)

    def take(self, rows: Sequence[int]) -> Context:
        """Only the batch rows named, in that order."""
        return Context(tuple(layer.take(rows) for layer in self.rows), tuple(self.starts[r] for r in rows))

    def join(self, other: Context) -> Context:
        """The batch rows of both, `other`'s last."""
        layers = tuple(mine.join(yours) for mine, yours in zip(self.rows, other.rows, strict=True))
        return Context(layers, self.starts + other.starts)

    @property
    def state(self) -> list[mx.array]:
        """The arrays that hold it, to be evaluated or sent ahead."""
        return [array for layer in self.rows for array in layer.state]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.rows)


class LayerRows:
    """Keys and values [B, kv_heads, capacity, head_dim] of one layer; the first column of row b has position origins[b].

    `limit`: context rows that a block can see (None: all). A layer with a limit holds at most limit + SLACK rows and the
    rows being written.
    """

    def __init__(self, layer: LayerConfig, limit: int | None, origins: tuple[int, ...]):
        self.layer, self.limit, self.origins = layer, limit, origins
        # None until the first rows say how large they are.
        self.keys: Any = None
        self.values: Any = None
        self._masks: dict[tuple[int, int], Mask] = {}

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    @property
    def state(self) -> list[mx.array]:
        """The arrays, to be evaluated."""
        return [] if self.keys is None else [self.keys, self.values]

    def restart(self, origins: tuple[int, ...]) -> None:
        """Forget all rows; the next ones to be written begin at these positions."""
        self.origins = origins

    def write(self, keys: mx.array, values: mx.array, positions: tuple[int, ...]) -> None:
        """Put rows [B, kv_heads, L, head_dim] at the positions given, one a batch row, in place."""
        count = keys.shape[2]
        if not count:
            return
        self._reserve(keys, values, positions)
        at = self._columns(positions)
        if len(set(at)) == 1:
            self.keys[:, :, at[0] : at[0] + count] = keys
            self.values[:, :, at[0] : at[0] + count] = values
            return
        rows = mx.arange(len(at))[:, None]
        columns = mx.array(at)[:, None] + mx.arange(count)
        self.keys[rows, :, columns] = keys.swapaxes(1, 2)
        self.values[rows, :, columns] = values.swapaxes(1, 2)

    def seen(self, starts: tuple[int, ...], slots: int) -> tuple[mx.array, mx.array, Mask]:
        """Keys, values and mask for a block of `slots` at `starts` whose own rows have been written."""
        used = self._columns(starts)
        if len(set(used)) == 1:
            held = used[0] if self.limit is None else min(used[0], self.limit)
            span = slice(used[0] - held, used[0] + slots)
            if (held, slots) not in self._masks:
                if len(self._masks) > 64:
                    self._masks.clear()
                self._masks[held, slots] = block_mask(held, slots, self.layer)
            return self.keys[:, :, span], self.values[:, :, span], self._masks[held, slots]
        top = max(used) + slots
        mask = ragged_mask(used, slots, top, self.layer, self.limit)
        return self.keys[:, :, :top], self.values[:, :, :top], mask

    def copy(self) -> LayerRows:
        keys, values = (None if a is None else copied(a) for a in (self.keys, self.values))
        return self._with(keys, values, self.origins)

    def __deepcopy__(self, memo: dict) -> LayerRows:
        return self.copy()

    def take(self, rows: Sequence[int]) -> LayerRows:
        picked = mx.array(list(rows))
        keys, values = (None if a is None else a[picked] for a in (self.keys, self.values))
        return self._with(keys, values, tuple(self.origins[r] for r in rows))

    def join(self, other: LayerRows) -> LayerRows:
        origins = self.origins + other.origins
        if self.keys is None and other.keys is None:
            return self._with(None, None, origins)
        capacity = max(a.shape[2] for a in (self.keys, other.keys) if a is not None)

        def both(mine: Any, yours: Any) -> mx.array:
            like = mine if mine is not None else yours
            fill = lambda a, n: _zeros(like, capacity, n) if a is None else _padded(a, capacity)
            return mx.concatenate([fill(mine, len(self.origins)), fill(yours, len(other.origins))])

        return self._with(both(self.keys, other.keys), both(self.values, other.values), origins)

    def _with(self, keys: mx.array | None, values: mx.array | None, origins: tuple[int, ...]) -> LayerRows:
        twin = LayerRows(self.layer, self.limit, origins)
        twin.keys, twin.values = keys, values
        return twin

    def _columns(self, positions: tuple[int, ...]) -> list[int]:
        return [p - o for p, o in zip(positions, self.origins, strict=True)]

    def _reserve(self, keys: mx.array, values: mx.array, positions: tuple[int, ...]) -> None:
        """Room for the rows: drop what no slot can see, then grow."""
        count = keys.shape[2]
        capacity = 0 if self.keys is None else self.keys.shape[2]
        if max(self._columns(positions)) + count <= capacity:
            return
        drop = [0] * len(positions)
        if self.limit is not None:
            drop = [max(0, column - self.limit) for column in self._columns(positions)]
        self.origins = tuple(o + d for o, d in zip(self.origins, drop, strict=True))
        used = max(self._columns(positions))
        spare = SLACK if self.limit is not None else max(SLACK, used // 4)
        capacity = -(-(used + count + spare) // 64) * 64
        self.keys = _moved(self.keys, keys, drop, used, capacity)
        self.values = _moved(self.values, values, drop, used, capacity)


def block_mask(held: int, slots: int, layer: LayerConfig) -> Mask:
    """The mask of a block right behind `held` context rows: None where all is seen, "causal", or bool [slots, held + slots]."""
    if layer.window is None or held + slots <= layer.window:
        return "causal" if layer.causal else None
    ahead = mx.arange(held, held + slots)[:, None] - mx.arange(held + slots)[None]
    return (ahead < layer.window) & (ahead >= 0 if layer.causal else ahead > -layer.window)


def ragged_mask(used: list[int], slots: int, top: int, layer: LayerConfig, limit: int | None) -> mx.array:
    """bool [B, 1, slots, top]: row b has `used[b]` context columns, then its block, then nothing."""
    first = mx.array(used)[:, None, None]
    query, key = first + mx.arange(slots)[None, :, None], mx.arange(top)[None, None]
    ahead = query - key
    seen = ahead >= 0 if layer.causal else key < first + slots
    if layer.window is not None:
        seen = seen & (ahead < layer.window) & (ahead > -layer.window)
    if limit is not None:
        seen = seen & (key >= first - limit)
    return seen[:, None]


def _moved(old: mx.array | None, like: mx.array, drop: list[int], used: int, capacity: int) -> mx.array:
    """A larger buffer that holds `used` columns of each row of the old one, less the first `drop[b]`."""
    if old is None:
        return _zeros(like, capacity, like.shape[0])
    if len(set(drop)) == 1:
        return _padded(old[:, :, drop[0] : drop[0] + used], capacity)
    return mx.concatenate([_padded(old[b : b + 1, :, d : d + used], capacity) for b, d in enumerate(drop)])


def _zeros(like: mx.array, capacity: int, rows: int) -> mx.array:
    return mx.zeros((rows, like.shape[1], capacity, like.shape[3]), dtype=like.dtype)


def _padded(x: mx.array, capacity: int) -> mx.array:
    return mx.pad(x, [(0, 0), (0, 0), (0, capacity - x.shape[2]), (0, 0)])

"""Keys and values that launches write where they lie, and the order of launches, of which MLX knows nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx

# Tokens by which a cache's buffers grow, at least.
GROWTH = 512


class Turn:
    """Orders all launches of this process whose blocks wait for one another: two of them side by side could wait for ever, and MLX
    knows nothing of what they write into caches. Each takes something that the one before gave as an input."""

    def __init__(self) -> None:
        self._last: mx.array | None = None

    @property
    def last(self) -> mx.array:
        if self._last is None:
            self._last = mx.zeros((1,), mx.int32)
            # Any thread may be the next.
            mx.eval(self._last)
        return self._last

    @last.setter
    def last(self, given: mx.array) -> None:
        self._last = given


TURN = Turn()


class Buffer(NamedTuple):
    """Keys and values of all layers [2 L, heads, room, D], the views of it that are the first layer's keys and the last one's
    values, and where the last launch ended: caches that hold more were written by somebody else."""

    whole: mx.array
    first: mx.array
    last: mx.array
    end: int


class Buffers:
    """The buffers that launches write into in place, by the first cache (or layer) of those that have views of them.

    When caches are first seen their contents are copied into one buffer, which nobody else holds. Whoever writes them otherwise
    says so before (`leave`): MLX writes into copies then.
    """

    def __init__(self, heads: int, dim: int, dtype: mx.Dtype):
        self._empty = (1, heads, 0, dim)
        self._dtype = dtype
        self._known: WeakKeyDictionary[Any, Buffer] = WeakKeyDictionary()

    def of(self, parts: Sequence[Any], held: int, needed: int, end: int) -> mx.array:
        """The buffer of caches `parts`, which hold `held` tokens, with room for `needed`; a launch will write up to `end`."""
        first, known = parts[0], self._known.get(parts[0])
        if known is None or not self.holds(parts, held) or needed > known.whole.shape[2]:
            self.leave(parts)
            empty = mx.zeros(self._empty, self._dtype)
            buffers = [empty if a is None else a for part in parts for a in (part.keys, part.values)]
            whole = together(buffers, held, needed)
            for i, part in enumerate(parts):
                part.keys, part.values = whole[2 * i : 2 * i + 1], whole[2 * i + 1 : 2 * i + 2]
            known = Buffer(whole, first.keys, parts[-1].values, end)
        self._known[first] = known._replace(end=end)
        return known.whole

    def holds(self, parts: Sequence[Any], held: int) -> bool:
        """Whether these are views of a buffer that nobody else wrote since."""
        known = self._known.get(parts[0])
        return (
            known is not None and known.first is parts[0].keys and known.last is parts[-1].values and held <= known.end
        )

    def leave(self, parts: Sequence[Any]) -> None:
        """Wait for what was sent: somebody else will write these next."""
        if parts and self._known.pop(parts[0], None) is not None:
            mx.eval(TURN.last)


def together(buffers: Sequence[mx.array], held: int, needed: int) -> mx.array:
    """One new buffer [n, heads, room, D] that begins with the first `held` rows of n buffers [1, heads, .., D]: room for `needed`
    rows and a quarter more."""
    room = -(-(needed + needed // 4) // GROWTH) * GROWTH
    if not held:
        return mx.zeros((len(buffers), buffers[0].shape[1], room, buffers[0].shape[3]), buffers[0].dtype)
    return mx.pad(mx.concatenate([a[:, :, :held] for a in buffers]), [(0, 0), (0, 0), (0, room - held), (0, 0)])

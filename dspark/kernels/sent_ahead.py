"""Forwards of one launch that were sent behind others before these were read: which are taken once they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx

from dspark.records import Said


class Last(NamedTuple):
    """The last forward of some caches: its logits, what is said of them, and what the caches held before."""

    logits: mx.array
    said: Said
    held: int


class Following(NamedTuple):
    """A forward that was sent behind `last` before that was read: its tokens, taps that were asked for, and what it gives."""

    ids: mx.array
    tapped: tuple[int, ...]
    last: Last
    given: tuple[mx.array, mx.array | None, Said]


class SentAhead:
    """By the first of some caches, their last forward and the one sent behind it. Keeps no cache."""

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[Any, Last] = WeakKeyDictionary()
        self._following: WeakKeyDictionary[Any, Following] = WeakKeyDictionary()

    def forget(self, caches: Sequence[Any]) -> None:
        """Of these caches' forwards none is followed any more, nor what was sent behind it taken."""
        if caches:
            self._last.pop(caches[0], None)
            self._following.pop(caches[0], None)

    def note(self, caches: Sequence[Any], last: Last) -> None:
        self._last[caches[0]] = last

    def last(self, caches: Sequence[Any], logits: mx.array) -> Last | None:
        """The last forward of these caches, if it gave these logits."""
        last = self._last.get(caches[0])
        return last if last is not None and last.logits is logits else None

    def put(self, caches: Sequence[Any], following: Following) -> None:
        self._following[caches[0]] = following

    def take(self, ids: mx.array, caches: Sequence[Any], tapped: tuple[int, ...]) -> Any:
        """What was sent of these very ids, where the caches hold what the forward in front of it says by now; None otherwise.
        Whatever was sent is forgotten."""
        sent = self._following.pop(caches[0], None)
        if sent is None or sent.ids is not ids or sent.tapped != tapped or sent.last is not self._last.get(caches[0]):
            return None
        standing: Any = sent.last.said.words[0].tolist()
        return sent.given if caches[0].offset == sent.last.held + standing[0] + 1 else None

"""The ways back: one small class for each kind of cache. They keep no state; `arm` gives the ticket that the others take.

Tickets hold positions, or references to arrays that the block does not write into. A second handle on a buffer that is
written in place would make MLX copy it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import attrs
import mlx.core as mx

from dspark.errors import DsparkError


class AbstractRoller(ABC):
    """One cache's way back after a block of `width` rows.

    `method`: the word that recipes use; `refeeds`: `settle` is not possible, only `rewind`, and the kept tokens are fed
    again; `records`: needs the tape of the forward; `detail`: how, for `explain`; `cost`: of a rejection.
    """

    method: ClassVar[str]
    refeeds: ClassVar[bool] = False
    records: ClassVar[bool] = False
    cost: ClassVar[str] = "nothing"

    @property
    def detail(self) -> str:
        return ""

    @abstractmethod
    def arm(self, cache: Any, width: int) -> Any: ...

    @abstractmethod
    def settle(self, cache: Any, ticket: Any, width: int, keep: int, tape: Any) -> None:
        """Keep the first `keep` of the rows just fed, 1 <= keep < width."""

    @abstractmethod
    def rewind(self, cache: Any, ticket: Any) -> None:
        """As before the block. Raises DsparkError where that is lost."""

    def shorten(self, cache: Any, length: int) -> None:
        """Forget what lies behind the first `length` tokens, where `cache.is_trimmable()` says so between rounds."""
        cache.trim(cache.offset - length)


@attrs.frozen
class TrimRoller(AbstractRoller):
    """Append-only KV caches: the length is the state, so going back is a subtraction."""

    method = "kv-trim"

    def arm(self, cache: Any, width: int) -> int:
        return cache.offset

    def settle(self, cache: Any, ticket: int, width: int, keep: int, tape: Any) -> None:
        cache.trim(width - keep)

    def rewind(self, cache: Any, ticket: int) -> None:
        cache.trim(cache.offset - ticket)


@attrs.frozen
class CutRoller(TrimRoller):
    """Caches that append to whatever their arrays hold: the arrays themselves are cut."""

    def settle(self, cache: Any, ticket: int, width: int, keep: int, tape: Any) -> None:
        _cut_rows(cache, ticket + keep)

    def rewind(self, cache: Any, ticket: int) -> None:
        if ticket == 0:
            cache.keys = cache.values = None
            cache.offset = 0
        else:
            _cut_rows(cache, ticket)

    def shorten(self, cache: Any, length: int) -> None:
        self.rewind(cache, length)


@attrs.frozen
class WindowRoller(AbstractRoller):
    """Rotating caches. Behind a block of several rows the buffer is in temporal order and still holds the window in front
    of the block, so its tail is cut. A single row overwrites only what no later row looks at, so the pointer moves back."""

    method = "kv-trim"

    @property
    def detail(self) -> str:
        return "tail cut"

    def arm(self, cache: Any, width: int) -> Any:
        # A block of several rows makes new arrays; a single row is written in place, so no handle may be kept on it.
        return (cache.offset, cache._idx) if width == 1 else (cache.keys, cache.values, cache.offset, cache._idx)

    def settle(self, cache: Any, ticket: Any, width: int, keep: int, tape: Any) -> None:
        drop = width - keep
        if cache._idx != cache.keys.shape[2]:
            raise DsparkError("a rotating cache was written by something other than the block that is rolled back")
        cache.keys, cache.values = cache.keys[..., :-drop, :], cache.values[..., :-drop, :]
        cache._idx -= drop
        cache.offset -= drop

    def rewind(self, cache: Any, ticket: Any) -> None:
        if len(ticket) == 4:
            cache.keys, cache.values, cache.offset, cache._idx = ticket
            return
        back = cache.offset - ticket[0]
        if back > 1 and cache.offset > cache.max_size:
            raise DsparkError(f"a rotating cache went {back} single rows past its window and cannot go back")
        if ticket[0] == 0:
            cache.keys = cache.values = None
        cache.offset -= back
        cache._idx -= back


@attrs.frozen
class ReplayRoller(AbstractRoller):
    """Recurrent caches: the state at the kept row is rebuilt from the recorded inputs. `how` comes from the target."""

    how: Any
    method = "recurrence-replay"
    records = True

    @property
    def detail(self) -> str:
        return self.how.detail

    @property
    def cost(self) -> str:  # type: ignore[override]
        return "the recurrence over the kept rows" if self.how.slots is not None else "one layer over the kept rows"

    def arm(self, cache: Any, width: int) -> list[Any]:
        return list(cache.cache)

    def settle(self, cache: Any, ticket: list[Any], width: int, keep: int, tape: Any) -> None:
        cache.cache = tape.rebuild(cache, self.how, ticket, (keep,))

    def rewind(self, cache: Any, ticket: list[Any]) -> None:
        cache.cache = list(ticket)


@attrs.frozen
class CheckpointRoller(AbstractRoller):
    """Any cache whose state is in its attributes: those from before the block are put back, and the kept tokens fed again."""

    method = "checkpoint"
    refeeds = True
    cost = "the kept tokens again, in front of the next block"

    def arm(self, cache: Any, width: int) -> dict[str, Any]:
        return {name: _detached(value) for name, value in vars(cache).items()}

    def settle(self, cache: Any, ticket: dict[str, Any], width: int, keep: int, tape: Any) -> None:
        raise AssertionError("a checkpoint rewinds; the buffers feed the kept tokens again")

    def rewind(self, cache: Any, ticket: dict[str, Any]) -> None:
        vars(cache).clear()
        vars(cache).update({name: _detached(value) for name, value in ticket.items()})


@attrs.frozen
class PositionCheckpoint(CheckpointRoller):
    """A checkpoint of an append-only KV cache: its length is enough, and no second handle on the buffer is kept."""

    def arm(self, cache: Any, width: int) -> int:  # type: ignore[override]
        return cache.offset

    def rewind(self, cache: Any, ticket: int) -> None:  # type: ignore[override]
        cache.trim(cache.offset - ticket)


def _detached(value: Any) -> Any:
    """A value that later writes do not reach: containers are copied; an array gets a new handle, since writing a slice
    changes the object that holds it. The buffer itself is not copied."""
    if isinstance(value, mx.array):
        return value[...]
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_detached(v) for v in value)
    if isinstance(value, dict):
        return {k: _detached(v) for k, v in value.items()}
    return value


def _cut_rows(cache: Any, length: int) -> None:
    cache.keys, cache.values = cache.keys[..., :length, :], cache.values[..., :length, :]
    cache.offset = length

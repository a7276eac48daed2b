"""Which rollback each layer's cache gets, decided by what the cache is and does, never by its family's name.

A roller brings one cache back after a verify: `arm` before the block (cheap, references only), then either `settle` (keep
the first `keep` of the `width` rows just fed) or `rewind` (as before the block). A plan lists a roller for every leaf
cache; if one of them can only rewind, all rewind and the kept tokens are fed again in front of the next block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import attrs

from dspark.errors import BindError

METHODS = ("auto", "kv-trim", "recurrence-replay", "checkpoint")


class AbstractRoller(ABC):
    """One cache's way back. Holds no state of its own: `arm` returns the ticket that the other two take."""

    method: ClassVar[str]
    refeeds: ClassVar[bool] = False

    @abstractmethod
    def arm(self, cache: Any) -> Any: ...

    @abstractmethod
    def settle(self, cache: Any, ticket: Any, width: int, keep: int) -> None: ...

    @abstractmethod
    def rewind(self, cache: Any, ticket: Any) -> None: ...


@attrs.frozen
class TrimRoller(AbstractRoller):
    """Append-only KV caches: the length is the state, so going back is a subtraction. Costs nothing."""

    method = "kv-trim"

    def arm(self, cache: Any) -> int:
        return cache.offset

    def settle(self, cache: Any, ticket: int, width: int, keep: int) -> None:
        cache.trim(width - keep)

    def rewind(self, cache: Any, ticket: int) -> None:
        cache.trim(cache.offset - ticket)


@attrs.frozen
class CheckpointRoller(AbstractRoller):
    """Any cache whose state is in its attributes: references from before the block are put back. Costs a re-feed."""

    method = "checkpoint"
    refeeds = True

    def arm(self, cache: Any) -> dict[str, Any]:
        return {name: _detach(value) for name, value in vars(cache).items()}

    def settle(self, cache: Any, ticket: dict[str, Any], width: int, keep: int) -> None:
        raise AssertionError("a checkpoint rewinds; the buffers feed the kept tokens again")

    def rewind(self, cache: Any, ticket: dict[str, Any]) -> None:
        vars(cache).clear()
        vars(cache).update({name: _detach(value) for name, value in ticket.items()})


@attrs.frozen
class OffsetCheckpointRoller(AbstractRoller):
    """A checkpoint of an append-only KV cache: its length is enough, and no second handle on the buffer is kept."""

    method = "checkpoint"
    refeeds = True

    def arm(self, cache: Any) -> int:
        return cache.offset

    def settle(self, cache: Any, ticket: int, width: int, keep: int) -> None:
        raise AssertionError("a checkpoint rewinds; the buffers feed the kept tokens again")

    def rewind(self, cache: Any, ticket: int) -> None:
        cache.trim(cache.offset - ticket)


def _detach(value: Any) -> Any:
    """A value that later in-place writes to the cache do not reach: containers are copied, arrays are not."""
    return list(value) if isinstance(value, list) else value


@attrs.frozen
class LayerPlan:
    """One line of a plan: cache number in the list (dots for members of a CacheList), its class, and its roller."""

    index: str
    cache: str
    roller: AbstractRoller


@attrs.frozen
class Plan:
    """The rollback of every leaf cache, in the order of `leaves`."""

    layers: tuple[LayerPlan, ...]

    @property
    def refeeds(self) -> bool:
        """Whether a rejection is repaid by feeding the kept tokens again."""
        return any(layer.roller.refeeds for layer in self.layers)

    def summary(self) -> str:
        """`kv-trim (36 of 36)`, for `explain`."""
        counts: dict[str, int] = {}
        for layer in self.layers:
            counts[layer.roller.method] = counts.get(layer.roller.method, 0) + 1
        return ", ".join(f"{method} ({n} of {len(self.layers)})" for method, n in counts.items())


def leaves(caches: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every cache that holds arrays, members of a CacheList one by one, with its index."""
    for i, cache in enumerate(caches):
        if cache is None:
            continue
        if hasattr(cache, "caches"):
            yield from leaves(cache.caches, f"{prefix}{i}.")
        else:
            yield f"{prefix}{i}", cache


def is_append_only(cache: Any) -> bool:
    """Whether trimming the position restores the cache (mlx-lm's and mlx-vlm's KVCache and QuantizedKVCache)."""
    return type(cache).__name__ in ("KVCache", "QuantizedKVCache")


def choose(cache: Any, method: str) -> AbstractRoller | None:
    """The roller that a method means for a cache, or None where it cannot serve."""
    if is_append_only(cache):
        return {"kv-trim": TrimRoller(), "auto": TrimRoller(), "checkpoint": OffsetCheckpointRoller()}.get(method)
    return None


def make_plan(caches: Sequence[Any], method: str = "auto") -> Plan:
    """Plan the rollback of a fresh cache list. Raises BindError where a layer cannot be restored by `method`."""
    layers = []
    for index, cache in leaves(caches):
        roller = choose(cache, method)
        if roller is None:
            works = [m for m in METHODS if choose(cache, m) is not None]
            raise BindError(
                f"layer {index} caches a {type(cache).__name__}, which {method!r} cannot roll back; "
                + (
                    f"works: {', '.join(works)}"
                    if works
                    else "dspark has no rollback for it, so use --plain with mlx_lm"
                )
            )
        layers.append(LayerPlan(index, type(cache).__name__, roller))
    return Plan(tuple(layers))

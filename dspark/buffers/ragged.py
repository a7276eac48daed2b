"""The layout of several rows at different lengths: one forward for all, each row keeping its own count."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.buffers.base import AbstractBuffers, LeafBuffers
from dspark.buffers.leaves import all_leaves, is_append_only, is_recurrent, is_rotating
from dspark.buffers.plan import Plan
from dspark.buffers.ragged_cache import RaggedKVCache
from dspark.buffers.rollers import ReplayRoller
from dspark.buffers.single import SingleBuffers
from dspark.buffers.slots import join
from dspark.errors import DsparkError
from dspark.records import Tokens

SLACK = 32


class _Armed(NamedTuple):
    tickets: list[Any]
    width: int
    tape: Any


class RaggedBuffers(LeafBuffers):
    """B rows. KV caches are padded on the right with a length a row, windows are rings, recurrent slots are stacked.

    Made of one prefilled row; further ones are admitted. Nothing is ever owed: plans that feed tokens again cannot be held
    here (`unbatchable` says why; rows then go one after another).
    """

    def __init__(self, row: SingleBuffers):
        if (reason := unbatchable(row.caches, row.plan)) is not None:
            raise DsparkError(reason)
        if row.armed:
            raise DsparkError("a round is under way; rows join a batch between rounds")
        self.plan, self.refeeds, self._records = row.plan, row.refeeds, row.plan.records
        self.epoch, self.held, self.poisoned = row.epoch, row.held, row.poisoned
        self.caches = [_adopted(cache) for cache in row.caches]
        self.leaves = all_leaves(self.caches)
        self._armed: list[_Armed] = []

    @property
    def owed_tokens(self) -> tuple[int, ...]:
        return (0,) * self.rows

    def forward(
        self, target: Any, ids: mx.array, target_layer_ids: tuple[int, ...] = ()
    ) -> tuple[mx.array, mx.array | None]:
        self.check()
        width = ids.shape[1]
        for cache in self.leaves:
            if isinstance(cache, RaggedKVCache):
                cache.widen(width - 1)
        tape = target.record(width) if self._records and width > 1 else None
        self._armed.append(_Armed([_arm(cache) for cache in self.leaves], width, tape))
        self.held = tuple(n + width for n in self.held)
        extra = () if tape is None else (tape,)
        return target(ids, self.caches, target_layer_ids, *extra)

    def settle(self, keep: tuple[int, ...], fed: tuple[Tokens, ...]) -> None:
        armed = self._armed.pop(0)
        self.epoch += 1
        if all(k == armed.width for k in keep):
            return
        if self._armed:
            raise AssertionError("only a round of one possible length may be sent ahead")
        self.held = tuple(n - armed.width + k for n, k in zip(self.held, keep, strict=True))
        for layer, cache, ticket in zip(self.plan.layers, self.leaves, armed.tickets, strict=True):
            if isinstance(cache, RaggedKVCache):
                cache.set_lengths([n + k for n, k in zip(ticket, keep, strict=True)])
            elif any(keep):
                cache.cache = armed.tape.rebuild(cache, layer.roller.how, ticket, keep)  # type: ignore[attr-defined]
            else:
                cache.cache = list(ticket)

    def restore(self, to: int = 0) -> None:
        if len(self._armed) <= to:
            return
        undone = self._armed[to:]
        del self._armed[to:]
        for cache, ticket in zip(self.leaves, undone[0].tickets, strict=True):
            if isinstance(cache, RaggedKVCache):
                cache.set_lengths(ticket)
            else:
                cache.cache = list(ticket)
        width = sum(armed.width for armed in undone)
        self.held = tuple(n - width for n in self.held)

    def pay(self, target: Any) -> None:
        """Nothing is owed."""

    def trim(self, length: int) -> bool:
        if self.rows != 1 or self._armed or length > self.held[0]:
            return False
        if any(not isinstance(c, RaggedKVCache) or (c.ring or c.size() + 1) <= c.size() for c in self.leaves):
            return False
        for cache in self.leaves:
            cache.set_lengths([length])
        self.held = (length,)
        self.epoch += 1
        return True

    def fork(self) -> RaggedBuffers:
        if self._armed:
            raise DsparkError("a round is under way; fork between rounds")
        twin = copy.copy(self)
        twin.caches, twin._armed = copy.deepcopy(self.caches), []
        twin.leaves = all_leaves(twin.caches)
        return twin

    def admit(self, other: AbstractBuffers) -> None:
        if self._armed or other.armed:
            raise DsparkError("a round is under way; rows are admitted between rounds")
        rows = RaggedBuffers(other) if isinstance(other, SingleBuffers) else other
        if not isinstance(rows, RaggedBuffers):
            raise DsparkError(f"{type(other).__name__} cannot join a ragged batch")
        for layer, mine, its in zip(self.plan.layers, self.leaves, rows.leaves, strict=True):
            if isinstance(mine, RaggedKVCache):
                mine.extend(its)
            else:
                _stack_slots(mine, its, layer.roller, (self.rows, rows.rows))
        self.held += rows.held
        self.epoch += 1

    def retire(self, rows: Sequence[int]) -> None:
        if self._armed:
            raise DsparkError("a round is under way; rows are retired between rounds")
        rows = list(rows)
        self.caches = [_taken(cache, rows) for cache in self.caches]
        self.leaves = all_leaves(self.caches)
        self.held = tuple(self.held[r] for r in rows)
        self.epoch += 1


def unbatchable(caches: Sequence[Any], plan: Plan) -> str | None:
    """Why these caches cannot share one forward, or None where they can."""
    for layer, cache in zip(plan.layers, all_leaves(caches), strict=True):
        if layer.roller.refeeds:
            return f"layer {layer.index} is rolled back by checkpoint, which has no form for several rows"
        if is_recurrent(cache):
            if not isinstance(layer.roller, ReplayRoller):
                return f"layer {layer.index} ({layer.cache}) has no replay"
        elif not (is_rotating(cache) or (is_append_only(cache) and hasattr(cache, "keys"))) or _chunked(cache):
            return f"layer {layer.index} caches a {layer.cache}, which has no form for several rows"
        elif cache.keys is not None and not hasattr(cache, "bits") and cache.values.shape[-1] == 0:
            return (
                f"layer {layer.index} keeps keys without values, an index that counts columns and not a row's positions"
            )
        elif getattr(cache, "keep", 0):
            return f"layer {layer.index} always keeps its first {cache.keep} tokens, which has no form for several rows"
    return None


def _chunked(cache: Any) -> bool:
    return hasattr(cache, "start_position")


def _adopted(cache: Any) -> Any:
    """One row's cache in its form for several rows. The original must not be used again."""
    if hasattr(cache, "caches"):
        twin = copy.copy(cache)
        twin.caches = tuple(_adopted(member) for member in cache.caches)
        return twin
    return cache if is_recurrent(cache) else RaggedKVCache.adopt(cache, SLACK)


def _taken(cache: Any, rows: list[int]) -> Any:
    if isinstance(cache, RaggedKVCache):
        return cache.take(rows)
    twin, index = copy.copy(cache), mx.array(rows)
    if hasattr(cache, "caches"):
        twin.caches = tuple(_taken(member, rows) for member in cache.caches)
    else:
        twin.cache = [None if slot is None else slot[index] for slot in cache.cache]
    return twin


def _arm(cache: Any) -> Any:
    return list(cache.lengths) if isinstance(cache, RaggedKVCache) else list(cache.cache)


def _stack_slots(mine: Any, its: Any, roller: Any, rows: tuple[int, int]) -> None:
    """Put another cache's rows behind these. A cache that was fed nothing has no slots yet: zeros, where that is the same."""
    slots = []
    for pair in zip(mine.cache, its.cache, strict=True):
        filled = [slot for slot in pair if slot is not None]
        if len(filled) == 1 and not roller.how.zero_start:
            raise DsparkError(
                "a prompt of one token cannot join a batch with this model, whose state does not start from zero; "
                "decode it alone or give it one token more"
            )
        new = lambda n, like: mx.zeros((n, *like.shape[1:]), like.dtype)
        parts = [new(n, filled[0]) if slot is None else slot for slot, n in zip(pair, rows, strict=True) if filled]
        slots.append(join(parts) if parts else None)
    mine.cache = slots

"""The layout of one row: mlx-lm's own caches and the fused causal mask."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.buffers.base import AbstractBuffers, LeafBuffers
from dspark.buffers.leaves import all_leaves, own_buffers
from dspark.buffers.plan import Plan
from dspark.buffers.quantize import KVBits
from dspark.buffers.rollers import TrimRoller
from dspark.errors import DsparkError
from dspark.records import Tokens

MAX_OWED = 16


class _Armed(NamedTuple):
    """A forward that is not settled: how many rows it fed, the rollers' tickets (None where all trim), what was owed, and
    its records."""

    width: int
    tickets: list[Any] | None = None
    owed: Tokens = ()
    tape: Any = None


# Where all trim, a forward is known by its width.
_trimmed = functools.cache(_Armed)


class SingleBuffers(LeafBuffers):
    """B = 1. Rounds sent ahead arm one behind another: tickets are settled first in, first out.

    `kv`: quantise KV caches once so many tokens are held; `quantized`: whether that has happened.
    """

    def __init__(self, caches: Sequence[Any], plan: Plan, kv: KVBits | None = None):
        self.caches, self.plan, self.kv = list(caches), plan, kv
        self.epoch, self.held, self.poisoned = 0, (0,), None
        self.leaves = all_leaves(self.caches)
        self._rollers = [layer.roller for layer in plan.layers]
        # Where every layer trims, one number is the ticket of all: a round costs no Python a layer, a rejection very little.
        self._all_trim = all(type(roller) is TrimRoller for roller in self._rollers)
        # Caches that were trimmed to one length once are always fed together, so that length need not be asked for again.
        self._alike = False
        self._records, self.refeeds = plan.records, plan.refeeds
        self._owed: Tokens = ()
        self._armed: list[_Armed] = []
        self.quantized = False
        self._quantize()

    @property
    def owed_tokens(self) -> tuple[int, ...]:
        return (len(self._owed),)

    def forward(
        self, target: Any, ids: mx.array, target_layer_ids: tuple[int, ...] = ()
    ) -> tuple[mx.array, mx.array | None]:
        if self.poisoned is not None:
            self.check()
        width, (held,) = ids.shape[1], self.held
        if self._all_trim:
            self._armed.append(_trimmed(width))
            self.held = (held + width,)
            return target(ids, self.caches, target_layer_ids)
        if len(self._owed) > MAX_OWED:
            self.pay(target)
        owed = self._owed
        rows = len(owed) + width
        tape = target.record(rows) if self._records and rows > 1 else None
        tickets = [r.arm(c, rows) for r, c in zip(self._rollers, self.leaves, strict=True)]
        self._armed.append(_Armed(width, tickets, owed, tape))
        self._owed = ()
        self.held = (held + width,)
        if owed:
            ids = mx.concatenate([mx.array([owed], dtype=ids.dtype), ids], axis=1)
        extra = () if tape is None else (tape,)
        logits, taps = target(ids, self.caches, target_layer_ids, *extra)
        if not owed:
            return logits, taps
        return logits[:, len(owed) :], None if taps is None else taps[:, len(owed) :]

    def settle(self, keep: tuple[int, ...], fed: tuple[Tokens, ...]) -> None:
        armed = self._armed.pop(0)
        self.epoch += 1
        drop = armed.width - keep[0]
        if drop == 0:
            if self.kv is not None:
                self._quantize()
            return
        if self._armed:
            raise AssertionError("only a round of one possible length may be sent ahead")
        length = self.held[0] - drop
        self.held = (length,)
        if self._alike:
            for cache in self.leaves:
                cache.offset = length  # what its trim does
        elif self._all_trim:
            for cache in self.leaves:
                cache.trim(drop)
            self._alike = all(cache.offset == length for cache in self.leaves)
        elif keep[0] == 0:
            self._rewind(armed)
        elif self.refeeds:
            self._rewind(armed)
            self._owed = armed.owed + tuple(fed[0][: keep[0]])
        else:
            rows = len(armed.owed) + armed.width
            for roller, cache, ticket in zip(self._rollers, self.leaves, armed.tickets or (), strict=True):
                roller.settle(cache, ticket, rows, rows - drop, armed.tape)
        if self.kv is not None:
            self._quantize()

    def restore(self, to: int = 0) -> None:
        if len(self._armed) <= to:
            return
        undone = self._armed[to:]
        del self._armed[to:]
        self.held = (self.held[0] - sum(armed.width for armed in undone),)
        self._rewind(undone[0])

    def _rewind(self, armed: _Armed) -> None:
        """As before this forward, whose rows `held` counts no more."""
        tickets = [self.held[0]] * len(self.leaves) if armed.tickets is None else armed.tickets
        for roller, cache, ticket in zip(self._rollers, self.leaves, tickets, strict=True):
            roller.rewind(cache, ticket)
        self._owed = armed.owed

    def _quantize(self) -> None:
        if self.kv is not None and not self.quantized and not self._armed and self.held[0] >= self.kv.start:
            self.kv.apply(self.caches)
            self.quantized = True
            self.leaves = all_leaves(self.caches)

    def pay(self, target: Any) -> None:
        if not self._owed:
            return
        target(mx.array([self._owed]), self.caches, ())
        self._owed = ()
        mx.eval(self.state)

    def trim(self, length: int) -> bool:
        drop = self.held[0] - length
        if drop == 0:
            return True
        if self._owed or self._armed or any(layer.roller.method != "kv-trim" for layer in self.plan.layers):
            return False
        if not all(cache.is_trimmable() for cache in self.leaves):
            return False
        for roller, cache in zip(self._rollers, self.leaves, strict=True):
            roller.shorten(cache, length)
        self.held = (length,)
        self.epoch += 1
        return True

    def fork(self) -> SingleBuffers:
        if self._armed:
            raise DsparkError("a round is under way; fork between rounds")
        twin = SingleBuffers(copy.deepcopy(self.caches), self.plan, self.kv)
        own_buffers(twin.leaves)
        twin.epoch, twin.held, twin.poisoned, twin._owed = self.epoch, self.held, self.poisoned, self._owed
        twin.quantized = self.quantized
        return twin

    def admit(self, other: AbstractBuffers) -> None:
        raise DsparkError("these buffers hold one row; `batch_of` makes a layout of several")

    def retire(self, rows: Sequence[int]) -> None:
        if list(rows) != [0]:
            raise DsparkError("these buffers hold one row, which cannot be retired")

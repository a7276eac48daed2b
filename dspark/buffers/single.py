"""The layout of one row: mlx-lm's own caches and the fused causal mask."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dspark.buffers.base import AbstractBuffers
from dspark.buffers.plan import Plan, leaves
from dspark.errors import DsparkError
from dspark.records import Tokens

MAX_OWED = 16


class SingleBuffers(AbstractBuffers):
    """B = 1. Rounds sent ahead arm one behind another: tickets are settled first in, first out."""

    def __init__(self, caches: Sequence[Any], plan: Plan):
        self.caches, self.plan = list(caches), plan
        self.epoch, self.held, self.poisoned = 0, (0,), None
        self._leaves = [cache for _, cache in leaves(self.caches)]
        self._rollers = [layer.roller for layer in plan.layers]
        self._owed: Tokens = ()
        self._armed: list[tuple[list[Any], int, Tokens]] = []

    @property
    def owed_tokens(self) -> tuple[int, ...]:
        return (len(self._owed),)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._leaves if not cache.empty())

    @property
    def state(self) -> list[mx.array]:
        return [a for cache in self._leaves for _, a in tree_flatten(cache.state) if isinstance(a, mx.array)]

    def forward(
        self, target: Any, ids: mx.array, target_layer_ids: tuple[int, ...] = ()
    ) -> tuple[mx.array, mx.array | None]:
        self.check()
        if len(self._owed) > MAX_OWED:
            self.pay(target)
        owed, width = self._owed, ids.shape[1]
        self._armed.append(([r.arm(c) for r, c in zip(self._rollers, self._leaves, strict=True)], width, owed))
        if owed:
            ids = mx.concatenate([mx.array([owed], dtype=ids.dtype), ids], axis=1)
            self._owed = ()
        logits, taps = target(ids, self.caches, target_layer_ids)
        self.held = (self.held[0] + width,)
        return logits[:, len(owed) :], None if taps is None else taps[:, len(owed) :]

    def settle(self, keep: tuple[int, ...], fed: tuple[Tokens, ...]) -> None:
        tickets, width, owed = self._armed.pop(0)
        self.epoch += 1
        drop = width - keep[0]
        if drop == 0:
            return
        if self._armed:
            raise AssertionError("only a round of one possible length may be sent ahead")
        self.held = (self.held[0] - drop,)
        if self.plan.refeeds:
            self._rewind(tickets)
            self._owed = owed + tuple(fed[0][: keep[0]])
            return
        rows = len(owed) + width
        for roller, cache, ticket in zip(self._rollers, self._leaves, tickets, strict=True):
            roller.settle(cache, ticket, rows, rows - drop)

    def restore(self) -> None:
        if not self._armed:
            return
        tickets, _, owed = self._armed[0]
        width = sum(w for _, w, _ in self._armed)
        self._armed.clear()
        self._rewind(tickets)
        self._owed = owed
        self.held = (max(self.held[0] - width, 0),)

    def _rewind(self, tickets: list[Any]) -> None:
        for roller, cache, ticket in zip(self._rollers, self._leaves, tickets, strict=True):
            roller.rewind(cache, ticket)

    def pay(self, target: Any) -> None:
        if not self._owed:
            return
        owed, self._owed = self._owed, ()
        target(mx.array([owed]), self.caches, ())
        mx.eval(self.state)

    def trim(self, length: int) -> bool:
        drop = self.held[0] - length
        if drop == 0:
            return True
        if self._owed or self._armed or any(layer.roller.method != "kv-trim" for layer in self.plan.layers):
            return False
        if not all(cache.is_trimmable() for cache in self._leaves):
            return False
        for cache in self._leaves:
            cache.trim(drop)
        self.held = (length,)
        self.epoch += 1
        return True

    def fork(self) -> SingleBuffers:
        if self._armed:
            raise DsparkError("a round is under way; fork between rounds")
        twin = SingleBuffers(copy.deepcopy(self.caches), self.plan)
        twin.epoch, twin.held, twin.poisoned, twin._owed = self.epoch, self.held, self.poisoned, self._owed
        return twin

    def admit(self, other: AbstractBuffers) -> None:
        raise DsparkError("these buffers hold one row; open the session with a list of prompts to decode several")

    def retire(self, rows: Sequence[int]) -> None:
        if list(rows) != [0]:
            raise DsparkError("these buffers hold one row, which cannot be retired")

"""Several rows whose caches have no form for several rows: one forward a row, one after another. Right, and no faster."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from dspark.buffers.base import AbstractBuffers
from dspark.buffers.single import SingleBuffers
from dspark.errors import DsparkError
from dspark.records import Tokens


class StackedBuffers(AbstractBuffers):
    """Rows of `SingleBuffers`. Costs B forwards a round. `reason`: why they do not share one."""

    def __init__(self, row: SingleBuffers, reason: str = ""):
        self.plan, self.refeeds, self.reason = row.plan, row.refeeds, reason
        self.epoch, self.poisoned = row.epoch, row.poisoned
        self._rows = [row]

    @property
    def held(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(row.held[0] for row in self._rows)

    @property
    def owed_tokens(self) -> tuple[int, ...]:
        return tuple(row.owed_tokens[0] for row in self._rows)

    @property
    def armed(self) -> int:
        return max(row.armed for row in self._rows)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self._rows)

    @property
    def state(self) -> list[mx.array]:
        return [array for row in self._rows for array in row.state]

    def forward(
        self, target: Any, ids: mx.array, target_layer_ids: tuple[int, ...] = ()
    ) -> tuple[mx.array, mx.array | None]:
        self.check()
        before = self.armed
        try:
            said = [row.forward(target, ids[i : i + 1], target_layer_ids) for i, row in enumerate(self._rows)]
        except BaseException:
            self.restore(before)
            raise
        logits = mx.concatenate([one for one, _ in said])
        return logits, mx.concatenate([taps for _, taps in said]) if target_layer_ids else None  # type: ignore[misc]

    def settle(self, keep: tuple[int, ...], fed: tuple[Tokens, ...]) -> None:
        self.epoch += 1
        for i, (row, count) in enumerate(zip(self._rows, keep, strict=True)):
            row.settle((count,), fed[i : i + 1])

    def restore(self, to: int = 0) -> None:
        for row in self._rows:
            row.restore(to)

    def pay(self, target: Any) -> None:
        for row in self._rows:
            row.pay(target)

    def trim(self, length: int) -> bool:
        return len(self._rows) == 1 and self._rows[0].trim(length)

    def fork(self) -> StackedBuffers:
        twin = copy.copy(self)
        twin._rows = [row.fork() for row in self._rows]
        return twin

    def admit(self, other: AbstractBuffers) -> None:
        if self.armed or other.armed:
            raise DsparkError("a round is under way; rows are admitted between rounds")
        if not isinstance(other, SingleBuffers | StackedBuffers):
            raise DsparkError(f"{type(other).__name__} cannot join rows that go one after another")
        self._rows.extend(other._rows if isinstance(other, StackedBuffers) else [other])
        self.epoch += 1

    def retire(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[r] for r in rows]
        self.epoch += 1

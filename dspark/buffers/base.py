"""What a layout of caches promises. Buffers are the one thing that a round changes in place, and they say so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dspark.errors import PoisonedBuffers, StaleState
from dspark.records import Tokens

if TYPE_CHECKING:
    from dspark.buffers.plan import Plan


class AbstractBuffers(ABC):
    """Caches of B rows. `epoch` counts settled rounds; `held` is how many tokens each row's context has.

    Between `forward` and `settle` the buffers are armed: `restore` goes back to before the forward. Methods that change
    them are imperatives and return None (`forward` returns what the target said). refeeds: whether `settle` wants to know
    the kept tokens, because a rejection is repaid by feeding them again.
    """

    plan: Plan
    refeeds: bool
    epoch: int
    held: tuple[int, ...]
    poisoned: str | None

    @property
    def rows(self) -> int:
        return len(self.held)

    @property
    @abstractmethod
    def owed_tokens(self) -> tuple[int, ...]:
        """Tokens a row that are committed but must be fed again, in front of the next block."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the caches hold."""

    @property
    @abstractmethod
    def state(self) -> list[mx.array]:
        """The arrays that hold what was fed, to be evaluated or awaited."""

    @abstractmethod
    def forward(
        self, target: Any, ids: mx.array, target_layer_ids: tuple[int, ...] = ()
    ) -> tuple[mx.array, mx.array | None]:
        """Arm, feed ids [B, W] behind what is held (owed tokens first), return logits [B, W, V] and taps [B, W, F]."""

    @abstractmethod
    def settle(self, keep: tuple[int, ...], fed: tuple[Tokens, ...]) -> None:
        """Keep the first `keep` rows of the last forward, whose tokens were `fed` (host values, at least the kept ones)."""

    @property
    @abstractmethod
    def armed(self) -> int:
        """Forwards that are not settled."""

    @abstractmethod
    def restore(self, to: int = 0) -> None:
        """Undo forwards until `to` of them are left unsettled; nothing to do when there are no more.

        Raises DsparkError where a cache cannot go back; the buffers must then be poisoned.
        """

    @abstractmethod
    def pay(self, target: Any) -> None:
        """Feed what is owed by a forward of its own."""

    @abstractmethod
    def trim(self, length: int) -> bool:
        """Forget everything behind the first `length` tokens of a single row; False where the caches cannot."""

    @abstractmethod
    def fork(self) -> AbstractBuffers:
        """An independent copy. Costs the caches' bytes."""

    @abstractmethod
    def admit(self, other: AbstractBuffers) -> None:
        """Put another layout's rows behind these; `other` must not be used again."""

    @abstractmethod
    def retire(self, rows: Sequence[int]) -> None:
        """Keep only the rows named, in the order given."""

    def poison(self, reason: str) -> None:
        self.poisoned = reason

    def check(self, epoch: int | None = None) -> None:
        """Raise where the buffers must not be used, or not by a state of `epoch`."""
        if self.poisoned is not None:
            raise PoisonedBuffers(f"these caches cannot be used any more: {self.poisoned}; open a new session")
        if epoch is not None and epoch != self.epoch:
            raise StaleState(
                f"this state is from round {epoch} and the caches are at round {self.epoch}; "
                "a round consumes its state, call session.fork() to keep two continuations"
            )


class LeafBuffers(AbstractBuffers):
    """Layouts that hold their caches themselves: `leaves` are those with arrays, `_armed` the forwards not settled."""

    leaves: list[Any]
    _armed: list[Any]

    @property
    def armed(self) -> int:
        return len(self._armed)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.leaves if not cache.empty())

    @property
    def state(self) -> list[mx.array]:
        return [a for cache in self.leaves for _, a in tree_flatten(cache.state) if isinstance(a, mx.array)]

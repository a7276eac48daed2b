"""Cap controllers: how many drafts to offer in the next round. They see measured rounds and never acceptance alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dspark.records import RoundEvent

FOREVER = 1 << 30


class Offer(int):
    """A cap that differs by drafter: an int, the most drafts of all, and `by_source` for those that are limited apart."""

    by_source: Mapping[str, int]

    def __new__(cls, most: int, by_source: Mapping[str, int] | None = None) -> Offer:
        offer = super().__new__(cls, most)
        offer.by_source = by_source or {}
        return offer


def cap_for(cap: int, sources: Iterable[str]) -> int:
    """Most drafts for a drafter that signs with one of `sources`: what a hybrid hands on to a branch."""
    known = getattr(cap, "by_source", {})
    limits = [known[s] for s in sources if s in known]
    return min(max(limits), cap) if limits else int(cap)


class AbstractCap(ABC):
    """`init` makes a carry, `propose` reads it before the graph is built, `ponder` readies it behind that, `observe` moves it on
    after the read."""

    @property
    def watches(self) -> bool:
        """Whether `observe` does anything; where not, no event is made for it."""
        return True

    @property
    def wants_costs(self) -> bool:
        """Whether a cost curve changes anything, so that measuring one is worth its seconds."""
        return True

    def starting(self, cap: int) -> AbstractCap:
        """The same controller, beginning with the cap that calibration found; itself where that has no place."""
        return self

    @property
    def begins_with(self) -> int | None:
        """The cap that it begins with, where it can be told to; else None."""
        return None

    @abstractmethod
    def init(self, costs: Any = None) -> Any:
        """The carry of a new session. `costs` is a cost curve where this machine has been calibrated, else None."""

    def again(self, carry: Any, costs: Any = None) -> Any:
        """The carry of a new session that follows one which ended with `carry`: what was learned may stay."""
        return self.init(costs)

    @abstractmethod
    def propose(self, carry: Any) -> int:
        """Most drafts to offer in the next round; 0 is the plain step. May be an `Offer`, which tells drafters apart."""

    def fit(self, carry: Any, source: str, offered: int) -> tuple[int, int]:
        """(drafts to keep, rows to verify) once `source` has offered so many: a short draft may be cut, and rows beyond
        drafts + 1 are padding, where that verify costs less."""
        return offered, offered + 1

    def ponder(self, carry: Any, context_tokens: Sequence[int]) -> Any:
        """The carry, readied for the next choice while the device works on the round that `carry` proposed: what takes long is
        done here, for the device waits while `observe` works. context_tokens: held when this round was sent, or when the one
        behind it was, one number a row."""
        return carry

    @abstractmethod
    def observe(self, carry: Any, event: RoundEvent) -> Any:
        """The carry after a round."""

    @abstractmethod
    def reason(self, carry: Any) -> str:
        """Why the cap is what it is: "pinned", "calibrated", "adaptive", "parked", or "default (not calibrated)"."""

    def parked_rounds(self, carry: Any) -> int:
        """Rounds from now on that are sure to offer nothing, whatever is observed: they may be sent ahead."""
        return 0

    def sure(self, carry: Any) -> int:
        """What is as good as sure to be offered in the next round, whatever comes of the one under way, asked for behind `ponder`;
        0: nothing is. Its forward may then be sent ahead, for nothing where another cap is proposed after all."""
        return 0

    def shadow(self, carry: Any) -> int:
        """Most drafts to make beside the next parked round, only to be judged by what plain steps say (`RoundEvent.judged`); 0
        makes none. May be an `Offer`."""
        return 0

    def predicted_ms(self, carry: Any) -> float | None:
        """What the next round should take, where the controller knows."""
        return None

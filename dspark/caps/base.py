"""Cap controllers: how many drafts to offer in the next round. They see measured rounds and never acceptance alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from dspark.records import RoundEvent

FOREVER = 1 << 30


class AbstractCap(ABC):
    """`init` makes a carry, `propose` reads it before the graph is built, `observe` moves it on after the read."""

    @abstractmethod
    def init(self, costs: Any = None) -> Any:
        """The carry of a new session. `costs` is a cost curve where this machine has been calibrated, else None."""

    @abstractmethod
    def propose(self, carry: Any) -> int:
        """Most drafts to offer in the next round; 0 is the plain step."""

    @abstractmethod
    def observe(self, carry: Any, event: RoundEvent) -> Any:
        """The carry after a round."""

    @abstractmethod
    def reason(self, carry: Any) -> str:
        """Why the cap is what it is: "pinned", "calibrated", "adaptive" or "parked"."""

    def parked_rounds(self, carry: Any) -> int:
        """Rounds from now on that are sure to offer nothing, whatever is observed: they may be sent ahead."""
        return 0

    def predicted_ms(self, carry: Any) -> float | None:
        """What the next round should take, where the controller knows."""
        return None

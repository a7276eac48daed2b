"""When to stop drafting, for how long, and when to try again: what was gained over plain decoding is kept as an account."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

# In plain steps: what a session may lose before it has gained anything, and what it may lose on end later.
START, PATIENCE = 1.0, 2.0
# Gains saved up for probes, in plain steps.
MOST_SAVED = 20.0
# Plain rounds between probes: doubling from the first to the second, or as long as debts take to fade, up to the third.
SHORTEST, USUAL, LONGEST = 8, 32, 128


class Account(NamedTuple):
    """parked: plain rounds still to go; run: those of this park so far; credit: what may still be lost before parking;
    saved: gains less losses; fails: parks since drafting last paid. Amounts in plain steps."""

    parked: int = 0
    run: int = 0
    credit: float = START
    saved: float = START
    fails: int = 0

    def drafted(self, gained: float, loss: float) -> Account:
        """After a round that was free to draft."""
        credit = _within(self.credit + gained, 0.0, PATIENCE)
        saved = _within(self.saved + gained, -loss * LONGEST, MOST_SAVED)
        return self._replace(credit=credit, saved=saved, parked=max(self.parked - 1, 0), run=0)

    def rested(self, gained: float, loss: float) -> Account:
        """After a parked round, which earns the right to lose `loss` of a step again."""
        saved = _within(self.saved + gained + loss, -loss * LONGEST, MOST_SAVED)
        return self._replace(saved=saved, parked=self.parked - 1, run=self.run + 1)

    def judged(self, gain: float, loss: float) -> Account:
        """Park if a drafting round is expected to lose (`gain` below 0) and nothing may be lost any more."""
        if gain >= 0:
            return self._replace(fails=0)
        if self.credit > 0:
            return self
        pause = min(SHORTEST << self.fails, USUAL)
        debt = ceil(-self.saved / loss)
        return self._replace(parked=min(max(debt, pause), LONGEST), fails=min(self.fails + 1, 8))

    def closed(self) -> Account:
        """Park for as long as may be, where no acceptance could pay."""
        return self._replace(parked=LONGEST, run=0)


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)

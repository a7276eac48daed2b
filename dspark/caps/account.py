"""When to stop drafting, for how long, and when to try again: what was gained over plain decoding is kept as an account."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

# In plain steps: what may be lost on end at first, later, and where a loss must be expected.
START, PATIENCE, WARNED = 3.0, 2.0, 1.0
# Gains saved up for probes, in plain steps: at first, and at most.
FIRST_SAVED, MOST_SAVED = 1.0, 20.0
# Plain rounds that a new session may begin with.
FRESH = 16
# Plain rounds between probes: doubling from the first to the second, or as long as debts take to fade, up to the third.
SHORTEST, USUAL, FIRST, LONGEST = 8, 32, 64, 128


class Account(NamedTuple):
    """parked: plain rounds still to go; run: those of this park so far; credit: what may still be lost before parking;
    saved: gains less losses; fails: parks since drafting last paid. Amounts in plain steps."""

    parked: int = 0
    run: int = 0
    credit: float = START
    saved: float = FIRST_SAVED
    fails: int = 0

    def drafted(self, gained: float, loss: float) -> Account:
        """After a round that was free to draft."""
        credit = _within(self.credit + gained, 0.0, max(PATIENCE, self.credit))
        saved = _within(self.saved + gained, -loss * LONGEST, MOST_SAVED)
        return self._replace(credit=credit, saved=saved, parked=max(self.parked - 1, 0), run=0)

    def rested(self, gained: float, loss: float) -> Account:
        """After a parked round, which earns the right to lose `loss` of a step again."""
        saved = _within(self.saved + gained + loss, -loss * LONGEST, MOST_SAVED)
        return self._replace(saved=saved, parked=self.parked - 1, run=self.run + 1)

    def judged(self, gain: float, loss: float) -> Account:
        """Park if a drafting round is expected to lose (`gain` below 0) and nothing may be lost any more, or whatever is
        expected if all that may be owed is owed: then the expectation is wrong."""
        bankrupt = self.saved <= -loss * LONGEST
        if gain >= 0 and not bankrupt:
            return self._replace(fails=0)
        if self.credit > 0:
            return self
        pause = min(SHORTEST << self.fails, USUAL)
        debt = ceil(-self.saved / loss)
        # A bad beginning says little yet.
        most = LONGEST if self.fails else FIRST
        return self._replace(parked=min(max(debt, pause), most), fails=min(self.fails + 1, 8))

    def again(self, gain: float) -> Account:
        """For the next session, where a drafting round was last expected to gain so much. Its text may be of another kind: debts
        stay, so that many short sessions lose hardly more than a long one, but the park that pays them is cut short."""
        if self.saved < 0:
            return self._replace(parked=min(self.parked, FRESH))
        return Account(credit=START if gain >= 0 else WARNED, saved=self.saved)

    def closed(self) -> Account:
        """Park for as long as may be, where no acceptance could pay."""
        return self._replace(parked=LONGEST, run=0)


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)

"""When to stop drafting, for how long, and when to try again: what was gained over plain decoding is kept as an account."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from dspark.caps.drafters import Outlook

# In plain steps: what may be lost from the start while drafting may yet pay, and what gains may be saved up. The budget and a
# round that goes beyond it are 1 % of 400 steps.
BUDGET, MOST_SAVED = 3.3, 20.0
# Standard deviations of the expected gain by which drafting must be expected to lose before it stops within the budget.
SURE = 1.0
# Plain rounds that a new session of an engine in debt begins with at most.
FRESH = 16
# What gains may bring into the next session: its text may be one on which all of them would be lost.
CARRIED = 6.0
# What may be owed beyond the budget where it begins with so few.
BEYOND = 0.5
# What shadows may owe beyond the budget, and how many times the worst round may be lost where they woke drafting.
LENT, AGAIN = 0.95, 1.1
# Plain rounds between probes: doubling from the first to the second with every one that fails, longer the surer the loss is,
# or as long as debts take to fade, up to the third.
SHORTEST, USUAL, LONGEST = 8, 64, 128


class Account(NamedTuple):
    """parked: plain rounds still to go; run: those of this park so far; saved: gains less losses, in plain steps; fails:
    parks since drafting last paid; shut: whether no acceptance could pay, so that nothing needs to be asked."""

    parked: int = 0
    run: int = 0
    saved: float = 0.0
    fails: int = 0
    shut: bool = False

    def drafted(self, gained: float, loss: float) -> Account:
        """After a round that was free to draft."""
        return self._replace(saved=_within(self.saved + gained, loss), parked=max(self.parked - 1, 0), run=0)

    def rested(self, gained: float, loss: float) -> Account:
        """After a parked round, which earns the right to lose `loss` of a step again."""
        return self._replace(saved=_within(self.saved + gained + loss, loss), parked=self.parked - 1, run=self.run + 1)

    def judged(self, outlook: Outlook, loss: float) -> Account:
        """Park if a drafting round is expected to lose and that is sure, seen how far the expectation may err; and once the
        budget is lost whatever is expected: then the expectation is wrong."""
        gain, doubt, risk = outlook
        if self.saved > -BUDGET and gain + SURE * doubt >= 0:
            return self if gain < 0 else self._replace(fails=0)
        # A probe must be within the budget again; one that may well succeed comes soon.
        debt = ceil((risk - self.saved - BUDGET) / loss)
        sure = SHORTEST * 4.0 ** min(max(-gain / doubt - SURE, 0.0), 2.0) if doubt > 0 else LONGEST
        pause = max(min(SHORTEST << self.fails, USUAL), int(sure), debt)
        return self._replace(parked=min(pause, LONGEST), fails=min(self.fails + 1, 8))

    def lends(self, price: float) -> bool:
        """Whether a shadow of that price, in plain steps, may be made beside the next parked round."""
        return self.parked > 1 and not self.shut and 0 < price <= self.saved + BUDGET + LENT

    def woken(self, risk: float) -> Account:
        """Draft again behind the round that was sent already, and lose a round that costs `risk` at most, whatever is owed."""
        return self._replace(parked=1, saved=max(self.saved, AGAIN * risk - BUDGET))

    def prolonged(self) -> Account:
        """Stay parked: shadows say that a probe would lose."""
        return self._replace(parked=LONGEST)

    def ended(self) -> Account:
        """Behind a park."""
        return self._replace(run=0, shut=False)

    def again(self) -> Account:
        """For the next session. Its text may be of another kind: debts stay, so that many short sessions lose hardly more than
        a long one, but the park that pays them is cut short, unless a probe failed beyond the budget already."""
        if self.saved <= -BUDGET - BEYOND:
            return self._replace(shut=False)
        if self.saved < -BUDGET / 2:
            return self._replace(parked=min(self.parked, FRESH), shut=False)
        return Account(saved=min(self.saved, CARRIED))

    def closed(self) -> Account:
        """Park for as long as may be, where no acceptance could pay."""
        return self._replace(parked=LONGEST, run=0, shut=True)


def _within(saved: float, loss: float) -> float:
    """Debts are no larger than the longest park pays beyond the budget."""
    return min(max(saved, -BUDGET - loss * LONGEST), MOST_SAVED)

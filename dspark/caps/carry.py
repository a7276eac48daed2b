"""What the adaptive cap knows of a session: its carry, and what follows from it alone."""

from __future__ import annotations

from typing import NamedTuple

from dspark.caps.account import Account
from dspark.caps.base import Offer
from dspark.caps.correct import Correction
from dspark.caps.curve import CostCurve
from dspark.caps.drafters import Drafter, Outlook, could_pay
from dspark.caps.price import with_verify
from dspark.caps.shadows import Shadows
from dspark.records import RoundEvent

# Plain steps that tell what one takes, where there is no curve or a doubtful one.
FIRST_LOOK = 4
# Drafted rounds of an engine's first that nobody is blamed for: nothing is compiled or allocated yet, and no cache warm.
COLD = 3
# What weighing caps takes the host, about, and the share of the rounds between two weighings that it may be; such rounds at most.
RECKONING_MS, RECKONING_SHARE, MOST_EVERY = 0.3, 0.08, 6
# Share of rounds sent ahead below which prices do not count on it; of that share a round's own part.
SENT_AHEAD, SENT_PART = 0.25, 0.2
# Drafted rounds before a disturbed curve may be believed that no draft could ever pay.
TRIED = 4


class AdaptiveCarry(NamedTuple):
    """costs: the curve; rounds, drafted: rounds seen, and those that drafted; depth, batch: what prices are for; plain: ms
    of a plain step there; owed: tokens to be fed again; outlook: of the next drafting round; missed: share of rounds
    in which no drafter had anything to say; late: whether the last round took far too long; woken: whether no round was
    drafted since the start or a park: the next one finds nothing made for it (what to draft behind, graphs, kernels), costs
    more than those behind it, and tells nothing of them; shadows: those of this park; looks: ms of the first plain steps,
    where there is no curve; unheard: the last round, where what follows from it can wait until the device is busy again;
    corrected: the round at which prices were corrected last; ahead: share of the rounds lately that were sent before the one in
    front was read, of those whose drafter's price counts on it."""

    costs: CostCurve
    drafters: tuple[Drafter, ...]
    plain: float
    account: Account
    correction: Correction = Correction()
    rounds: int = 0
    drafted: int = 0
    depth: int = 0
    batch: int = 1
    owed: int = 0
    outlook: Outlook = Outlook()
    missed: float = 0.0
    late: bool = False
    woken: bool = True
    shadows: Shadows = Shadows()
    looks: tuple[float, ...] | None = None
    unheard: RoundEvent | None = None
    corrected: int = 0
    ahead: float = 1.0

    @property
    def looking(self) -> bool:
        """Whether the first plain steps of a machine without a curve are still being timed."""
        return self.looks is not None and len(self.looks) < FIRST_LOOK

    @property
    def starting(self) -> bool:
        """Whether rounds still find an engine cold, so that what they take tells nothing. A curve that was not measured is learned
        from them all the same."""
        return self.drafted < COLD and self.looks is None

    @property
    def never_pays(self) -> bool:
        """Whether no acceptance could pay by the curve, where that is known: a guess is tried first."""
        if self.looks is not None and self.drafted < TRIED:
            return False
        return not could_pay(self.drafters)

    @property
    def every(self) -> int:
        """Rounds after which caps are weighed: as many as keep that short beside them."""
        ms = min(d.best.ms for d in self.drafters)
        return min(1 + int(RECKONING_MS / (RECKONING_SHARE * ms)), MOST_EVERY)

    @property
    def offer(self) -> Offer:
        """What every drafter may draft."""
        caps = {d.source: d.cap for d in self.drafters}
        return Offer(max(caps.values()), caps)

    @property
    def sure(self) -> Offer:
        """The same without those that only draft to be judged again."""
        caps = {**self.offer.by_source, **{d.source: 0 for d in self.drafters if d.probing}}
        return Offer(max(caps.values()), caps)

    @property
    def alone(self) -> bool:
        """Whether rounds are not sent ahead here, whatever the curve has: those that are sampled, or of several sequences."""
        return self.ahead < SENT_AHEAD

    @property
    def mispriced(self) -> bool:
        """Whether prices count on rounds being sent ahead that are not, or do not where they are."""
        saves = any(min(d.curve.draft) < 0 for d in self.drafters)
        return saves and self.alone == any(min(d.prices.draft) < 0 for d in self.drafters)

    def find(self, source: str) -> Drafter | None:
        return next((d for d in self.drafters if d.source == source), None)

    def gain(self, event: RoundEvent, ms: float) -> float:
        """What a round that is charged with so many milliseconds gained over plain steps, in such steps."""
        return sum([len(row.tokens) for row in event.rows]) / max(len(event.rows), 1) - ms / self.plain

    def price(self, event: RoundEvent, corrected: bool) -> float:
        """What a round should have taken, by its own width, source and rejections."""
        row = max(event.rows, key=lambda r: r.offered)
        known = self.find(row.source) or self.drafters[0]
        prices = known.prices if corrected else known.curve
        draft = prices.draft[min(row.offered, len(prices.draft) - 1)]
        rejected = any(r.offered and len(r.tokens) < event.width for r in event.rows)
        rows = min(event.width + self.owed, len(prices.verify))
        # What being sent ahead saves is in the drafter's price.
        draft = draft if event.ahead else max(draft, 0.0)
        return with_verify(draft + prices.host, prices.verify[rows - 1]) + prices.replay * rejected

    def sent_ahead(self, event: RoundEvent) -> float:
        """`ahead` behind a round."""
        row = max(event.rows, key=lambda r: r.offered)
        known = self.find(row.source) if row.offered else None
        if known is None or min(known.curve.draft) >= 0:
            return self.ahead
        return self.ahead + SENT_PART * (event.ahead - self.ahead)

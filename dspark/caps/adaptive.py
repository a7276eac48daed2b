"""The cap that earns most: the cap and width with the most expected tokens a millisecond, weighed anew as the session goes on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import attrs

from dspark.caps.account import BUDGET, SHORTEST, Account
from dspark.caps.base import FOREVER, AbstractCap
from dspark.caps.carry import FIRST_LOOK, AdaptiveCarry
from dspark.caps.correct import PLAIN, Correction
from dspark.caps.curve import CostCurve, nominal
from dspark.caps.drafters import Drafter, best_of, mute, new_drafter, outlook
from dspark.caps.estimate import Estimator
from dspark.caps.price import price_list
from dspark.caps.shadows import CHEAPER, SIGNS, Shadows, price
from dspark.errors import InputError
from dspark.records import RoundEvent
from dspark.stages.registry import register_cap

# Plain steps are timed again where rounds are off the curve by more than exp(DOUBT) and none was timed for RELOOK rounds.
DOUBT, RELOOK = 0.15, 256
# Context growth after which prices are looked up again, and rounds after which they are corrected by what was observed.
DEPTH_STEP, CORRECT_EVERY = 128, 16
# Drafted rounds after which caps are chosen anew in one of so many rounds: estimates move slowly then.
SETTLED, CHOOSE_EVERY = 16, 3
# Plain steps that the first drafted round behind others may take longer than those behind it, without being blamed for it.
WAKING = 1.0
# What must be left of the budget, in plain steps, where a round is heard of only behind the next one's send.
ENOUGH = 1.0 - BUDGET
# A single round that took longer than this many times its price was disturbed, and its loss is not the drafter's.
DISTURBED = 2.0


@register_cap("adaptive")
@attrs.frozen
class AdaptiveCap(AbstractCap):
    """Choose cap and width by the cost curve and by acceptance as this session shows it, for each drafter apart.

    Drafting stops (parks) where it is sure to lose, or is expected to and has lost what it may: plain steps are then sent
    ahead, and a probe follows after 8 to 128 of them, the later the surer the loss and the more was lost, so that losses
    stay near four plain steps and `loss` of the rest. Where a draft costs little of what such a round may lose, drafts are
    made beside plain steps instead (shadows), and drafting begins again once they would have gained. Observed times correct
    the curve, a disturbed one from the first round on; an engine's first three drafted rounds, which find nothing ready,
    count as the curve has them. Without a curve the first rounds are plain, a curve is guessed from them, and `reason` says
    "default (not calibrated)".

    start: the last drafter's cap at first, which calibration replaces by this machine's own; None takes what the curve says
    of the prior; most: longest draft; loss: share of plain decoding's time that probes may cost; hysteresis: how much better
    another cap must be; prior: acceptance expected at first, where the curve names none; memory: rounds over which
    acceptance is averaged. Costs some 0.05 to 0.1 ms of host time a round and 0.2 to 0.4 where caps are weighed, which is every
    first to third round, or where rounds are short every few, at most six; all but 0.02 beside the device, unless the budget is
    nearly lost.
    """

    start: int | None = None
    most: int = 32
    loss: float = 0.01
    hysteresis: float = 0.02
    prior: float = 0.65
    memory: float = 30.0

    def __attrs_post_init__(self) -> None:
        for name in ("start", "most"):
            if (getattr(self, name) or 0) < 0:
                raise InputError(f"{name} is {getattr(self, name)}; a cap is at least 0")
        for name, low, high in (("loss", 0.001, 0.5), ("hysteresis", 0.0, 0.5)):
            if not low <= getattr(self, name) <= high:
                raise InputError(f"{name} is {getattr(self, name)}; it must lie between {low} and {high}")
        _ = self._estimator

    # ---- the contract -----------------------------------------------------------------------------------------------

    @property
    def begins_with(self) -> int | None:
        return self.start

    def starting(self, cap: int) -> AdaptiveCap:
        return attrs.evolve(self, start=cap)

    def init(self, costs: CostCurve | None = None) -> AdaptiveCarry:
        curve = costs or nominal(1.0, max(self.most, 1))
        drafters = tuple(new_drafter(price_list(curve, 0, s, self.most), s) for s in curve.sources or ("",))
        guess = costs is None or costs.disturbed
        account = Account(parked=FIRST_LOOK) if guess else Account()
        carry = AdaptiveCarry(curve, drafters, curve.plain_at(0), account, looks=() if guess else None)
        carry = self._begun(self._chosen(carry, afresh=True))
        return carry._replace(account=account.closed()) if carry.never_pays else carry

    def propose(self, carry: AdaptiveCarry) -> int:
        return 0 if carry.account.parked else carry.offer

    def fit(self, carry: AdaptiveCarry, source: str, offered: int) -> tuple[int, int]:
        known = carry.find(source) or carry.drafters[0]
        return best_of(known, offered, least=1 if carry.outlook.gain < 0 or known.probing else 0)

    def ponder(self, carry: AdaptiveCarry, context_tokens: Sequence[int]) -> AdaptiveCarry:
        late = carry.unheard
        if late is not None:
            carry = self._counted(carry._replace(unheard=None), late)
        parked, begins = carry.account.parked, not carry.account.run
        if carry.looking or (parked > 1 and not begins):
            return carry
        if parked == 1:
            # The last plain step of a park: nearly all is known that there will be.
            if carry.outlook.gain < 0 and carry.shadows.stay:
                return carry
            carry = self._looked_up(self._faded(carry), context_tokens, afresh=True)
            account, shadows = carry.account._replace(shut=carry.never_pays), carry.shadows._replace(since=0)
            return self._chosen(carry._replace(account=account, shadows=shadows))
        if not parked and carry.rounds % carry.every:
            return carry
        often = carry.drafted <= SETTLED or not carry.rounds % CHOOSE_EVERY or carry.every > 1
        probed = any(d.probing and not d.quiet for d in carry.drafters)
        if parked or often or probed or carry.rounds - carry.corrected >= CORRECT_EVERY:
            carry = self._looked_up(carry, context_tokens)
            # The cap to begin with stays until it was seen.
            carry = self._chosen(carry) if carry.drafted else carry
        elif late is not None:
            carry = self._reckoned(carry)
        if late is not None:
            account = self._decided(carry).account
            # The round under way was sent before: it is none of the park's.
            carry = carry._replace(account=account._replace(parked=account.parked + (account.parked > 0)))
        return carry

    def observe(self, carry: AdaptiveCarry, event: RoundEvent) -> AdaptiveCarry:
        if carry.unheard is not None:
            carry = self._heard(carry._replace(unheard=None), carry.unheard)
        if carry.looks is None and not carry.account.parked:
            heard = {row.source for row in event.rows}
            gained = carry.gain(event, self._charged(carry, event)[0])
            if carry.account.saved + gained > ENOUGH and not any(
                d.probing and d.source in heard for d in carry.drafters
            ):
                return carry._replace(unheard=event)
        return self._heard(carry, event)

    def _charged(self, carry: AdaptiveCarry, event: RoundEvent) -> tuple[float, bool]:
        """What a round that was free to draft is charged with, in milliseconds, and whether it took far too long."""
        predicted = carry.price(event, corrected=True)
        late = event.elapsed_ms > DISTURBED * predicted
        ms = _positive(event.elapsed_ms, predicted)
        ms = min(ms, DISTURBED * predicted) if late and not carry.late else ms
        if carry.starting:
            ms = min(ms, predicted)
        elif carry.woken and carry.looks is None:
            ms = max(min(ms, predicted), ms - WAKING * carry.plain)
        return ms, late

    def _counted(self, carry: AdaptiveCarry, event: RoundEvent) -> AdaptiveCarry:
        """The carry behind a round that was free to draft; what is expected of the next one is not asked."""
        (ms, late), drafted = self._charged(carry, event), any(row.offered for row in event.rows)
        told = carry
        for row in event.rows:
            cut = len(row.tokens) <= row.accepted
            told = self._judged_row(told, row.source if row.offered else None, row.offered, row.accepted, cut)
        return told._replace(
            account=carry.account.drafted(carry.gain(event, ms), self.loss),
            correction=self._observed(carry, event),
            ahead=carry.sent_ahead(event),
            rounds=carry.rounds + 1,
            drafted=carry.drafted + drafted,
            owed=event.owed_tokens,
            late=late,
            woken=carry.woken and not drafted,
        )

    def _heard(self, carry: AdaptiveCarry, event: RoundEvent) -> AdaptiveCarry:
        """The carry behind a round, drafting weighed by it; what cap is best is not asked."""
        if carry.account.parked and not event.cap:
            return self._rested(carry._replace(rounds=carry.rounds + 1), event)
        carry = self._counted(carry, event)
        if carry.looks is not None:
            # A guess is corrected before anything is judged by it.
            carry = self._looked_up(carry, event.context_tokens)
        return self._decided(self._reckoned(carry))

    def _decided(self, carry: AdaptiveCarry) -> AdaptiveCarry:
        """Whether to draft on, by what is expected of it."""
        if carry.account.parked:
            # This round was sent before the park was decided on.
            return carry
        if self._doubts(carry):
            return carry._replace(account=carry.account._replace(parked=FIRST_LOOK))
        return carry._replace(account=carry.account.judged(carry.outlook, self.loss))

    def reason(self, carry: AdaptiveCarry) -> str:
        if carry.account.parked and not carry.looking:
            return "parked"
        if carry.looks is not None and not (carry.costs.disturbed and carry.drafted):
            return "default (not calibrated)"
        heard = carry.unheard is not None and any(row.offered for row in carry.unheard.rows)
        return "adaptive" if carry.drafted or heard else "calibrated"

    def parked_rounds(self, carry: AdaptiveCarry) -> int:
        return carry.account.parked

    def sure(self, carry: AdaptiveCarry) -> int:
        if carry.account.parked or carry.looks is not None or carry.account.saved - carry.outlook.risk <= -BUDGET:
            return 0
        return carry.sure

    def shadow(self, carry: AdaptiveCarry) -> int:
        if not carry.account.parked or carry.looks is not None:
            # What nobody measured must be tried to be known.
            return 0
        cost = price(carry.drafters, carry.plain)
        return carry.offer if carry.account.lends(cost) and cost * CHEAPER <= carry.outlook.risk else 0

    def predicted_ms(self, carry: AdaptiveCarry) -> float | None:
        if carry.account.parked:
            return None if carry.looking else carry.plain
        # At first the last one counts: those before it may find nothing.
        busiest = max(reversed(carry.drafters), key=lambda d: d.share)
        return busiest.table[busiest.cap].ms

    def again(self, carry: AdaptiveCarry, costs: CostCurve | None = None) -> AdaptiveCarry:
        if carry.unheard is not None:
            carry = self._counted(carry._replace(unheard=None), carry.unheard)
        if carry.looking or (costs is not None and costs != carry.costs):
            return self.init(costs)
        rest = self._estimator.rest
        drafters = tuple(d._replace(estimate=rest(d.estimate, FOREVER), stale=True) for d in carry.drafters)
        account = carry.account.again()
        carry = self._chosen(carry._replace(drafters=drafters, account=account, owed=0, late=False, woken=True))
        return carry._replace(account=carry.account.closed()) if carry.never_pays else carry

    # ---- moving on --------------------------------------------------------------------------------------------------

    @property
    def _estimator(self) -> Estimator:
        return _estimator(self.prior, self.memory)

    def _begun(self, carry: AdaptiveCarry) -> AdaptiveCarry:
        """The carry with the last drafter's cap at `start`: those before it look up, and draft what they find. Where the curve
        promises nothing at the usual acceptance, drafting waits a little."""
        if self.start == 0 or carry.outlook.gain < 0:
            parked = max(SHORTEST, carry.account.parked)
            return carry._replace(account=carry.account._replace(parked=parked))
        if self.start is None:
            return carry
        *others, last = carry.drafters
        return carry._replace(drafters=(*others, last.beginning(self.start)))

    @staticmethod
    def _observed(carry: AdaptiveCarry, event: RoundEvent) -> Correction:
        """What is known of this run's prices after a round that was free to draft."""
        predicted = carry.price(event, corrected=False)
        # What takes longer while nothing is ready yet tells nothing; what is faster even so does.
        slow = event.elapsed_ms > predicted and (carry.starting or (carry.woken and carry.looks is None))
        if carry.owed or slow:
            return carry.correction
        sure = carry.looks is None
        return carry.correction.observe(event.width, carry.rounds, predicted, event.elapsed_ms, sure)

    def _judged_row(
        self, carry: AdaptiveCarry, name: str | None, offered: int, accepted: int, cut: bool = False
    ) -> AdaptiveCarry:
        """After a draft of the drafter `name` was judged; None where nobody drafted."""
        if name is not None and carry.find(name) is None:
            # The nameless drafter of a curve without drafters makes room for the first that has a name.
            fresh = new_drafter(price_list(carry.costs, carry.depth, name, self.most, carry.batch), name)
            carry = carry._replace(drafters=(*(d for d in carry.drafters if d.source), fresh))
        part = 1.0 / (1.0 + self.memory)
        drafters = []
        for known in carry.drafters:
            share, mine = known.share * (1.0 - part), known.source == name
            if not mine:
                drafters.append(known._replace(share=share, quiet=known.quiet + 1))
                continue
            prior = carry.costs.acceptance(known.source)
            estimate = self._estimator.observe(known.estimate, offered, accepted, cut, prior, known.rates)
            drafters.append(known._replace(estimate=estimate, stale=True, share=share + part, quiet=0))
        missed = carry.missed * (1.0 - part) + part * (name is None)
        return carry._replace(drafters=tuple(drafters), missed=missed)

    def _doubts(self, carry: AdaptiveCarry) -> bool:
        """Whether rounds take so much more or less than the curve says that plain steps should be timed as well."""
        return carry.correction.off() > DOUBT and carry.correction.age(PLAIN, carry.rounds) > RELOOK

    def _rested(self, carry: AdaptiveCarry, event: RoundEvent) -> AdaptiveCarry:
        """After a parked round. The first of a park was not sent ahead: it costs more, and tells nothing of plain steps."""
        if carry.looking:
            return self._looked(carry, event)
        account, gained = carry.account, 0.0
        if account.run and not (event.shadow or carry.shadows.falling):
            usual = carry.costs.plain_at(max(event.context_tokens), len(event.rows))
            correction = carry.correction.observe(PLAIN, carry.rounds, usual, event.elapsed_ms)
            carry = carry._replace(correction=correction)
        else:
            gained = 1.0 - min(_positive(event.elapsed_ms, carry.plain) / carry.plain, DISTURBED)
        account = account.rested(gained, self.loss)
        carry = carry._replace(account=account, shadows=carry.shadows.rested(event.shadow > 0))
        if event.judged:
            carry = self._shown(carry, event)
        if carry.account.parked:
            return carry
        if carry.outlook.gain < 0 and carry.shadows.stay:
            return carry._replace(account=carry.account.prolonged(), shadows=carry.shadows.prolonged())
        shut, account = carry.account.shut, carry.account.ended()
        carry = self._faded(carry)._replace(account=account, woken=True, shadows=Shadows())
        if shut:
            return carry._replace(account=account.closed())
        return self._reckoned(self._corrected(carry))

    def _shown(self, carry: AdaptiveCarry, event: RoundEvent) -> AdaptiveCarry:
        """After shadows were judged: draft again if they would have gained and more is expected."""
        carry = self._faded(carry)
        for row in event.judged:
            carry = self._judged_row(carry, row.source, row.offered, row.accepted)
            known = carry.find(row.source) or carry.drafters[0]
            carry = carry._replace(shadows=carry.shadows.showed(known, row.offered, row.accepted, carry.plain))
        carry = self._chosen(carry)
        if carry.shadows.signs > SIGNS and carry.outlook.gain >= 0:
            return carry._replace(account=carry.account.woken(carry.outlook.risk))
        return carry

    def _faded(self, carry: AdaptiveCarry) -> AdaptiveCarry:
        """Evidence as old as it is now."""
        rest, rounds = self._estimator.rest, carry.shadows.since
        return carry._replace(drafters=tuple(d._replace(estimate=rest(d.estimate, rounds)) for d in carry.drafters))

    def _looked(self, carry: AdaptiveCarry, event: RoundEvent) -> AdaptiveCarry:
        """After one of the first plain steps of a machine without a curve; after the last of them, guess one. A disturbed
        curve is a guess already, to be corrected by what they took."""
        looks = (*(carry.looks or ()), event.elapsed_ms)
        carry = carry._replace(looks=looks, account=carry.account._replace(parked=FIRST_LOOK - len(looks)))
        if carry.looking:
            return carry
        plain = sorted(looks[1:])[(FIRST_LOOK - 1) // 2]
        if carry.costs.disturbed:
            price = carry.costs.plain_at(max(event.context_tokens), len(event.rows))
            carry = carry._replace(correction=carry.correction.observe(PLAIN, carry.rounds, price, plain, sure=False))
        elif 0 < plain < float("inf"):
            carry = carry._replace(costs=nominal(plain, max(self.most, 1)))
        return self._begun(self._chosen(self._looked_up(carry, event.context_tokens, afresh=True)))

    def _looked_up(self, carry: AdaptiveCarry, held: Sequence[int], afresh: bool = False) -> AdaptiveCarry:
        """Prices for the context and batch as they are now, corrected by what was observed. Often just the last ones."""
        depth, batch = max(held, default=carry.depth), len(held) or carry.batch
        drafters = carry.drafters
        moved = afresh or batch != carry.batch or abs(depth - carry.depth) >= max(DEPTH_STEP, depth // 16)
        if moved:
            carry = carry._replace(depth=depth, batch=batch)
            look = lambda source: price_list(carry.costs, depth, source, self.most, batch)
            drafters = tuple(d._replace(curve=look(d.source)) for d in drafters)
        carry = carry._replace(drafters=drafters)
        due = carry.rounds - carry.corrected >= CORRECT_EVERY or carry.drafted < CORRECT_EVERY // 2
        return self._corrected(carry) if moved or due or carry.mispriced else carry

    @staticmethod
    def _corrected(carry: AdaptiveCarry) -> AdaptiveCarry:
        factors = carry.correction.factors(carry.rounds, near=carry.looks is not None)
        curves = [d.curve.alone() if carry.alone else d.curve for d in carry.drafters]
        prices = [curve.corrected(factors) for curve in curves]
        drafters = tuple(d._replace(prices=p, stale=True) for d, p in zip(carry.drafters, prices, strict=True))
        return carry._replace(drafters=drafters, plain=drafters[0].prices.plain, corrected=carry.rounds)

    def _chosen(self, carry: AdaptiveCarry, afresh: bool = False) -> AdaptiveCarry:
        """The best cap of every drafter, and what drafting on is expected to gain over plain steps."""
        margin = 0.0 if afresh else self.hysteresis
        return self._weighed(carry, tuple(self._told(d, carry.costs, margin) if d.stale else d for d in carry.drafters))

    @staticmethod
    def _weighed(carry: AdaptiveCarry, drafters: tuple[Drafter, ...]) -> AdaptiveCarry:
        drafters = mute(drafters, carry.missed)
        return carry._replace(drafters=drafters, outlook=outlook(drafters, carry.missed, carry.plain))

    def _reckoned(self, carry: AdaptiveCarry) -> AdaptiveCarry:
        """What drafting on at the caps as they are is expected to gain by the latest evidence. A drafter that was never asked has
        none yet."""
        drafters = []
        for known in carry.drafters:
            if known.stale and known.best.cap:
                known = known.reckoned(*self._rates(known, carry.costs))
            elif known.stale:
                known = self._told(known, carry.costs, 0.0)
            drafters.append(known)
        return self._weighed(carry, tuple(drafters))

    def _told(self, known: Drafter, costs: CostCurve, margin: float) -> Drafter:
        return known.chosen(*self._rates(known, costs), margin)

    def _rates(self, known: Drafter, costs: CostCurve) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Acceptance by position, and its variances."""
        prior = costs.acceptance(known.source)
        rates = self._estimator.rates(known.estimate, prior)
        return rates, self._estimator.doubts(known.estimate, rates, prior)


@lru_cache
def _estimator(prior: float, memory: float) -> Estimator:
    return Estimator(prior, memory=memory)


def _positive(ms: float, otherwise: float) -> float:
    return ms if 0 < ms < float("inf") else otherwise

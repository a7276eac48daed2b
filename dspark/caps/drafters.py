"""What the adaptive cap knows of each drafter, and how caps are chosen where several share a session."""

from __future__ import annotations

from typing import NamedTuple

from dspark.caps.estimate import AcceptanceEstimate
from dspark.caps.price import Choice, PriceList, choices, doubt, expected_tokens, round_ms

# Rounds after which a drafter that another one shuts out is tried again.
RETRY = 32
# A cap of half as many drafts must be better by so many times the usual hysteresis where the longer one's rounds take less than so
# many times as long.
RELUCTANCE, HARDLY = 2.5, 1.1
# Share of rounds in which nobody drafts, above which a drafter that was never heard is not waited for.
SILENT = 0.2
# Acceptance that no drafter is expected to exceed: where not even it would pay, nothing is probed.
CEILING = 0.97


class Drafter(NamedTuple):
    """source: how it signs; curve, prices: its costs by the curve, and as corrected; share: of all rounds; quiet: rounds
    since it drafted last; table: the best width for every cap; best: the best cap above 0; cap: what it may draft now;
    probing: whether it only drafts to be judged again; stale: whether prices or acceptance moved since it was chosen;
    doubt: how far the best cap's tokens may be off, a standard deviation; rates: acceptance by position when it was weighed
    last."""

    source: str
    estimate: AcceptanceEstimate
    curve: PriceList
    prices: PriceList
    table: tuple[Choice, ...]
    best: Choice
    cap: int
    share: float = 0.0
    quiet: int = 0
    probing: bool = False
    stale: bool = True
    doubt: float = 0.0
    rates: tuple[float, ...] = ()

    def chosen(self, rates: tuple[float, ...], variances: tuple[float, ...], hysteresis: float) -> Drafter:
        """With the best cap at these rates; another than the last one only if it is better by a share of `hysteresis`, and one
        half as long whose rounds are hardly shorter only if it is better by more: it would see less of what comes."""
        table = choices(self.prices, rates)
        best = max(table[1:], key=lambda c: c.rate, default=table[0])
        if 0 < self.best.cap < len(table) and hysteresis:
            kept = table[self.best.cap]
            if 2 * best.cap <= kept.cap and kept.ms < HARDLY * best.ms:
                hysteresis *= RELUCTANCE
            best = kept if best.rate < kept.rate * (1.0 + hysteresis) else best
        off = doubt(rates, variances, best.cap) if best.cap else 0.0
        return self._replace(table=table, best=best, cap=best.cap, probing=False, stale=False, doubt=off, rates=rates)

    def reckoned(self, rates: tuple[float, ...], variances: tuple[float, ...]) -> Drafter:
        """With what the best cap so far is worth at these rates; whether another one is better is not asked."""
        cap, width = self.best.cap, self.best.width
        best = Choice(cap, width, expected_tokens(rates, cap), round_ms(self.prices, rates, cap, width))
        return self._replace(best=best, doubt=doubt(rates, variances, cap), rates=rates)

    def beginning(self, cap: int) -> Drafter:
        """With this cap, or the longest that it has, until it was seen to draft."""
        best = self.table[min(cap, len(self.table) - 1)]
        return self._replace(best=best, cap=best.cap)


def new_drafter(prices: PriceList, source: str) -> Drafter:
    step = Choice(0, 1, 1.0, prices.verify[0] + prices.host)
    return Drafter(source, AcceptanceEstimate(), prices, prices, (step,), step, 0)


def mute(drafters: tuple[Drafter, ...], missed: float) -> tuple[Drafter, ...]:
    """Of several, asked in this order, let none draft where those behind it earn more, or a step without drafts does while
    another one's drafts pay; after RETRY rounds of silence it may once.

    One behind that was never heard counts by what is expected of it, unless rounds go by in which nobody speaks (`missed`).
    """
    if len(drafters) == 1:
        return drafters
    step = drafters[0].table[0].rate
    rate, heard = 0.0, []
    for known in reversed(drafters):
        others = any(d.share and d.best.rate > step for d in drafters if d is not known)
        # What one that was never heard earns is a guess, of which one round makes an end.
        if known.best.rate < max(rate if known.estimate.seen else 0.0, step if others else 0.0):
            due = known.quiet >= RETRY
            heard.append(known._replace(cap=known.best.cap if due else 0, probing=due))
            continue
        heard.append(known._replace(cap=known.best.cap, probing=False))
        if known.share or missed < SILENT:
            rate = max(rate, known.best.rate)
    return tuple(reversed(heard))


class Outlook(NamedTuple):
    """What the next round that is free to draft should gain over a plain step, in such steps; how far that may err, a standard
    deviation; and what the round loses if no draft stands."""

    gain: float = 0.0
    doubt: float = 0.0
    risk: float = 0.0


def outlook(drafters: tuple[Drafter, ...], missed: float, plain: float) -> Outlook:
    """The outlook where a plain step takes `plain` ms. Rounds of a drafter that is shut out fall to the next one behind that is
    not."""
    total = sum(d.share for d in drafters) + missed
    shares = [d.share / total if total else 1.0 / len(drafters) for d in drafters]
    tokens, cost, variance, over = 0.0, 0.0, 0.0, 0.0
    for known, share in zip(drafters, shares, strict=True):
        over += share
        if known.cap and not known.probing:
            tokens += over * known.best.tokens
            cost += over * known.best.ms / plain
            variance += (over * known.doubt) ** 2
            over = 0.0
    idle = over + (missed / total if total else 0.0)
    tokens, cost = tokens + idle, cost + idle * drafters[0].table[0].ms / plain
    return Outlook(tokens - cost, variance**0.5, cost - 1.0)


def could_pay(drafters: tuple[Drafter, ...]) -> bool:
    """Whether any acceptance short of perfect would make drafting faster than plain decoding."""
    return any(c.tokens / c.ms * d.prices.plain > 1.0 for d in drafters for c in choices(d.prices, (CEILING,))[1:])


def best_of(known: Drafter, offered: int, least: int) -> tuple[int, int]:
    """How many of `offered` drafts to keep, at least `least`, and in how many rows to verify them."""
    longest = min(offered, len(known.table) - 1)
    if longest <= least:
        return longest, known.table[longest].width
    if longest == known.best.cap:
        return longest, known.best.width
    # The drafter has run already, so its time counts alike for every cut.
    draft = known.prices.draft
    best = max(known.table[least : longest + 1], key=lambda c: c.tokens / (c.ms - draft[c.cap] + draft[longest]))
    return best.cap, best.width

"""Tokens per millisecond of every cap, and the best one. Pure; used by the adaptive cap, the calibrator and `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dspark.caps.correct import Factors
from dspark.caps.curve import CostCurve, line

# The buffers feed owed tokens by a forward of their own beyond this many.
MAX_OWED = 16
# Of its verify that a round takes at least, however much is saved by sending it ahead.
LEAST_SHARE = 0.1


class Choice(NamedTuple):
    """A cap, the rows to verify (more than cap + 1 where a wider verify is cheaper), and what a round of it is worth.

    tokens: expected committed tokens a sequence, the bonus included; ms: expected milliseconds.
    """

    cap: int
    width: int
    tokens: float
    ms: float

    @property
    def rate(self) -> float:
        """Committed tokens a millisecond."""
        return self.tokens / self.ms


class PriceList(NamedTuple):
    """Costs seen from one depth and batch, in milliseconds: verify[w - 1] of w rows; draft[k] of k tokens, its length less
    one being the longest draft; host, plain, replay, refeeds as in CostCurve. widths: those that may be verified, rising;
    tries: for each cap, the widths worth trying."""

    verify: tuple[float, ...]
    draft: tuple[float, ...]
    widths: tuple[int, ...]
    host: float
    plain: float
    replay: float
    refeeds: bool
    tries: tuple[tuple[int, ...], ...]

    def alone(self) -> PriceList:
        """Prices of rounds that are not sent before the ones in front are read: nothing is saved."""
        return self._replace(draft=tuple([max(ms, 0.0) for ms in self.draft])) if min(self.draft) < 0 else self

    def corrected(self, factors: Factors) -> PriceList:
        """Prices as this run has them. What may be padded stays as measured: a width that seems dear for a few rounds is no reason
        to try those above it, none of which was seen."""
        if factors.usual == 1.0 and not factors.own:
            return self
        widths = factors.by_width(len(self.verify))
        verify = tuple([ms * by for ms, by in zip(self.verify, widths, strict=True)])
        # What a drafter's rounds save is a share of what they take.
        draft = [ms * (factors.usual if ms >= 0 else by) for ms, by in zip(self.draft, widths, strict=False)]
        return self._replace(
            verify=verify,
            draft=tuple(draft),
            host=self.host * factors.usual,
            plain=self.plain * factors.plain,
        )


def price_list(costs: CostCurve, depth: float, source: str = "", most: int | None = None, batch: int = 1) -> PriceList:
    """What rounds drafted by `source` cost behind `depth` tokens, for caps up to `most` (what was measured where None)."""
    drafter = costs.draft(source)
    longest = costs.longest(source) if most is None else min(most, costs.longest(source))
    longest = min(longest, costs.widest - 1)
    verify = tuple(costs.verify_at(w, depth, batch) for w in range(1, costs.widest + 1))
    widths = costs.grids[0].widths if costs.fixed_widths else tuple(range(1, costs.widest + 1))
    return PriceList(
        verify=verify,
        draft=tuple(drafter.at(k) if drafter else 0.0 for k in range(longest + 1)),
        widths=widths,
        host=costs.host_ms,
        plain=costs.plain_at(depth, batch),
        replay=costs.replay_ms,
        refeeds=costs.refeeds,
        tries=_tries(verify, longest + 1, widths, costs.refeeds),
    )


def _tries(verify: Sequence[float], caps: int, widths: Sequence[int], refeeds: bool) -> tuple[tuple[int, ...], ...]:
    """Widths worth trying for each cap: its own, and the cheapest above where that is cheaper; all above where debts make a
    width's price depend on the cap."""
    usable, tries = set(widths), []
    above: tuple[int, ...] = ()
    for width in range(len(verify), 0, -1):
        own = (width,) if width in usable else ()
        if width <= caps:
            cheaper = refeeds or not own or any(verify[w - 1] < verify[width - 1] for w in above)
            tries.append(own + above if cheaper else own)
        if refeeds:
            above = own + above
        elif own and (not above or verify[width - 1] <= verify[above[0] - 1]):
            above = own
    return tuple(reversed(tries))


def expected_tokens(rates: Sequence[float], cap: int) -> float:
    """Accepted length at a cap: 1 + p1 + p1 p2 + ..., where rates[i] is the acceptance of draft i + 1 once all before it
    were accepted. Positions behind the last rate repeat it."""
    total = reach = 1.0
    for i in range(cap):
        reach *= rates[i] if i < len(rates) else rates[-1]
        total += reach
    return total


def doubt(rates: Sequence[float], variances: Sequence[float], cap: int) -> float:
    """Standard deviation of `expected_tokens`, where `rates` are known with these variances and err independently. The last
    one holds for all positions behind, and errs for all of them at once."""
    last = min(cap, len(rates)) - 1
    slopes = [0.0] * (last + 1)
    reach, behind = [], 1.0
    for i in range(cap):
        behind *= rates[min(i, last)]
        reach.append(behind)
    behind = 0.0
    for i in range(cap - 1, -1, -1):
        behind += reach[i]
        slopes[min(i, last)] += behind / max(rates[min(i, last)], 1e-3)
    return sum(s * s * v for s, v in zip(slopes, variances, strict=False)) ** 0.5


def with_verify(ms: float, verify: float) -> float:
    """Milliseconds of a round beside its verify, and that: never next to nothing, whatever is saved."""
    return max(ms + verify, LEAST_SHARE * verify)


def round_ms(prices: PriceList, rates: Sequence[float], cap: int, width: int) -> float:
    """Expected milliseconds of a round of `cap` drafts verified in `width` rows, its rejections included. Rows added as
    padding are rejections every round."""
    rejected = 1.0
    if width == cap + 1:
        for i in range(cap):
            rejected *= rates[i] if i < len(rates) else rates[-1]
        rejected = 1.0 - rejected
    return _round_ms(prices, cap, width, expected_tokens(rates, cap), rejected)


def _round_ms(prices: PriceList, cap: int, width: int, tokens: float, rejected: float) -> float:
    ms = prices.draft[cap] + prices.host + rejected * prices.replay
    if not prices.refeeds or rejected <= 0.0:
        return with_verify(ms, prices.verify[width - 1])
    kept = (tokens - (cap + 1) * (1.0 - rejected)) / rejected
    owed, pays = _debt(rejected, kept)
    return ms + _rows_ms(prices, width + owed) + pays * _rows_ms(prices, MAX_OWED)


def _debt(rejected: float, kept: float) -> tuple[float, float]:
    """Where every rejection puts `kept` tokens in front of the next block: how many are owed on average, and how often a
    round the debt is paid by a forward of its own. A run of n rejections reaches the bound; the chain renews there."""
    n = int(MAX_OWED / kept) + 1
    weights = [rejected**i for i in range(n)]
    total = sum(weights)
    return kept * sum(i * w for i, w in enumerate(weights)) / total, rejected * weights[-1] / total


def _rows_ms(prices: PriceList, rows: float) -> float:
    return line(range(1, len(prices.verify) + 1), prices.verify, rows)


def choices(prices: PriceList, rates: Sequence[float]) -> tuple[Choice, ...]:
    """The cheapest width for every cap, in order from cap 0, which is a step that nothing was drafted for and that cannot
    be sent ahead (`plain` is the price of one that can)."""
    found = []
    tokens = reach = 1.0
    known = len(rates)
    for cap, tries in enumerate(prices.tries):
        if cap:
            reach *= rates[cap - 1] if cap <= known else rates[-1]
            tokens += reach
        best, width = float("inf"), 0
        for tried in tries:
            ms = _round_ms(prices, cap, tried, tokens, 1.0 - reach if tried == cap + 1 else 1.0)
            if ms < best:
                best, width = ms, tried
        if not width:
            break
        found.append(Choice(cap, width, tokens, best))
    return tuple(found)


def best_cap(
    costs: CostCurve,
    rates: Sequence[float],
    depth: float = 0,
    source: str = "",
    most: int | None = None,
    batch: int = 1,
) -> Choice:
    """The cap and width that commit most tokens a millisecond, over all caps and widths. Cap 0 is plain pipelined decoding.

    rates: acceptance by position (`Estimator.rates`); depth: tokens of context; source: who drafts. Of equals the smaller
    cap. Costs a loop over caps times widths, some 0.1 ms.
    """
    prices = price_list(costs, depth, source, most, batch)
    plain = Choice(0, 1, 1.0, prices.plain)
    return max((plain, *choices(prices, rates)[1:]), key=lambda c: c.rate)


def speed_ups(
    costs: CostCurve, depth: float, source: str = "", most: int | None = None
) -> list[tuple[float, Choice, float]]:
    """For acceptances 0.5 to 0.95 alike at all positions: the best choice and how many times plain decoding it is."""
    plain = costs.plain_at(depth)
    table = []
    for rate in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        choice = best_cap(costs, (rate,), depth, source, most)
        table.append((rate, choice, choice.rate * plain))
    return table

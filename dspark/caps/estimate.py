"""Acceptance by draft position, learned from what rounds reveal and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import attrs

from dspark.errors import InputError

# How much better a position that was never judged is taken to be than the one before it.
RISE = 1.25


class AcceptanceEstimate(NamedTuple):
    """Discounted counts by draft position: how often a position was judged, and how often it was accepted then.

    low, high: how far accepted counts have lately run below and above what these rates expect, in standard deviations.
    """

    seen: tuple[float, ...] = ()
    hits: tuple[float, ...] = ()
    low: float = 0.0
    high: float = 0.0


@attrs.frozen
class Estimator:
    """Moves an `AcceptanceEstimate` on.

    A round of n offered drafts of which a were accepted judges positions 1 to min(a + 1, n): those behind the first
    rejection, and those not offered, are censored. Full acceptance therefore says nothing about the next position.

    prior: acceptance expected before anything was seen; weight: how many judged drafts a prior counts as; lean: how many the
    position before counts as, at later positions without a prior; memory: rounds after which a round's evidence has faded to
    1/e; rest_weight: evidence that a rest (no drafting) leaves at most, so that a probe afterwards is believed; alarm, slack:
    the text is taken to have changed, and old evidence counts as one judged draft, once accepted counts ran more than
    `alarm` standard deviations off, `slack` of one forgiven each round (Page's cumulative sum test, Biometrika 41, 1954).
    """

    prior: float = 0.65
    weight: float = 3.0
    lean: float = 1.0
    memory: float = 30.0
    rest_weight: float = 1.0
    alarm: float = 4.0
    slack: float = 0.5

    def __attrs_post_init__(self) -> None:
        if not 0 < self.prior < 1:
            raise InputError(f"prior is {self.prior}; an acceptance lies between 0 and 1")
        for name in ("weight", "lean", "memory", "rest_weight", "alarm", "slack"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} is {getattr(self, name)}; it must be above 0")

    def init(self) -> AcceptanceEstimate:
        return AcceptanceEstimate()

    def observe(
        self,
        estimate: AcceptanceEstimate,
        offered: int,
        accepted: int,
        cut: bool = False,
        prior: Sequence[float] = (),
        rates: Sequence[float] = (),
    ) -> AcceptanceEstimate:
        """The estimate after a round. `cut`: the round ended early, so the draft behind the accepted ones was not judged; rates:
        those of the estimate, or of one some rounds older, where they are known."""
        judged = accepted if cut else min(accepted + 1, offered)
        if not cut:
            estimate = self._watched(estimate, offered, accepted, rates or self.rates(estimate, prior))
        keep = 1.0 - 1.0 / (1.0 + self.memory)
        grow = (0.0,) * (judged - len(estimate.seen))
        seen = [s * keep for s in estimate.seen + grow]
        hits = [h * keep for h in estimate.hits + grow]
        for i in range(judged):
            seen[i] += 1.0
            hits[i] += i < accepted
        return estimate._replace(seen=tuple(seen), hits=tuple(hits))

    def rest(self, estimate: AcceptanceEstimate, rounds: int) -> AcceptanceEstimate:
        """The estimate after `rounds` rounds without drafts: rates stay, their evidence fades, down to `rest_weight`."""
        fade = (1.0 - 1.0 / (1.0 + self.memory)) ** rounds
        return _weaker(estimate, fade, self.rest_weight)

    def rates(self, estimate: AcceptanceEstimate, prior: Sequence[float] = ()) -> tuple[float, ...]:
        """Acceptance of each position judged so far or named by `prior` (in place of the estimator's own number), given
        that all before it were accepted; the last one holds for all behind. Where little was seen, a position leans on its
        prior, and without one on the position before it, raised by RISE up to the usual prior: where one draft stood the next
        ones often do, since texts differ more than positions, and only what is offered can be judged."""
        before, rates, known = prior[0] if prior else self.prior, [], len(prior)
        seen, hits, weight, usual = estimate.seen, estimate.hits, self.weight, 0.0 if prior else self.prior
        for i in range(max(len(seen) + 1, known)):
            before = prior[i] if i < known else max(before, min(usual, RISE * before))
            if i < len(seen):
                before = (hits[i] + weight * before) / (seen[i] + weight)
            if i + 1 >= known:
                weight = self.lean
            rates.append(before)
        return tuple(rates)

    def doubts(
        self, estimate: AcceptanceEstimate, rates: Sequence[float], prior: Sequence[float] = ()
    ) -> tuple[float, ...]:
        """Variance of each of `rates`, which this estimate gave: that of a beta distribution by as many judged drafts as were
        seen and as its prior counts as. A position never judged has its prior's."""
        seen, known = estimate.seen, len(prior)
        weights = [self.weight if i < max(known, 1) else self.lean for i in range(len(rates))]
        counts = [w + (seen[i] if i < len(seen) else 0.0) for i, w in enumerate(weights)]
        return tuple([p * (1.0 - p) / (n + 1.0) for p, n in zip(rates, counts, strict=True)])

    def _watched(
        self, estimate: AcceptanceEstimate, offered: int, accepted: int, rates: Sequence[float]
    ) -> AcceptanceEstimate:
        off = _surprise(rates, offered, accepted)
        low = max(estimate.low - off - self.slack, 0.0)
        high = max(estimate.high + off - self.slack, 0.0)
        if max(low, high) <= self.alarm:
            return estimate._replace(low=low, high=high)
        return _weaker(estimate, 0.0, 1.0)._replace(low=0.0, high=0.0)


def _weaker(estimate: AcceptanceEstimate, fade: float, least: float) -> AcceptanceEstimate:
    """Counts scaled by `fade`, but not below `least` judged drafts a position; rates stay."""
    scale = [max(least / s, fade) if s > least else 1.0 for s in estimate.seen]
    return estimate._replace(
        seen=tuple(s * f for s, f in zip(estimate.seen, scale, strict=True)),
        hits=tuple(h * f for h, f in zip(estimate.hits, scale, strict=True)),
    )


def _surprise(rates: Sequence[float], offered: int, accepted: int) -> float:
    """How many standard deviations an accepted count lies above its mean. A tenth of a draft is added to the variance, so
    that a rate near 0 or 1 is not an oath."""
    reach, mean, square = 1.0, 0.0, 0.0
    for i in range(offered):
        reach *= rates[i] if i < len(rates) else rates[-1]
        mean += reach
        square += (2 * i + 1) * reach
    return (accepted - mean) / sqrt(max(square - mean * mean, 0.0) + 0.1)

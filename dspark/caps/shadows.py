"""When drafts are made beside plain steps only to be judged, and what they must show before drafting begins again."""

from __future__ import annotations

from typing import NamedTuple

from dspark.caps.drafters import Drafter

# How many times cheaper than a lost round a shadow must be: where it is not, a round that may gain tells more.
CHEAPER = 4.0
# What a shadow costs at least, in plain steps: a drafter that runs beside the host in a round runs beside nothing here.
LEAST = 0.1
# What the shadows of a park must have gained in all, had they been rounds, in plain steps.
SIGNS = 3.0
# Plain steps that a shadow's time falls into: the one under way when it is made, and the one behind it.
FALLS = 2
# Parks in a row that shadows may prolong: prices are only learned from rounds that draft.
IN_A_ROW = 8


class Shadows(NamedTuple):
    """judged: shadows of this park that were; since: plain rounds since drafts were judged last; signs: what they would have
    gained, in plain steps, since that was last nothing; falling: rounds to come that a shadow's time may fall into; parks:
    those prolonged in a row."""

    judged: int = 0
    since: int = 0
    signs: float = 0.0
    falling: int = 0
    parks: int = 0

    @property
    def stay(self) -> bool:
        """Whether shadows of this park make a probe needless that is expected to lose."""
        return self.judged > 0 and self.parks < IN_A_ROW

    def prolonged(self) -> Shadows:
        return self._replace(judged=0, parks=self.parks + 1)

    def rested(self, made: bool) -> Shadows:
        """After a parked round."""
        return self._replace(since=self.since + 1, falling=FALLS - 1 if made else max(self.falling - 1, 0))

    def showed(self, known: Drafter, offered: int, accepted: int, plain: float) -> Shadows:
        """After a shadow of `known` was judged, where a plain step takes `plain` ms."""
        best = known.best
        gained = min(accepted, best.cap) + 1 - best.ms / plain if best.cap else 0.0
        return self._replace(judged=self.judged + 1, since=0, signs=max(self.signs + gained, 0.0))


def price(drafters: tuple[Drafter, ...], plain: float) -> float:
    """What a shadow costs at most, in plain steps: every drafter is asked. 0 where none may draft."""
    asked = [d.prices.draft[min(d.cap, len(d.prices.draft) - 1)] for d in drafters if d.cap]
    return max(sum(asked) / plain, LEAST) if asked else 0.0

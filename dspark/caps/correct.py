"""How far this run's rounds are off the measured curve: a median of a few recent ones for each width."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf, log
from types import MappingProxyType
from typing import NamedTuple

KEEP = 7
# Rounds after which half of what a width taught is forgotten: a width thought dear is tried again some day.
HALF_LIFE = 512
# Rows over which half of what a width has of its own is lost.
REACH = 2
# The key of plain pipelined steps; verifies use their width.
PLAIN = 0


class Window(NamedTuple):
    """Logs of observed over predicted milliseconds at one width, the newest last, and the round of the newest."""

    key: int
    round: int
    logs: tuple[float, ...]


class Correction(NamedTuple):
    """One window a width seen. It begins with two zeros, the curve's own word, so that one slow round changes nothing."""

    windows: tuple[Window, ...] = ()

    def observe(self, key: int, round: int, predicted_ms: float, observed_ms: float, sure: bool = True) -> Correction:
        """After a round of `key` rows. Times that are no positive numbers teach nothing. Not `sure`: the curve is a guess,
        and its word does not count."""
        if not (0 < observed_ms < float("inf") and predicted_ms > 0):
            return self
        ratio = log(observed_ms / predicted_ms)
        others = tuple(w for w in self.windows if w.key != key)
        old = next((w.logs for w in self.windows if w.key == key), (0.0, 0.0) if sure else ())
        return Correction((*others, Window(key, round, (*old, ratio)[-KEEP:])))

    def age(self, key: int, round: int) -> float:
        """Rounds since a width was last observed; infinite where it never was."""
        return next((round - w.round for w in self.windows if w.key == key), float("inf"))

    def off(self) -> float:
        """How far rounds are off the curve where they are most, as the absolute of a logarithm; half a window says nothing."""
        return max((abs(_median(w.logs)) for w in self.windows if w.key != PLAIN), default=0.0)

    def factors(self, round: int, near: bool = False) -> Factors:
        """What to multiply predictions with.

        What all widths have in common (a throttled machine) is told from what one has of its own by shrinkage: the common
        part is a mean with two of the curve's own zeros. Neighbours go through the same kernels: of what a width has of its own
        half is believed of one that was not seen, REACH rows further on. `near`: the curve is a guess, so that all of it is,
        whatever the distance.
        """
        own = {w.key: _median(w.logs) * 0.5 ** ((round - w.round) / HALF_LIFE) for w in self.windows}
        common = sum(own.values()) / (len(own) + 2)
        factors = {key: exp(value) for key, value in own.items()}
        return Factors(exp(common), factors, inf if near and any(own) else REACH)


class Factors(NamedTuple):
    """usual: for widths far from all that were seen; own: by width seen, and PLAIN; reach: rows over which half of what a width
    has of its own is lost."""

    usual: float = 1.0
    own: Mapping[int, float] = MappingProxyType({})
    reach: float = REACH

    @property
    def plain(self) -> float:
        """For plain steps; where the curve is a guess, they were measured."""
        return self.own.get(PLAIN, self.usual if self.reach < inf else 1.0)

    def by_width(self, count: int) -> list[float]:
        """For widths 1 to `count`."""
        seen = sorted(key for key in self.own if key != PLAIN)
        if not seen:
            return [self.usual] * count
        found, at = [], 0
        for width in range(1, count + 1):
            while at + 1 < len(seen) and seen[at + 1] - width < abs(width - seen[at]):
                at += 1
            share = 0.5 ** (abs(width - seen[at]) / self.reach)
            found.append(self.usual * (self.own[seen[at]] / self.usual) ** share)
        return found


def _median(values: tuple[float, ...]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

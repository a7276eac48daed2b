"""How far this run's rounds are off the measured curve: a median of a few recent ones for each width."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log
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

    def factors(self, round: int, near: bool = False) -> tuple[float, Mapping[int, float]]:
        """What to multiply predictions with: one factor for widths far from those seen, and those of the widths seen and near.

        What all widths have in common (a throttled machine) is told from what one has of its own by shrinkage: the common
        part is a mean with two of the curve's own zeros. Half of what one has of its own each REACH rows further on share with
        it. `near`: the curve is a guess, so that a width never seen is taken to be as far off as the nearest one that was.
        """
        own = {w.key: _median(w.logs) * 0.5 ** ((round - w.round) / HALF_LIFE) for w in self.windows}
        common = sum(own.values()) / (len(own) + 2)
        factors = {key: exp(value) for key, value in own.items()}
        return exp(common), Nearest(factors) if near and any(own) else Fading(factors)


class Fading(dict[int, float]):
    """Factors by width, where a width that is not there has something of the one nearest to it: neighbours go through the same
    kernels."""

    def get(self, key: int, default: float = 1.0) -> float:  # type: ignore[override]
        near = None if key == PLAIN or key in self else self.nearest(key)
        if near is None:
            return super().get(key, default)
        return default * (self[near] / default) ** (0.5 ** (abs(near - key) / REACH))

    def nearest(self, key: int) -> int | None:
        """The width nearest to this one."""
        return min((k for k in self if k != PLAIN), key=lambda k: abs(k - key), default=None)


class Nearest(Fading):
    """Factors by width, where a width that is not there has the factor of the one nearest to it. A plain step that was not
    corrected is as it was measured."""

    def get(self, key: int, default: float = 1.0) -> float:
        if key == PLAIN or key in self:
            return dict.get(self, key, 1.0)
        near = self.nearest(key)
        return default if near is None else self[near]


def _median(values: tuple[float, ...]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

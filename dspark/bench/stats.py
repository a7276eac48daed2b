"""What can be said of repeated measurements: medians, spreads, and a ratio only where the runs can carry one. Pure numbers."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

DRAWS = 2000
LEVEL = 0.95
# Fewer leave a bootstrap too sure of itself.
MIN_PAIRS = 8
# An interval whose ends differ by more than this factor leaves open how large an effect is.
MAX_WIDTH = 2.0

Ratios = Sequence[Sequence[float]]


class Spread(NamedTuple):
    """Median and quartiles of so many values."""

    median: float
    low: float
    high: float
    count: int


class Interval(NamedTuple):
    """A ratio, its bootstrap interval, and of how many pairs and prompts it is."""

    ratio: float
    low: float
    high: float
    pairs: int
    prompts: int


class SpeedUp(NamedTuple):
    """A ratio that may be printed, or why none may: then `refused` says it and the interval is all there is."""

    interval: Interval | None
    refused: str | None


def spread(values: Sequence[float]) -> Spread | None:
    """Median and quartiles; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return Spread(_quantile(ordered, 0.5), _quantile(ordered, 0.25), _quantile(ordered, 0.75), len(ordered))


def paired(ours: Sequence[Sequence[float | None]], theirs: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Ratios ours / theirs of runs that stood side by side: for each prompt, one a repeat. Pairs with a gap are left out, and
    so are prompts with no pair."""
    found = [[a / b for a, b in zip(mine, its, strict=True) if a and b] for mine, its in zip(ours, theirs, strict=True)]
    return [ratios for ratios in found if ratios]


def bootstrap(ratios: Ratios, draws: int = DRAWS, seed: int = 0) -> Interval | None:
    """The geometric mean over prompts of each prompt's median ratio, and its 95 % interval; None of nothing.

    Prompts are drawn with replacement, and of each drawn prompt its repeats: the interval holds for other prompts of the kind
    as well as for other runs of these. Percentile method; the same seed gives the same interval.
    """
    if not ratios:
        return None
    chance = random.Random(seed)
    logs = [[math.log(r) for r in prompt] for prompt in ratios]
    means = sorted(
        _mean([_median(chance.choices(p, k=len(p))) for p in chance.choices(logs, k=len(logs))]) for _ in range(draws)
    )
    tail = (1 - LEVEL) / 2
    low, high = _quantile(means, tail), _quantile(means, 1 - tail)
    point = _mean([_median(prompt) for prompt in logs])
    return Interval(math.exp(point), math.exp(low), math.exp(high), sum(map(len, ratios)), len(ratios))


def speed_up(ratios: Ratios, draws: int = DRAWS, seed: int = 0) -> SpeedUp:
    """The ratio, or why these runs carry none: too few pairs, an interval that holds 1, or one that is too wide."""
    found = bootstrap(ratios, draws, seed)
    if found is None:
        return SpeedUp(None, "nothing was measured on both sides")
    if found.pairs < MIN_PAIRS:
        runs = "1 pair of runs is" if found.pairs == 1 else f"{found.pairs} pairs of runs are"
        return SpeedUp(found, f"{runs} too few, {MIN_PAIRS} are needed")
    between = f"the interval from {found.low:.2f} to {found.high:.2f}"
    if found.low <= 1 <= found.high:
        return SpeedUp(found, f"no difference that these runs can show: {between} holds 1")
    if found.high > MAX_WIDTH * found.low:
        way = "at least" if found.low > 1 else "at most"
        bound = found.low if found.low > 1 else found.high
        return SpeedUp(found, f"{way} {bound:.2f}, but {between} is too wide for a figure")
    return SpeedUp(found, None)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _quantile(ordered: Sequence[float], q: float) -> float:
    """By linear interpolation between the neighbours."""
    at = q * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])

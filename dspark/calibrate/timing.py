"""Medians of interleaved repeats: what a disturbed or throttled machine says is noticed, and said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

# Passes over all cases: at least, at most, and further ones for those that are noisy.
LEAST, MOST, AGAIN = 3, 15, 4
# A figure whose middle half spreads more than this, to either side, is noisy; a machine that got slower by more is throttled.
NOISY, THROTTLED = 0.1, 0.1

Progress = Callable[[int, int, str], None]


class Case(NamedTuple):
    """Something to time. `run` does it once, waits for the device, and returns the milliseconds that count."""

    name: str
    run: Callable[[], float]


class Timed(NamedTuple):
    """A case's median in milliseconds, and the half-width of its middle half as a share of it."""

    ms: float
    spread: float


class Times(NamedTuple):
    """What timing found: `timed` by the cases' names; `notes`: sentences on its quality, none if it is good; `slower`: by what
    share the machine got slower meanwhile."""

    timed: dict[str, Timed]
    notes: tuple[str, ...]
    slower: float = 0.0

    @property
    def quiet(self) -> bool:
        """Whether at most a quarter of the figures is noisy, and the machine was not throttled."""
        noisy = sum(t.spread > NOISY for t in self.timed.values())
        return 4 * noisy <= len(self.timed) and self.slower <= THROTTLED

    @property
    def spread(self) -> float:
        return max(t.spread for t in self.timed.values())


def time_cases(
    cases: Sequence[Case],
    budget_s: float,
    progress: Progress | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Times:
    """Run all cases in turn, for about `budget_s`. They must be warm: what they run is compiled and in the caches.

    In turn, so that whatever disturbs the machine disturbs all alike. Noisy cases get further passes, for half
    as long at most.
    """
    samples: dict[str, list[float]] = {case.name: [] for case in cases}
    tell = progress or (lambda done, total, what: None)
    passes, n, start = LEAST, 0, clock()
    while n < passes:
        for i, case in enumerate(cases):
            tell(n * len(cases) + i, passes * len(cases), case.name)
            samples[case.name].append(case.run())
        n += 1
        passes = max(LEAST, min(MOST, int(budget_s / ((clock() - start) / n or 1e-9))))
    until = clock()
    early = {name: list(found) for name, found in samples.items()}
    for again in range(AGAIN):
        for case in cases:
            if clock() - until > budget_s / 2:
                break
            if _timed(samples[case.name]).spread > NOISY:
                tell(n * len(cases), n * len(cases), f"{case.name}, again: the machine is not quiet ({again + 1})")
                samples[case.name].append(case.run())
    timed = {name: _timed(found) for name, found in samples.items()}
    ratios = [median(found[-(len(found) // 2) :]) / median(found[: len(found) // 2]) for found in early.values()]
    slower = median(ratios) - 1
    return Times(timed, tuple(_notes(timed, slower)), slower)


def _timed(samples: Sequence[float]) -> Timed:
    ordered, n = sorted(samples), len(samples)
    middle = median(ordered)
    low, high = ordered[n // 4], ordered[n - 1 - n // 4]
    return Timed(middle, (high - low) / 2 / middle if middle > 0 else 0.0)


def _notes(timed: dict[str, Timed], slower: float) -> list[str]:
    notes = []
    noisy = {name: t.spread for name, t in timed.items() if t.spread > NOISY}
    if noisy:
        worst = max(noisy, key=lambda name: noisy[name])
        notes.append(
            f"the machine was not quiet: {len(noisy)} of {len(timed)} figures varied by more than {NOISY:.0%}, most "
            f"the {worst} by {noisy[worst]:.0%}; calibrate again when nothing else runs"
        )
    if slower > THROTTLED:
        notes.append(
            f"the machine got {slower:.0%} slower while it was measured (heat?); calibrate again when it is cool"
        )
    return notes

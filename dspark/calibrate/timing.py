"""Medians of interleaved repeats: what a disturbed or throttled machine says is noticed, and said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

# Passes over all cases: at least, at most, and further ones for those that are noisy.
LEAST, MOST, AGAIN = 3, 40, 4
# A case that takes less is short.
SHORT_MS = 5.0
# A figure whose median may be off by more than this, a standard error, is noisy; a machine that got slower by more is throttled.
NOISY, THROTTLED = 0.1, 0.1
# The standard error of a median of n normal samples is 1.253 standard deviations / sqrt(n), one of these 1.483 half-widths of
# the middle half.
ERROR = 1.253 * 1.483

Progress = Callable[[int, int, str], None]


class Case(NamedTuple):
    """Something to time. `run` does it once, waits for the device, and returns the milliseconds that count."""

    name: str
    run: Callable[[], float]


class Timed(NamedTuple):
    """A case's median in milliseconds, the half-width of its middle half as a share of it, and how far the median may be off: its
    standard error, a share too. Many repeats of a noisy figure say as much as a few of a steady one."""

    ms: float
    spread: float
    error: float = 0.0


class Times(NamedTuple):
    """What timing found: `timed` by the cases' names; `notes`: sentences on its quality, none if it is good; `slower`: by what
    share the machine got slower meanwhile."""

    timed: dict[str, Timed]
    notes: tuple[str, ...]
    slower: float = 0.0

    @property
    def quiet(self) -> bool:
        """Whether at most a quarter of the figures is noisy, and the machine was not throttled."""
        noisy = sum(t.error > NOISY for t in self.timed.values())
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

    In turn, so that whatever disturbs the machine disturbs all alike. Where it got slower meanwhile, all are run anew, for half
    as long: clocks settle once, and what the machine keeps up from then on is what counts. Noisy cases get further passes, for
    half as long at most.
    """
    tell = progress or (lambda done, total, what: None)
    samples = _series(cases, budget_s, tell, clock)
    # Of so few passes one is the last by luck, and doing all again takes as long as they did.
    few = min(map(len, samples.values())) == LEAST
    if (slower := _slower(samples) / (2 if few else 1)) > THROTTLED:
        again = lambda done, total, what: tell(done, total, f"{what}, again: the machine got slower")
        samples = _series(cases, budget_s / 2, again, clock)
        slower = _slower(samples)
    until, total = clock(), sum(map(len, samples.values()))
    for n in range(AGAIN):
        for case in cases:
            if clock() - until > budget_s / 2:
                break
            if _timed(samples[case.name]).error > NOISY:
                tell(total, total, f"{case.name}, again: the machine is not quiet ({n + 1})")
                samples[case.name].append(_run(case))
    timed = {name: _timed(found) for name, found in samples.items()}
    return Times(timed, tuple(_notes(timed, slower)), slower)


def _series(
    cases: Sequence[Case], budget_s: float, tell: Progress, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Milliseconds of each case, of as many passes over all as the time is enough for."""
    samples: dict[str, list[float]] = {case.name: [] for case in cases}
    passes, n, start = LEAST, 0, clock()
    while n < passes:
        for i, case in enumerate(cases):
            tell(n * len(cases) + i, passes * len(cases), case.name)
            samples[case.name].append(_run(case))
        n += 1
        passes = max(LEAST, min(MOST, int(budget_s / ((clock() - start) / n or 1e-9))))
    return samples


def _run(case: Case) -> float:
    """Milliseconds of one run. A short one runs twice, and the second time counts: rounds follow others of their kind, and what
    ran before on the device may not have ended."""
    took = case.run()
    return took if took > SHORT_MS else case.run()


def _slower(samples: dict[str, list[float]]) -> float:
    """By what share the second half of the passes took longer than the first."""
    ratios = [median(found[-(len(found) // 2) :]) / median(found[: len(found) // 2]) for found in samples.values()]
    return median(ratios) - 1


def _timed(samples: Sequence[float]) -> Timed:
    ordered, n = sorted(samples), len(samples)
    middle = median(ordered)
    low, high = ordered[n // 4], ordered[n - 1 - n // 4]
    spread = (high - low) / 2 / middle if middle > 0 else 0.0
    return Timed(middle, spread, ERROR * spread / n**0.5)


def _notes(timed: dict[str, Timed], slower: float) -> list[str]:
    notes = []
    noisy = {name: t.error for name, t in timed.items() if t.error > NOISY}
    if noisy:
        worst = max(noisy, key=lambda name: noisy[name])
        notes.append(
            f"the machine was not quiet: {len(noisy)} of {len(timed)} figures may be off by more than {NOISY:.0%}, "
            f"most the {worst} by {noisy[worst]:.0%}; calibrate again when nothing else runs"
        )
    if slower > THROTTLED:
        notes.append(
            f"the machine got {slower:.0%} slower while it was measured (heat?); calibrate again when it is cool"
        )
    return notes

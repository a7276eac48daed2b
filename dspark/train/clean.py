"""Find loops: an answer whose end repeats itself teaches a drafter nothing and flatters its acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A tail counts as a loop from so many tokens, and from so many repeats of its period.
SHORTEST_LOOP = 16
REPEATS = 3


def loop_start(tokens: Sequence[int]) -> int | None:
    """Where a periodic tail begins: the first of the tokens that only repeat. None where the text ends otherwise.

    A tail is periodic when each of its tokens equals the one a period before it, over at least two more periods and
    SHORTEST_LOOP tokens; the first period itself is not part of it.
    """
    text = np.asarray(tokens)
    best = None
    for period in range(1, len(text) // REPEATS + 1):
        differs = np.flatnonzero(text[period:] != text[:-period])
        start = period + (int(differs[-1]) + 1 if differs.size else 0)
        repeated = len(text) - start
        if repeated >= max((REPEATS - 1) * period, SHORTEST_LOOP) and (best is None or start < best):
            best = start
    return best


def cut_loop(tokens: Sequence[int]) -> list[int]:
    """The tokens without their periodic tail."""
    start = loop_start(tokens)
    return list(tokens) if start is None else list(tokens[:start])

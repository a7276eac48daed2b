"""Which widths and caps of a recipe are worth measuring."""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import log

from dspark.stages.base import AbstractDraft

# Widths beyond a block that lookup may use, and those of a quick measurement. GPU kernels change at multiples of 8.
LOOKUP_WIDTHS = (8, 9, 12, 16, 24, 33)
QUICK_WIDTHS = (1, 2, 4, 8, 16, 33)
# On a CPU nothing changes at them.
CPU_WIDTHS = (8, 12, 16, 33)
# Next kernel sizes, to one of which a block may be padded.
KERNELS = (8, 16, 32)
# Narrow widths, whose slope says whether a wide one can be afforded.
FIRST_ROWS = 4
# Rows that are measured one by one for a recipe of lookup alone, and a drafter without a bound of its own.
EACH, UNBOUNDED = 4, 8


def widths_for(draft: AbstractDraft, quick: bool = False, kind: str = "") -> tuple[int, ...]:
    """Widths to verify on a backend of this kind: each up to the block's, the next to which a block may be padded, and some that
    lookup uses."""
    block = block_width(draft)
    lookup = max((longest(d) + 1 for d in drafters(draft) if looks_up(d)), default=0)
    most = max(block, lookup)
    usual = QUICK_WIDTHS if quick else CPU_WIDTHS if kind == "cpu" else LOOKUP_WIDTHS
    some = [w for w in usual if lookup or w <= block]
    widths = (
        {1, 2, most} | {w for w in some if w <= most} | {w for w in KERNELS if block < w}.intersection(_next(block))
    )
    if not quick:
        widths |= set(range(1, (block or EACH) + 1))
    return tuple(sorted(widths))


def block_width(draft: AbstractDraft) -> int:
    """Rows of the longest block that a network drafts; 0 where none does."""
    return max((longest(d) + 1 for d in drafters(draft) if not looks_up(d)), default=0)


def by_worth(widths: Sequence[int], needed: Container[int]) -> list[int]:
    """Widths in the order in which they should be measured while there is time: those needed, then such that halve what is
    left between, for what lies between is interpolated."""
    order = [w for w in widths if w in needed] or [widths[0]]
    left = [w for w in widths if w not in order]
    while left:
        gap = lambda w: min(abs(log(w / known)) for known in order)
        # Wide ones tell by how they compare with narrow ones, so these come first.
        best = max(left, key=lambda w: (w <= FIRST_ROWS, gap(w)))
        order.append(best)
        left.remove(best)
    return order


def caps_for(draft: AbstractDraft) -> tuple[int, ...]:
    """Caps at which a drafter is timed; between them its time is interpolated."""
    most = longest(draft)
    return tuple(sorted({1, (most + 1) // 2, most}))


def drafters(draft: AbstractDraft) -> tuple[AbstractDraft, ...]:
    """The drafters of a pipeline in the order in which they are asked, those that never draft left out."""
    branches = getattr(draft, "branches", None)
    found = [d for branch in branches for d in drafters(branch)] if branches else [draft]
    return tuple(d for d in found if d.longest != 0)


def longest(draft: AbstractDraft) -> int:
    return draft.longest or UNBOUNDED


def looks_up(draft: AbstractDraft) -> bool:
    """Whether a drafter works on host tokens alone: it runs no network, so its time is not the device's."""
    return "host_tokens" in draft.needs and not draft.target_layer_ids


def _next(block: int) -> set[int]:
    """The next kernel size above a block."""
    return {next((w for w in KERNELS if w > block), KERNELS[-1])} if block else set()

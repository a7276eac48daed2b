"""A machine whose rounds take what a table says, and text whose drafts stand by a script: caps can be tried in no time."""

from __future__ import annotations

import random
from collections.abc import Callable

from dspark.caps import AbstractCap
from dspark.caps.base import cap_for
from dspark.caps.curve import CostCurve, DraftCost, Grid
from dspark.records import RoundEvent, RowCommit

# (milliseconds by width, plain pipelined step, drafter for one token and for each more, host), shared/facts-like shapes.
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
MACHINES = {
    "flat": ((130, 140, 155, 170, 172, 175, 178, 180, 182, 190, 200), 130, (12, 1.0), 3),
    "knee8": ((8.9, 12.8, 16.2, 19.6, 22.6, 25.8, 29.5, 18.7, 18.4, 18.2, 18.6), 9.1, (1.5, 0.05), 0.5),
    "step2": ((10.5, 17.3, 17.1, 17.5, 18.2, 18.4, 18.0, 17.8, 17.6, 17.6, 16.2), 9.1, (1.5, 0.05), 0.5),
    "linear": (tuple(179 * w for w in WIDTHS), 179, (12, 1.0), 3),
    "gentle": ((20, 21, 22, 23, 25, 28, 31, 34, 37, 46, 60), 20, (2.0, 0.2), 0.5),
}


def machine(name: str, longest: int = 7, slope: float = 0.0, **options) -> CostCurve:
    """The curve of a machine of the table; `slope` is what 1000 tokens of context add, as a share."""
    verify, plain, (first, more), host = MACHINES[name]
    deep = 1 + slope * 8
    grid = Grid(
        (0, 8000), WIDTHS, [verify, [v * deep for v in verify]], [plain, plain * deep]
    )
    caps = tuple(range(1, longest + 1))
    drafts = [DraftCost("lookup", (1, 15), (0.01, 0.01)), DraftCost("dspark", caps, [first + more * (k - 1) for k in caps])]
    return CostCurve([grid], drafts, host_ms=host, **options)


class Text:
    """`length` tokens; whether a draft of token t stands, given that those before it did, is fixed beforehand."""

    def __init__(self, rate: Callable[[int], float], length: int, seed: int, hit: Callable[[int], float] | None = None):
        rng = random.Random(seed)
        self.length = length
        self.right = [rng.random() < rate(t) for t in range(length)]
        self.copied = [rng.random() < hit(t) for t in range(length)] if hit else [False] * length

    def accepted(self, at: int, offered: int, source: str) -> int:
        bits = self.right if source == "dspark" else self.copied
        n = 0
        while n < offered and at + n < self.length and bits[at + n]:
            n += 1
        return n


class Run:
    """Decode a text under a cap; `ms` is what it took, `caps` what was offered round by round."""

    def __init__(self, cap: AbstractCap, text: Text, truth: CostCurve, costs: CostCurve | None, seed: int = 0, noise: float = 0.03, lookup: bool = False):
        self.ms, self.caps, self.events = 0.0, [], []
        rng = random.Random(seed)
        carry, at, was_plain = cap.init(costs), 0, False
        while at < text.length:
            offer = cap.propose(carry)
            parked = cap.parked_rounds(carry) > 0
            source, drafted, width, draft_ms = "plain", 0, 1, 0.0
            if offer:
                if lookup and at > 3 and all(text.copied[at - 3 : at]):
                    source, drafted = "lookup", cap_for(offer, ("lookup",))
                elif truth.draft("dspark"):
                    source, drafted = "dspark", cap_for(offer, ("dspark",))
                    drafted = min(drafted, truth.longest("dspark"))
                if drafted:
                    draft_ms = truth.draft(source).at(drafted)
                    drafted, width = cap.fit(carry, source, drafted)
            accepted = text.accepted(at, drafted, source)
            kept = min(accepted + 1, text.length - at)
            if parked and was_plain:
                ms = truth.plain_at(at)
            else:
                ms = truth.verify_at(width, at) + truth.host_ms + draft_ms
            ms *= max(1 + rng.gauss(0, noise), 0.5)
            was_plain = parked
            row = RowCommit(0, (1,) * kept, min(accepted, kept), drafted, source if drafted else "plain")
            event = RoundEvent(
                len(self.caps) + 1, (row,), int(offer), cap.reason(carry), width, 1, ms, (at,), predicted_ms=cap.predicted_ms(carry)
            )
            carry = cap.observe(carry, event)
            at += kept
            self.ms += ms
            self.caps.append(drafted)
            self.events.append(event)
        self.carry = carry


def plain_ms(text: Text, truth: CostCurve) -> float:
    return sum(truth.plain_at(t) for t in range(text.length))

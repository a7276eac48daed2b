"""A machine whose rounds take what a table says, and text whose drafts stand by a script: caps can be tried in no time."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs

from dspark.caps import AbstractCap
from dspark.caps.base import FOREVER, cap_for
from dspark.caps.curve import CostCurve, DraftCost, Grid
from dspark.records import RoundEvent, RowCommit, Shadow

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
LONGEST = 7
# Milliseconds by width, of a plain step, of the drafter for one token and for each more, and of the host. Shapes as
# measured: a CPU with a BLAS, 8-bit and 16-bit weights on a GPU, unpacked products on a CPU, and a smooth one.
MACHINES = {
    "flat": ((130, 140, 155, 170, 172, 175, 178, 180, 182, 190, 200), 130, (12, 1.0), 3),
    "knee": ((8.9, 12.8, 16.2, 19.6, 22.6, 25.8, 29.5, 18.7, 18.4, 18.2, 18.6), 9.1, (1.5, 0.05), 0.5),
    "step": ((10.5, 17.3, 17.1, 17.5, 18.2, 18.4, 18.0, 17.8, 17.6, 17.6, 16.2), 9.1, (1.5, 0.05), 0.5),
    "linear": (tuple(179 * w for w in WIDTHS), 179, (12, 1.0), 3),
    "smooth": ((20, 21, 22, 23, 25, 28, 31, 34, 37, 46, 60), 20, (2.0, 0.2), 0.5),
}
CONTENT: dict[str, Callable[[int], float]] = {
    "chat": lambda t: 0.6,
    "code": lambda t: 0.85,
    "switching": lambda t: 0.9 if (t // 150) % 2 == 0 else 0.15,
    "hopeless": lambda t: 0.03,
}


def machine(name: str, slope: float = 0.0, **options) -> CostCurve:
    """The curve of a machine of the table; `slope` is the share that 1000 tokens of context add to a step."""
    verify, plain, (first, more), host = MACHINES[name]
    deep = 1 + slope * 8
    grid = Grid((0, 8000), WIDTHS, [verify, [ms * deep for ms in verify]], [plain, plain * deep])
    caps = tuple(range(1, LONGEST + 1))
    drafts = [
        DraftCost("lookup", (1, WIDTHS[-1] - 1), (0.01, 0.01)),
        DraftCost("dspark", caps, [first + more * (k - 1) for k in caps]),
    ]
    return CostCurve([grid], drafts, host_ms=host, **options)


class Text:
    """`length` tokens. Whether a draft of a token stands, given that those before it did, is the same for every cap.

    rate, copied: by position, how likely the drafter and lookup are right.
    """

    def __init__(
        self, rate: Callable[[int], float], length: int, seed: int, copied: Callable[[int], float] | None = None
    ):
        rng = random.Random(seed)
        self.length = length
        self.drafted = [rng.random() < rate(t) for t in range(length)]
        self.copied = [rng.random() < copied(t) for t in range(length)] if copied else [False] * length

    def accepted(self, at: int, offered: int, source: str) -> int:
        right = self.copied if source == "lookup" else self.drafted
        n = 0
        while n < offered and at + n < self.length and right[at + n]:
            n += 1
        return n

    def matches(self, at: int) -> bool:
        """Whether lookup finds anything here: the last three tokens were a copy."""
        return at > 3 and all(self.copied[at - 3 : at])


class Run:
    """A text decoded under a cap on a machine. `ms`: what it took; `events`: its rounds; `carry`: the cap's last.

    truth: what rounds take, with `noise`; costs: what the cap is told; before: the session that this one follows; waking:
    milliseconds that the first drafted round behind others takes longer.
    """

    def __init__(
        self,
        cap: AbstractCap,
        text: Text,
        truth: CostCurve,
        costs: CostCurve | None,
        seed: int = 0,
        noise: float = 0.03,
        before: Run | None = None,
        waking: float = 0.0,
    ):
        self._waking = waking
        self.ms, self.events = 0.0, []
        self._rng, self._noise, self._plain = random.Random(seed), noise, False
        self._shadow: tuple[int, Shadow] | None = None
        self.carry = cap.again(before.carry, costs) if before else cap.init(costs)
        at = 0
        while at < text.length:
            at += self._round(cap, text, truth, at)

    def _round(self, cap: AbstractCap, text: Text, truth: CostCurve, at: int) -> int:
        offer, parked = cap.propose(self.carry), cap.parked_rounds(self.carry) > 0
        source, offered, draft_ms = _drafted(text, truth, at, offer)
        offered, width = cap.fit(self.carry, source, offered) if offered else (0, 1)
        accepted = text.accepted(at, offered, source)
        kept = min(accepted + 1, text.length - at)
        # The first step of a park follows a round that had to be read before it.
        ahead = parked and self._plain
        ms = truth.plain_at(at) if ahead else truth.verify_at(width, at) + truth.host_ms
        judged = (self._shadow[1],) if self._shadow and ahead and at >= self._shadow[0] else ()
        self._shadow = self._shadow if ahead and not judged else None
        peek = cap.shadow(self.carry) if ahead and self._shadow is None else 0
        if peek:
            beside, found, draft_ms = _drafted(text, truth, at, peek)
            self._shadow = (at + found, Shadow(beside, found, text.accepted(at, found, beside)))
        if offered and (self._plain or not self.events):
            ms += self._waking
        ms = (ms + draft_ms) * max(1 + self._rng.gauss(0, self._noise), 0.5)
        self._plain = parked
        row = RowCommit(0, (1,) * kept, min(accepted, kept), offered, source if offered else "plain")
        reason, predicted = cap.reason(self.carry), cap.predicted_ms(self.carry)
        event = RoundEvent(
            len(self.events) + 1, (row,), int(offer), reason, width, 1, ms, (at,), predicted_ms=predicted
        )
        event = event._replace(shadow=int(peek), judged=judged)
        self.carry = cap.observe(cap.ponder(self.carry, (at,)), event)
        self.ms += ms
        self.events.append(event)
        return kept


def _drafted(text: Text, truth: CostCurve, at: int, offer: int) -> tuple[str, int, float]:
    """(who drafts here, how much, milliseconds)."""
    for name in ("lookup", "dspark") if text.matches(at) else ("dspark",):
        limit = min(cap_for(offer, (name,)), truth.longest(name))
        if limit > 0:
            return name, limit, truth.draft(name).at(limit)
    return "plain", 0, 0.0


@attrs.frozen
class Wide(AbstractCap):
    """A cap that never changes, verified in at least `width` rows."""

    cap: int = 0
    width: int = 1

    def init(self, costs: object = None) -> None:
        return None

    def propose(self, carry: None) -> int:
        return self.cap

    def fit(self, carry: None, source: str, offered: int) -> tuple[int, int]:
        return offered, max(self.width, offered + 1)

    def observe(self, carry: None, event: RoundEvent) -> None:
        return None

    def reason(self, carry: None) -> str:
        return "pinned"

    def parked_rounds(self, carry: None) -> int:
        return 0 if self.cap else FOREVER


def plain_ms(text: Text, truth: CostCurve) -> float:
    """What plain decoding takes."""
    return sum(truth.plain_at(at) for at in range(text.length))


def best_fixed_ms(texts: list[Text], truth: CostCurve) -> float:
    """What the best fixed cap takes, chosen in hindsight, each cap verified in its cheapest width; without noise."""
    tries = [Wide(0)]
    for cap in range(1, LONGEST + 1):
        width = min((w for w in WIDTHS if w > cap), key=lambda w: truth.verify_at(w, 0))
        tries.append(Wide(cap, width=width))
    return min(sum(Run(cap, text, truth, truth, noise=0).ms for text in texts) for cap in tries)

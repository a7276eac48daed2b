"""A cap that never changes, the two wrappers that bound and park another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs

from dspark.caps.base import FOREVER, AbstractCap, Offer
from dspark.errors import InputError
from dspark.records import RoundEvent
from dspark.stages.registry import register_cap


def _not_negative(instance: Any, attribute: Any, value: int) -> None:
    if value < 0:
        raise InputError(f"{attribute.name} is {value}; a cap is at least 0")


@register_cap("fixed")
@attrs.frozen
class FixedCap(AbstractCap):
    """Offer at most `cap` drafts every round. `why` is shown as the reason."""

    cap: int = attrs.field(default=4, validator=_not_negative)
    why: str = "pinned"

    @property
    def watches(self) -> bool:
        return False

    @property
    def wants_costs(self) -> bool:
        return False

    def init(self, costs: Any = None) -> None:
        return None

    def propose(self, carry: None) -> int:
        return self.cap

    def sure(self, carry: None) -> int:
        return self.cap

    def observe(self, carry: None, event: RoundEvent) -> None:
        return None

    def reason(self, carry: None) -> str:
        return self.why if self.cap else "parked"

    def parked_rounds(self, carry: None) -> int:
        return FOREVER if self.cap == 0 else 0


@attrs.frozen
class AbstractWrapper(AbstractCap):
    """A controller around another one: calibration is `inner`'s affair."""

    inner: AbstractCap

    @property
    def wants_costs(self) -> bool:
        return self.inner.wants_costs

    @property
    def begins_with(self) -> int | None:
        return self.inner.begins_with

    def starting(self, cap: int) -> AbstractCap:
        return attrs.evolve(self, inner=self.inner.starting(cap))


@register_cap("clip")
@attrs.frozen
class ClipCap(AbstractWrapper):
    """Keep another controller's cap between `lo` and `hi`."""

    lo: int = attrs.field(default=0, validator=_not_negative)
    hi: int = attrs.field(default=32, validator=_not_negative)

    def __attrs_post_init__(self) -> None:
        if self.lo > self.hi:
            raise InputError(f"a cap cannot lie between lo = {self.lo} and hi = {self.hi}; lo must not exceed hi")

    @property
    def watches(self) -> bool:
        return self.inner.watches

    def init(self, costs: Any = None) -> Any:
        return self.inner.init(costs)

    def again(self, carry: Any, costs: Any = None) -> Any:
        return self.inner.again(carry, costs)

    def propose(self, carry: Any) -> int:
        return self._clipped(self.inner.propose(carry))

    def shadow(self, carry: Any) -> int:
        made = self.inner.shadow(carry)
        return self._clipped(made) if made else 0

    def sure(self, carry: Any) -> int:
        made = self.inner.sure(carry)
        return self._clipped(made) if made else 0

    def _clipped(self, offer: int) -> Offer:
        clip = lambda cap: min(max(cap, self.lo), self.hi)
        # A drafter that is shut out stays so while another one may draft.
        by_source = {source: clip(cap) if cap else 0 for source, cap in getattr(offer, "by_source", {}).items()}
        return Offer(clip(int(offer)), by_source if offer else {})

    def fit(self, carry: Any, source: str, offered: int) -> tuple[int, int]:
        keep, width = self.inner.fit(carry, source, offered)
        keep = max(keep, min(self.lo, offered))
        return keep, max(width, keep + 1)

    def ponder(self, carry: Any, context_tokens: Sequence[int]) -> Any:
        return self.inner.ponder(carry, context_tokens)

    def observe(self, carry: Any, event: RoundEvent) -> Any:
        return self.inner.observe(carry, event)

    def reason(self, carry: Any) -> str:
        return self.inner.reason(carry)

    def parked_rounds(self, carry: Any) -> int:
        if self.hi == 0:
            return FOREVER
        return 0 if self.lo else self.inner.parked_rounds(carry)

    def predicted_ms(self, carry: Any) -> float | None:
        return self.inner.predicted_ms(carry)


class ParkCarry(NamedTuple):
    """inner: the wrapped carry; misses: drafted rounds in a row that accepted nothing; parked: plain rounds still to go."""

    inner: Any
    misses: int
    parked: int


@register_cap("park")
@attrs.frozen
class ParkCap(AbstractWrapper):
    """Stop drafting for `probe_every` plain rounds after `patience` drafted rounds in a row that accepted nothing.

    Parked rounds are sent ahead like plain decoding. Afterwards one failed probe is enough to park again.
    """

    probe_every: int = attrs.field(default=16)
    patience: int = attrs.field(default=8)

    def __attrs_post_init__(self) -> None:
        for name in ("probe_every", "patience"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def init(self, costs: Any = None) -> ParkCarry:
        return ParkCarry(self.inner.init(costs), 0, 0)

    def again(self, carry: ParkCarry, costs: Any = None) -> ParkCarry:
        return ParkCarry(self.inner.again(carry.inner, costs), 0, 0)

    def propose(self, carry: ParkCarry) -> int:
        return 0 if carry.parked else self.inner.propose(carry.inner)

    def fit(self, carry: ParkCarry, source: str, offered: int) -> tuple[int, int]:
        return self.inner.fit(carry.inner, source, offered)

    def ponder(self, carry: ParkCarry, context_tokens: Sequence[int]) -> ParkCarry:
        return carry if carry.parked else carry._replace(inner=self.inner.ponder(carry.inner, context_tokens))

    def observe(self, carry: ParkCarry, event: RoundEvent) -> ParkCarry:
        if carry.parked:
            return carry._replace(parked=carry.parked - 1)
        inner = self.inner.observe(carry.inner, event)
        if not any(row.offered for row in event.rows):
            return ParkCarry(inner, carry.misses, 0)
        if any(row.accepted for row in event.rows):
            return ParkCarry(inner, 0, 0)
        misses = carry.misses + 1
        if misses < self.patience:
            return ParkCarry(inner, misses, 0)
        return ParkCarry(inner, self.patience - 1, self.probe_every)

    def sure(self, carry: ParkCarry) -> int:
        return 0 if carry.parked or carry.misses + 1 >= self.patience else self.inner.sure(carry.inner)

    def shadow(self, carry: ParkCarry) -> int:
        return 0 if carry.parked else self.inner.shadow(carry.inner)

    def reason(self, carry: ParkCarry) -> str:
        return "parked" if carry.parked else self.inner.reason(carry.inner)

    def parked_rounds(self, carry: ParkCarry) -> int:
        return carry.parked or self.inner.parked_rounds(carry.inner)

    def predicted_ms(self, carry: ParkCarry) -> float | None:
        return self.inner.predicted_ms(carry.inner)

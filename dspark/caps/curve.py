"""What a round costs on this machine: measured milliseconds by rows verified, context depth, batch and drafted tokens.

Pure: numbers in, numbers out. Costs are not monotone (a kernel boundary can make 8 rows cheaper than 3), so nothing here
fits a law: widths are interpolated between their measured neighbours, depth is a straight line between measured depths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import attrs

from dspark.errors import InputError

# A width is a knee where a row costs this share of a one-row forward, and twice what rows cost before it.
KNEE_SHARE = 0.08
DROP_SHARE = 0.05


class Knee(NamedTuple):
    """A width at which the cost jumps: from `before_ms` at the measured width below it to `after_ms`."""

    width: int
    before_ms: float
    after_ms: float

    def __str__(self) -> str:
        change = (self.after_ms / self.before_ms - 1) * 100
        rows = f"{self.width} row{'s' if self.width > 1 else ''}"
        return f"{'dearer' if change > 0 else 'cheaper'} at {rows} ({change:+.0f} %)"


def _ascending(instance: Any, attribute: Any, value: Sequence[float]) -> None:
    least = 0 if attribute.name == "depths" else 1
    whole = all(isinstance(v, int) for v in value)
    if not value or not whole or any(b <= a for a, b in pairwise(value)) or value[0] < least:
        raise InputError(
            f"{attribute.name} is {list(value)}; it must be a rising list of whole numbers from {least} on"
        )


def _times(instance: Any, attribute: Any, value: Sequence[float]) -> None:
    for ms in value:
        if not 0 <= ms < float("inf"):
            raise InputError(f"{attribute.name} holds {ms}; a time is a number of milliseconds")


@attrs.frozen
class Grid:
    """One batch's costs: `verify_ms[d][w]` of `widths[w]` rows at `depths[d]` tokens of context, build and read included.

    plain_ms: by depth, a plain decoding step with the next one already sent.
    """

    depths: tuple[int, ...] = attrs.field(converter=tuple, validator=_ascending)
    widths: tuple[int, ...] = attrs.field(converter=tuple, validator=_ascending)
    verify_ms: tuple[tuple[float, ...], ...] = attrs.field(converter=lambda rows: tuple(tuple(r) for r in rows))
    plain_ms: tuple[float, ...] = attrs.field(converter=tuple, validator=_times)
    batch: int = 1

    def __attrs_post_init__(self) -> None:
        if self.widths[0] != 1:
            raise InputError(f"widths is {list(self.widths)}; it must begin with 1, the plain step")
        if len(self.verify_ms) != len(self.depths) or any(len(r) != len(self.widths) for r in self.verify_ms):
            raise InputError(f"verify_ms must hold {len(self.depths)} lists (depths) of {len(self.widths)} (widths)")
        if len(self.plain_ms) != len(self.depths):
            raise InputError(f"plain_ms holds {len(self.plain_ms)} numbers; one a depth is {len(self.depths)}")
        for row in (*self.verify_ms, self.plain_ms):
            if any(not 0 < ms < float("inf") for ms in row):
                raise InputError("verify_ms and plain_ms must be positive numbers of milliseconds")
        if self.batch < 1:
            raise InputError(f"batch is {self.batch}; it must be at least 1")

    def verify_at(self, width: float, depth: float) -> float:
        """Milliseconds of `width` rows (a fraction interpolates) behind `depth` tokens."""
        return line(self.depths, [line(self.widths, row, width) for row in self.verify_ms], depth)

    def plain_at(self, depth: float) -> float:
        """Milliseconds of a plain pipelined step behind `depth` tokens."""
        return line(self.depths, self.plain_ms, depth)


@attrs.frozen
class DraftCost:
    """What one drafter adds for `caps[i]` drafted tokens to a round of as many rows: `ms[i]`, below zero where such rounds are sent
    before the one in front is read, which saves more. `source` is how it signs its proposals; rates: acceptance by position
    on sample text, to begin with, where it was measured."""

    source: str
    caps: tuple[int, ...] = attrs.field(converter=tuple, validator=_ascending)
    ms: tuple[float, ...] = attrs.field(converter=tuple)
    rates: tuple[float, ...] = attrs.field(default=(), converter=tuple)

    def __attrs_post_init__(self) -> None:
        for rate in self.rates:
            if not 0 <= rate <= 1:
                raise InputError(f"draft {self.source!r}: rates holds {rate}; an acceptance lies between 0 and 1")
        for ms in self.ms:
            if not -inf < ms < inf:
                raise InputError(f"draft {self.source!r}: ms holds {ms}; a time is a number of milliseconds")
        if len(self.caps) != len(self.ms):
            raise InputError(f"draft {self.source!r}: {len(self.caps)} caps but {len(self.ms)} times; one a cap")

    @property
    def longest(self) -> int:
        return self.caps[-1]

    def at(self, cap: int) -> float:
        return line(self.caps, self.ms, cap) if cap else 0.0


@attrs.frozen
class CostCurve:
    """This machine's costs for one target and its drafters. Written to and read from TOML by `to_dict` and `from_dict`.

    grids: by batch, ascending; drafts: by source, in the order in which they are asked; host_ms: what a drafted round takes
    beyond its forward and its drafter (reading, cutting, text); replay_ms: what a rejected row adds to a round where
    recurrences are run again; refeeds: whether kept tokens are fed again after a rejection; fixed_widths: use measured
    widths only, for where a new width is compiled at run time; prefill_tokens_s: prompt tokens a second; floor_ms: reading
    all weights once at the machine's bandwidth; spread: relative half-width of the repeats' middle half, the largest of
    all figures; disturbed: whether something else ran meanwhile, so that the figures are a guess.
    """

    grids: tuple[Grid, ...] = attrs.field(converter=tuple)
    drafts: tuple[DraftCost, ...] = attrs.field(default=(), converter=tuple)
    host_ms: float = 0.0
    replay_ms: float = 0.0
    refeeds: bool = False
    fixed_widths: bool = False
    prefill_tokens_s: float | None = None
    floor_ms: float | None = None
    spread: float = 0.0
    disturbed: bool = False

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.disturbed, bool):
            raise InputError(f"disturbed is {self.disturbed!r}; it must be true or false")
        batches = [g.batch for g in self.grids]
        if not batches or batches != sorted(set(batches)):
            raise InputError(f"grids are for batches {batches}; there must be at least one, and rising")
        for name in ("host_ms", "replay_ms", "spread", "floor_ms", "prefill_tokens_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise InputError(f"{name} is {value}; it must be a number of at least 0")
        for draft in self.drafts:
            for cap, ms in zip(draft.caps, draft.ms, strict=True):
                if self.grids[0].verify_at(cap + 1, 0) + self.host_ms + ms <= 0:
                    raise InputError(f"draft {draft.source!r}: ms holds {ms}, with which a round would take no time")

    @property
    def widest(self) -> int:
        return self.grids[0].widths[-1]

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(d.source for d in self.drafts)

    def verify_at(self, width: float, depth: float, batch: int = 1) -> float:
        """Milliseconds of a forward of `width` rows for each of `batch` sequences.

        Between measured batches it is interpolated; beyond a single measured one, rows of all sequences count alike.
        """
        if batch == self.grids[0].batch:
            return self.grids[0].verify_at(width, depth)
        if len(self.grids) == 1:
            grid = self.grids[0]
            return grid.verify_at(max(width * batch / grid.batch, 1), depth)
        return line([g.batch for g in self.grids], [g.verify_at(width, depth) for g in self.grids], batch)

    def plain_at(self, depth: float, batch: int = 1) -> float:
        """Milliseconds of a plain pipelined step for `batch` sequences."""
        if batch == self.grids[0].batch:
            return self.grids[0].plain_at(depth)
        if len(self.grids) == 1:
            more = self.verify_at(1, depth, batch) - self.grids[0].verify_at(1, depth)
            return max(self.grids[0].plain_at(depth) + more, 1e-6)
        return line([g.batch for g in self.grids], [g.plain_at(depth) for g in self.grids], batch)

    def draft(self, source: str) -> DraftCost | None:
        return next((d for d in self.drafts if d.source == source), None)

    def longest(self, source: str) -> int:
        """Most tokens that `source` can draft as far as was measured."""
        draft = self.draft(source)
        return self.widest - 1 if draft is None else draft.longest

    def acceptance(self, source: str) -> tuple[float, ...]:
        """The acceptance by position that `source` begins with, or nothing."""
        draft = self.draft(source)
        return draft.rates if draft else ()

    def knees(self, depth: float | None = None) -> tuple[Knee, ...]:
        """Widths at which a verify turns dearer or cheaper at once, at the shallowest depth or the one given. A jump
        that is within the spread is none."""
        grid = self.grids[0]
        depth = grid.depths[0] if depth is None else depth
        times = [grid.verify_at(w, depth) for w in grid.widths]
        found, slopes = [], []
        for (w0, w1), (t0, t1) in zip(pairwise(grid.widths), pairwise(times), strict=True):
            slope = (t1 - t0) / (w1 - w0)
            usual = sum(slopes) / len(slopes) if slopes else 0.0
            told = abs(t1 - t0) > self.spread * t0
            if told and (t1 < t0 * (1 - DROP_SHARE) or slope > max(KNEE_SHARE * times[0], 2 * usual)):
                found.append(Knee(w1, t0, t1))
                slopes = []
            slopes.append(max(slope, 0.0))
        return tuple(found)

    def over_floor(self, depth: float = 0) -> float | None:
        """How many times the bandwidth floor a plain step takes, or None where the floor was not measured."""
        return self.plain_at(depth) / self.floor_ms if self.floor_ms else None

    def to_dict(self) -> dict[str, Any]:
        """Plain tables and lists for TOML; what is unset is left out. Times keep four digits."""
        table = attrs.asdict(self, value_serializer=_plain)
        return {key: value for key, value in table.items() if value is not None}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> CostCurve:
        """Read `to_dict`'s tables. Raises InputError naming the key that is missing, unknown or no number."""
        table = dict(_known(table, cls, "costs"))
        table["grids"] = [_make(Grid, t, f"costs.grids[{i}]") for i, t in enumerate(_tables(table, "grids"))]
        table["drafts"] = [_make(DraftCost, t, f"costs.drafts[{i}]") for i, t in enumerate(_tables(table, "drafts"))]
        return _make(cls, table, "costs")


def line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """`ys` over rising `xs`, straight between neighbours; level before the first, at the last slope (never falling) behind
    the last, so that noise in two figures cannot predict a negative time far away."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        if len(xs) == 1 or x == xs[-1]:
            return ys[-1]
        return ys[-1] + max((ys[-1] - ys[-2]) / (xs[-1] - xs[-2]), 0.0) * (x - xs[-1])
    i = bisect_left(xs, x)
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])


def nominal(plain_ms: float, longest: int = 8) -> CostCurve:
    """A guess for a machine that was never measured: a row more costs a tenth, a drafted round a fifth beside."""
    widths = tuple(range(1, longest + 2))
    verify = [plain_ms * (1 + 0.1 * (w - 1)) for w in widths]
    return CostCurve([Grid([0], widths, [verify], [plain_ms])], host_ms=0.2 * plain_ms)


def _plain(instance: Any, field: Any, value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(None, None, v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _tables(table: dict[str, Any], key: str) -> list[Any]:
    value = table.get(key, [])
    if not isinstance(value, list):
        raise InputError(f"costs.{key} is {value!r}; it must be a list of tables")
    return value


def _known(table: Any, cls: type, where: str) -> Mapping[str, Any]:
    if not isinstance(table, Mapping):
        raise InputError(f"{where} is {table!r}; it must be a table")
    fields = {f.name for f in attrs.fields(cls)}
    for key in table:
        if key not in fields:
            raise InputError(f"{where}.{key} is unknown; allowed are {', '.join(sorted(fields))}")
    return table


def _make(cls: type, table: Any, where: str) -> Any:
    fields = _known(table, cls, where)
    try:
        return cls(**fields)
    except TypeError as err:
        raise InputError(f"{where}: a key is missing or is no number ({err})") from err

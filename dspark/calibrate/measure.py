"""Measure what a recipe costs on this machine: seconds of timing on a bound engine, and a cost curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import attrs
import mlx.core as mx
from mlx import nn

from dspark.calibrate.bandwidth import floor_ms
from dspark.calibrate.bench import Bench, Dummy
from dspark.calibrate.fill import Unfillable
from dspark.calibrate.timing import Case, Progress, Times, time_cases
from dspark.calibrate.widths import block_width, by_worth, caps_for, drafters, longest, looks_up, widths_for
from dspark.caps.curve import CostCurve, DraftCost, Grid, line
from dspark.errors import InputError
from dspark.kernels.ahead import ROWS, compile_ahead
from dspark.kernels.stack import MOST_LAUNCHED, MOST_ROWS
from dspark.platform import backend

# Context depths of the two ends, in tokens, and the room that rounds need behind the deeper one.
SHALLOW, DEEP, ROOM = 256, 4096, 256
# Seconds of timing behind the warm-up.
BUDGET_S = {"cpu": 6.0, "metal": 8.0, "cuda": 8.0}
# What one pass over all widths may take, in one-row forwards, and in milliseconds at least and at most. A curve that rewards
# drafting fits; one on which rows cost a step each does not, and its wide end is left out.
WIDTHS_STEPS, WIDTHS_MS = 20, (1000.0, 6000.0)
PREFILL_TOKENS = {"cpu": 32, "metal": 512, "cuda": 1024}
# Each shape is run so often before it is timed: what is compiled or allocated at first must not count.
WARM_UPS = {"cpu": 1, "metal": 2, "cuda": 2}
# Rounds of a drafter's own that are timed in a row.
DRAFTED_ROUNDS = {"cpu": 1, "metal": 4, "cuda": 4}
# The same where each is sent before the one in front of it is read, and tokens in front of them, which launches read.
FOLLOWED_ROUNDS, FOLLOWED_PROMPT = 6, 64
# Behind a deep context a width may take this share of that time: what depth adds is much the same a row.
DEEP_SHARE = 0.25
# A few dictionary look-ups and a list, for a lookup of any length.
LOOKUP_MS = 0.02
# How often a lookup's draft stands by position, as 161 rounds of four kinds of text had it (docs/calibration.md).
LOOKUP_RATES = (0.85, 0.8, 0.9)


class Measured(NamedTuple):
    """A curve, how long it took, sentences on its quality (noise, heat, what could not be measured), and whether the machine
    was quiet enough for anything to follow from the figures."""

    costs: CostCurve
    seconds: float
    notes: tuple[str, ...]
    quiet: bool = True


def measure(
    engine: Any,
    *,
    batches: Sequence[int] = (),
    quick: bool = False,
    progress: Progress | None = None,
    budget_s: float | None = None,
) -> Measured:
    """Time verifies by width at two depths, every drafter by cap, plain steps, sessions and prefill.

    batches: sequences decoded together, for which a few widths are timed as well; quick: fewer widths, one depth and less
    time. progress(done, total, what) is called before each case. Compiling is never
    counted. Takes some 10 seconds of timing and a few for warming up; holds caches of some 4,000 tokens, and nothing
    afterwards. Raises InputError for a recipe that never drafts.
    """
    if not drafters(engine.pipeline.draft):
        raise InputError("this recipe never drafts, so there is nothing to calibrate")
    started, kind = perf_counter(), backend()
    budget_s = budget_s or BUDGET_S[kind] / (4 if quick else 1)
    _compile_ahead(engine, quick, progress)
    with engine.enter(), mx.stream(engine.stream or mx.default_stream(mx.default_device())):
        suite = Suite(engine, kind, quick, progress)
        for rows in sorted(set(batches) - {1}):
            suite.add_batch(rows)
        times = time_cases(suite.cases, budget_s, progress)
        costs = suite.curve(times)
    mx.clear_cache()
    return Measured(costs, perf_counter() - started, (*times.notes, *suite.notes), times.quiet)


def _compile_ahead(engine: Any, quick: bool, progress: Progress | None) -> None:
    """Have the kernels that MLX compiles for these cases compiled side by side, those of drafters too."""
    draft = engine.pipeline.draft
    heads = [head for d in drafters(draft) if getattr(head := getattr(d, "head", None), "launch", None) is None]
    models = [getattr(engine.target, "model", None), *heads]
    tell = progress or (lambda done, total, what: None)
    # A prefill has more rows than any draft, its last chunk and a batch of narrow drafts few.
    rows = {*widths_for(draft, quick), ROWS[0], ROWS[-1]}
    if launched(engine):
        # Forwards of few rows are launches; a prompt has many.
        rows = {ROWS[-1]} | {count for count in rows if count > MOST_LAUNCHED}
    compile_ahead([m for m in models if isinstance(m, nn.Module)], rows, lambda text: tell(0, 0, text))


def launched(engine: Any) -> bool:
    """Whether the target's forwards of few rows are launches of our own."""
    return getattr(engine.target, "launch", None) is not None


class Suite:
    """The cases to time for an engine, warm, and how their times become a curve."""

    def __init__(self, engine: Any, kind: str, quick: bool, progress: Progress | None):
        self.engine, self.kind, self.quick = engine, kind, quick
        self.cases: list[Case] = []
        self.notes: list[str] = []
        self._tell = progress or (lambda done, total, what: None)
        draft = engine.pipeline.draft
        self._own = attrs.evolve(engine.pipeline, accept=engine.accept())
        self._dummy = attrs.evolve(self._own, draft=Dummy(draft.target_layer_ids))
        self._drafters = drafters(draft)
        self._rows: dict[str, int] = {}
        self._followed: set[str] = set()
        self._batches: list[int] = []
        bench = self._bench(self._dummy, self._depths()[0])
        self.depths = [bench.depth]
        self.widths = self._widths(bench)
        self._few: tuple[int, ...] = ()
        self._add("session", lambda: bench.session(1))
        if any(layer.roller.method == "recurrence-replay" for layer in engine.plan.layers):
            self._add("rejection", lambda: bench.rejection(self.widths[-1]))
        self._prefill(bench)
        self._plain(bench.depth)
        self._draft(bench.depth)
        for depth in self._depths()[1:]:
            self._deep(depth)

    def _depths(self) -> list[int]:
        room = (self.engine.context_length or DEEP + ROOM) - ROOM
        shallow = max(min(SHALLOW, room // 2), 1)
        deep = min(DEEP, room)
        return [shallow] if self.quick or deep < 4 * shallow else [shallow, deep]

    def _bench(self, pipeline: Any, depth: int) -> Bench:
        try:
            return Bench(self.engine, pipeline, depth)
        except Unfillable as why:
            note = f"costs by depth are not known: {why}"
            if note not in self.notes:
                self.notes.append(note)
            return Bench(self.engine, pipeline, 1)

    def _add(self, name: str, run: Any) -> float:
        """A case, warmed up. Returns the last warm-up's milliseconds."""
        self._tell(0, 0, f"warming up, {name}")
        took = [run() for _ in range(WARM_UPS[self.kind])]
        self.cases.append(Case(name, run))
        return took[-1]

    def _widths(self, bench: Bench) -> tuple[int, ...]:
        """Verifies of the widths that are worth their time, the telling ones first."""
        wanted = widths_for(self.engine.pipeline.draft, self.quick, self.kind)
        needed = {1, 2, block_width(self.engine.pipeline.draft)}
        if launched(self.engine):
            # Whatever the rows of a launch, it is one of two kernels.
            needed = {1, block_width(self.engine.pipeline.draft)}
            wanted = tuple(w for w in wanted if w in needed or not w % 8 or w > MOST_ROWS)
        took: dict[int, float] = {}
        for width in by_worth(wanted, needed):
            expected = _by_slope(took, width)
            if width in needed or sum(took.values()) + expected <= _affordable_ms(took[1]):
                took[width] = self._add(_verify(width, bench.depth), partial(bench.verify, width))
        widest = max(took)
        if widest < wanted[-1]:
            self.notes.append(
                f"drafts of more than {widest - 1} tokens are left out: {widest} rows take {took[widest]:.0f} ms here"
            )
        return tuple(sorted(took))

    def _plain(self, depth: int) -> None:
        bench = self._bench(self._own, depth)
        self._add(_plain(depth), bench.plain)

    def _prefill(self, bench: Bench) -> None:
        room = (self.engine.context_length or 1 << 20) - bench.depth - ROOM // 2
        self.prefill_tokens = max(min(PREFILL_TOKENS[self.kind], self._own.prefill.chunk, room), 1)
        self._add("prefill", lambda: bench.prefill(self.prefill_tokens))

    def _draft(self, depth: int) -> None:
        for draft in self._drafters:
            if looks_up(draft):
                continue
            bench = self._bench(attrs.evolve(self._own, draft=draft), depth)
            for cap in self._caps(draft):
                self._add(_drafted(draft, cap), partial(self._round, draft, bench, cap))

    def _round(self, draft: Any, bench: Bench, cap: int) -> float:
        """A round of a drafter's own. What its forward takes is known only later, so its rows are noted."""
        name = _drafted(draft, cap)
        if self._follows(draft):
            self._rows[name] = cap + 1
            self._followed.add(name)
            return bench.session(cap, FOLLOWED_ROUNDS, FOLLOWED_PROMPT)
        took, self._rows[name] = bench.drafted(cap, DRAFTED_ROUNDS[self.kind])
        return took

    def _follows(self, draft: Any) -> bool:
        """Whether such rounds are sent before the one in front is read: then the host works beside the device, and only whole
        ones can be timed."""
        head = getattr(draft, "head", None)
        return launched(self.engine) and getattr(head, "launch", None) is not None

    def _caps(self, draft: Any) -> tuple[int, ...]:
        return tuple(cap for cap in caps_for(draft) if cap < self.widths[-1]) or (1,)

    def _deep(self, depth: int) -> None:
        """Behind a deep context, a few widths: what it adds is interpolated between them."""
        bench = self._bench(self._dummy, depth)
        if bench.depth != depth:
            return
        self.depths.append(depth)
        last, took = len(self.widths) - 1, {}
        # A CPU's attention costs a row what it costs the next; on a GPU other kernels take over.
        some = (0, last // 2) if self.kind == "cpu" else (0, last // 2, last)
        for width in sorted({self.widths[i] for i in some}):
            if len(took) < 2 or _by_slope(took, width) <= DEEP_SHARE * _affordable_ms(took[1]):
                took[width] = self._add(_verify(width, depth), partial(bench.verify, width))
        self._few = tuple(took)
        # A CPU's plain step is one row's forward, whatever is sent ahead.
        if self.kind != "cpu":
            self._plain(depth)

    def add_batch(self, rows: int) -> None:
        """Widths at which several rows are verified in one forward, at the first depth: up to a block's, and the widest's
        half, since rows of all sequences count."""
        if rows < 1:
            raise InputError(f"a batch of {rows} cannot be measured; it must be at least 1")
        bench = Bench(self.engine, self._dummy, self.depths[0], rows)
        self._batches.append(rows)
        for width in self._batch_widths():
            self._add(_verify(width, bench.depth, rows), partial(bench.verify, width))
        self._add(_plain(bench.depth, rows), bench.plain)

    def _batch_widths(self) -> tuple[int, ...]:
        most = max(block_width(self.engine.pipeline.draft), 4)
        return tuple(w for w in self.widths if w <= most)

    def curve(self, times: Times) -> CostCurve:
        """What the times say."""
        ms = {name: t.ms for name, t in times.timed.items()}
        shallow = self.depths[0]
        rejection = ms.get("rejection", 0.0)
        rows = [[min(ms[_verify(w, shallow)], max(self._least_round(ms, w) - rejection, 1e-3)) for w in self.widths]]
        for depth in self.depths[1:]:
            added = [ms[_verify(w, depth)] - ms[_verify(w, shallow)] for w in self._few]
            rows.append([max(t + line(self._few, added, w), 1e-3) for t, w in zip(rows[0], self.widths, strict=True)])
        plain = ms[_plain(shallow)]
        steps = [
            ms.get(_plain(d), max(plain + row[0] - rows[0][0], 1e-3)) for d, row in zip(self.depths, rows, strict=True)
        ]
        grid = Grid(self.depths, self.widths, rows, steps)
        grids = [grid, *(self._batch_grid(rows, grid, ms) for rows in self._batches)]

        host = max(ms["session"] - grid.verify_at(2, shallow), 0.0)

        def added_by(draft: Any) -> DraftCost:
            source = draft.sources[0]
            if looks_up(draft):
                return DraftCost(source, (1, max(longest(draft), 2)), (LOOKUP_MS, LOOKUP_MS), LOOKUP_RATES)
            names = {cap: _drafted(draft, cap) for cap in self._caps(draft)}
            own = [ms[n] - rejection - grid.verify_at(self._rows[n], shallow) for n in names.values()]
            if self._follows(draft):
                return DraftCost(source, tuple(names), [added - host for added in own])
            return DraftCost(source, tuple(names), [max(added, 0.0) for added in own])

        return CostCurve(
            grids,
            [added_by(draft) for draft in self._drafters],
            host_ms=host,
            replay_ms=rejection,
            refeeds=self.engine.plan.refeeds,
            fixed_widths=self.kind == "cuda" and not launched(self.engine),
            prefill_tokens_s=self.prefill_tokens / ms["prefill"] * 1000,
            floor_ms=floor_ms(self.engine.target, self.kind),
            spread=times.spread,
            disturbed=not times.quiet,
        )

    def _least_round(self, ms: Mapping[str, float], width: int) -> float:
        """The shortest round of a drafter's own with so many rows, of those that wait for the one in front: no verify takes longer
        than a whole one, though by itself, with drafts from the host, it may seem to."""
        alone = (ms[name] for name, rows in self._rows.items() if rows == width and name not in self._followed)
        return min(alone, default=inf)

    def _batch_grid(self, rows: int, one: Grid, ms: Mapping[str, float]) -> Grid:
        """A batch's costs: depth adds to each of its rows what it adds to a single one."""
        widths, shallow = self._batch_widths(), self.depths[0]
        verify, plain = [ms[_verify(w, shallow, rows)] for w in widths], ms[_plain(shallow, rows)]
        deeper = lambda now, then: rows * max(then - now, 0.0)
        by_depth = [
            [t + deeper(one.verify_at(w, shallow), one.verify_at(w, d)) for t, w in zip(verify, widths, strict=True)]
            for d in self.depths
        ]
        return Grid(
            self.depths,
            widths,
            by_depth,
            [plain + deeper(one.plain_at(shallow), one.plain_at(d)) for d in self.depths],
            batch=rows,
        )


def _by_slope(took: Mapping[int, float], width: int) -> float:
    """What a width should take, by the line from one row to the widest measured below it."""
    below = max((w for w in took if w < width), default=0)
    if below < 2:
        return 0.0
    return took[below] + max(took[below] - took[1], 0.0) / (below - 1) * (width - below)


def _affordable_ms(one_row_ms: float) -> float:
    low, high = WIDTHS_MS
    return min(max(WIDTHS_STEPS * one_row_ms, low), high)


def _verify(width: int, depth: int, rows: int = 1) -> str:
    return f"verify of {width} rows at {depth}{_for(rows)}"


def _plain(depth: int, rows: int = 1) -> str:
    return f"plain step at {depth}{_for(rows)}"


def _for(rows: int) -> str:
    return f" for {rows} sequences" if rows > 1 else ""


def _drafted(draft: Any, cap: int) -> str:
    return f"{draft.sources[0]} round of {cap}"

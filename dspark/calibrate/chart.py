"""A calibration for a person: curves, cap, knees, predicted speed-ups and the floor, as rich renderables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dspark.calibrate.record import Calibration
from dspark.caps.curve import CostCurve, Grid
from dspark.caps.price import best_cap, speed_ups

BAR, EIGHTHS = 22, " ▏▎▍▌▋▊▉"
# Below this a speed-up is noise.
WORTH = 1.005


class Subject(NamedTuple):
    """Whose calibration it is. where: the file's path or what became of it; source: the drafter that the cap is for; pinned:
    the recipe's fixed cap, None where the cap is open; begins: the
    cap that the recipe itself begins with, if it says so; depth: tokens of context that caps are judged at; rates: acceptance
    taken for granted there."""

    recipe: str
    target: str
    where: str
    source: str
    pinned: int | None
    begins: int | None
    depth: int
    rates: tuple[float, ...]


def report(calibration: Calibration, subject: Subject) -> RenderableType:
    """Everything, a section below the other, in at most 80 columns."""
    costs = calibration.costs
    parts: list[RenderableType] = [_lines(_head(calibration, subject))]
    parts += [_verify(grid, costs) for grid in costs.grids]
    if costs.drafts:
        parts.append(_drafts(costs))
    parts += [_lines(_facts(costs)), _lines(_cap(calibration, subject)), _speed_ups(costs, subject)]
    if calibration.notes:
        parts.append(_lines([("note", note) for note in calibration.notes]))
    spaced = [piece for part in parts for piece in (Text(), part)]
    return Group(*spaced[1:])


def _head(calibration: Calibration, subject: Subject) -> Iterator[tuple[str, str]]:
    machine = calibration.machine
    yield "recipe", subject.recipe
    yield "target", subject.target
    yield "machine", f"{machine['chip']}, {machine['backend']}, {machine['cores']} cores, {machine['memory_gb']} GB"
    yield "", f"mlx {machine['mlx']}, BLAS {machine['blas']}, {machine['os']}"
    spread = f"figures varied by up to {calibration.costs.spread:.0%}"
    yield "measured", f"{calibration.date}, in {calibration.seconds:.0f} s; {spread}"
    yield "kept in", subject.where


def _verify(grid: Grid, costs: CostCurve) -> RenderableType:
    """Milliseconds by rows, a column for the shallowest and the deepest context."""
    depths = sorted({min(grid.depths), max(grid.depths)})
    batch = f" of each of {grid.batch} sequences" if grid.batch > 1 else ""
    table = _table()
    table.add_column("rows", justify="right")
    for depth in depths:
        table.add_column(f"{depth:,} tokens of context", no_wrap=True)
    table.add_column("", no_wrap=True)
    knees = {} if grid.batch > 1 else {knee.width: str(knee) for knee in costs.knees()}
    most = max(max(row) for row in grid.verify_ms)
    table.add_row("plain", *(_bar(grid.plain_at(d), most) for d in depths), "a step sent ahead")
    for width in grid.widths:
        bars = [_bar(grid.verify_at(width, depth), most) for depth in depths]
        table.add_row(str(width), *bars, Text(knees.get(width, ""), style="yellow"))
    return _titled(f"verify{batch}, ms by rows", table)


def _drafts(costs: CostCurve) -> RenderableType:
    table = _table()
    table.add_column("drafter")
    table.add_column("tokens", justify="right")
    table.add_column("", no_wrap=True)
    most = max((ms for draft in costs.drafts for ms in draft.ms), default=0.0)
    most = max(most, costs.grids[0].verify_ms[0][0])
    for draft in costs.drafts:
        for i, (cap, ms) in enumerate(zip(draft.caps, draft.ms, strict=True)):
            table.add_row("" if i else draft.source, str(cap), _bar(ms, most))
    below = any(ms < 0 for draft in costs.drafts for ms in draft.ms)
    why = ": below zero where the next round is sent before the last one is read" if below else ""
    return _titled(f"drafter, ms it adds to a round, by drafted tokens{why}", table)


def _facts(costs: CostCurve) -> Iterator[tuple[str, str]]:
    depth = costs.grids[0].depths[0]
    yield "plain step", f"{_ms(costs.plain_at(depth))} ms ({1000 / costs.plain_at(depth):.1f} tokens/s)"
    if costs.floor_ms and (over := costs.over_floor(depth)):
        yield (
            "floor",
            f"{_ms(costs.floor_ms)} ms to read all weights once; a step takes {over:.1f} times that",
        )
    else:
        yield "floor", "not known: a step does not read all weights"
    yield "host", f"{_ms(costs.host_ms)} ms a drafted round beside its forward and its drafter"
    if costs.replay_ms:
        yield "rejection", f"{_ms(costs.replay_ms)} ms to run recurrences again"
    if costs.refeeds:
        yield "rejection", "kept tokens are fed again in front of the next block"
    if costs.prefill_tokens_s:
        yield "prefill", f"{costs.prefill_tokens_s:,.0f} tokens/s"


def _cap(calibration: Calibration, subject: Subject) -> Iterator[tuple[str, str]]:
    costs = calibration.costs
    best = best_cap(costs, subject.rates, subject.depth, subject.source)
    taken = f"if {max(subject.rates):.0%} of its drafts stand, behind {subject.depth} tokens"
    rows = f", verified in {best.width} rows" if best.width > best.cap + 1 else ""
    if best.cap:
        yield "cap", f"{best.cap} suits {subject.source} best {taken}{rows}"
    else:
        yield "cap", f"no draft of {subject.source} pays {taken}"
    if subject.pinned is not None:
        yield "", f"the recipe fixes the cap at {subject.pinned}, which stays"
    elif calibration.start is not None:
        yield "", f"runs begin with {calibration.start} and adapt"
    elif subject.begins is not None:
        yield "", f"runs begin with the recipe's {subject.begins} and adapt: no cap follows from disturbed figures"
    else:
        yield "", "runs adapt from the first round on"
    knees = costs.knees()
    yield "knee", "; ".join(map(str, knees)) if knees else "none: a row costs about as much as the one before it"


def _speed_ups(costs: CostCurve, subject: Subject) -> RenderableType:
    depths = sorted({subject.depth, costs.grids[0].depths[-1]})
    table = _table()
    table.add_column("acceptance", justify="right")
    for depth in depths:
        table.add_column(f"{depth:,} tokens", justify="right")
    by_depth = [speed_ups(costs, depth, subject.source) for depth in depths]
    for rows in zip(*by_depth, strict=True):
        said = [f"{times:.2f} x, cap {c.cap}" if c.cap and times >= WORTH else "parked" for _, c, times in rows]
        table.add_row(f"{rows[0][0]:.2f}", *said)
    return _titled(f"predicted speed-up over plain decoding, {subject.source}", table)


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), header_style="dim")


def _titled(title: str, table: Table) -> RenderableType:
    return Group(Text(title, style="bold"), table)


def _lines(lines: Any) -> RenderableType:
    """(label, text) in two columns."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=10)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(label, Text(text))
    return table


def _bar(ms: float, most: float) -> Text:
    """A bar in eighths of a column, and its figure."""
    eighths = round(max(ms, 0.0) / most * BAR * 8) if most else 0
    bar = "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
    return Text.assemble((bar, "cyan"), " ", _ms(ms))


def _ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"

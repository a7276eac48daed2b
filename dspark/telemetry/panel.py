"""What the live view looks like: rich renderables made of a `Tally` and a few facts. No terminal is touched here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dspark.platform import size_text
from dspark.telemetry.tally import Tally

EIGHTHS = " ▁▂▃▄▅▆▇█"
CHART_ROWS = 4
NARROWEST, WIDEST = 40, 120


class Facts(NamedTuple):
    """What does not change while a session runs. `context_length` is the most tokens that it can hold, or None."""

    target: str
    drafter: str = ""
    context_length: int | None = None


class Phase(NamedTuple):
    """What is going on: "load", "prefill", "decode" or "done"; `text` says more; `done` of `total` tokens or bytes."""

    name: str
    text: str = ""
    done: int = 0
    total: int = 0


class Shown(NamedTuple):
    """Everything that a drawing needs. prompt_tokens: 0 while unknown; ttft_s: None before the first token."""

    facts: Facts
    phase: Phase
    tally: Tally
    elapsed_s: float = 0.0
    prompt_tokens: int = 0
    prefill_s: float = 0.0
    ttft_s: float | None = None


def panel(shown: Shown, width: int) -> RenderableType:
    """The table view, a box of `width` columns and at most 13 rows."""
    width = max(NARROWEST, min(width, WIDEST))
    inner = width - 4
    body: list[RenderableType] = [_heads(shown, inner)]
    if shown.phase.name in ("load", "prefill"):
        body.append(_progress(shown, inner))
    elif shown.tally.rounds:
        body += [Text(), _measures(shown.tally, inner)]
    title = Text.assemble(" ", ("dspark", "bold"), "  ", shown.facts.target, " ")
    title.truncate(inner - 14, overflow="ellipsis")
    return Panel(
        Group(*body),
        title=title,
        title_align="left",
        subtitle=_clock(shown),
        subtitle_align="right",
        width=width,
        border_style="dim",
    )


def line(shown: Shown, width: int) -> Text:
    """The one-line view."""
    phase, tally = shown.phase, shown.tally
    if phase.name in ("load", "prefill"):
        text = Text(_progress_text(shown), style="dim")
    else:
        last = tally.last
        parts = [
            f"{tally.tokens:,} tokens",
            f"{tally.tokens_per_s_now:.1f} tokens/s",
            f"accepted length {tally.accepted_length:.2f}",
            f"acceptance {percent(tally.acceptance_rate)}" if tally.offered else "no drafts",
            f"cap {last.cap} ({last.cap_reason})" if last else "",
        ]
        text = Text(" · ".join(p for p in parts if p), style="dim")
    text.truncate(max(width - 1, 10), overflow="ellipsis")
    return text


def percent(share: float) -> str:
    """`61 %`"""
    return f"{100 * share:.0f} %"


def _clock(shown: Shown) -> Text:
    tally = shown.tally
    return Text(f" {tally.tokens:,} tokens, {tally.rounds:,} rounds, {shown.elapsed_s:.0f} s ", style="dim")


def _heads(shown: Shown, width: int) -> RenderableType:
    """Labels and values in two columns, or in one where there is no room."""
    tally, last = shown.tally, shown.tally.last
    draft = shown.facts.drafter or "-"
    context = f"{max(last.context_tokens, default=0):,}" if last else f"{shown.prompt_tokens:,}"
    if shown.facts.context_length:
        held = max(last.context_tokens, default=0) if last else shown.prompt_tokens
        context += f" of {shown.facts.context_length:,} ({percent(held / shown.facts.context_length)})"
    pairs = [("drafter", draft), ("cap", _cap(shown)), ("context", context)]
    pairs.append(("memory", size_text(last.memory_bytes) if last and last.memory_bytes else "-"))
    pairs.append(("first token", _first(shown)))
    if tally.rounds:
        pairs.append(("round", _round(tally)))
    return _two_columns(pairs, width)


def _cap(shown: Shown) -> str:
    tally, last = shown.tally, shown.tally.last
    if last is None:
        return "-"
    looking = last.cap_reason == "parked" and tally.shadowed
    judged = f"; shadows {percent(tally.said_too / tally.shadowed)}" if looking else ""
    return f"{last.cap} ({last.cap_reason}{judged})"


def _first(shown: Shown) -> str:
    text = "-" if shown.ttft_s is None else f"{shown.ttft_s:.2f} s"
    if shown.prefill_s > 0 and shown.prompt_tokens > 1:
        text += f" (prefill {shown.prompt_tokens / shown.prefill_s:,.0f}/s)"
    return text


def _round(tally: Tally) -> str:
    text = f"{_ms(tally.round_ms)} ms"
    return text if tally.predicted_ms is None else f"{text} (predicted {_ms(tally.predicted_ms)})"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _two_columns(pairs: list[tuple[str, str]], width: int) -> Table:
    columns = 2 if width >= 60 else 1
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(columns):
        table.add_column(style="dim", no_wrap=True, width=11)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    cells = [cell for pair in pairs for cell in pair]
    cells += [""] * (-len(cells) % (2 * columns))
    for i in range(0, len(cells), 2 * columns):
        table.add_row(*cells[i : i + 2 * columns])
    return table


def _measures(tally: Tally, width: int) -> RenderableType:
    """Accepted drafts by position on the left, speed and shares on the right."""
    right = 34
    chart_width = width - right - 2
    if chart_width < 12:
        return _numbers(tally, width)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=chart_width, no_wrap=True)
    table.add_column(width=right, no_wrap=True)
    table.add_row(chart(tally.rates(), chart_width), _numbers(tally, right))
    return table


def _numbers(tally: Tally, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True, width=15)
    table.add_column(no_wrap=True, width=max(width - 16, 8))
    table.add_row("tokens/s", Text(f"{tally.tokens_per_s_now:.1f}, mean {tally.tokens_per_s:.1f}"))
    table.add_row("accepted length", Text(f"{tally.accepted_length:.2f}", style="bold"))
    table.add_row("acceptance rate", percent(tally.acceptance_rate) if tally.offered else "-")
    for source, share in tally.shares()[:3]:
        table.add_row(source, _bar(share, max(width - 22, 4)) + f" {percent(share):>5}")
    return table


def _bar(share: float, width: int) -> Text:
    """A horizontal bar in eighths of a column."""
    eighths = round(share * width * 8)
    text = "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")
    return Text(text.ljust(width), style="cyan")


def chart(rates: list[float], width: int) -> RenderableType:
    """Upright bars, one a draft position from the left: how often it was accepted when it was offered."""
    if not rates:
        return Text("no drafts yet", style="dim")
    axis = 6
    each = next((w for w in (4, 3, 2, 1) if axis + len(rates) * w <= width), 1)
    rates = rates[: (width - axis) // each]
    thick = max(each - 1, 1)
    rows = []
    for row in range(CHART_ROWS, 0, -1):
        label = {CHART_ROWS: "100 %", 1: ""}.get(row, "")
        bars = "".join(_cell(rate, row) * thick + " " * (each - thick) for rate in rates)
        rows.append(Text.assemble((f"{label:>5} ", "dim"), (bars, "green")))
    rows.append(Text.assemble((" " * axis, ""), (_marks(len(rates), each, lambda i: str(i + 1)), "dim")))
    if each == 4:
        rows.append(
            Text.assemble(("    %  "[:axis], "dim"), _marks(len(rates), each, lambda i: f"{100 * rates[i]:.0f}"))
        )
    else:
        rows.append(Text("accepted by draft position".center(width)[:width].rstrip(), style="dim"))
    return Group(*rows)


def _cell(rate: float, row: int) -> str:
    return EIGHTHS[max(0, min(8, round(rate * CHART_ROWS * 8) - (row - 1) * 8))]


def _marks(count: int, each: int, label: Callable[[int], str]) -> str:
    """Labels under the bars, left out where they would run into one another."""
    text = ""
    for i in range(count):
        mark = label(i)
        if len(text) <= i * each and (each > 2 or i == 0 or (i + 1) % 4 == 0):
            text = text.ljust(i * each) + mark + " "
    return text.rstrip()


def _progress_text(shown: Shown) -> str:
    phase = shown.phase
    if phase.name == "prefill" and phase.total:
        speed = f", {phase.done / shown.elapsed_s:,.0f} tokens/s" if phase.done and shown.elapsed_s else ""
        return f"reading the prompt: {phase.done:,} of {phase.total:,} tokens{speed}"
    return phase.text or "starting"


def _progress(shown: Shown, width: int) -> RenderableType:
    phase = shown.phase
    text: Any = Text(_progress_text(shown))
    if not phase.total:
        return Group(Text(), text)
    return Group(Text(), text, _bar(phase.done / phase.total, min(width, 60)))

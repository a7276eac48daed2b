"""The live view: a sink that draws at 4 Hz on its own thread, and keeps the answer's text and its table apart.

The decode loop only appends to a queue. Where text and view share a screen, the view is the only writer: lines that are
complete go to standard output above the table, the line under way stands on top of it. At the end the table is erased and
what was printed is the text alone.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from dspark.records import RoundEvent
from dspark.telemetry.panel import WIDEST, Facts, Phase, Shown, line, panel
from dspark.telemetry.tally import Tally
from dspark.telemetry.terminal import Region, cells, fold, harmless, size

REFRESH_S = 0.25
TEXT_S = 0.05
# Beneath this a table would leave no room for the text.
TABLE_COLUMNS, TABLE_ROWS = 44, 20


class Board:
    """What a view knows, changed by the session's thread and read by the drawing one."""

    def __init__(self, facts: Facts, clock: Callable[[], float] = time.perf_counter):
        self.facts, self.phase, self.tally = facts, Phase("load"), Tally()
        self.prompt_tokens, self.ttft_s, self.prefill_s = 0, None, 0.0
        self._clock, self._queue = clock, deque[RoundEvent]()
        self._began = self._phase_began = clock()
        self._ended: float | None = None

    def __call__(self, event: RoundEvent) -> None:
        """The sink: costs an append."""
        if self.ttft_s is None:
            self.ttft_s = self._clock() - self._began
            self.turn(Phase("decode"))
        self._queue.append(event)

    def turn(self, phase: Phase) -> None:
        """Go on to another phase; time to first token counts from the beginning of prefill."""
        if phase.name != self.phase.name:
            now = self._clock()
            if phase.name == "prefill":
                self._began = now
            if phase.name == "decode":
                self.prefill_s = now - self._began
            if phase.name == "done":
                self._ended = now
            self._phase_began = now
        self.phase = phase

    def shown(self) -> Shown:
        """Count what came in meanwhile and say what there is to draw."""
        while self._queue:
            self.tally.add(self._queue.popleft())
        elapsed = (self._ended or self._clock()) - self._phase_began
        return Shown(self.facts, self.phase, self.tally, elapsed, self.prompt_tokens, self.prefill_s, self.ttft_s)


class LiveView:
    """Draws a board to a terminal. `mode` is "table" or "line"; `text_to`: where the answer goes when it is the same screen.

    `start`, then any number of `text` and sink calls, then `stop`, which leaves only text on the screen. An error of the
    terminal's (it was closed) ends the drawing and is raised by `text` or `stop`.
    """

    def __init__(self, board: Board, stream: TextIO, mode: str = "table", text_to: TextIO | None = None):
        self.board, self.mode = board, mode
        self._stream, self._text_to, self._region = stream, text_to, Region(stream)
        self._incoming: deque[str] = deque()
        self._notes: deque[str] = deque()
        self._pending, self._tail_from, self._tail_width = "", 0, 0
        self._rows: list[str] = []
        self._width = 0
        self._drawn_at, self._dirty = 0.0, True
        self._error: BaseException | None = None
        self._lock, self._over, self._resting = threading.Lock(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="dspark-live", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def text(self, text: str) -> None:
        """Add to the answer; control characters are made visible."""
        if self._error is not None:
            raise self._error
        if text:
            self._incoming.append(harmless(text))

    def note(self, text: str) -> None:
        """Print a line above the view, to the view's own stream."""
        self._notes.append(text)

    def by_hand(self, every_s: float) -> None:
        """Draw now, on the caller's thread, unless that was done less than `every_s` ago; the drawing thread rests from now on,
        since it would be in the way of what is being timed."""
        self._resting.set()
        if time.monotonic() - self._drawn_at >= every_s and self._error is None:
            try:
                with self._lock:
                    self._draw()
            except Exception as error:
                self._error = error

    def by_itself(self) -> None:
        """Let the drawing thread go on."""
        self._resting.clear()

    def stop(self) -> None:
        """Erase the view and print what is left of notes and text. Safe to call twice, and from another thread."""
        self._over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        with self._lock:
            self._region.erase()
            self._say()
            self._take()
            self._print(self._pending)
            self._pending = ""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while not self._over.wait(TEXT_S):
            if self._resting.is_set():
                continue
            try:
                with self._lock:
                    self._draw()
            except Exception as error:  # raised where it can be told, by the thread that writes
                self._error = error
                return

    def _draw(self) -> None:
        columns, rows = size(self._stream)
        self._take()
        now = time.monotonic()
        if now - self._drawn_at >= REFRESH_S:
            self._drawn_at, self._dirty = now, True
            self._rows = self._render(columns, rows)
        if self._notes:
            self._region.erase()
            self._say()
        if not self._dirty:
            return
        done, newline, rest = self._pending.rpartition("\n")
        if newline:
            self._region.erase()
            self._print(done + newline)
            self._pending, self._tail_from = rest, 0
        tail = self._tail(columns, rows - len(self._rows) - 1)
        self._region.draw(
            [*tail, *self._rows], [*(sum(map(cells, row)) for row in tail), *[self._width] * len(self._rows)]
        )
        self._dirty = False

    def _take(self) -> None:
        while self._incoming:
            self._pending += self._incoming.popleft()
            self._dirty = True

    def _say(self) -> None:
        while self._notes:
            self._stream.write(f"{self._notes.popleft()}\n")
            self._dirty = True
        self._stream.flush()

    def _tail(self, columns: int, room: int) -> list[str]:
        """The last rows of the line under way. Rows that are out of sight are not folded again."""
        if not self._pending:
            return []
        if columns != self._tail_width:
            self._tail_from, self._tail_width = 0, columns
        folded = fold(self._pending[self._tail_from :], columns)
        room = max(room, 1)
        if len(folded) > room:
            self._tail_from += folded[-room][0]
            folded = folded[-room:]
        return [row for _, row in folded]

    def _print(self, text: str) -> None:
        if text and self._text_to is not None:
            self._text_to.write(text)
            self._text_to.flush()

    def _render(self, columns: int, rows: int) -> list[str]:
        shown = self.board.shown()
        small = self.mode == "line" or columns < TABLE_COLUMNS or rows < TABLE_ROWS
        self._width = min(columns - 1, WIDEST)
        return to_rows(line(shown, self._width) if small else panel(shown, self._width), self._width)


def to_rows(renderable: Any, width: int) -> list[str]:
    """A rich renderable as rows of text with escape codes for colour."""
    console = _console(io.StringIO(), width)
    with console.capture() as capture:
        console.print(renderable, end="")
    return capture.get().rstrip("\n").split("\n")


def svg(
    events: Iterable[RoundEvent], facts: Facts, *, prompt_tokens: int = 0, prefill_s: float = 0.0, command: str = ""
) -> str:
    """What the screen showed behind the last of `events`, the answer and the table below it, as an SVG of 80 columns.

    `command` is what was typed; times before the first round are not in events, so prefill is told.
    """
    tally, text, first_s = Tally(), "", None
    for event in events:
        tally.add(event)
        text += event.rows[0].text
        first_s = prefill_s + event.elapsed_ms / 1000 if first_s is None else first_s
    shown = Shown(facts, Phase("decode"), tally, tally.elapsed_ms / 1000, prompt_tokens, prefill_s, first_s)
    console = _console(io.StringIO(), 80, record=True)
    if command:
        console.print(f"$ {command}", style="bold")
    console.print(harmless(text).rstrip("\n"))
    console.print(panel(shown, 80))
    return console.export_svg(title="dspark", unique_id="dspark")


def _console(file: TextIO, width: int, record: bool = False) -> Any:
    from rich.console import Console

    return Console(
        file=file,
        width=width,
        height=50,
        force_terminal=True,
        record=record,
        no_color=bool(os.environ.get("NO_COLOR")),
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )

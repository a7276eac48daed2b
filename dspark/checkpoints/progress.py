"""How a download says how far it is: one small record, and a line on standard error for those who want no more."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple, TextIO


class Progress(NamedTuple):
    """`done` of `total` bytes of `what`; `total` is None while it is not known."""

    what: str
    done: int
    total: int | None


Report = Callable[[Progress], None]


class StderrProgress:
    """Write progress as one line: redrawn on a terminal, otherwise a line for each tenth and nothing in between."""

    def __init__(self, stream: TextIO | None = None, every_s: float = 0.1):
        self.stream, self.every_s = stream or sys.stderr, every_s
        self._drawn_at, self._tenth, self._what, self._open = 0.0, -1, "", False

    def __call__(self, progress: Progress) -> None:
        if progress.what != self._what:
            self.close()
            self._what, self._tenth = progress.what, -1
        finished = progress.total is not None and progress.done >= progress.total
        if self.stream.isatty():
            self._redraw(progress, finished)
        else:
            self._log(progress)

    def close(self) -> None:
        """End the line that was being redrawn, if there is one."""
        if self._open:
            self.stream.write("\n")
            self.stream.flush()
            self._open = False

    def _redraw(self, progress: Progress, finished: bool) -> None:
        now = time.monotonic()
        if finished or now - self._drawn_at >= self.every_s:
            self._drawn_at, self._open = now, True
            self.stream.write(f"\r\x1b[K{_line(progress)}")
            self.stream.flush()
            if finished:
                self.close()

    def _log(self, progress: Progress) -> None:
        tenth = progress.done * 10 // progress.total if progress.total else 0
        if tenth > self._tenth:
            self._tenth = tenth
            self.stream.write(_line(progress) + "\n")
            self.stream.flush()


def _line(progress: Progress) -> str:
    done = f"{progress.done / 1e6:.0f}"
    if not progress.total:
        return f"{progress.what}: {done} MB"
    return f"{progress.what}: {done} of {progress.total / 1e6:.0f} MB ({100 * progress.done // progress.total} %)"

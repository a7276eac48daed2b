"""How far a calibration is, on standard error. Drawn between timed cases only: a thread that draws would be measured too."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from dspark.cli.failures import say
from dspark.cli.screen import LOG_EVERY_S, measuring_in_words
from dspark.telemetry.terminal import is_terminal

DRAW_EVERY_S = 0.2


class Measuring:
    """A progress callback (`done`, `total`, `what`; no total while warming up): a bar on a terminal, elsewhere a line now and
    then. Enter it for as long as it is called."""

    def __init__(self, shown: bool):
        self._terminal = shown and is_terminal(sys.stderr)
        self._shown, self._bar, self._task = shown, None, None
        self._said = time.monotonic()

    def __enter__(self) -> Measuring:
        if self._terminal:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("measuring"), BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description}"))
            bar: Any = Progress(*columns, console=Console(file=sys.stderr), transient=True, auto_refresh=False)
            bar.start()
            self._bar, self._task = bar, bar.add_task("", total=None)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            # A terminal that was closed meanwhile is no reason to lose what was measured.
            with contextlib.suppress(OSError, ValueError):
                self._bar.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if self._bar is not None and now - self._said >= DRAW_EVERY_S:
            self._said = now
            with contextlib.suppress(OSError, ValueError):
                self._bar.update(self._task, completed=done, total=total or None, description=what, refresh=True)
        elif self._shown and not self._terminal and now - self._said >= LOG_EVERY_S:
            self._said = now
            say(measuring_in_words(done, total, what))

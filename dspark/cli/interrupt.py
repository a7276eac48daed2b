"""Ctrl-C: the first one ends the answer behind the round under way, the second one leaves at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from dspark.cli.failures import INTERRUPTED

TERMINATED = 143


class Interrupts:
    """While it is entered, SIGINT and SIGTERM call `first`, and from the second one on `leave`, on a thread of its own.

    A thread, because Python runs its handlers between bytecodes of the main thread, which a long forward does not reach;
    the byte that a signal writes to the pipe is seen at once.
    """

    def __init__(self, first: Callable[[], None], leave: Callable[[], None]):
        self._first, self._leave = first, leave
        self._caught: list[int] = []
        self._undo: list[Callable[[], Any]] = []

    @property
    def exit_code(self) -> int | None:
        """What the process should end with, or None where no signal came."""
        if not self._caught:
            return None
        return TERMINATED if self._caught[0] == signal.SIGTERM else INTERRUPTED

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._undo = [lambda: signal.set_wakeup_fd(old)]
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, lambda *_: None)
            self._undo.insert(0, lambda number=number, before=before: signal.signal(number, before))
        self._undo.append(lambda: os.close(writer))
        threading.Thread(target=self._watch, args=(reader,), name="dspark-interrupts", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def _watch(self, reader: int) -> None:
        with contextlib.suppress(OSError):
            while caught := os.read(reader, 16):
                for number in caught:
                    if number in (signal.SIGINT, signal.SIGTERM):
                        self._handle(number)
        with contextlib.suppress(OSError):
            os.close(reader)

    def _handle(self, number: int) -> None:
        self._caught.append(number)
        if len(self._caught) == 1:
            self._first()
        else:
            self._leave()

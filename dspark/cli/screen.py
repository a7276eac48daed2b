"""Who writes where: the answer to standard output, all else to standard error, and both in order on one terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from dspark.checkpoints.progress import Progress, StderrProgress
from dspark.cli.failures import ReaderGone, mute_stdout, say
from dspark.errors import DsparkError
from dspark.records import RoundEvent
from dspark.telemetry.panel import Facts, Phase
from dspark.telemetry.terminal import harmless, is_terminal, same_terminal

LOG_EVERY_S = 10.0
# Between drawings while the machine is measured.
MEASURING_S = 1.0


class Answer:
    """Standard output. Control characters are made visible on a terminal; elsewhere the text stays as it is.

    Raises ReaderGone where nobody reads any more, DsparkError where the disk is full.
    """

    def __init__(self) -> None:
        self.stream, self._last = sys.stdout, "\n"
        self.on_terminal = bool(self.stream.isatty())
        if hasattr(self.stream, "reconfigure"):
            self.stream.reconfigure(errors="replace")

    def write(self, text: str) -> None:
        if not text:
            return
        self._last = text[-1]
        self._put(harmless(text) if self.on_terminal else text)

    def put(self, text: str) -> None:
        """Write text of dspark's own, escape codes and all."""
        self._put(text)

    def end(self, last: str = "") -> None:
        """End the last line, whoever wrote it."""
        if (last or self._last)[-1] != "\n":
            self._put("\n")

    def _put(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError:
            raise ReaderGone from None
        except OSError as error:
            # What is left in the buffer would fail again when the interpreter ends, with an exit code of its own.
            mute_stdout()
            raise DsparkError(f"standard output: {error.strerror}; the text is incomplete") from None


class PlainScreen:
    """No view: notes are lines on standard error, and a long prefill says now and then how far it is."""

    def __init__(self, answer: Answer, quiet: bool = False):
        self._answer, self._quiet, self._last = answer, quiet, ""
        self._download = StderrProgress()
        self._logged_at = time.monotonic()

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def __call__(self, event: RoundEvent) -> None: ...

    def stop(self) -> None: ...

    def note(self, text: str) -> None:
        if not self._quiet:
            say(f"note: {text}")

    def load(self, text: str) -> None:
        self._now_and_then(text)

    def download(self, progress: Progress) -> None:
        if not self._quiet:
            self._download(progress)

    def measuring(self, done: int, total: int, what: str) -> None:
        self._now_and_then(measuring_in_words(done, total, what))

    def opened(self, facts: Facts) -> None:
        self._download.close()
        self._logged_at = time.monotonic()

    def prefill(self, done: int, total: int) -> None:
        self._now_and_then(f"reading the prompt: {done:,} of {total:,} tokens")

    def text(self, text: str) -> None:
        self._answer.write(text)

    def _now_and_then(self, text: str) -> None:
        now = time.monotonic()
        if not self._quiet and now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            say(text)


class LiveScreen:
    """The live view. Where text and view share a terminal the view writes both."""

    def __init__(self, answer: Answer, mode: str, facts: Facts, shows_text: bool):
        from dspark.telemetry.live import Board, LiveView

        self._answer = answer
        self._shared = shows_text and same_terminal(sys.stdout, sys.stderr)
        self.board = Board(_clean(facts))
        self._view = LiveView(self.board, sys.stderr, mode, sys.stdout if self._shared else None)

    def __enter__(self) -> LiveScreen:
        self._view.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def __call__(self, event: RoundEvent) -> None:
        self.board(event)

    def stop(self) -> None:
        self._view.stop()

    def note(self, text: str) -> None:
        self._view.note(dim(harmless(f"note: {text}")))

    def load(self, text: str) -> None:
        self.board.turn(Phase("load", harmless(text)))

    def download(self, progress: Progress) -> None:
        total = progress.total or 0
        size = f" of {total / 1e6:.0f}" if total else ""
        text = f"fetching {short(progress.what)}: {progress.done / 1e6:.0f}{size} MB"
        self.board.turn(Phase("load", harmless(text), progress.done, total))

    def measuring(self, done: int, total: int, what: str) -> None:
        self.board.turn(Phase("load", harmless(measuring_in_words(done, total, what)), done, total))
        self._view.by_hand(MEASURING_S)

    def opened(self, facts: Facts) -> None:
        self._view.by_itself()
        self.board.facts = _clean(facts)
        self.board.turn(Phase("prefill", "reading the prompt"))

    def prefill(self, done: int, total: int) -> None:
        self.board.prompt_tokens = total
        self.board.turn(Phase("prefill", "", done, total))

    def text(self, text: str) -> None:
        if self._shared:
            self._view.text(text)
        else:
            self._answer.write(text)


Screen = PlainScreen | LiveScreen


def make_screen(answer: Answer, live: str, quiet: bool, facts: Facts, shows_text: bool) -> Screen:
    """The view that was asked for, where standard error is a terminal that can show it; else none."""
    if live == "off" or quiet or not is_terminal(sys.stderr):
        return PlainScreen(answer, quiet)
    return LiveScreen(answer, "line" if live == "line" else "table", facts, shows_text)


@contextlib.contextmanager
def hushed(screen: Screen) -> Iterator[None]:
    """Keep libraries' warnings off standard error; dspark's own become notes."""

    def show(message: Any, category: type, *rest: Any) -> None:
        if category.__module__.startswith("dspark"):
            screen.note(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


def short(source: str) -> str:
    """A source for a person: of a wheel's or a folder's, the last part."""
    return source.rstrip("/").rsplit("/", 1)[-1] if source.startswith(("wheel:", "/", ".", "~")) else source


def measuring_in_words(done: int, total: int, what: str) -> str:
    """`measuring this machine, 40 %: verify of 4 rows at 256`"""
    return f"measuring this machine, {100 * done // total} %: {what}" if total else f"measuring this machine: {what}"


def _clean(facts: Facts) -> Facts:
    return facts._replace(target=harmless(facts.target), drafter=harmless(facts.drafter))


def dim(text: str) -> str:
    """Text in a lower voice where standard error is a terminal that may show it."""
    return f"\x1b[2m{text}\x1b[0m" if is_terminal(sys.stderr) and not os.environ.get("NO_COLOR") else text

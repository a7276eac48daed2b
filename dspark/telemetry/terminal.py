"""What a terminal needs: making text harmless, wrapping it, and a region at the bottom that can be drawn over again."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from typing import Any, TextIO

# Control bytes as their pictures (U+2400 ...), so that an answer cannot move the cursor, set a title or paste a command.
HARMLESS = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"} | {0x7F: 0x2421}
HARMLESS |= {i: f"<{i:02x}>" for i in range(0x80, 0xA0)}

FALLBACK_SIZE = (80, 24)


def harmless(text: str) -> str:
    """Text for a terminal: control characters become visible signs; newline and tab stay."""
    return text.translate(HARMLESS)


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal that understands cursor movements."""
    return bool(getattr(stream, "isatty", lambda: False)()) and os.environ.get("TERM", "") != "dumb"


def same_terminal(a: Any, b: Any) -> bool:
    """Whether both streams end on one screen, so that what is written to one disturbs the other."""
    if not (is_terminal(a) and is_terminal(b)):
        return False
    try:
        return os.ttyname(a.fileno()) == os.ttyname(b.fileno())
    except (OSError, ValueError):
        return True


def size(stream: Any) -> tuple[int, int]:
    """(columns, rows) of the terminal behind a stream."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return FALLBACK_SIZE
    return (columns or FALLBACK_SIZE[0], rows or FALLBACK_SIZE[1])


def cells(char: str) -> int:
    """Columns that a character takes."""
    if char < "\x7f":
        return 1
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def fold(text: str, width: int) -> list[tuple[int, str]]:
    """Rows of at most `width` columns, as a terminal wraps them, each with its place in `text`; tabs become spaces."""
    rows: list[tuple[int, str]] = []
    start, row, used = 0, "", 0
    for at, char in enumerate(text):
        shown = " " * (8 - used % 8) if char == "\t" else char
        taken = len(shown) if char == "\t" else cells(char)
        if used + taken > width:
            rows.append((start, row))
            start, row, used = at, "", 0
            shown = shown[:width]
        row += shown
        used += taken
    return [*rows, (start, row)]


class Region:
    """The rows below everything that was printed. `draw` replaces them, `erase` takes them away.

    Rows are cut at the right edge, never wrapped. Nothing of the terminal's state is changed for longer than a draw, but for
    the cursor, which is hidden until `erase`.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream
        self._widths: list[int] = []

    def draw(self, rows: Sequence[str], widths: Sequence[int]) -> None:
        """Show `rows`, which take `widths` columns, in place of the ones shown before."""
        body = "\r\n".join(f"{row}\x1b[0m" for row in rows)
        # The cursor waits in the first column: the terminal's own echo of a key then does not wrap to another row.
        self.stream.write(f"\x1b[?2026h\x1b[?25l{self._back()}\x1b[?7l{body}\x1b[?7h\r\x1b[?2026l")
        self.stream.flush()
        self._widths = list(widths)

    def erase(self) -> None:
        """Take the rows away; what is printed next begins where they began."""
        if self._widths:
            self.stream.write(f"{self._back()}\x1b[?25h")
            self.stream.flush()
            self._widths = []

    def _back(self) -> str:
        """To the first column of the first row, and everything from there on erased."""
        if not self._widths:
            return "\r"
        columns, _ = size(self.stream)
        # A terminal that became narrower has wrapped what was drawn; the cursor is where the last row begins.
        up = sum(max(1, -(-width // columns)) for width in self._widths[:-1])
        return f"\r\x1b[{up}A\x1b[J" if up else "\r\x1b[J"

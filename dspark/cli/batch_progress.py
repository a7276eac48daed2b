"""How far a batch is, on standard error: one line that is drawn anew on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from dspark.cli.failures import say
from dspark.cli.screen import LOG_EVERY_S, dim
from dspark.records import Commit
from dspark.rows import Result
from dspark.telemetry.terminal import is_terminal, size

DRAW_EVERY_S = 0.25


class BatchProgress:
    """Counts commits. Entered while the session runs; `erase` takes the line away, `lifted` while something else is written."""

    def __init__(self, prompts: int, shown: bool):
        self._prompts, self._shown = prompts, shown
        self._terminal = shown and is_terminal(sys.stderr)
        self._drawn, self._ended, self._tokens, self._rows = False, 0, 0, 0
        self._began = self._said = time.monotonic()

    def __enter__(self) -> BatchProgress:
        self._began = self._said = time.monotonic()
        return self

    def __exit__(self, *exc: object) -> None:
        self.erase()

    def count(self, commit: Commit) -> None:
        self._tokens += sum(len(row.tokens) for row in commit.rows)
        self._ended += sum(row.finish is not None for row in commit.rows)
        self._rows = len(commit.rows)
        now = time.monotonic()
        if self._shown and now - self._said >= (DRAW_EVERY_S if self._terminal else LOG_EVERY_S):
            self._said = now
            self._draw()

    def text(self) -> str:
        """`12 of 40 answered, 4 at once, 1,234 tokens, 56.7 tokens/s`"""
        rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
        return (
            f"{self._ended:,} of {self._prompts:,} answered, {self._rows} at once, {self._tokens:,} tokens, "
            f"{rate:.1f} tokens/s"
        )

    def erase(self) -> None:
        if self._drawn:
            self._drawn = False
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write("\r\x1b[2K")
                sys.stderr.flush()

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        drawn = self._drawn
        self.erase()
        yield
        if drawn:
            self._draw()

    def _draw(self) -> None:
        if not self._terminal:
            say(self.text())
            return
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"\r\x1b[2K{dim(self.text()[: size(sys.stderr)[0] - 1])}")
            sys.stderr.flush()
            self._drawn = True


def in_all(results: Sequence[Result], took_s: float) -> list[str]:
    """Lines for a person at the end: how many ended how, and what drafting did over all of them."""
    ends = Counter("not begun" if r.finish == "cancelled" and not r.tokens else r.finish for r in results)
    tokens = sum(r.generated_tokens for r in results)
    rounds = sum(r.rounds for r in results)
    lines = [
        f"{len(results)} prompts: {', '.join(f'{n} {finish}' for finish, n in ends.most_common())}; {tokens:,} tokens in "
        f"{took_s:.2f} s ({tokens / max(took_s, 1e-9):.1f} tokens/s)"
    ]
    if rounds:
        offered, accepted = sum(r.offered_tokens for r in results), sum(r.accepted_tokens for r in results)
        rate = f", acceptance rate {100 * accepted / offered:.0f} % ({accepted} of {offered})" if offered else ""
        lines.append(f"accepted length {tokens / rounds:.2f} over {rounds:,} rounds of a row{rate}")
    return lines

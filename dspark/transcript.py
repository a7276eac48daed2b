"""One row's answer on the host: where it ends, and what of it may be shown."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from dspark.records import Tokens


class Transcript:
    """Takes committed tokens, ends exactly, and gives out text that will never be taken back.

    A stop token ends the text in front of it and is the last token kept. A stop string is never shown, not even in part:
    text that could be the beginning of one is held back until it is settled. `left` says how many tokens may still come.
    Characters of several tokens come out whole.
    """

    def __init__(
        self,
        detokenizer: Any,
        stop_tokens: Iterable[int] = (),
        stops: tuple[str, ...] = (),
        max_tokens: int = 256,
    ):
        self.tokens: list[int] = []
        self.finish: str | None = "length" if max_tokens == 0 else None
        self.left = max_tokens
        self._detokenizer = detokenizer
        self._stop_tokens = frozenset(stop_tokens)
        self._stops = tuple(stops)
        self._shown: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """All that was shown."""
        return "".join(self._shown)

    def feed(self, tokens: list[int]) -> tuple[Tokens, str]:
        """Take a round's tokens: those that stand, none behind the end, and the text that may be shown now."""
        left = self.left
        if len(tokens) > left:
            tokens = tokens[:left]
        ending, spoken = "length" if len(tokens) == left else None, tokens
        if not self._stop_tokens.isdisjoint(tokens):
            end = next(i for i, token in enumerate(tokens) if token in self._stop_tokens)
            tokens, ending, spoken = tokens[: end + 1], "stop", tokens[:end]
        if self._stops:
            said, shown = self._until_stop(spoken)
            if self.finish:
                tokens, ending = tokens[:said], None
        else:
            detokenizer = self._detokenizer
            for token in spoken:
                detokenizer.add_token(token)
            shown = detokenizer.last_segment
        if ending:
            shown += self._flush()
            self.finish = self.finish or ending
        self.tokens += tokens
        self.left = left - len(tokens)
        self._shown.append(shown)
        return tuple(tokens), shown

    def _until_stop(self, tokens: list[int]) -> tuple[int, str]:
        """Detokenise: how many tokens until a stop string was complete, or all, and what may be shown."""
        detokenizer, shown = self._detokenizer, ""
        for i, token in enumerate(tokens):
            detokenizer.add_token(token)
            shown += self._show(detokenizer.last_segment)
            if self.finish:
                return i + 1, shown
        return len(tokens), shown

    def end(self, finish: str) -> str:
        """End from outside ("cancelled", "error"); the text that was held back, which is part of the answer."""
        shown = "" if self.finish else self._flush()
        self.finish = self.finish or finish
        self._shown.append(shown)
        return shown

    def fork(self) -> Transcript:
        """An independent copy."""
        twin = copy.copy(self)
        twin.tokens, twin._shown = list(self.tokens), list(self._shown)
        twin._detokenizer = copy.copy(self._detokenizer)
        for name in ("tokens", "_current_tokens"):
            if isinstance(getattr(self._detokenizer, name, None), list):
                setattr(twin._detokenizer, name, list(getattr(self._detokenizer, name)))
        return twin

    def _show(self, segment: str) -> str:
        """What of a segment is certain not to belong to a stop string."""
        if not self._stops:
            return segment
        self._held += segment
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            self.finish = "stop"
            return shown
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def _flush(self) -> str:
        self._detokenizer.finalize()
        shown = self._show(self._detokenizer.last_segment)
        held, self._held = self._held, ""
        return shown + held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0

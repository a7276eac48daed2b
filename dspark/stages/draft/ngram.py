"""What lookup remembers of one row: its tokens, where each n-gram was last seen, and whether its drafts have paid lately."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.records import Tokens

LONG_DEPTH = 8
MAX_DEPTH = 16


class NGramIndex:
    """Finds the latest earlier occurrence of the n-gram that ends the row, longest n first. Constant cost a token.

    An n-gram is entered when the token behind it arrives, so that a lookup never finds itself. Absorbing tokens twice
    does no harm: each knows its position.
    """

    def __init__(self, min_ngram: int, max_ngram: int):
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.history: list[int] = []
        self._seen: dict[Tokens, int] = {}

    def absorb(self, tokens: Tokens, end: int) -> int:
        """Take in `tokens`, whose last one stands at position `end`; how many of them were new."""
        fresh = end + 1 - len(self.history)
        for token in tokens[len(tokens) - fresh :] if fresh > 0 else ():
            history, at = self.history, len(self.history)
            for n in self.sizes:
                if n <= at:
                    self._seen[tuple(history[at - n : at])] = at
            history.append(token)
        return max(fresh, 0)

    def find(self) -> tuple[int, int]:
        """(position behind the match, tokens in common before it), or (0, 0). Depth is counted up to 16."""
        history, at = self.history, len(self.history)
        for n in self.sizes:
            hit = self._seen.get(tuple(history[at - n :])) if n <= at else None
            if hit is not None:
                depth = n
                while depth < MAX_DEPTH and depth < hit and history[hit - 1 - depth] == history[at - 1 - depth]:
                    depth += 1
                return hit, depth
        return 0, 0

    def follow(self, start: int, length: int) -> list[int]:
        """The `length` tokens behind a match; one that runs into the row's end goes round again."""
        found = self.history[start : start + length]
        period = len(self.history) - start
        while len(found) < length:
            found.append(found[len(found) - period])
        return found


class Gate:
    """Shortens drafts while they fail. A draft fails when less than half of it is said; a success opens the gate.

    0 or 1 strikes in a row: drafts grow with the match. 2 and 3: base length. From 4 on nothing is drafted but a probe of
    base length on every `probe_every`th match.
    """

    BASE_AFTER, CLOSED_AFTER = 2, 4

    def __init__(self, probe_every: int):
        self.probe_every, self.strikes, self._waiting = probe_every, 0, 0
        self._drafts: Sequence[int] = ()
        self._stood = 0

    def drafted(self, drafts: Sequence[int]) -> None:
        """Told what was drafted. A draft that is not judged yet no longer counts."""
        self._drafts, self._stood = drafts, 0

    def judge(self, said: Sequence[int]) -> None:
        """Told what is said behind the last draft, by one round or by several."""
        for token in said:
            if not self._drafts:
                return
            stands = token == self._drafts[self._stood]
            self._stood += stands
            if not stands or self._stood == len(self._drafts):
                self.strikes = self.strikes + 1 if 2 * self._stood < len(self._drafts) else 0
                self._drafts = ()

    def length(self, depth: int, base: int, longest: int) -> int:
        """How many tokens to draft behind a match of `depth`."""
        if self.strikes >= self.CLOSED_AFTER:
            self._waiting += 1
            if self._waiting < self.probe_every:
                return 0
            self._waiting = 0
        if depth >= LONG_DEPTH and self.strikes < self.BASE_AFTER:
            return min(2 * depth, longest)
        return min(base, longest)

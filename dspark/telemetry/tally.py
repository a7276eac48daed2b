"""What a stream of round events adds up to. Pure bookkeeping; the live view, the summary and tests read it."""

from __future__ import annotations

from collections import Counter, deque

from dspark.records import RoundEvent

# Long enough to be readable, short enough to show that a text became harder.
WINDOW_MS = 3000.0


class Tally:
    """Add events with `add`, read the rest.

    positions[i]: (rounds in which draft position i + 1 was offered, rounds in which it was accepted); sources: rounds by who
    drafted, each row counted; last: the latest event; shadowed, said_too: drafts made beside plain steps, and those of them that
    plain steps said too.
    """

    def __init__(self) -> None:
        self.last: RoundEvent | None = None
        self.rounds = self.row_rounds = self.tokens = self.offered = self.accepted = self.reads = 0
        self.shadowed = self.said_too = 0
        self.elapsed_ms = 0.0
        self.positions: list[list[int]] = []
        self.sources: Counter[str] = Counter()
        self._recent: deque[tuple[float, int]] = deque()
        self._recent_ms, self._recent_tokens = 0.0, 0
        self._predicted_ms, self._predictions = 0.0, 0

    def add(self, event: RoundEvent) -> None:
        """Count a round."""
        self.last = event
        self.rounds += 1
        self.reads += event.reads
        self.elapsed_ms += event.elapsed_ms
        if event.predicted_ms is not None:
            self._predicted_ms += event.predicted_ms
            self._predictions += 1
        for shadow in event.judged:
            self.shadowed += shadow.offered
            self.said_too += shadow.accepted
        committed = 0
        for row in event.rows:
            committed += len(row.tokens)
            self.row_rounds += 1
            self.offered += row.offered
            self.accepted += row.accepted
            self.sources[row.source] += 1
            self._count_positions(row.offered, row.accepted)
        self.tokens += committed
        self._remember(event.elapsed_ms, committed)

    def _count_positions(self, offered: int, accepted: int) -> None:
        while len(self.positions) < offered:
            self.positions.append([0, 0])
        for i in range(offered):
            self.positions[i][0] += 1
            self.positions[i][1] += i < accepted

    def _remember(self, elapsed_ms: float, tokens: int) -> None:
        self._recent.append((elapsed_ms, tokens))
        self._recent_ms += elapsed_ms
        self._recent_tokens += tokens
        while len(self._recent) > 1 and self._recent_ms - self._recent[0][0] >= WINDOW_MS:
            ms, count = self._recent.popleft()
            self._recent_ms -= ms
            self._recent_tokens -= count

    @property
    def accepted_length(self) -> float:
        """Tokens a round and row, the bonus included."""
        return self.tokens / self.row_rounds if self.row_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts of those offered."""
        return self.accepted / self.offered if self.offered else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Over all rounds."""
        return 1000 * self.tokens / self.elapsed_ms if self.elapsed_ms else 0.0

    @property
    def tokens_per_s_now(self) -> float:
        """Over the last seconds."""
        return 1000 * self._recent_tokens / self._recent_ms if self._recent_ms else 0.0

    @property
    def round_ms(self) -> float:
        """Mean time of a round."""
        return self.elapsed_ms / self.rounds if self.rounds else 0.0

    @property
    def predicted_ms(self) -> float | None:
        """Mean of what the cost curve said, over the rounds that it spoke of."""
        return self._predicted_ms / self._predictions if self._predictions else None

    def rates(self) -> list[float]:
        """Acceptance by draft position, the first one first."""
        return [accepted / offered for offered, accepted in self.positions]

    def shares(self) -> list[tuple[str, float]]:
        """Share of rounds by source, the largest first, "plain" last."""
        total = sum(self.sources.values()) or 1
        order = sorted(self.sources.items(), key=lambda item: (item[0] == "plain", -item[1], item[0]))
        return [(source, count / total) for source, count in order]

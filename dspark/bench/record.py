"""What one run of one arm leaves behind, and the figures that follow from it. All arms are timed from outside, alike."""

from __future__ import annotations

from typing import NamedTuple

Delivery = tuple[float, int]


class Run(NamedTuple):
    """One prompt answered by one arm.

    tokens: all that were said; deliveries: (seconds since the call, tokens that came then), in order; took_s: until the call
    was over; rounds: target forwards of the answer, None where an arm does not tell; peak_bytes: most device memory.
    """

    tokens: tuple[int, ...]
    deliveries: tuple[Delivery, ...]
    took_s: float
    rounds: int | None = None
    peak_bytes: int | None = None

    @property
    def first_s(self) -> float | None:
        """Until the first token came."""
        return self.deliveries[0][0] if self.deliveries else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second behind the first delivery, whose own tokens are not counted; None where all came at once."""
        if len(self.deliveries) < 2:
            return None
        (began, _), (ended, _) = self.deliveries[0], self.deliveries[-1]
        later = sum(count for _, count in self.deliveries[1:])
        return later / (ended - began) if ended > began else None

    @property
    def whole_rate(self) -> float | None:
        """Tokens a second from the call to its last token, the prompt's reading included."""
        if not self.deliveries or self.deliveries[-1][0] <= 0:
            return None
        return sum(count for _, count in self.deliveries) / self.deliveries[-1][0]

    @property
    def accepted_length(self) -> float | None:
        """Tokens a round, the bonus included."""
        return len(self.tokens) / self.rounds if self.rounds else None

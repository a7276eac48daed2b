"""Did all arms say the same? Where two first differ, how close the target's two likeliest tokens were there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

CHUNK = 512
# A tie may be broken by rounding where its gap is below so many times the difference that rounding was seen to make.
NEAR = 10
# Tokens that are looked at: random weights make ties of several.
MOST = 16


class Divergence(NamedTuple):
    """Where an arm first says something else than the reference: the token's place in the answer, and what both say (None
    where one has ended)."""

    at: int
    reference: int | None
    other: int | None


class Gap(NamedTuple):
    """gap: between the two largest logits; noise: how much logits of this row moved between a wide and a narrow forward; top: the
    tokens of those two, and of any more that are as close to the largest as rounding may move them."""

    gap: float
    noise: float
    top: tuple[int, ...]

    def near_tie(self, found: Divergence) -> bool:
        """Whether rounding alone can have led to this divergence."""
        return {found.reference, found.other} <= set(self.top) and self.gap <= NEAR * self.noise


def spoken(tokens: Sequence[int], stop_tokens: frozenset[int], limit: int) -> tuple[int, ...]:
    """An answer as it is compared: at most `limit` tokens, up to and with the first stop token."""
    cut = tuple(tokens[:limit])
    end = next((i for i, token in enumerate(cut) if token in stop_tokens), None)
    return cut if end is None else cut[: end + 1]


def first_divergence(reference: Sequence[int], other: Sequence[int]) -> Divergence | None:
    """None where both are the same."""
    for i, (a, b) in enumerate(zip(reference, other, strict=False)):
        if a != b:
            return Divergence(i, a, b)
    if len(reference) == len(other):
        return None
    i = min(len(reference), len(other))
    said = lambda tokens: tokens[i] if i < len(tokens) else None
    return Divergence(i, said(reference), said(other))


def gap_behind(target: Any, context: Sequence[int]) -> Gap:
    """The gap between the two likeliest tokens behind `context` (at least two ids). Costs two forwards over it."""
    wide = _last_logits(target, context, CHUNK)
    narrow = _last_logits(target, context, 1)
    ranked: Any = mx.argsort(-narrow)[:MOST].tolist()
    short: Any = (narrow[ranked[0]] - narrow[mx.array(ranked)]).tolist()
    noise: Any = mx.abs(wide - narrow).max().item()
    top = tuple(token for i, token in enumerate(ranked) if i < 2 or short[i] <= NEAR * noise)
    return Gap(short[1], noise, top)


def _last_logits(target: Any, context: Sequence[int], last: int) -> mx.array:
    """Logits [V] float32 behind `context`, whose last `last` tokens go through one forward."""
    caches = target.make_caches()
    split = max(0, len(context) - last)
    starts = [*range(0, split, CHUNK), split]
    logits = None
    for start, end in zip(starts, [*starts[1:], len(context)], strict=True):
        if end > start:
            logits, _ = target(mx.array([list(context[start:end])]), caches)
            mx.eval(logits)
    assert logits is not None
    return logits[0, -1].astype(mx.float32)

"""Giving a drafted block another shape: fewer drafts than were made, or more rows than they fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from dspark.caps.base import AbstractCap
from dspark.records import Proposal


def fitted(proposal: Proposal, cap: AbstractCap, carry: Any, longest: int | None = None) -> Proposal:
    """The block that the cap controller would rather have verified: each row's draft cut to what pays, and all rows padded to
    the widest that any of them asks for. longest: positions that the target has, beyond which nothing is padded."""
    offered, width = [], 1
    for source, drafted in zip(proposal.source, proposal.offered, strict=True):
        kept = 0
        if drafted:
            kept, rows = cap.fit(carry, source, drafted)
            kept = min(kept, drafted)
            width = max(width, kept + 1, rows)
        offered.append(kept)
    if longest is not None:
        width = max(min(width, longest - max(proposal.start)), max(offered) + 1)
    if tuple(offered) == proposal.offered and width == proposal.tokens.shape[1] + 1:
        return proposal
    return reshaped(proposal, tuple(offered), width)


def believed(proposal: Proposal, keep: Sequence[int]) -> Proposal:
    """The block up to the drafts that its drafter still believes in, `keep` of each row."""
    offered = tuple([min(n, k) for n, k in zip(proposal.offered, keep, strict=True)])
    return reshaped(proposal, offered, max(offered) + 1)


def reshaped(proposal: Proposal, offered: tuple[int, ...], width: int) -> Proposal:
    """The block with `offered` drafts a row, in `width` rows. Padding is token 0 with no mass in q; it lies behind the offered
    drafts, where no accept stage looks, and is rolled back with what was rejected."""
    drafts, q = width - 1, proposal.q
    if q is not None:
        q = type(q)(*[_wide(array, drafts) for array in q]) if drafts else None
    source = tuple([name if n else "plain" for name, n in zip(proposal.source, offered, strict=True)])
    tokens = _wide(proposal.tokens, drafts)
    return Proposal(proposal.anchor, tokens, offered, q, source, proposal.start, waits=proposal.waits)


def _wide(array: mx.array, width: int) -> mx.array:
    """The first `width` columns of [B, K, ...]; zeros where there are fewer."""
    short = width - array.shape[1]
    if short <= 0:
        return array[:, :width] if short else array
    return mx.pad(array, [(0, 0), (0, short), *[(0, 0)] * (array.ndim - 2)])

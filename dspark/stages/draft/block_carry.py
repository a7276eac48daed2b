"""What a block drafter carries from round to round."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from dspark.models.heads import Context
from dspark.stages.warp import Warps


class Foreseen(NamedTuple):
    """Tokens [1, K] that were drafted behind a round whose end only the device knew, and that round's taps [1, W, F], which the
    context has taken in."""

    tokens: mx.array
    taps: mx.array


class BlockCarry(NamedTuple):
    """context: keys and values of committed tokens; seeds: one a row; warps: how each row's drafts are drawn, None for the
    likeliest token; waiting: taps [B, 1, F] of plain steps behind the context, which are taken in together; foreseen: what was
    drafted before the round was read, None for nothing."""

    context: Context
    seeds: tuple[int, ...]
    warps: tuple[Warps | None, ...]
    waiting: tuple[mx.array, ...] = ()
    foreseen: Foreseen | None = None

    @property
    def starts(self) -> tuple[int, ...]:
        """A row's tokens that it was told of."""
        return tuple([start + len(self.waiting) for start in self.context.starts])

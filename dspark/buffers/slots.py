"""Slots of recurrent caches, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def join(parts: Sequence[mx.array]) -> mx.array:
    """Rows of several slots behind one another, [B, ...]. A window that is not full yet is as good as one with zeros in
    front, so shorter ones are padded there."""
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    return mx.concatenate([_padded(part, shape) for part in parts])


def _padded(part: mx.array, shape: Sequence[int]) -> mx.array:
    missing = [(want - have, 0) for want, have in zip(shape, part.shape[1:], strict=True)]
    return mx.pad(part, [(0, 0), *missing]) if any(front for front, _ in missing) else part

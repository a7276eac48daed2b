"""The few largest of many logits, and the border of a nucleus, without sorting the vocabulary.

A full sort of 9 x 49,152 logits costs a CPU about a third of the verify that made them.
"""

from __future__ import annotations

import mlx.core as mx

SMALL = 512


def top(logits: mx.array, n: int) -> tuple[mx.array, mx.array]:
    """The n largest of the last axis, largest first: values and ids, each [..., n].

    The vocabulary is cut into groups and only the n groups with the largest maxima are looked at: every other token is
    smaller than n others. Costs one pass over V and a selection among n times the group's size.
    """
    size = logits.shape[-1]
    group = _group(size, n)
    if group == 1:
        ids = mx.argpartition(logits, size - n, axis=-1)[..., size - n :]
        values = mx.take_along_axis(logits, ids, axis=-1)
    else:
        groups, which = _best_groups(logits, n, group)
        at = mx.argpartition(groups, n * group - n, axis=-1)[..., n * group - n :]
        values = mx.take_along_axis(groups, at, axis=-1)
        ids = mx.take_along_axis(which, at // group, axis=-1) * group + at % group
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(values, order, axis=-1), mx.take_along_axis(ids, order, axis=-1)


def top_values(logits: mx.array, n: int) -> mx.array:
    """The n largest values of the last axis, smallest first, [..., n]."""
    size = logits.shape[-1]
    group = _group(size, n)
    if group > 1:
        logits, _ = _best_groups(logits, n, group)
        size = n * group
    return mx.sort(mx.partition(logits, size - n, axis=-1)[..., size - n :], axis=-1)


def nucleus_border(probs: mx.array, mass: float) -> mx.array:
    """The smallest probability [..., 1] of the shortest list of likeliest tokens that holds at least `mass`.

    On a CPU the half that holds the border is kept, again and again: a quickselect by mass, exact for every distribution,
    2 V steps instead of V log V. A GPU partitions by sorting, so there one sort of probs [..., V] is cheaper.
    """
    above = mx.zeros((*probs.shape[:-1], 1))
    while probs.shape[-1] > SMALL and mx.default_device().type == mx.DeviceType.cpu:
        half = (probs.shape[-1] + 1) // 2
        if probs.shape[-1] % 2:
            probs = mx.concatenate([probs, mx.zeros_like(probs[..., :1])], axis=-1)
        parts = mx.partition(probs, half, axis=-1)
        lower, upper = parts[..., :half], parts[..., half:]
        with_upper = above + mx.sum(upper, axis=-1, keepdims=True)
        inside = with_upper >= mass
        probs = mx.where(inside, upper, lower)
        above = mx.where(inside, above, with_upper)
    return border(mx.sort(probs, axis=-1), mass - above)


def border(probs: mx.array, mass: mx.array | float, values: mx.array | None = None) -> mx.array:
    """Of probs [..., n], smallest first, the last one [..., 1] whose larger ones hold less than `mass`; or its value."""
    before = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    dropped = mx.sum(before >= mass, axis=-1, keepdims=True)
    return mx.take_along_axis(probs if values is None else values, dropped, axis=-1)


def _group(size: int, n: int) -> int:
    """Tokens a group: a power of two near sqrt(size / n), which balances both passes; 1 where grouping gains nothing."""
    group = 1 << max(0, ((size // n).bit_length() - 1) // 2)
    return group if size >= 16 * SMALL // 2 and group >= 4 else 1


def _best_groups(logits: mx.array, n: int, group: int) -> tuple[mx.array, mx.array]:
    """The n groups with the largest maxima, side by side [..., n * group], and which they are [..., n]."""
    *lead, size = logits.shape
    if size % group:
        logits = mx.concatenate([logits, mx.full((*lead, group - size % group), -mx.inf)], axis=-1)
    groups = logits.reshape(*lead, -1, group)
    best = mx.max(groups, axis=-1)
    count = best.shape[-1]
    which = mx.argpartition(best, count - n, axis=-1)[..., count - n :]
    return mx.take_along_axis(groups, which[..., None], axis=-2).reshape(*lead, n * group), which

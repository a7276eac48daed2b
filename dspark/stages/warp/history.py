"""What penalties remember of a session, kept on the device and moved on by the accepted count, without a read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from dspark.records import Tokens
from dspark.stages.warp.base import NO_CONTEXT, Context
from dspark.stages.warp.chain import Warps


class History(NamedTuple):
    """recent [B, R] int32: the last tokens, the anchor last, prompt included; a past shorter than R repeats its first
    token in front, which changes nothing for a set. counts [B, V] float32: the answer's tokens, the anchor included once
    it is one of them. Either is None where no link asks for it; counts also before the first round."""

    recent: mx.array | None
    counts: mx.array | None


class Block(NamedTuple):
    """A history spread over a block: `line` [B, R + K] is the recent tokens with the drafts behind them."""

    context: Context
    line: mx.array | None


NO_BLOCK = Block(NO_CONTEXT, None)


def begin(warp: Warps, prompts: Sequence[Tokens]) -> History | None:
    """The history of sessions that have only their prompts; None where no link needs one."""
    if not warp.recent_tokens and not warp.counts:
        return None
    size = warp.recent_tokens
    rows = [[*(p[:1] * (size - len(p))), *p[-size:]] for p in prompts] if size else None
    return History(None if rows is None else mx.array(rows, dtype=mx.int32), None)


def spread(history: History | None, warp: Warps, tokens: mx.array, vocab_size: int) -> Block:
    """What each of the K + 1 rows sees: row i has the first i drafts of tokens [B, K] behind the past."""
    if history is None:
        return NO_BLOCK
    rows, drafts = tokens.shape
    recent, counts, line = history.recent, None, None
    if recent is not None:
        size = recent.shape[1]
        line = mx.concatenate([recent, tokens], axis=1) if drafts else recent
        at = mx.arange(drafts + 1)[:, None] + mx.arange(size)
        recent = line[:, at] if drafts else line[:, None]
    if warp.counts:
        counts = _counts(history, rows, vocab_size)[:, None]
        if drafts:
            counts = mx.repeat(counts, drafts + 1, axis=1)
            row, slot = mx.arange(drafts + 1)[:, None], mx.arange(drafts)
            seen = (slot < row).astype(mx.float32)[None]
            where = (mx.arange(rows)[:, None, None], row[None], tokens[:, None])
            counts = counts.at[where].add(seen)
    return Block(Context(recent, counts), line)


def advance(history: History | None, block: Block, accepted: mx.array, following: mx.array) -> History | None:
    """The history behind a round: the first accepted [B] drafts and the token that follows them [B]."""
    if history is None:
        return None
    recent, counts = history.recent, block.context.counts
    if recent is not None and block.line is not None:
        size = recent.shape[1]
        at = accepted[:, None] + mx.arange(1, size)
        recent = mx.concatenate([mx.take_along_axis(block.line, at, axis=1), following[:, None]], axis=1)
    if counts is not None:
        rows = mx.arange(counts.shape[0])
        counts = (counts[:, 0] if counts.shape[1] == 1 else counts[rows, accepted]).at[rows, following].add(1)
    return History(recent, counts)


def take(history: History | None, rows: Sequence[int]) -> History | None:
    """The history of some rows, in the order given."""
    if history is None:
        return None
    at = mx.array(list(rows), dtype=mx.int32)
    return History(*(None if array is None else array[at] for array in history))


def join(history: History | None, other: History | None, rows: int, other_rows: int) -> History | None:
    """Two histories of the same chain behind one another."""
    if history is None or other is None:
        return None
    recent = history.recent
    if recent is not None and other.recent is not None:
        recent = mx.concatenate([recent, other.recent])
    known = next((h.counts for h in (history, other) if h.counts is not None), None)
    if known is None:
        return History(recent, None)
    both = [_counts(history, rows, known.shape[1]), _counts(other, other_rows, known.shape[1])]
    return History(recent, mx.concatenate(both))


def _counts(history: History, rows: int, vocab_size: int) -> mx.array:
    return mx.zeros((rows, vocab_size)) if history.counts is None else history.counts

"""Batches of fixed shapes: conversations of one padded length, and the blocks to train on in each.

Which rows and anchors a step gets depends on the seed and the step's number alone, so a run goes on anywhere. Conversations
are padded at their end, not packed: a causal target computes the same in front of a padding, whatever its family.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from dspark.errors import InputError
from dspark.train.conversations import Conversation


class Batch(NamedTuple):
    """ids [B, L]; anchors [B, N] positions, ascending; kept [B, N]: false for what fills up; ends [B]: tokens of a row."""

    ids: mx.array
    anchors: mx.array
    kept: mx.array
    ends: mx.array


class _Class(NamedTuple):
    ids: np.ndarray
    first: np.ndarray
    ends: np.ndarray


class Batches:
    """Endless batches over conversations: `at(step)`. `anchors` blocks a row, whose anchors are drawn anew each epoch among
    the last token of the prompt and all of the answer that has a successor."""

    def __init__(
        self, conversations: Sequence[Conversation], lengths: Sequence[int], rows: int, anchors: int, seed: int
    ):
        self.rows, self.anchors, self.seed = rows, anchors, seed
        self.classes = [made for made in _classes(conversations, lengths) if len(made.ids)]
        # A class of few rows repeats them in a batch, rather than being left out.
        self.per_class = [max(1, len(c.ids) // rows) for c in self.classes]
        if not self.classes:
            raise InputError("no conversation fits into [data] lengths; raise them")

    @property
    def epoch_steps(self) -> int:
        return sum(self.per_class)

    def at(self, step: int) -> Batch:
        epoch, place = divmod(step, self.epoch_steps)
        plan = self._plan(epoch)
        which, picked = plan[place]
        return self._batch(self.classes[which], picked, np.random.default_rng((self.seed, 1, step)))

    def each_class(self) -> list[Batch]:
        """One batch of every shape."""
        rng = np.random.default_rng(0)
        return [self._batch(c, np.arange(self.rows) % len(c.ids), rng) for c in self.classes]

    def _plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        if getattr(self, "_held", (None, []))[0] != epoch:
            rng = np.random.default_rng((self.seed, 0, epoch))
            plan = []
            for which, (c, count) in enumerate(zip(self.classes, self.per_class, strict=True)):
                order = np.resize(rng.permutation(len(c.ids)), count * self.rows)
                plan += [(which, part) for part in order.reshape(count, self.rows)]
            self._held = epoch, [plan[i] for i in rng.permutation(len(plan))]
        return self._held[1]

    def _batch(self, c: _Class, picked: np.ndarray, rng: np.random.Generator) -> Batch:
        ids, first, ends = c.ids[picked], c.first[picked], c.ends[picked]
        places = np.arange(ids.shape[1])
        open_ = (places >= first[:, None]) & (places < ends[:, None] - 1)
        draw = np.where(open_, rng.random(open_.shape), 2.0)
        count = min(self.anchors, ids.shape[1])
        anchors = np.argpartition(draw, count - 1, axis=1)[:, :count]
        anchors.sort(axis=1)
        kept = np.take_along_axis(open_, anchors, axis=1)
        anchors = np.where(kept, anchors, first[:, None])
        return Batch(mx.array(ids), mx.array(anchors.astype(np.int32)), mx.array(kept), mx.array(ends.astype(np.int32)))


def _classes(conversations: Sequence[Conversation], lengths: Sequence[int]) -> list[_Class]:
    """Rows by padded length; what is longer than the largest is cut there."""
    rows: dict[int, list[tuple[list[int], int]]] = {length: [] for length in lengths}
    for prompt, answer in conversations:
        text = [*prompt, *answer][: lengths[-1]]
        if len(prompt) < len(text):
            rows[next(n for n in lengths if n >= len(text))].append((text, len(prompt)))
    made = []
    for length, found in rows.items():
        ids = np.zeros((len(found), length), np.int32)
        for row, (text, _) in zip(ids, found, strict=True):
            row[: len(text)] = text
        made.append(_Class(ids, np.array([p - 1 for _, p in found], int), np.array([len(t) for t, _ in found], int)))
    return made


def frequent(conversations: Sequence[Conversation], count: int, vocab_size: int, always: Sequence[int]) -> np.ndarray:
    """The `count` most frequent tokens of the answers, ascending; `always` are among them."""
    tally = np.zeros(vocab_size, np.int64)
    for row in conversations:
        np.add.at(tally, np.asarray(row.answer, int), 1)
    tally[list(always)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-tally, kind="stable")[:count])

"""Accepted length on stored texts: every round that a greedy drafter would make along a target's own greedy answer, from one
forward. The same as drafting for real, since a draft stands exactly while it equals the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from dspark.models.heads.drafting import draft_rows
from dspark.models.heads.head import Head
from dspark.models.heads.packed import packed_hidden
from dspark.train.clean import loop_start
from dspark.train.conversations import Conversation

TOKENS = 200
FIRST = 100
CAP = 4


class Accepted(NamedTuple):
    """Tokens a round, the bonus included: of whole answers, at cap 4, of the first 100 tokens, of answers without loops;
    shares: of all rounds, those that accepted 0, 1, ... drafts."""

    full: float
    cap4: float
    first100: float
    no_loops: float
    shares: tuple[float, ...]

    def line(self) -> str:
        return f"{self.full:.3f} (cap 4 {self.cap4:.3f}, first 100 {self.first100:.3f}, no loops {self.no_loops:.3f})"


Measure = Callable[[Any, mx.array, mx.array, mx.array], mx.array]


def make_measure(
    head: Head, teach: Callable[[mx.array], tuple[mx.array, mx.array]], cast: Callable[[Any], Any]
) -> Measure:
    """A function (parameters, ids [B, L], firsts [B], ends [B]) -> drafts that stand behind each of TOKENS anchors, [B, TOKENS]."""

    def measure(parameters: Any, ids: mx.array, firsts: mx.array, ends: mx.array) -> mx.array:
        head.update(cast(parameters))
        rows, length = ids.shape
        anchors = mx.minimum(firsts[:, None] + mx.arange(TOKENS), length - 1)
        taps, _ = teach(ids)
        hidden = packed_hidden(head, taps, anchors, mx.take_along_axis(ids, anchors, axis=1))
        first, count = head.config.first_slot, head.config.num_drafts
        hidden = hidden[:, :, first : first + count].reshape(rows * TOKENS, count, -1)
        tokens = draft_rows(head, hidden, mx.take_along_axis(ids, anchors, axis=1).reshape(-1, 1)).tokens
        places = anchors[..., None] + 1 + mx.arange(count)
        labels = mx.take_along_axis(ids, mx.minimum(places, length - 1).reshape(rows, -1), axis=1)
        right = (tokens == labels.reshape(tokens.shape)) & (places < ends[:, None, None]).reshape(tokens.shape)
        return mx.cumprod(right.astype(mx.int32), axis=1).sum(axis=1).reshape(rows, TOKENS)

    return measure


def accepted_length(
    measure: Measure, parameters: Any, texts: Sequence[Conversation], lengths: Sequence[int], rows: int
) -> Accepted:
    """Replay `texts`, `rows` at a time, answers cut at TOKENS. Costs one forward of target and drafter for each batch, and
    the drafter's vocabulary product for TOKENS blocks a text."""
    texts = [Conversation(t.prompt, t.answer[:TOKENS]) for t in texts if t.answer]
    size = next((n for n in lengths if n >= max(len(t.prompt) + len(t.answer) for t in texts)), None)
    size = size or max(len(t.prompt) + len(t.answer) for t in texts)
    stands = []
    for at in range(0, len(texts), rows):
        part = [texts[i % len(texts)] for i in range(at, at + rows)]
        ids = np.zeros((rows, size), np.int32)
        for row, text in zip(ids, part, strict=True):
            both = [*text.prompt, *text.answer]
            row[: len(both)] = both
        firsts = mx.array([len(t.prompt) - 1 for t in part])
        ends = mx.array([len(t.prompt) + len(t.answer) for t in part])
        stands += np.array(measure(parameters, mx.array(ids), firsts, ends)).tolist()
    return summary(stands[: len(texts)], [t.answer for t in texts])


def summary(stands: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Accepted:
    """Figures of replayed answers. stands[i][t]: drafts that stand when an anchor has t tokens of answer i behind it."""
    straight = [i for i, answer in enumerate(answers) if loop_start(answer) is None]
    every = range(len(answers))
    deepest = max(max(row) for row in stands)
    counts = np.zeros(deepest + 1)
    for i in every:
        for accepted in _rounds(stands[i], len(answers[i]), deepest):
            counts[accepted] += 1
    ratio = lambda picked, cap, most: _ratio(stands, answers, picked, cap, most)
    return Accepted(
        ratio(every, deepest, TOKENS),
        ratio(every, CAP, TOKENS),
        ratio(every, deepest, FIRST),
        ratio(straight, deepest, TOKENS) if straight else float("nan"),
        tuple((counts / counts.sum()).round(4).tolist()),
    )


def _ratio(
    stands: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], picked: Any, cap: int, most: int
) -> float:
    tokens = rounds = 0
    for i in picked:
        size = min(len(answers[i]), most)
        made = _rounds(stands[i], size, cap)
        tokens, rounds = tokens + size, rounds + len(made)
    return tokens / max(rounds, 1)


def _rounds(stands: Sequence[int], size: int, cap: int) -> list[int]:
    at, made = 0, []
    while at < size:
        accepted = min(stands[at], cap)
        made.append(accepted)
        at += accepted + 1
    return made

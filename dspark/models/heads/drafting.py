"""Draft from a block's rows. Graph only: the Markov chain and the selector's walk stay on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from dspark.models.heads.head import Head
from dspark.records import DenseQ, SparseQ

Warp = Callable[[mx.array], mx.array]
GROUP = 64


class Draft(NamedTuple):
    """tokens [B, K] int32, ids of the target; q: exactly what they were drawn from, None for one certain token a slot;
    hidden [B, K, H]: the rows that predicted them (for `Head.confidence`)."""

    tokens: mx.array
    q: SparseQ | DenseQ | None
    hidden: mx.array


class Sampling(NamedTuple):
    """How to draw. noise: Gumbel, of `noise_shape`. warp: logits [B, V] -> logits, temperature and truncation, -inf for what is
    cut; used by dspark and dflash. temperature: used by dflash2, whose q is its selector's own."""

    noise: mx.array
    warp: Warp = lambda logits: logits
    temperature: float | mx.array = 1.0


def draft(head: Head, hidden: mx.array, anchor: mx.array, cap: int, sampling: Sampling | None = None) -> Draft:
    """Draft `cap` tokens from a block's hidden rows [B, slots, H] behind anchor [B, 1]; greedy without `sampling`.

    Costs, over the block: cap products with the Markov tables for dspark; one sort of the vocabulary for dflash2.
    """
    return draft_rows(head, head.predicting(hidden, cap), anchor, sampling)


def draft_rows(head: Head, hidden: mx.array, anchor: mx.array, sampling: Sampling | None = None) -> Draft:
    """Draft one token a row of `hidden` [B, K, H], the predicting rows of a block."""
    if head.config.kind == "dflash2":
        return _selector_walk(head, hidden, anchor, sampling)
    if head.config.markov == "none":
        return _independent(head, hidden, sampling)
    return _markov_walk(head, hidden, anchor, sampling)


def noise_shape(head: Head, batch: int, cap: int) -> tuple[int, int, int]:
    """Shape of the Gumbel noise that drawing `cap` tokens takes."""
    selecting = head.config.kind == "dflash2"
    return batch, cap, head.config.selector_top_k if selecting else head.target_vocab_size


def previous_tokens(anchor: mx.array, tokens: mx.array) -> mx.array:
    """The token in front of each draft: anchor [B, 1], tokens [B, K] -> [B, K]."""
    return mx.concatenate([anchor.astype(tokens.dtype), tokens[:, :-1]], axis=1)


def kept_prefix(confidence: mx.array, threshold: float) -> mx.array:
    """How many drafts to keep, [B] int32: all before the first whose confidence falls below `threshold` (0: all).

    confidence: logits [B, K]. The rule looks at no token that it judges, so it changes no distribution.
    """
    return mx.cumprod((mx.sigmoid(confidence) >= threshold).astype(mx.int32), axis=1).sum(axis=1)


def _markov_walk(head: Head, hidden: mx.array, anchor: mx.array, sampling: Sampling | None) -> Draft:
    """Each slot's logits take a bias from the token drafted before it, so slots follow one another."""
    markov, base = head.markov_head, head.base_logits(hidden)
    previous, state = anchor[:, 0], None
    tokens, drawn_from = [], []
    for k in range(hidden.shape[1]):
        feature, state = markov.feature(previous, hidden[:, k], state)
        logits = base[:, k] + markov.markov_w2(feature).astype(mx.float32)
        previous, law = _choose(head, logits, sampling, k)
        tokens.append(previous)
        drawn_from.append(law)
    return Draft(mx.stack(tokens, axis=1), _dense(drawn_from), hidden)


def _independent(head: Head, hidden: mx.array, sampling: Sampling | None) -> Draft:
    base = head.base_logits(hidden)
    if sampling is None:
        return Draft(_greedy(head, base), None, hidden)
    slots = [_choose(head, base[:, k], sampling, k) for k in range(hidden.shape[1])]
    return Draft(mx.stack([token for token, _ in slots], axis=1), _dense([law for _, law in slots]), hidden)


def _choose(head: Head, logits: mx.array, sampling: Sampling | None, k: int) -> tuple[mx.array, mx.array | None]:
    """One slot: logits [B, V_head] -> token [B], and the logits it was drawn from [B, V] (None when greedy)."""
    if sampling is None:
        return _greedy(head, logits), None
    warped = sampling.warp(head.widen(logits))
    return mx.argmax(warped + sampling.noise[:, k], axis=-1).astype(mx.int32), warped


def _greedy(head: Head, logits: mx.array) -> mx.array:
    best = mx.argmax(logits, axis=-1).astype(mx.int32)
    return best if head.target_ids is None else head.target_ids[best]


def _dense(laws: list[mx.array | None]) -> DenseQ | None:
    known = [law for law in laws if law is not None]
    return DenseQ(mx.softmax(mx.stack(known, axis=1), axis=-1, precise=True)) if known else None


class Lattice(NamedTuple):
    """DFlash 2's candidates ids [B, K, C] int32, best first, and path scores [B, K, P, C] float32 from each predecessor: the
    anchor alone for the first slot (all P rows alike), the previous slot's candidates after it."""

    ids: mx.array
    scores: mx.array


def lattice(head: Head, hidden: mx.array, anchor: mx.array) -> Lattice:
    """Candidates and all scores between neighbouring slots, at once: K C C numbers of r products each."""
    unary, ids = best(head.base_logits(hidden), head.config.selector_top_k)
    first = mx.broadcast_to(anchor[:, :, None].astype(ids.dtype), (ids.shape[0], 1, ids.shape[2]))
    before = mx.concatenate([first, ids[:, :-1]], axis=1)
    return Lattice(ids, head.candidate_selector.scores(hidden, before, ids, unary))


def best(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest of the last axis, largest first: values and ids int32.

    A large vocabulary is searched in two steps, since a GPU sorts whatever it partitions: the best groups of 64 by their
    maximum hold all of the best.
    """
    ids = None
    if logits.shape[-1] > 4 * GROUP * count:
        logits, ids = _best_groups(logits, count)
    if count < logits.shape[-1]:
        places = mx.argpartition(-logits, kth=count - 1, axis=-1)[..., :count]
    else:
        places = mx.broadcast_to(mx.arange(count), logits.shape)
    values = mx.take_along_axis(logits, places, axis=-1)
    order = mx.argsort(-values, axis=-1)
    places = mx.take_along_axis(places, order, axis=-1)
    found = places if ids is None else mx.take_along_axis(ids, places, axis=-1)
    return mx.take_along_axis(values, order, axis=-1), found.astype(mx.int32)


def _best_groups(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The members of the `count` groups with the largest maxima: logits and ids [..., count * GROUP]."""
    short = -logits.shape[-1] % GROUP
    if short:
        logits = mx.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, short)], constant_values=-mx.inf)
    groups = logits.reshape(*logits.shape[:-1], -1, GROUP)
    picked = mx.argpartition(-groups.max(axis=-1), kth=count - 1, axis=-1)[..., :count, None]
    members = mx.take_along_axis(groups, picked, axis=-2)
    flat = (*logits.shape[:-1], count * GROUP)
    return members.reshape(flat), (picked * GROUP + mx.arange(GROUP, dtype=picked.dtype)).reshape(flat)


def _selector_walk(head: Head, hidden: mx.array, anchor: mx.array, sampling: Sampling | None) -> Draft:
    """Left to right, the best (or a drawn) candidate behind the one chosen before; every slot's choice behind every
    predecessor is made at once, the walk then only looks up."""
    paths = lattice(head, hidden, anchor)
    scores = paths.scores
    if sampling is not None:
        scores = scores / sampling.temperature
        choices = mx.argmax(scores + sampling.noise[:, :, None], axis=-1)
    else:
        choices = mx.argmax(scores, axis=-1)
    place = mx.zeros((hidden.shape[0], 1), dtype=choices.dtype)
    came_from, places = [], []
    for k in range(hidden.shape[1]):
        came_from.append(place)
        place = mx.take_along_axis(choices[:, k], place, axis=1)
        places.append(place)
    tokens = mx.take_along_axis(paths.ids, mx.stack(places, axis=1), axis=2)[..., 0]
    if sampling is None:
        return Draft(tokens, None, hidden)
    walked = mx.take_along_axis(scores, mx.stack(came_from, axis=1)[..., None], axis=2)[:, :, 0]
    return Draft(tokens, SparseQ(paths.ids, mx.softmax(walked, axis=-1, precise=True)), hidden)

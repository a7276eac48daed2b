"""Losses of block drafters. The vocabulary's part is differentiated by hand, so that logits are made once and none are kept.

With p the drafter's distribution of a row and t the target's, s = sign(p - t), and y the label, the gradients by the logits are
ce: p - [y], kl(t || p): p - t, l1 = |p - t|: p (s - <s, p>).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from dspark.models.heads.head import Head

# Columns looked at together when the largest are sought.
GROUP = 64
ROWS_AT_ONCE = 8192


class Mix(NamedTuple):
    """Weights of the terms. gamma: a slot's weight falls as exp(-k / gamma). by_weights: normalise by the sum of the weights
    (DeepSpec), else by the number of slots that count (speculators)."""

    ce: float = 0.1
    l1: float = 0.9
    kl: float = 0.0
    confidence: float = 1.0
    selector: float = 1.0
    gamma: float = 4.0
    by_weights: bool = True


class Slots(NamedTuple):
    """What R predicting rows are held against. labels, previous: int32 [R]; teacher: [R', V] probabilities of positions and
    `rows` [R], each row's own position among them (teacher None where no term needs it); counts: float32 [R], 0 for what is
    no label; weights: [R], counts times decay."""

    labels: mx.array
    previous: mx.array
    teacher: mx.array | None
    rows: mx.array
    counts: mx.array
    weights: mx.array


class Terms(NamedTuple):
    """A loss and its parts, scalars. hit: share of counted rows whose argmax is the label."""

    total: mx.array
    parts: dict[str, mx.array]


def decayed(counts: mx.array, gamma: float) -> mx.array:
    """Weights of counted slots [..., K]: exp(-k / gamma), k from 0 for the first predicted token."""
    return counts * mx.exp(-mx.arange(counts.shape[-1]) / gamma)


def head_loss(head: Head, hidden: mx.array, slots: Slots, mix: Mix, table: mx.array) -> Terms:
    """The loss of predicting rows hidden [N, K, H], flattened to R = N K in `slots`. table: lm_head's rows [V, H], frozen.

    dspark: ce, l1 and confidence; dflash: ce (kl, l1 where asked for); dflash2: the same and its selector.
    """
    blocks, slots_each, width = hidden.shape
    rows = hidden.reshape(-1, width)
    features = second = None
    if head.config.markov != "none":
        before = slots.previous.reshape(blocks, slots_each)
        features = head.markov_head.features(before, hidden).reshape(rows.shape[0], -1)
        second = head.markov_head.markov_w2.weight
    norm = slots.weights.sum() + 1e-6 if mix.by_weights else slots.counts.sum() + 1e-5
    share = slots.weights / norm
    top = head.config.selector_top_k if head.config.kind == "dflash2" else 0
    pushed, parts = vocabulary_loss(rows, features, second, table, slots, share, mix, top)
    if head.config.confidence != "none":
        confidence = head.confidence(hidden, slots.previous.reshape(blocks, slots_each)).reshape(-1)
        wanted = mx.stop_gradient(parts.pop("stands"))
        lost = (bce(confidence, wanted) * share).sum()
        parts["confidence"], pushed = lost, pushed + mix.confidence * lost
    if top:
        lost = selector_loss(head, rows, slots, share, table, parts.pop("ids"), parts.pop("best"))
        parts["selector"], pushed = lost, pushed + mix.selector * lost
    parts.pop("stands", None)
    total = mix.ce * parts["ce"] + mix.l1 * parts.get("l1", 0.0) + mix.kl * parts.get("kl", 0.0)
    total = total + mix.confidence * parts.get("confidence", 0.0) + mix.selector * parts.get("selector", 0.0)
    total = mx.stop_gradient(total)
    return Terms(total + (pushed - mx.stop_gradient(pushed)), {k: mx.stop_gradient(v) for k, v in parts.items()})


def bce(logits: mx.array, wanted: mx.array) -> mx.array:
    """Binary cross entropy of logits with chances."""
    return mx.logaddexp(mx.zeros_like(logits), logits) - wanted * logits


def vocabulary_loss(
    rows: mx.array,
    features: mx.array | None,
    second: mx.array | None,
    table: mx.array,
    slots: Slots,
    share: mx.array,
    mix: Mix,
    top: int,
) -> tuple[mx.array, dict[str, mx.array]]:
    """A scalar whose gradient by rows [R, H], features [R, r] and second [V, r] is that of the weighted terms (its value
    means nothing), and the terms' values; "stands" [R]: the chance that a sampled draft is accepted; with `top`, "ids" [R, top]
    the likeliest tokens and "best" [R] the teacher's choice."""
    pushed, found = mx.array(0.0), []
    frozen = mx.stop_gradient
    for at in range(0, rows.shape[0], ROWS_AT_ONCE):
        span = slice(at, at + ROWS_AT_ONCE)
        x, f = rows[span], None if features is None else features[span]
        teacher = None if slots.teacher is None else slots.teacher[slots.rows[span]]
        parts, slope = _terms(frozen(x), _frozen(f), _frozen(second), table, teacher, slots, span, share, mix, top)
        pushed = pushed + (x * frozen(slope @ table)).astype(mx.float32).sum()
        if f is not None and second is not None:
            pushed = pushed + (f * frozen(slope @ frozen(second))).astype(mx.float32).sum()
            pushed = pushed + (second * frozen(slope.T @ frozen(f))).astype(mx.float32).sum()
        found.append(parts)
    sums: dict[str, Any] = {k: sum(p[k] for p in found) for k in found[0] if found[0][k].ndim == 0}
    kept = {k: mx.concatenate([p[k] for p in found]) for k in found[0] if found[0][k].ndim}
    return pushed, {**sums, **kept}


def _frozen(x: mx.array | None) -> mx.array | None:
    return None if x is None else mx.stop_gradient(x)


def _terms(
    x: mx.array,
    f: mx.array | None,
    second: mx.array | None,
    table: mx.array,
    teacher: mx.array | None,
    slots: Slots,
    span: slice,
    share: mx.array,
    mix: Mix,
    top: int,
) -> tuple[dict[str, mx.array], mx.array]:
    """Values of a chunk's rows, and the gradient of their weighted sum by the logits [rows, V]."""
    logits = x @ table.T
    if f is not None and second is not None:
        logits = logits + f @ second.T
    label, weight = slots.labels[span], share[span]
    p = mx.softmax(logits, axis=-1, precise=True)
    own = mx.take_along_axis(p, label[:, None], axis=-1)[:, 0].astype(mx.float32)
    best = mx.argmax(logits, axis=-1)
    parts = {
        "ce": (-mx.log(mx.maximum(own, 1e-30)) * weight).sum(),
        "hit": ((best == label) * slots.counts[span]).sum() / (slots.counts.sum() + 1e-6),
    }
    w = weight[:, None]
    here = mx.arange(table.shape[0])[None] == label[:, None]
    slope = (mix.ce * w) * (p - here)
    if teacher is not None:
        gap = p.astype(mx.float32) - teacher
        if mix.kl:
            slope = slope + (mix.kl * w) * gap
            ratio = mx.log(mx.maximum(teacher, 1e-30)) - mx.log(mx.maximum(p, 1e-30))
            parts["kl"] = ((teacher * ratio).astype(mx.float32).sum(axis=-1) * weight).sum()
        away = mx.abs(gap).sum(axis=-1)
        parts["stands"] = 1 - away / 2
        if mix.l1:
            sign = mx.sign(gap)
            slope = slope + (mix.l1 * w) * p * (sign - (sign * p).sum(axis=-1, keepdims=True))
            parts["l1"] = (away * weight).sum()
    if top:
        parts["ids"] = top_ids(logits, top)
        parts["best"] = label if teacher is None else mx.argmax(teacher, axis=-1).astype(mx.int32)
    return parts, slope.astype(x.dtype)


def top_ids(logits: mx.array, count: int) -> mx.array:
    """Ids [R, count] of the largest columns, largest first, without sorting the vocabulary: the `count` best groups of
    columns hold them all."""
    rows, vocab = logits.shape
    short = -vocab % GROUP
    if short:
        logits = mx.concatenate([logits, mx.full((rows, short), -mx.inf, dtype=logits.dtype)], axis=1)
    grouped = logits.reshape(rows, -1, GROUP)
    if grouped.shape[1] <= count:
        return mx.argsort(-logits, axis=-1)[:, :count].astype(mx.int32)
    groups = mx.argsort(-grouped.max(axis=-1), axis=-1)[:, :count]
    inside = mx.take_along_axis(grouped, groups[..., None], axis=1).reshape(rows, -1)
    places = mx.argsort(-inside, axis=-1)[:, :count]
    group = mx.take_along_axis(groups, places // GROUP, axis=1)
    return (group * GROUP + places % GROUP).astype(mx.int32)


def selector_loss(
    head: Head, rows: mx.array, slots: Slots, share: mx.array, table: mx.array, ids: mx.array, best: mx.array
) -> mx.array:
    """Cross entropy over the candidates ids [R, C] behind the true token before them; where `best` [R] is no candidate it
    takes the weakest one's place. Differentiable in the candidates' own logits too."""
    there = (ids == best[:, None]).any(axis=-1)
    last = mx.where(there, ids[:, -1], best)
    ids = mx.concatenate([ids[:, :-1], last[:, None]], axis=-1)
    unary = (table[ids] @ rows[..., None])[..., 0].astype(mx.float32)
    lead = lambda array: array[None]
    scores = head.candidate_selector.scores(lead(rows), lead(slots.previous[:, None]), lead(ids), lead(unary))[0, :, 0]
    chosen = mx.where(ids == best[:, None], scores, 0.0).sum(axis=-1)
    return ((mx.logsumexp(scores, axis=-1) - chosen) * share).sum()

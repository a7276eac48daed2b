"""Lend a target's embedding and vocabulary projection to a drafter that has none of its own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dspark.errors import BindError
from dspark.models.heads import Head

PROBE_ROWS = 4
# Of the spread of a row of logits: what rounding may move the largest one by.
SLACK = 0.02


def lend(head: Head, target: Any) -> None:
    """Bind `head` to the target's own tables, quantised ones included: rows unscaled, logits raw.

    Raises BindError where the target has no table that the head needs, or where the projection found is not what the target
    itself ends with. Costs two vocabulary projections of four rows where lm_head is borrowed.
    """
    config = head.config
    embedding, projection = getattr(target, "embedding", None), getattr(target, "lm_head_raw", None)
    if embedding is None and "borrowed" in (config.embedding, config.lm_head):
        raise BindError(f"the drafter borrows the target's embedding, and none was found in {target.name}")
    tied = projection is embedding
    project = getattr(embedding, "as_linear", None) if tied else projection
    if config.lm_head == "borrowed":
        _check(project, target)
    head.bind(embedding, project, target.vocab_size)


def _check(project: Any, target: Any) -> None:
    """The raw projection must rank tokens as the target's head does, which may cap and scale but not reorder."""
    if project is None or "head" not in target.provides:
        raise BindError(
            f"the drafter borrows the target's lm_head, and none was found in {target.name}; take a drafter that has its own"
        )
    hidden = mx.random.normal((1, PROBE_ROWS, target.hidden_size), key=mx.random.key(0))
    raw, said = project(hidden).astype(mx.float32), target.head(hidden)
    best = mx.take_along_axis(raw, mx.argmax(said, axis=-1, keepdims=True), axis=-1)[..., 0]
    short = mx.max(raw, axis=-1) - best
    if raw.shape != said.shape or (short > SLACK * (mx.max(raw, axis=-1) - mx.min(raw, axis=-1))).any().item():
        raise BindError(
            f"the vocabulary projection found in {target.name} is not what its logits come from, so it cannot be lent; take a "
            "drafter that has its own lm_head"
        )

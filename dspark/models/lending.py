"""Lend a target's embedding and vocabulary projection to a drafter that has none of its own."""

from __future__ import annotations

from collections.abc import Callable
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
    lend_tables(head, target)


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


def lend_tables(head: Head, target: Any) -> None:
    """Bind a drafter to a target's raw tables, tied and quantised ones included, each fed in its own number format.

    A reduced vocabulary without rows of its own gets a copy of those of the target; the whole is then not multiplied by.
    """
    embedding, raw = getattr(target, "embedding", None), getattr(target, "lm_head_raw", None)
    project = None if raw is None else _projection(head, raw, tied=raw is embedding)
    head.bind(embedding, project, target.vocab_size)


def _projection(head: Head, raw: Any, tied: bool) -> Callable[[mx.array], mx.array]:
    project = raw.as_linear if tied else raw
    if head.config.lm_head == "borrowed" and head.target_ids is not None:
        project = _rows_of(raw, head.target_ids)
    dtype = raw["scales"].dtype if "scales" in raw else raw.weight.dtype
    # Some packings have scales that are no floats: those take hidden states as they are.
    return (lambda hidden: project(hidden.astype(dtype))) if mx.issubdtype(dtype, mx.floating) else project


def _rows_of(raw: Any, ids: mx.array) -> Callable[[mx.array], mx.array]:
    """The projection onto some rows of a linear layer or an embedding, packed or plain: a copy of those rows."""
    rows = {name: raw[name][ids] for name in ("weight", "scales", "biases", "bias") if name in raw}
    mx.eval(rows)
    bias = rows.get("bias", 0)
    if "scales" not in rows:
        return lambda hidden: hidden @ rows["weight"].T + bias
    how = {"group_size": raw.group_size, "bits": raw.bits, "mode": getattr(raw, "mode", "affine")}
    return lambda hidden: (
        mx.quantized_matmul(hidden, rows["weight"], rows["scales"], rows.get("biases"), transpose=True, **how) + bias
    )

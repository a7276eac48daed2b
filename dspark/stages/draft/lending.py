"""Lend a target's embedding and vocabulary projection to a drafter that has none of its own."""

from __future__ import annotations

from typing import Any

from dspark.errors import BindError
from dspark.models.heads import Head


def lend(head: Head, target: Any) -> None:
    """Bind `head` to the target's own tables, quantised ones included: rows unscaled, logits raw.

    Raises BindError where the target has no table that the head needs.
    """
    config = head.config
    embedding, projection = getattr(target, "embedding", None), getattr(target, "lm_head_raw", None)
    if embedding is None and "borrowed" in (config.embedding, config.lm_head):
        raise BindError(f"the drafter borrows the target's embedding, and none was found in {target.name}")
    tied = projection is embedding and hasattr(embedding, "as_linear")
    head.bind(embedding, embedding.as_linear if tied else projection, target.vocab_size)

"""Rows leave a state and join one: pure functions on records, whatever the stages carry."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dspark.pipeline import Pipeline
from dspark.records import Settled, State


def take_rows(pipeline: Pipeline, state: State, rows: Sequence[int], epoch: int) -> State:
    """The state of some rows, in the order given."""
    old, picked = state.settled, mx.array(list(rows))
    settled = Settled(
        old.anchor[picked],
        None if old.tokens is None else tuple(old.tokens[r] for r in rows),
        None if old.taps is None else old.taps[picked],
        tuple(old.keep[r] for r in rows),
        tuple(old.start[r] for r in rows),
    )
    draft, accept = pipeline.draft.take(state.draft, rows), pipeline.accept.take(state.accept, rows)
    return State(epoch, settled, draft, accept, state.cap)


def join_rows(pipeline: Pipeline, state: State, other: State, epoch: int) -> State:
    """The rows of both, `other`'s behind. What their last records hold is absorbed first, so that no taps need to be put
    together; the cap's carry is the first one's."""
    draft = pipeline.draft.join(_absorbed(pipeline, state), _absorbed(pipeline, other))
    accept = pipeline.accept.join(state.accept, other.accept)
    mine, its = state.settled, other.settled
    assert mine.tokens is not None
    assert its.tokens is not None
    start = mine.start + its.start
    tokens = tuple([row[-1:] for row in mine.tokens + its.tokens])
    settled = Settled(mx.concatenate([mine.anchor, its.anchor]), tokens, None, (0,) * len(start), start)
    return State(epoch, settled, draft, accept, state.cap)


def _absorbed(pipeline: Pipeline, state: State) -> object:
    return pipeline.draft.skip(state.settled, state.draft)

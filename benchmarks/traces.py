"""Acceptance traces: what each drafter would have had accepted at every position of an answer.

A trace is recorded by rounds that offer as many drafts as the drafter has and keep one token each, so that every position of
the answer is one's beginning. `cap_replays` walks along it under any cap.
"""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx

from benchmarks.cap_replays import Judged, Trace
from dspark.calibrate.widths import drafters, longest
from dspark.caps import FixedCap
from dspark.records import Opening, RowCommit, State
from dspark.round import land, send


class OneToken:
    """A row that keeps the first token of every round and notes what was accepted."""

    def __init__(self) -> None:
        self.judged: list[Judged] = []
        self.tokens: list[int] = []

    def commit(self, said: list[int], accepted: int, offered: int, source: str) -> RowCommit:
        self.judged.append((offered, accepted))
        self.tokens.append(said[0])
        return RowCommit(0, (said[0],), min(accepted, 1), offered, source)


def record(engine: Any, ids: tuple[int, ...], most: int) -> Trace:
    """The trace of an answer of at most `most` tokens, greedy. Costs a round a token for each drafter.

    On a GPU or under a real BLAS two drafters' answers may part where two tokens are as likely: the trace ends there.
    """
    offers, told = {}, []
    with engine.enter(), mx.stream(engine.stream or mx.default_stream(mx.default_device())):
        for draft in drafters(engine.pipeline.draft):
            row = _along(engine, draft, ids, most)
            offers[draft.sources[0]] = row.judged
            told.append(row.tokens)
    same = next((i for i, said in enumerate(zip(*told, strict=False)) if len(set(said)) > 1), min(map(len, told)))
    return Trace(len(ids), {source: judged[:same] for source, judged in offers.items()})


def _along(engine: Any, draft: Any, ids: tuple[int, ...], most: int) -> OneToken:
    pipeline = attrs.evolve(engine.pipeline, draft=draft, accept=engine.accept(), cap=FixedCap(longest(draft)))
    opening = Opening(engine.target, (ids,), (0,), pipeline.accept)
    buffers, carry, settled = engine.buffers(), draft.init(opening), None
    for following in pipeline.prefill(engine.target, buffers, ids, 0, draft.target_layer_ids, None):
        carry = carry if settled is None else draft.skip(settled, carry)
        settled = following
    assert settled is not None
    state, row = State(buffers.epoch, settled, carry, pipeline.accept.init(opening), None), OneToken()
    while len(row.tokens) < most and not (row.tokens and row.tokens[-1] in engine.stop_tokens):
        flight = send(pipeline, engine.target, buffers, state, longest(draft))
        state, *_ = land(pipeline, buffers, flight, [row])
    return row

"""Acceptance traces: what each drafter would have had accepted at every position of an answer, and rounds replayed on them.

A trace is recorded by rounds that offer as many drafts as the drafter has and keep one token each, so that every position of
the answer is one's beginning. A replay walks along it under any cap and takes its milliseconds from a cost curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import mlx.core as mx

from dspark.calibrate.widths import drafters, longest
from dspark.caps import AbstractCap, FixedCap
from dspark.caps.base import cap_for
from dspark.caps.curve import CostCurve
from dspark.records import Opening, RoundEvent, RowCommit, State
from dspark.round import land, send

Judged = tuple[int, int]


class Trace(NamedTuple):
    """prompt_tokens; for each drafter, in the order in which they are asked, (offered, accepted) at every position."""

    prompt_tokens: int
    offers: dict[str, list[Judged]]

    @property
    def length(self) -> int:
        return min(map(len, self.offers.values()))


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


class Replayed(NamedTuple):
    """Milliseconds and rounds of a replay, and the cap's last carry."""

    ms: float
    rounds: int
    carry: Any


def replay(cap: AbstractCap, trace: Trace, costs: CostCurve, carry: Any) -> Replayed:
    """A session under `cap`, its rounds taking what the curve says."""
    at, ms, rounds, sent = 0, 0.0, 0, False
    while at < trace.length:
        offer, parked = cap.propose(carry), cap.parked_rounds(carry) > 0
        source, offered, width, draft_ms = "plain", 0, 1, 0.0
        for name, judged in trace.offers.items():
            limit = min(cap_for(offer, (name,)), costs.longest(name), trace.length - at - 1)
            if offered or limit <= 0:
                continue
            draft = costs.draft(name)
            draft_ms += draft.at(limit) if draft else 0.0
            if found := min(judged[at][0], limit):
                source = name
                offered, width = cap.fit(carry, name, found)
        accepted = min(trace.offers[source][at][1], offered) if offered else 0
        depth = trace.prompt_tokens + at
        # The first step of a park waits for the round before it.
        took = costs.plain_at(depth) if parked and sent else costs.verify_at(width, depth) + costs.host_ms + draft_ms
        sent, rounds, ms = parked, rounds + 1, ms + took
        kept = min(accepted + 1, trace.length - at)
        row = RowCommit(0, (0,) * kept, min(accepted, kept), offered, source if offered else "plain")
        carry = cap.observe(carry, RoundEvent(rounds, (row,), int(offer), "", width, 1, took, (depth,)))
        at += kept
    return Replayed(ms, rounds, carry)


def replay_all(cap: AbstractCap, traces: Sequence[Trace], costs: CostCurve) -> float:
    """Milliseconds of several answers one after the other, as sessions of one engine: what the cap learned stays."""
    total, carry = 0.0, None
    for trace in traces:
        done = replay(cap, trace, costs, cap.init(costs) if carry is None else cap.again(carry, costs))
        total, carry = total + done.ms, done.carry
    return total


def plain_ms(traces: Sequence[Trace], costs: CostCurve) -> float:
    return sum(costs.plain_at(t.prompt_tokens + at) for t in traces for at in range(t.length))

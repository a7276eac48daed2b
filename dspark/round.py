"""One round. Draft, Verify and Accept build graph in `send`; `land` holds the only device read of the package's loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.pipeline import Pipeline
from dspark.records import Acceptance, Logprobs, Proposal, Settled, State, TokenLogprobs, Tokens
from dspark.stages.base import no_proposal

Decide = Callable[[int, list[int]], int]


class Flight(NamedTuple):
    """A round that was sent and not read: the state it consumed, what it proposed, what came of it on the device.

    `draft`, `accept`: the carries behind it; `draft` is None for a parked round, whose drafter is told at landing.
    """

    state: State
    proposal: Proposal
    acceptance: Acceptance
    draft: Any
    accept: Any


class Landing(NamedTuple):
    """A round that was read: the state behind it, and per row the kept tokens, how many of them were drafted and their
    log-probabilities (empty unless asked for)."""

    state: State
    tokens: tuple[Tokens, ...]
    drafted: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...]


def send(pipeline: Pipeline, target: Any, buffers: Any, state: State, cap: int) -> Flight:
    """Build the graph of a round and start it. Cap 0 is the plain step: the drafter is not asked, and is told at landing.

    On an error the buffers are back at the state they had, or poisoned.
    """
    draft = None
    if cap:
        proposal, draft = pipeline.draft(state.settled, state.draft, cap)
    else:
        proposal = no_proposal(state.settled)
    try:
        verdict = pipeline.verify(target, buffers, proposal, pipeline.draft.target_layer_ids)
        acceptance, accept = pipeline.accept(verdict, state.accept)
        mx.async_eval(*_outputs(acceptance))
    except BaseException as error:
        _undo(buffers, error)
        raise
    return Flight(state, proposal, acceptance, draft, accept)


def ahead(flight: Flight, epoch: int) -> State:
    """The state behind a flight of width 1, whose length is known before it is read. Its host tokens are not."""
    settled, acceptance = flight.state.settled, flight.acceptance
    start = tuple(s + 1 for s in settled.start)
    unread = Settled(acceptance.next[:, None], None, acceptance.verdict.taps, (1,) * len(start), start)
    return State(epoch, unread, flight.draft, flight.accept, flight.state.cap)


def land(pipeline: Pipeline, buffers: Any, flight: Flight, decide: Decide) -> Landing:
    """Read the round, let `decide(row, tokens)` say how many tokens stand, and bring the buffers back to those.

    The one read: accepted counts, next tokens and drafts together. On an error the buffers are restored or poisoned.
    """
    state, acceptance = flight.state, flight.acceptance
    settled = state.settled
    try:
        counts, nexts, drafts, logprobs = _read(acceptance)
        said = [[*row[:n], last] for row, n, last in zip(drafts, counts, nexts, strict=True)]
        keep = tuple(decide(row, tokens) for row, tokens in enumerate(said))
        tokens = tuple(tuple(row[:n]) for row, n in zip(said, keep, strict=True))
        anchors = settled.tokens or ()
        buffers.settle(keep, tuple((a[-1], *t[:-1]) for a, t in zip(anchors, tokens, strict=True)))
    except BaseException as error:
        _undo(buffers, error)
        raise
    draft = flight.draft
    if draft is None:
        draft = pipeline.draft.skip(settled, state.draft)
    whole = all(len(row) == n for row, n in zip(said, keep, strict=True))
    anchor = acceptance.next[:, None] if whole else mx.array([[row[-1]] for row in tokens], dtype=mx.int32)
    start = tuple(s + n for s, n in zip(settled.start, keep, strict=True))
    after = Settled(anchor, tokens, acceptance.verdict.taps, keep, start)
    drafted = tuple(min(n, count) for n, count in zip(keep, counts, strict=True))
    return Landing(
        State(buffers.epoch, after, draft, flight.accept, state.cap), tokens, drafted, _by_token(logprobs, keep)
    )


def _outputs(acceptance: Acceptance) -> list[mx.array]:
    drafts = acceptance.verdict.proposal.tokens
    outputs = [acceptance.next] if drafts.shape[1] == 0 else [acceptance.accepted, acceptance.next, drafts]
    if acceptance.logprobs is not None:
        outputs.extend(acceptance.logprobs)
    return outputs


def _read(acceptance: Acceptance) -> tuple[list[int], list[int], list[list[int]], Sequence[Any] | None]:
    """The device read. A plain step has nothing but its next token to read."""
    mx.eval(*_outputs(acceptance))
    nexts, drafts = acceptance.next.tolist(), acceptance.verdict.proposal.tokens
    logprobs = None if acceptance.logprobs is None else [array.tolist() for array in acceptance.logprobs]
    if drafts.shape[1] == 0:
        return [0] * len(nexts), nexts, [[]] * len(nexts), logprobs
    return acceptance.accepted.tolist(), nexts, drafts.tolist(), logprobs


def _by_token(logprobs: Sequence[Any] | None, keep: tuple[int, ...]) -> tuple[tuple[TokenLogprobs, ...], ...]:
    if logprobs is None:
        return ((),) * len(keep)
    chosen, ids, values = Logprobs(*logprobs)
    return tuple(
        tuple(TokenLogprobs(chosen[b][i], tuple(zip(ids[b][i], values[b][i], strict=True))) for i in range(n))
        for b, n in enumerate(keep)
    )


def _undo(buffers: Any, error: BaseException) -> None:
    """Put the buffers back to before the round; where that fails they are unusable and say why."""
    try:
        buffers.restore()
        mx.eval(buffers.state)
    except BaseException as worse:
        buffers.poison(f"a round failed ({error}) and could not be undone ({worse})")

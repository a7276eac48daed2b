"""One round. Draft, Verify and Accept build graph in `send`; `land` holds the only device read of the package's loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.blocks import believed, fitted
from dspark.pipeline import Pipeline
from dspark.records import Acceptance, Proposal, Settled, State, TokenLogprobs, Tokens
from dspark.stages.base import no_proposal
from dspark.transcript import Cut

Decide = Callable[[int, list[int]], Cut]


class Flight(NamedTuple):
    """A round that was sent and not read: the state it consumed, the cap, what it proposed, what came of it on the device.

    `draft`, `accept`: the carries behind it; `draft` is None for a parked round, whose drafter is told at landing.
    """

    state: State
    cap: int
    proposal: Proposal
    acceptance: Acceptance
    draft: Any
    accept: Any


class Landing(NamedTuple):
    """A round that was read: the state behind it, and per row what was cut, the kept tokens, how many of them a draft said,
    and their log-probabilities (None unless asked for)."""

    state: State
    cuts: list[Cut]
    tokens: tuple[Tokens, ...]
    accepted: list[int]
    logprobs: list[tuple[TokenLogprobs, ...]] | None


def send(pipeline: Pipeline, target: Any, buffers: Any, state: State, cap: int) -> Flight:
    """Build the graph of a round and start it. Cap 0 is the plain step: the drafter is not asked, and is told at landing.

    A drafted block is cut and padded as the cap controller has it (`fit`), where that has a mind of its own.

    On an error the buffers are back at the state they had, or poisoned.
    """
    draft = None
    try:
        if cap:
            proposal, draft = pipeline.draft(state.settled, state.draft, cap)
            if proposal.keep is not None:
                # A drafter that declares a second read makes it here.
                proposal = believed(proposal, proposal.keep.tolist())  # type: ignore[arg-type]
            if pipeline.fits:
                proposal = fitted(proposal, pipeline.cap, state.cap, getattr(target, "context_length", None))
        else:
            proposal = no_proposal(state.settled)
        verdict = pipeline.verify(target, buffers, proposal, pipeline.draft.target_layer_ids)
        acceptance, accept = pipeline.accept(verdict, state.accept)
        mx.async_eval(*_outputs(acceptance))
    except BaseException as error:
        _undo(buffers, error)
        raise
    return Flight(state, cap, proposal, acceptance, draft, accept)


def ahead(flight: Flight, epoch: int) -> State:
    """The state behind a flight of width 1, whose length is known before it is read. Its host tokens are not."""
    settled, acceptance = flight.state.settled, flight.acceptance
    start = tuple([s + 1 for s in settled.start])
    unread = Settled(acceptance.next[:, None], None, acceptance.verdict.taps, (1,) * len(start), start)
    return State(epoch, unread, flight.draft, flight.accept, flight.state.cap)


def land(pipeline: Pipeline, buffers: Any, flight: Flight, decide: Decide) -> Landing:
    """Read the round, let `decide(row, tokens)` say how many tokens of each row stand, and bring the buffers back to those.

    The one read: accepted counts, next tokens and drafts together. On an error the buffers are restored or poisoned.
    """
    acceptance, settled = flight.acceptance, flight.state.settled
    cuts, tokens, keep, start, accepted, ended = [], [], [], [], [], False
    try:
        counts, nexts, drafts, logprobs = _read(acceptance)
        for i, count in enumerate(counts):
            row = drafts[i][:count]
            row.append(nexts[i])
            cut = decide(i, row)
            kept = cut.kept
            cuts.append(cut)
            tokens.append(tuple(row[:kept]))
            keep.append(kept)
            start.append(settled.start[i] + kept)
            accepted.append(kept if kept < count else count)
            ended = ended or cut.finish is not None
        standing, said = tuple(keep), tuple(tokens)
        buffers.settle(standing, _fed(settled, said) if buffers.refeeds else ())
    except BaseException as error:
        _undo(buffers, error)
        raise
    draft = flight.draft
    if draft is None:
        draft = pipeline.draft.skip(settled, flight.state.draft)
    anchor = mx.array([[row[-1]] for row in tokens], dtype=mx.int32) if ended else acceptance.next[:, None]
    after = Settled(anchor, said, acceptance.verdict.taps, standing, tuple(start))
    state = State(buffers.epoch, after, draft, flight.accept, flight.state.cap)
    return Landing(state, cuts, said, accepted, None if logprobs is None else _by_token(logprobs, standing))


def _outputs(acceptance: Acceptance) -> list[mx.array]:
    drafts = acceptance.verdict.proposal.tokens
    outputs = [acceptance.accepted, acceptance.next, drafts] if drafts.shape[1] else [acceptance.next]
    if acceptance.logprobs is not None:
        outputs.extend(acceptance.logprobs)
    return outputs


def _read(acceptance: Acceptance) -> tuple[list[int], list[int], list[list[int]], Sequence[Any] | None]:
    """The device read. A plain step has nothing but its next token to read."""
    mx.eval(*_outputs(acceptance))
    nexts: Any = acceptance.next.tolist()
    drafts = acceptance.verdict.proposal.tokens
    logprobs = None if acceptance.logprobs is None else [array.tolist() for array in acceptance.logprobs]
    if drafts.shape[1] == 0:
        return [0] * len(nexts), nexts, [[]] * len(nexts), logprobs
    counts: Any = acceptance.accepted.tolist()
    said: Any = drafts.tolist()
    return counts, nexts, said, logprobs


def _fed(settled: Settled, tokens: tuple[Tokens, ...]) -> tuple[Tokens, ...]:
    """The kept rows' tokens: the anchor and all that was committed but the last, which is the next anchor."""
    assert settled.tokens is not None
    return tuple([(before[-1], *row[:-1]) for before, row in zip(settled.tokens, tokens, strict=True)])


def _by_token(logprobs: Sequence[Any], keep: tuple[int, ...]) -> list[tuple[TokenLogprobs, ...]]:
    chosen, ids, values = logprobs
    return [
        tuple([TokenLogprobs(chosen[b][i], tuple(zip(ids[b][i], values[b][i], strict=True))) for i in range(n)])
        for b, n in enumerate(keep)
    ]


def _undo(buffers: Any, error: BaseException) -> None:
    """Put the buffers back to before the round; where that fails they are unusable and say why."""
    try:
        buffers.restore()
        mx.eval(buffers.state)
    except BaseException as worse:
        buffers.poison(f"a round failed ({error}) and could not be undone ({worse})")

"""One round. Draft, Verify and Accept build graph in `send`; `land` holds the only device read of the package's loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.blocks import believed, fitted
from dspark.caps.base import cap_for
from dspark.pipeline import Pipeline
from dspark.records import Acceptance, Proposal, RowCommit, Settled, State, TokenLogprobs, Tokens, new
from dspark.stages.base import no_proposal


class Flight(NamedTuple):
    """A round that was sent and not read: the state it consumed, the cap, what it proposed, what came of it on the device.

    `draft`, `accept`: the carries behind it; `draft` is None for a parked round, whose drafter is told at landing; sent: the next
    round's block, with which the target is at work behind this one.
    """

    state: State
    cap: int
    proposal: Proposal
    acceptance: Acceptance
    draft: Any
    accept: Any
    sent: mx.array | None = None

    @property
    def ahead(self) -> bool:
        """Whether a drafted round's forward was sent before the round in front was read."""
        return self.proposal.block is not None and self.proposal.block is self.state.settled.sent


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
            elif getattr(target, "sends_ahead", False):
                mx.async_eval(proposal.tokens)
            if pipeline.fits:
                proposal = fitted(proposal, pipeline.cap, state.cap, getattr(target, "context_length", None))
        else:
            proposal = no_proposal(state.settled)
        verdict = pipeline.verify(target, buffers, proposal, pipeline.target_layer_ids)
        acceptance, accept = pipeline.accept(verdict, state.accept)
        pending = pipeline.draft.pending(draft) if cap and pipeline.pends else None
        if acceptance.report is not None and acceptance.logprobs is None:
            # It comes of one launch with all that is read.
            mx.async_eval(acceptance.report, pending)
        else:
            mx.async_eval(acceptance.accepted, acceptance.next, proposal.tokens, acceptance.logprobs, pending)
    except BaseException as error:
        undo(buffers, error)
        raise
    return new(Flight, (state, cap, proposal, acceptance, draft, accept, None))


def follow(pipeline: Pipeline, target: Any, buffers: Any, flight: Flight, cap: int, carry: Any, left: int) -> Flight:
    """Begin with the round behind a drafted one before that is read: send its drafts and, where they are as good as sure to be
    proposed, their forward.

    cap: what the next round will be offered, 0 where that is not known; carry: the cap controller's, which may want another shape
    of the block; left: tokens that may be said still, this round's included. Nothing needs to be undone where the next round is
    another one after all: the caches do not count what was not asked for."""
    if flight.acceptance.logprobs is not None:
        return flight
    draft = pipeline.draft.foresee(flight.acceptance, flight.draft, cap or flight.cap)
    block = pipeline.draft.begun(draft)
    if block is None:
        return flight
    verdict, (source,), width = flight.acceptance.verdict, flight.proposal.source, flight.proposal.tokens.shape[1] + 1
    drafts = block.shape[1] - 1
    certain = drafts <= cap_for(cap, (source,)) and width <= left and not flight.proposal.waits
    if certain and pipeline.fits:
        certain = pipeline.cap.fit(carry, source, drafts) == (drafts, drafts + 1)
    if certain and target.follow(block, verdict.logits, buffers.caches, pipeline.target_layer_ids):
        return flight._replace(draft=draft, sent=block)
    mx.async_eval(block)
    return flight._replace(draft=draft)


def ahead(flight: Flight, epoch: int) -> State:
    """The state behind a flight of width 1, whose length is known before it is read. Its host tokens are not."""
    settled, acceptance = flight.state.settled, flight.acceptance
    start = tuple([s + 1 for s in settled.start])
    unread = Settled(mx.expand_dims(acceptance.next, 1), None, acceptance.verdict.taps, (1,) * len(start), start)
    return State(epoch, unread, flight.draft, flight.accept, flight.state.cap)


def land(
    pipeline: Pipeline, buffers: Any, flight: Flight, rows: Sequence[Any]
) -> tuple[State, list[RowCommit], list[tuple[TokenLogprobs, ...]] | None]:
    """Read the round, let each of `rows` commit its tokens (as `Row.commit` does), and bring the buffers back to what stands.
    Gives the state behind the round, the commits, and the log-probabilities of each row's tokens where they were asked for.

    The one read: accepted counts, next tokens and drafts together. Where it fails the buffers are as before the round; once
    a row was told there is no way back, and a failure poisons them. A row that commits nothing has failed: it keeps a token
    that nobody is shown until it is retired.
    """
    before, _, proposal, acceptance, draft, accept, sent = flight
    settled = before.settled
    try:
        counts, nexts, drafts, logprobs = read(acceptance)
    except BaseException as error:
        undo(buffers, error)
        raise
    commits, tokens, keep, start, short = [], [], [], [], False
    try:
        for i, row in enumerate(rows):
            count = counts[i]
            said = drafts[i][:count]
            said.append(nexts[i])
            commit = row.commit(said, count, proposal.offered[i], proposal.source[i])
            stands = commit.tokens or (said[0],)
            kept = len(stands)
            commits.append(commit)
            tokens.append(stands)
            keep.append(kept)
            start.append(settled.start[i] + kept)
            if kept <= count:
                short = True
        standing, spoken = tuple(keep), tuple(tokens)
        buffers.settle(standing, _fed(settled, spoken) if buffers.refeeds else ())
    except BaseException as error:
        buffers.poison(f"a round failed while its tokens were being committed ({error})")
        raise
    if draft is None:
        draft = told(pipeline, settled, before.draft)
    anchor = mx.array([[row[-1]] for row in spoken], dtype=mx.int32) if short else mx.expand_dims(acceptance.next, 1)
    after = new(
        Settled, (anchor, spoken, acceptance.verdict.taps, standing, tuple(start), not short, None if short else sent)
    )
    state = new(State, (buffers.epoch, after, draft, accept, before.cap))
    return state, commits, None if logprobs is None else _by_token(logprobs, standing)


def told(pipeline: Pipeline, settled: Settled, carry: Any) -> Any:
    """The drafter's carry once it was told of tokens that it did not draft; what that takes is sent to the device."""
    carry = pipeline.draft.skip(settled, carry)
    if pipeline.pends:
        mx.async_eval(pipeline.draft.pending(carry))
    return carry


def read(acceptance: Acceptance) -> tuple[list[int], list[int], list[list[int]], Sequence[Any] | None]:
    """The device read."""
    said = acceptance.verdict.said
    if said is not None and acceptance.report is not None and acceptance.logprobs is None:
        words: Any = [word.tolist() for word in said.words]
        (accepted, following), *drafts = words
        row = [token for pair in drafts for token in pair]
        return [accepted], [following], [row[: acceptance.verdict.proposal.tokens.shape[1]]], None
    counts, nexts, drafts = acceptance.accepted, acceptance.next, acceptance.verdict.proposal.tokens
    mx.eval(counts, nexts, drafts, acceptance.logprobs)
    logprobs = None if acceptance.logprobs is None else [array.tolist() for array in acceptance.logprobs]
    return counts.tolist(), nexts.tolist(), drafts.tolist(), logprobs  # type: ignore[return-value]


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


def undo(buffers: Any, error: BaseException) -> None:
    """Put the buffers back to before the round; where that fails they are unusable and say why."""
    try:
        buffers.restore()
        mx.eval(buffers.state)
    except BaseException as worse:
        buffers.poison(f"a round failed ({error}) and could not be undone ({worse})")

"""Rounds to be timed: on a bound pipeline, behind a context of any depth, with drafts of any width."""

from __future__ import annotations

from itertools import pairwise
from statistics import median, median_low
from time import perf_counter
from typing import Any

import attrs
import mlx.core as mx

from dspark.buffers.batch import batch_of
from dspark.calibrate.fill import chunks, fill
from dspark.caps.fixed import FixedCap
from dspark.pipeline import Pipeline
from dspark.records import Opening, Proposal, RowCommit, Settled, State
from dspark.round import ahead, follow, land, read, send
from dspark.session import SessionOptions
from dspark.stages.accept.rows import ByRow
from dspark.stages.base import AbstractDraft
from dspark.states import join_rows

# Tokens of made-up prompts: small numbers that every vocabulary has, no two neighbours alike.
ALPHABET = 97
SESSION_ROUNDS = 3
SESSION_PROMPT = 4


def made_up(length: int) -> tuple[int, ...]:
    """A prompt without n-grams that repeat soon."""
    return tuple((i * i * 31 + i * 17) % ALPHABET + 3 for i in range(length))


@attrs.frozen
class Dummy(AbstractDraft):
    """Offers as many made-up tokens as asked for, and costs nothing. `layers`: taps that the real drafter would want."""

    layers: tuple[int, ...] = ()

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.layers

    def init(self, opening: Opening) -> tuple[None, ...]:
        return (None,) * len(opening.prompts)

    def skip(self, settled: Settled, carry: Any) -> Any:
        return carry

    def __call__(self, settled: Settled, carry: Any, cap: int) -> tuple[Proposal, Any]:
        rows = len(settled.start)
        # Drafters that are worth it have the anchor in front of their tokens.
        block = mx.array([made_up(cap + 1)] * rows, dtype=mx.int32)
        return Proposal(
            settled.anchor, block[:, 1:], (cap,) * rows, None, ("dummy",) * rows, settled.start, None, block
        ), carry


class Everything:
    """A row in which every token stands."""

    def commit(self, said: list[int], accepted: int, offered: int, source: str) -> RowCommit:
        return RowCommit(0, tuple(said), accepted, offered, source)


class Bench:
    """`rows` rows behind `depth` made-up tokens each. Methods run once and return milliseconds; the depth creeps up with
    them.

    Raises Unfillable where the target's caches cannot be filled without a prefill.
    """

    def __init__(self, engine: Any, pipeline: Pipeline, depth: int, rows: int = 1):
        # A controller that cuts or pads blocks would change what is measured.
        pipeline = attrs.evolve(pipeline, cap=FixedCap(0))
        if rows > 1:
            pipeline = attrs.evolve(pipeline, accept=ByRow((pipeline.accept,)))
        self.engine, self.pipeline, self.target, self.depth = engine, pipeline, engine.target, depth
        self.rows = [Everything()] * rows
        self.buffers, self.state = self._row()
        if rows > 1:
            self.buffers = batch_of(self.target, self.buffers)
        for _ in range(rows - 1):
            buffers, state = self._row()
            self.buffers.admit(buffers)
            self.state = join_rows(pipeline, self.state, state, self.buffers.epoch)

    def _row(self) -> tuple[Any, State]:
        pipeline, prompt = self.pipeline, made_up(self.depth + 1)
        opening = Opening(self.target, (prompt,), (0,), pipeline.accept)
        buffers, draft = self.engine.buffers(), pipeline.draft.init(opening)
        taps = fill(buffers, self.target, prompt, pipeline.draft.target_layer_ids)
        for settled in chunks(prompt, taps):
            draft = pipeline.draft.skip(settled, draft)
        # The drafter has absorbed everything: an empty record opens the first round.
        opened = Settled(mx.array([prompt[-1:]]), (prompt[-1:],), None, (0,), (self.depth,))
        return buffers, State(buffers.epoch, opened, draft, pipeline.accept.init(opening), None)

    def verify(self, width: int) -> float:
        """A round of `width` rows up to its read; it is undone. The drafter must be a `Dummy`."""
        start = perf_counter()
        flight = send(self.pipeline, self.target, self.buffers, self.state, width - 1)
        read(flight.acceptance)
        took = _since(start)
        self.buffers.restore()
        return took

    def plain(self, steps: int = 3) -> float:
        """A plain step with the next one sent before it is read."""
        flight = send(self.pipeline, self.target, self.buffers, self.state, 0)
        ends = []
        for n in range(steps + 1):
            following = None
            if n < steps:
                behind = ahead(flight, self.buffers.epoch)
                following = send(self.pipeline, self.target, self.buffers, behind, 0)
            self.state, *_ = land(self.pipeline, self.buffers, flight, self.rows)
            ends.append(perf_counter())
            if following is not None:
                flight = following._replace(state=self.state)
        return median(b - a for a, b in pairwise(ends)) * 1000

    def drafted(self, cap: int, rounds: int = 1) -> tuple[float, int]:
        """(ms, rows verified) of a whole round of the pipeline's own drafter, its rejections settled; of several in a row, the
        median of all but the first, which follows other work and takes longer."""
        took = []
        for _ in range(rounds):
            start = perf_counter()
            flight = send(self.pipeline, self.target, self.buffers, self.state, cap)
            if self.pipeline.foresees:
                flight = follow(self.pipeline, self.target, self.buffers, flight, 0, None, 0)
            self.state, *_ = land(self.pipeline, self.buffers, flight, self.rows)
            took.append((_since(start), flight.proposal.tokens.shape[1] + 1))
        self.buffers.pay(self.target)
        mx.eval(self.buffers.state)
        return median_low(took[1:] or took)

    def rejection(self, width: int) -> float:
        """Bringing the buffers back after all of `width` - 1 drafts were rejected, the device's part included."""
        flight = send(self.pipeline, self.target, self.buffers, self.state, width - 1)
        read(flight.acceptance)
        mx.eval(self.buffers.state)
        tokens = self.state.settled.tokens
        assert tokens is not None
        start = perf_counter()
        self.buffers.settle((1,), (tokens[0][-1:],))
        mx.eval(self.buffers.state)
        took = _since(start)
        # One more token is held than the state knows of: only the depth matters here.
        self.state = self.state._replace(epoch=self.buffers.epoch)
        self.buffers.pay(self.target)
        return took

    def prefill(self, tokens: int) -> float:
        """Feeding so many tokens of a prompt; they are taken back."""
        ids = mx.array([made_up(tokens)])
        start = perf_counter()
        self.buffers.forward(self.target, ids, self.pipeline.draft.target_layer_ids)
        mx.eval(self.buffers.state)
        took = _since(start)
        self.buffers.restore()
        return took

    def session(self, cap: int, rounds: int = SESSION_ROUNDS, depth: int = SESSION_PROMPT) -> float:
        """A round of a real session behind a prompt of `depth` tokens, with its transcript and events; the mean of several that
        follow another one."""
        engine = attrs.evolve(
            self.engine, pipeline=attrs.evolve(self.pipeline, cap=FixedCap(cap)), stop_tokens=frozenset(), costs=None
        )
        prompt, limit = made_up(depth), (cap + 1) * (rounds + 3)
        session = engine.open(list(prompt), max_tokens=limit, options=SessionOptions(sinks=(lambda event: None,)))
        with session:
            session.step()
            start = perf_counter()
            for _ in range(rounds):
                session.step()
            return _since(start) / rounds


def _since(start: float) -> float:
    return (perf_counter() - start) * 1000

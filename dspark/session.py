"""A session owns the buffers, runs rounds until every row has ended, and streams commits."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import mlx.core as mx

from dspark.buffers.batch import batch_of
from dspark.errors import DsparkError
from dspark.records import Commit, Opening, RoundEvent, RowCommit, Shadow, State, new
from dspark.round import Flight, ahead, follow, land, send, told, undo
from dspark.rows import Request, Result, Row, with_logprobs
from dspark.shadow import Cast, cast, judge, judgeable
from dspark.stages.accept.rows import ByRow, failures
from dspark.states import join_rows, take_rows

Progress = Callable[[int, int], None]


class Cancelled(Exception):
    """Stops a prefill from its progress callback; never leaves the session."""


class Session:
    """Iterate over it for commits, one a round; `result` tells how it went. Made by `engine.open`.

    Changed in place by its own methods only. `cancel()` may be called from any thread and takes effect between rounds (in
    prefill: between chunks). An error in a round leaves the session where the round began, or poisons its buffers.
    """

    def __init__(self, engine: Any, requests: Sequence[Request], options: SessionOptions):
        self.engine, self.sinks = engine, options.sinks
        self._progress, self._batch = options.progress, options.batch
        self._cancelled = False
        self._waiting = [Row(i, request, engine.transcript(request)) for i, request in enumerate(requests)]
        self._several = len(requests) > 1
        self._rows: list[Row] = []
        self._ended: dict[int, Row] = {}
        self._buffers: Any = None
        self._state: State | None = None
        self._pipeline, self._target = engine.pipeline, engine.target
        self._never_drafts = engine.pipeline.draft.longest == 0
        self._watched = bool(self.sinks) or engine.pipeline.cap.watches
        self._events: list[RoundEvent] = []
        self._sent: Flight | None = None
        self._shadow: Cast | None = None
        self._cast = 0
        self._round, self._clock = 0, time.perf_counter()
        self._reuse = options.reuse
        self._scope, self._stream = engine.enter(), engine.stream

    # ---- what a user does -------------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Commit]:
        while (commit := self.step()) is not None:
            yield commit

    def cancel(self) -> None:
        """End with "cancelled" behind the round under way."""
        self._cancelled = True

    def step(self) -> Commit | None:
        """Run one round and return what it committed; None when every row has ended."""
        if self._stream is None:
            commit = self._step()
        else:
            with mx.stream(self._stream):
                commit = self._step()
        if self._events:
            self._tell()
        return commit

    def round(self, state: State) -> tuple[Commit | None, State]:
        """The same as a function of a state. Raises StaleState for one that a round has consumed already."""
        self._buffers.check(state.epoch)
        return self.step(), self.state

    @property
    def state(self) -> State:
        """What the next round consumes."""
        if self._state is None:
            self._admit_waiting()
        if self._state is None:
            raise DsparkError("this session has no row to decode")
        return self._state

    @property
    def results(self) -> tuple[Result, ...]:
        """One a prompt, in the order of the prompts; rows that wait have no tokens yet."""
        rows = {row.index: row for row in (*self._waiting, *self._rows)} | self._ended
        return tuple(rows[i].result() for i in sorted(rows))

    @property
    def result(self) -> Result:
        """The first prompt's result so far."""
        return self.results[0]

    def result_of(self, index: int) -> Result:
        """One prompt's result so far, by its place in the list of prompts."""
        row = self._ended.get(index) or next(r for r in (*self._rows, *self._waiting) if r.index == index)
        return row.result()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should be told once of how the rows are decoded."""
        reason = getattr(self._buffers, "reason", "")
        return (f"the rows go one after another, which is no faster: {reason}",) if reason else ()

    def fork(self) -> Session:
        """An independent continuation of this session. Costs a copy of the caches."""
        self._drop_sent()
        twin = copy.copy(self)
        twin._cancelled, twin._events = False, []
        twin._buffers = None if self._buffers is None else self._buffers.fork()
        twin._rows = [row.fork() for row in self._rows]
        twin._ended, twin._waiting = dict(self._ended), [row.fork() for row in self._waiting]
        if self._state is not None:
            twin._state = self._state._replace(
                draft=copy.deepcopy(self._state.draft), accept=copy.deepcopy(self._state.accept)
            )
        return twin

    def close(self) -> None:
        """Give the device settings back; the result stays. Safe to call twice. What the cap learned goes to the engine's next
        session."""
        if self._state is not None:
            self.engine.learn(self._state.cap)
        if self._buffers is not None and self._buffers.poisoned is None:
            self._drop_sent()
            self._buffers.pay(self._target)
        self._scope.close()

    def leave(self) -> tuple[Any, State, tuple[int, ...]] | None:
        """Hand over the buffers of an ended session of one prompt, its last state and every token of its context."""
        rows = list(self._ended.values())
        if self._rows or len(rows) != 1 or self._buffers is None or self._state is None:
            return None
        self.close()
        if self._buffers.poisoned is not None:
            return None
        left = self._buffers, self._state, rows[0].context
        self._buffers = self._state = None
        return left

    # ---- rounds -----------------------------------------------------------------------------------------------------

    def _step(self) -> Commit | None:
        if self._cancelled or (self._waiting and not self._admit_waiting()):
            return self._end_cancelled()
        if not self._rows:
            self.close()
            return None
        flight, state, buffers, held = self._sent, self._state, self._buffers, self._buffers.held
        if flight is None:
            assert state is not None
            if buffers.poisoned is not None:
                buffers.check()
            flight = send(self._pipeline, self._target, buffers, state, self._cap(state))
        elif self._watched and not self._never_drafts:
            flight = self._shadowed(flight)
        self._sent = None
        following = None if flight.cap else self._send_ahead(flight)
        flight, pondered = self._meanwhile(flight, held)
        if self._several:
            self._mark_failed(flight)
        state, commits, logprobs = land(self._pipeline, buffers, flight, self._rows)
        if logprobs is not None:
            commits = with_logprobs(self._rows, commits, logprobs)
        self._round += 1
        commit = new(Commit, (tuple(commits), self._round, flight.cap))
        self._go_on(state, following)
        if self._watched:
            self._go_on(self._observe(flight, state, commit, pondered), following)
        for row in commits:
            if row.finish is not None:
                self._retire()
                break
        return commit

    def _go_on(self, state: State, following: Flight | None) -> None:
        self._state, self._sent = state, None if following is None else following._replace(state=state)

    def _meanwhile(self, flight: Flight, held: tuple[int, ...]) -> tuple[Flight, Any]:
        """What is done while the device works: the cap's carry is readied, and the next round's forward sent where that round is
        sure to come. An error takes back what was sent."""
        cap, carry = self._pipeline.cap, flight.state.cap
        try:
            if self._watched:
                carry = cap.ponder(carry, held)
            if flight.cap and self._pipeline.foresees:
                left = self._rows[0].transcript.left
                flight = follow(self._pipeline, self._target, self._buffers, flight, cap.sure(carry), carry, left)
            return flight, carry
        except BaseException as error:
            undo(self._buffers, error)
            self._shadow = None
            raise

    def _cap(self, state: State) -> int:
        """What the controller proposes, but no more than could still be committed, or the target is at work on already."""
        if self._never_drafts:
            return 0
        most, sent = self._pipeline.cap.propose(state.cap), state.settled.sent
        for row in self._rows:
            if row.transcript.left > most:
                return most
        left = max([row.transcript.left for row in self._rows]) - 1
        return left if sent is None else min(most, max(left, sent.shape[1] - 1))

    def _send_ahead(self, flight: Flight) -> Flight | None:
        """Send the round behind a parked one before the parked one is read, where it is sure to be parked too."""
        if self._cancelled or any(row.transcript.left < 2 for row in self._rows):
            return None
        if not self._never_drafts and self._pipeline.cap.parked_rounds(flight.state.cap) < 2:
            return None
        return send(self._pipeline, self._target, self._buffers, ahead(flight, self._buffers.epoch), 0)

    def _shadowed(self, flight: Flight) -> Flight:
        """A plain step that was sent ahead, with drafts beside it where the cap controller wants some judged."""
        state = flight.state
        if self._shadow is not None or not (cap := self._pipeline.cap.shadow(state.cap)):
            return flight
        if not judgeable(self._pipeline, len(self._rows)):
            return flight
        self._shadow, carry = cast(self._pipeline, state, cap)
        self._cast = int(cap)
        return flight._replace(draft=carry)

    def _judged(self, flight: Flight, commits: Sequence[RowCommit]) -> tuple[Shadow, ...]:
        """What the shadow under way is found to be worth, once all of it was said; none where rounds draft again."""
        if self._shadow is None:
            return ()
        shadow = self._shadow = None if flight.cap else self._shadow.heard(commits)
        if shadow is None or not shadow.due:
            return ()
        self._shadow = None
        return judge(shadow)

    def _mark_failed(self, flight: Flight) -> None:
        """Tell rows whose accept stage raised; they end with this round, and the others go on."""
        for i, error in failures(flight.accept).items():
            self._rows[i].fail(error)

    def _observe(self, flight: Flight, state: State, commit: Commit, pondered: Any) -> State:
        """Tell the cap controller, and keep the event for the sinks."""
        cap, carry, now = self._pipeline.cap, flight.state.cap, time.perf_counter()
        judged = self._judged(flight, commit.rows)
        event = RoundEvent(
            round=commit.round,
            rows=commit.rows,
            cap=cap.propose(carry),
            cap_reason=cap.reason(carry),
            width=flight.proposal.tokens.shape[1] + 1,
            reads=self._pipeline.draft.reads if flight.cap else 1 + bool(judged),
            elapsed_ms=(now - self._clock) * 1000,
            context_tokens=self._buffers.held,
            owed_tokens=max(self._buffers.owed_tokens),
            memory_bytes=mx.get_active_memory(),
            predicted_ms=cap.predicted_ms(carry),
            shadow=self._cast,
            judged=judged,
            ahead=flight.ahead,
        )
        self._events.append(event)
        self._cast, self._clock = 0, now
        return state._replace(cap=cap.observe(pondered, event))

    def _tell(self) -> None:
        """Hand the events to the sinks, outside the stream that rounds run on."""
        while self._events:
            event = self._events.pop(0)
            for sink in self.sinks:
                sink(event)

    def _retire(self) -> None:
        """Take ended rows out. The buffers of the last one stay, so that a next prompt can go on from them."""
        live = [i for i, row in enumerate(self._rows) if row.transcript.finish is None]
        self._drop_sent()
        self._ended |= {row.index: row for row in self._rows if row.transcript.finish is not None}
        if live:
            assert self._state is not None
            self._buffers.retire(live)
            self._state = take_rows(self._pipeline, self._state, live, self._buffers.epoch)
        self._rows = [self._rows[i] for i in live]

    def _drop_sent(self) -> None:
        """Undo a round that was sent ahead, and forget a shadow; neither is counted."""
        if self._sent is not None:
            self._buffers.restore()
            self._sent = None
        self._shadow = None

    def _end_cancelled(self) -> Commit | None:
        self._drop_sent()
        rows = [row for row in (*self._rows, *self._waiting) if row.transcript.finish is None]
        self._rows, self._waiting = [], []
        self._ended |= {row.index: row for row in rows}
        commits = tuple(
            RowCommit(row.index, (), 0, 0, "plain", row.transcript.end("cancelled"), "cancelled") for row in rows
        )
        self.close()
        return Commit(commits, self._round, 0) if commits else None

    # ---- prompts ----------------------------------------------------------------------------------------------------

    def _admit_waiting(self) -> bool:
        """Prefill what waits, as far as there is room. False when cancelled meanwhile."""
        while self._waiting and len(self._rows) < self._batch:
            if not self._admit(self._waiting.pop(0)):
                return False
        return True

    def _admit(self, row: Row) -> bool:
        """Prefill a prompt and put it behind the live rows. False when cancelled meanwhile. In a batch a prompt that cannot be
        prefilled ends alone; a single one may be tried again."""
        row.opened()
        if row.transcript.finish is not None:
            self._ended[row.index] = row
            return True
        self._drop_sent()
        self._rows.append(row)
        try:
            buffers, state = self._prefill(row)
        except Cancelled:
            return False
        except BaseException as error:
            self._rows.remove(row)
            if self._several and isinstance(error, Exception):
                row.fail(error)
                row.transcript.end("error")
                self._ended[row.index] = row
                return True
            self._waiting.insert(0, row)
            raise
        row.prefilled()
        if len(self._rows) > 1:
            assert self._state is not None
            self._buffers.admit(buffers)
            state = join_rows(self._pipeline, self._state, state, self._buffers.epoch)
        else:
            self._buffers = batch_of(self._target, buffers) if self._several else buffers
        self._state = state._replace(epoch=self._buffers.epoch)
        self._clock = time.perf_counter()
        return True

    def _prefill(self, row: Row) -> tuple[Any, State]:
        pipeline, prompt = self.engine.pipeline, row.request.prompt
        opening = Opening(self._target, (prompt,), (row.request.seed,), row.request.accept)
        buffers, draft, known = self.engine.start(opening, self._reuse)
        self._reuse = None
        row.cached_tokens = buffers.held[0]
        try:
            settled = None
            for settled_next in pipeline.prefill(
                self._target, buffers, prompt, known, pipeline.target_layer_ids, self._progress_or_stop()
            ):
                if settled is not None:
                    draft = told(pipeline, settled, draft)
                settled = settled_next
        except BaseException:
            self._buffers = self._buffers or buffers
            raise
        assert settled is not None
        accept = ByRow((row.request.accept,)) if self._several else row.request.accept
        self._pipeline = attrs.evolve(pipeline, accept=accept)
        return buffers, State(buffers.epoch, settled, draft, accept.init(opening), self.engine.cap_carry())

    def _progress_or_stop(self) -> Progress:
        def progress(done: int, total: int) -> None:
            if self._progress is not None:
                self._progress(done, total)
            if self._cancelled:
                raise Cancelled

        return progress


class SessionOptions:
    """How a session runs: telemetry sinks, a prefill progress callback, rows decoded at once, a session to go on from."""

    def __init__(
        self,
        sinks: Sequence[Callable[[RoundEvent], None]] = (),
        progress: Progress | None = None,
        batch: int = 1,
        reuse: Session | None = None,
    ):
        self.sinks, self.progress, self.batch, self.reuse = tuple(sinks), progress, batch, reuse

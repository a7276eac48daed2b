"""Where a round's time goes: the host's share by stage, dispatch and waiting, and what each part takes when it runs alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from time import perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import attrs
import mlx.core as mx

import dspark.round
import dspark.session
from dspark.bench.arms import plain
from dspark.bench.measure import Question
from dspark.engine import Engine
from dspark.round import Flight

# Of a round, in order. draft, verify, accept: building their graphs; dispatch: handing the graph to the device; read: waiting
# for it; rollback: buffers; text: detokenizer and counts; cap: the controller and events; driver: the rest.
PARTS = ("draft", "verify", "accept", "dispatch", "read", "rollback", "text", "cap", "driver")


class Round(NamedTuple):
    """One round: its rows, drafts and committed tokens, and milliseconds by part, which add up to the whole.

    apart: whether the device was waited for behind every stage, so that the parts hold what each takes alone.
    """

    width: int
    offered: int
    tokens: int
    apart: bool
    parts: dict[str, float]

    @property
    def ms(self) -> float:
        return sum(self.parts.values())


@attrs.frozen
class Profile:
    """drafted: rounds of the recipe that offered drafts; parked: those that did not; plain: steps of the target alone."""

    drafted: tuple[Round, ...]
    parked: tuple[Round, ...]
    plain: tuple[Round, ...]

    @property
    def widths(self) -> dict[int, int]:
        """Rows verified, and in how many rounds; the most frequent first."""
        return dict(Counter(r.width for r in self.drafted).most_common())

    def at(self, width: int, apart: bool) -> list[Round]:
        return [r for r in self.drafted if r.width == width and r.apart == apart]


def middle(rounds: Sequence[Round]) -> dict[str, float]:
    """Milliseconds by part, means over the half of the rounds whose whole is in the middle, so that they add up to `whole`:
    a device that takes two steps at once makes every other read wait for nothing, and medians would hide the rest."""
    ordered = sorted(rounds, key=lambda r: r.ms)
    kept = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    return {part: fmean(r.parts.get(part, 0.0) for r in kept) for part in PARTS} if kept else {}


def whole(rounds: Sequence[Round]) -> float | None:
    """Milliseconds of a round, by the same mean."""
    return sum(middle(rounds).values()) if rounds else None


def profile(engine: Engine, questions: Sequence[Question], max_tokens: int, told: Callable[[str], None]) -> Profile:
    """Answer every prompt by the recipe and by the target alone, in turn, after an untimed answer of each.

    Every other drafted round waits for the device behind each of its stages.
    """
    arms = {"recipe": engine, "plain": plain(engine)}
    rounds: dict[str, list[Round]] = {name: [] for name in arms}
    for name, arm in arms.items():
        told(f"untimed answer, {name}")
        watched(arm, questions[0].ids, max_tokens)
    for place, question in enumerate(questions):
        for name in list(arms)[:: 1 if place % 2 == 0 else -1]:
            told(f"{question.kind} {question.place}, {name}")
            rounds[name] += watched(arms[name], question.ids, max_tokens)
    drafted = tuple(r for r in rounds["recipe"] if r.offered)
    parked = tuple(r for r in rounds["recipe"] if not r.offered)
    return Profile(drafted, parked, tuple(rounds["plain"]))


def watched(engine: Engine, ids: tuple[int, ...], max_tokens: int) -> list[Round]:
    """The rounds of an answer, but for the first, which holds the prefill."""
    watch, rounds = Watch(), []
    with engine.open(ids, max_tokens=max_tokens) as session, watch.on(session):
        step = watch.timed("driver", session.step)
        session.step()
        while True:
            watch.begin(apart=len(rounds) % 2 == 1)
            if (commit := step()) is None:
                return rounds
            assert watch.landed is not None
            proposal = watch.landed.proposal
            width, offered = proposal.tokens.shape[1] + 1, max(proposal.offered)
            parts = {part: seconds * 1000 for part, seconds in watch.seconds.items()}
            rounds.append(Round(width, offered, len(commit.tokens), watch.apart and offered > 0, parts))


class Watch:
    """Times the parts of a session's rounds. A part's time is its own: what another part takes inside it is taken off."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.landed: Flight | None = None
        self.apart = False
        self._inside = 0.0

    def begin(self, apart: bool) -> None:
        self.seconds, self.apart = defaultdict(float), apart

    def timed(self, part: str, call: Callable[..., Any], waits_for: Callable[[Any], Any] | None = None) -> Any:
        """`call`, timed as a part; `waits_for` picks what to wait for, of what it gives, where parts run apart."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._inside = self._inside, 0.0
            began = perf_counter()
            try:
                out = call(*args, **kwargs)
                if self.apart and waits_for is not None:
                    mx.eval(waits_for(out))
                return out
            finally:
                took = perf_counter() - began
                self.seconds[part] += took - self._inside
                self._inside = before + took

        return run

    @contextmanager
    def on(self, session: Any) -> Iterator[None]:
        """Watch this session. The driver's functions are replaced meanwhile, so no other session may run."""
        session._cap, session._observe = self.timed("cap", session._cap), self.timed("cap", session._observe)
        places = (
            (dspark.session, "send"), (dspark.session, "follow"), (dspark.session, "land"), (dspark.round, "read")
        )  # fmt: skip
        before = [getattr(*place) for place in places]
        send, follow, land, read = before
        watches = (
            self.timed("dispatch", self._send(send)),
            self.timed("dispatch", self._follow(follow)),
            self._land(land),
            self.timed("read", read),
        )
        try:
            for (module, name), watch in zip(places, watches, strict=True):
                setattr(module, name, watch)
            yield
        finally:
            for (module, name), original in zip(places, before, strict=True):
                setattr(module, name, original)
            del session._cap, session._observe

    def _send(self, send: Callable[..., Flight]) -> Callable[..., Flight]:
        def watched_send(pipeline: Any, target: Any, buffers: Any, state: Any, cap: int) -> Flight:
            draft = self.timed("draft", pipeline.draft, lambda out: (out[0].tokens, pipeline.draft.pending(out[1])))
            draft.pending = pipeline.draft.pending
            stages = SimpleNamespace(
                draft=draft,
                verify=self.timed("verify", pipeline.verify, lambda verdict: (verdict.logits, verdict.taps)),
                accept=self.timed("accept", pipeline.accept, lambda out: (out[0].accepted, out[0].next)),
                target_layer_ids=pipeline.target_layer_ids,
                cap=pipeline.cap,
                fits=pipeline.fits,
                pends=pipeline.pends,
            )
            return send(stages, target, buffers, state, cap)

        return watched_send

    def _follow(self, follow: Callable[..., Flight]) -> Callable[..., Flight]:
        def watched_follow(
            pipeline: Any, target: Any, buffers: Any, flight: Flight, cap: int, carry: Any, left: int
        ) -> Flight:
            # The next round is to show what its forward takes alone, where this one does not.
            return follow(pipeline, target, buffers, flight, cap, carry, left if self.apart else 0)

        return watched_follow

    def _land(self, land: Callable[..., Any]) -> Callable[..., Any]:
        def watched_land(pipeline: Any, buffers: Any, flight: Flight, rows: Any) -> Any:
            self.landed = flight
            draft = SimpleNamespace(
                skip=self.timed("draft", pipeline.draft.skip), pending=self.timed("dispatch", pipeline.draft.pending)
            )
            settle = self.timed("rollback", buffers.settle, lambda _: _replayed(buffers))
            listening = [SimpleNamespace(commit=self.timed("text", row.commit)) for row in rows]
            return land(
                SimpleNamespace(draft=draft, pends=pipeline.pends), _With(buffers, settle=settle), flight, listening
            )

        return watched_land


class _With:
    """An object with some of its methods replaced."""

    def __init__(self, inner: Any, **methods: Any):
        self._inner = inner
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _replayed(buffers: Any) -> list[Any]:
    """What a rollback computes: recurrent states. Trimming computes nothing."""
    return [getattr(leaf, "cache", None) for leaf in getattr(buffers, "leaves", ())]

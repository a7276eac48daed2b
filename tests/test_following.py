"""Forwards that are sent behind a drafted round before that is read: they are those that would be asked for behind it, whatever the
round ends with, and where another one is asked for nobody sees that they were there."""

import gc
import random
import weakref
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

import dspark.round as round_module
import dspark.session as session_module
from dspark.caps import AdaptiveCap, ClipCap, FixedCap, ParkCap
from dspark.caps.curve import CostCurve, DraftCost, Grid
from dspark.kernels import in_place, stack
from dspark.round import follow
from dspark.session import SessionOptions
from dspark.stages.accept import SampleMatch
from dspark.stages.draft import first_of
from dspark.stages.draft.first_of import FirstOf
from dspark.stages.warp import temperature, warps
from tests import stack_trials as trials
from tests.launched import BLOCK, LENGTH, LOOKUP, PROMPT, FittedCap, ScriptedCap, dspark, engine, plain, target
from tests.stack_trials import TAPPED, bits

PARKED = (3, 0, 0, 0, 2, 7, 7, 7, 0, 0)


class Log:
    """How many forwards were sent ahead, and how many of them taken."""

    def __init__(self, monkeypatch):
        self.sent, self.taken = 0, 0
        follow, sent = stack.Forward.follow, stack.Forward._sent

        def followed(forward, ids, *how):
            done = follow(forward, ids, *how)
            self.sent += done
            return done

        def looked(forward, ids, *how):
            found = sent(forward, ids, *how)
            self.taken += found is not None
            return found

        monkeypatch.setattr(stack.Forward, "follow", followed)
        monkeypatch.setattr(stack.Forward, "_sent", looked)


@pytest.fixture
def log(monkeypatch):
    return Log(monkeypatch)


@pytest.fixture
def to():
    return target()


@pytest.fixture
def stage(to):
    return dspark(to)


def alone(*how):
    """In place of `round.follow`: drafts are begun, and no forward behind them."""
    return follow(*how[:-1], 0)


def run(draft, to, cap=BLOCK, length=LENGTH, **options):
    """(the session, its rows, bits of the caches)."""
    session = engine(draft, to, cap=cap, **options).open(PROMPT, max_tokens=length, seed=5)
    rows = [commit.rows[0] for commit in session]
    held = session._buffers.held[0]
    kept = [bits(a[:, :, :held]) for cache in session._buffers.caches for a in (cache.keys, cache.values)]
    return session, rows, kept


# ---- sessions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [1, 2, 5, BLOCK])
def test_every_round_is_sent_ahead_until_the_text_may_end_before_it(to, stage, log, cap):
    session, rows, _ = run(stage, to, cap)
    assert session.result.tokens == plain()
    said = [sum(len(row.tokens) for row in rows[:i]) for i in range(len(rows))]
    assert log.sent == sum(LENGTH - n > row.offered for n, row in zip(said, rows, strict=True)) > 1
    assert log.sent - 1 <= log.taken <= log.sent


WAYS = {
    "cap 7": {},
    "cap 3": {"cap": 3},
    "parked": {"cap": ScriptedCap(PARKED)},
    "caps": {"cap": ScriptedCap((7, 7, 2, 7, 0, 5, 5))},
    "clipped": {"cap": ClipCap(FixedCap(7), lo=1, hi=4)},
    "parks": {"cap": ParkCap(FixedCap(7), probe_every=2, patience=2)},
}


@pytest.mark.parametrize("way", WAYS)
def test_nobody_sees_that_forwards_were_sent_ahead(to, monkeypatch, log, way):
    ahead = run(dspark(to), to, **WAYS[way])
    assert log.taken
    monkeypatch.setattr(session_module, "follow", alone)
    taken = log.taken
    behind = run(dspark(to), to, **WAYS[way])
    assert log.taken == taken
    assert ahead[0].result.tokens == behind[0].result.tokens == plain()
    assert [row.tokens for row in ahead[1]] == [row.tokens for row in behind[1]]
    assert all(map(np.array_equal, ahead[2], behind[2]))


class Sure(FittedCap):
    """Sure of its cap, but blocks are cut and padded."""

    def sure(self, carry):
        return BLOCK


class Liar(ScriptedCap):
    """Sure of what it does not offer."""

    def sure(self, carry):
        return BLOCK


@pytest.mark.parametrize("cap", [Sure((7, 7, 7)), Liar((7, 2, 0, 7, 4))], ids=["fitted", "another cap"])
def test_another_block_is_asked_for_anew(to, stage, log, cap):
    session, *_ = run(stage, to, cap)
    assert session.result.tokens == plain()
    assert log.taken < log.sent or isinstance(cap, Sure)


def test_a_forward_at_another_place_is_caught(to, monkeypatch):
    """The control."""
    launched = stack.Forward._launched

    def elsewhere(self, ids, caches, tapped, held, last=None):
        return launched(self, ids, caches, tapped, held - (last is not None), last)

    monkeypatch.setattr(stack.Forward, "_launched", elsewhere)
    assert run(dspark(to), to)[0].result.tokens != plain()


def test_a_block_that_is_cut_is_not_sent_ahead(to, stage, log):
    class Cut(Sure):
        SHAPES = ((4, 5),)

    session, rows, _ = run(stage, to, Cut((7,)))
    assert session.result.tokens == plain()
    assert {row.offered for row in rows[:-1]} == {4}
    assert not log.sent


def test_the_adaptive_cap_lets_forwards_be_sent_ahead(to, stage, log):
    session, *_ = run(stage, to, AdaptiveCap(start=7), costs=None)
    assert session.result.tokens == plain()
    assert not log.sent, "what nobody measured is looked at first"


# ---- lookup in front ------------------------------------------------------------------------------------------------------


def test_lookup_waits_for_a_round_that_is_under_way(to, stage, log):
    session, rows, _ = run(first_of(LOOKUP, stage), to)
    assert session.result.tokens == plain()
    sources = [row.source for row in rows]
    assert {"lookup", "dspark"} <= set(sources)
    assert log.taken > 2
    assert log.sent - log.taken <= 1, "what is sent is taken, but for the text's end"


def test_lookup_that_does_not_wait_is_noticed(to, stage, log, monkeypatch):
    """The control."""
    monkeypatch.setattr(FirstOf, "_sent", lambda self, settled, carry, cap: None)
    session, *_ = run(first_of(LOOKUP, stage), to)
    assert session.result.tokens == plain()
    assert log.sent - log.taken > 1


def test_who_waited_comes_next(to, stage, monkeypatch):
    asked, call = [], FirstOf.__call__

    def noted(self, settled, carry, cap):
        proposal, carry = call(self, settled, carry, cap)
        asked.append((settled.sent is not None, proposal.waits, proposal.source[0]))
        return proposal, carry

    monkeypatch.setattr(FirstOf, "__call__", noted)
    run(first_of(LOOKUP, stage), to, 3)
    behind = [after for (_, waits, _), after in pairwise(asked) if waits]
    assert behind
    assert not any(sent for sent, *_ in behind)
    assert any(source == "lookup" for *_, source in behind)
    assert {source for sent, _, source in asked if sent} == {"dspark"}


# ---- ends, errors, forks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 15, 16, 17])
def test_length_limits(to, stage, log, length):
    session, *_ = run(stage, to, length=length)
    assert session.result.tokens == plain()[:length]
    assert log.sent - log.taken <= 1, "but for the text's end"


def test_stops_in_the_middle_of_a_block(to, log):
    for stop in sorted(set(plain())):
        session, *_ = run(dspark(to), to, stop_tokens=frozenset({stop}))
        assert session.result.tokens == plain()[: plain().index(stop) + 1]
    assert log.sent > log.taken, "some were for nothing"


def test_a_session_goes_on_from_one_that_ended_early(to, stage, log):
    stop = plain()[14]
    made = engine(stage, to, stop_tokens=frozenset({stop}))
    with made.open(PROMPT, max_tokens=LENGTH) as first:
        list(first)
    prompt = (*PROMPT, *first.result.tokens, 4, 5)
    fresh = target()
    with engine(dspark(fresh), fresh).open(prompt, max_tokens=12) as other:
        list(other)
    with engine(stage, to).open(prompt, max_tokens=12, options=SessionOptions(reuse=first)) as second:
        list(second)
    assert second.result.cached_tokens
    assert second.result.tokens == other.result.tokens


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("behind", [False, True], ids=["before it is sent", "behind"])
def test_an_interrupt_changes_no_token(to, stage, monkeypatch, error, behind):
    follow, asked = type(to.launch).follow, []

    def interrupted(self, *how):
        asked.append(how)
        if len(asked) % 3 == 2:
            if behind:
                follow(self, *how)
            raise error
        return follow(self, *how)

    monkeypatch.setattr(type(to.launch), "follow", interrupted)
    session = engine(stage, to).open(PROMPT, max_tokens=LENGTH)
    broken = 0
    while session.result.finish is None:
        try:
            session.step()
        except error:
            broken += 1
    assert broken > 1
    assert session.result.tokens == plain()


def test_forks_go_ways_of_their_own(to, stage, log):
    session = engine(stage, to).open(PROMPT, max_tokens=LENGTH)
    for _ in range(4):
        session.step()
    assert session.state.settled.sent is not None
    twin = session.fork()
    list(twin)
    list(session)
    assert session.result.tokens == twin.result.tokens == plain()


def test_two_sessions_in_turn(to, log):
    """What was sent behind the one's round is there when its turn comes again."""
    sessions = [engine(dspark(to), to).open(PROMPT, max_tokens=LENGTH) for _ in range(2)]
    for _ in range(LENGTH):
        for session in sessions:
            session.step()
    assert [session.result.tokens for session in sessions] == [plain()] * 2
    assert log.taken >= log.sent - 2 > 4


@pytest.mark.parametrize("accept", [SampleMatch(warps(temperature(0.8)))], ids=["sample-match"])
def test_other_ways_of_choosing_send_nothing_ahead(to, stage, log, accept):
    run(stage, to, accept=accept)
    assert not log.sent


def test_a_batch_sends_nothing_ahead(to, stage, log):
    with engine(stage, to).open([list(PROMPT), [7, 8, 9]], max_tokens=20) as session:
        list(session)
    assert not log.sent


# ---- forwards -------------------------------------------------------------------------------------------------------------

CASE = trials.Case(trials.qwen3, mx.float16, tied=True, warps=2, splits=2, blocks=3, hidden=48, vocab=90)
ROWS, HELD = 8, 20


@pytest.fixture
def t():
    return trials.trial(CASE, HELD, (5, 8))


def asked(t, way, wrong, ahead, rows=6, room=True):
    """Bits of what a forward of `rows` gives and leaves in the caches, behind one of which `wrong` drafts stand; and whether it was
    sent ahead."""
    first, caches = trials.drafted(t, ROWS, wrong), t.caches()
    logits, _ = way(first, caches, TAPPED)
    ids = t.tokens[:, 2 : 2 + rows]
    sent = ahead and way.follow(ids, logits, caches, TAPPED)
    for cache in caches:
        cache.trim(ROWS - wrong - 1)
    logits, taps = way(ids, caches, TAPPED)
    said = way.said(logits)
    written = [a[:, :, : caches[0].offset] for cache in caches for a in (cache.keys, cache.values)]
    assert trials.greedy(ids, logits, said)
    return [bits(a) for a in (logits, taps, *written)], sent


@pytest.mark.parametrize("wrong", [0, 3, 7])
@pytest.mark.parametrize("rows", [1, 6, 13])
def test_a_forward_sent_ahead_has_the_bits_of_one_asked_for(t, monkeypatch, wrong, rows):
    way = trials.forward(CASE, t.model)
    want, _ = asked(t, way, wrong, False, rows)
    launches = []
    launched = stack.Forward._launched
    monkeypatch.setattr(stack.Forward, "_launched", lambda *how: launches.append(how) or launched(*how))
    got, sent = asked(t, way, wrong, True, rows)
    assert sent
    assert len(launches) == 2, "it was not computed again"
    assert all(map(np.array_equal, got, want))


def test_a_text_that_forgets_what_stands_is_caught(t):
    def deaf(kind):
        program = stack.program(kind)
        assert program.body.count("[0] + 1 : held") == 1
        body = program.body.replace("[0] + 1 : held", "[0] : held")
        return trials.stand_in(program._replace(body=body), written=trials.WRITTEN)

    right, wrong = trials.forward(CASE, t.model), trials.forward(CASE, t.model, deaf)
    want, got = asked(t, right, 3, True)[0], asked(t, wrong, 3, True)[0]
    assert not all(map(np.array_equal, got, want))


def changed(how, t, way, caches, ids):
    """What may happen between sending and asking; gives what is asked for."""
    if how == "trimmed":
        for cache in caches:
            cache.trim(1)
    if how == "written by MLX":
        way.leave(caches)
        trials.plain(t.model, ids[:, :1], caches)
    if how == "another forward":
        way(ids[:, :2] + 0, t.caches(), TAPPED)
    if how == "several launches":
        way(mx.tile(ids, (1, 3)), t.caches(), TAPPED)
    if how == "several launches behind":
        way(mx.tile(ids, (1, 3)), caches, TAPPED)
        for cache in caches:
            cache.trim(18)
    if how == "other caches":
        return ids, t.caches()
    return (ids + 0 if how == "equal ids" else ids), caches


@pytest.mark.parametrize(
    "how",
    [
        "trimmed",
        "written by MLX",
        "another forward",
        "several launches",
        "several launches behind",
        "other caches",
        "equal ids",
        "nothing",
    ],
)
def test_what_changed_meanwhile_is_computed_again(t, log, how):
    way = trials.forward(CASE, t.model)
    first, caches = trials.drafted(t, ROWS, 3), t.caches()
    logits, _ = way(first, caches, TAPPED)
    ids = t.tokens[:, 2:8]
    assert way.follow(ids, logits, caches, TAPPED)
    for cache in caches:
        cache.trim(ROWS - 4)
    ids, caches = changed(how, t, way, caches, ids)
    fresh = trials.forward(CASE, t.model)
    twins = [type(cache)() for cache in caches]
    for twin, cache in zip(twins, caches, strict=True):
        twin.state = *(a[:, :, : cache.offset] + 0 for a in (cache.keys, cache.values)), cache.offset
    taken, sent = log.taken, way._ahead._following.get(caches[0])
    got, want = way(ids, caches, TAPPED), fresh(ids, twins, TAPPED)
    # Forwards of other caches are no change.
    assert log.taken - taken == (how in ("nothing", "another forward", "several launches"))
    assert all(np.array_equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))
    if how in ("trimmed", "written by MLX"):
        assert sent is None or not np.array_equal(bits(sent.given[0]), bits(want[0])), (
            "the control: it is another forward"
        )


def test_buffers_that_grow_for_what_is_sent_ahead_keep_what_they_hold(t, monkeypatch):
    want, _ = asked(t, trials.forward(CASE, t.model), 3, False)
    monkeypatch.setattr(in_place, "GROWTH", 4)
    got, sent = asked(t, trials.forward(CASE, t.model), 3, True)
    assert sent
    assert all(map(np.array_equal, got, want))


def test_what_cannot_be_sent_ahead_is_not(t):
    way, caches = trials.forward(CASE, t.model), t.caches()
    logits, _ = way(t.tokens[:, 2:8], caches, TAPPED)
    ids = t.tokens[:, 3:9]
    assert not way.follow(ids, logits + 0, caches, TAPPED), "other logits"
    assert not way.follow(ids, logits, t.caches(), TAPPED), "other caches"
    assert not way.follow(mx.tile(ids, (1, 4)), logits, caches, TAPPED), "more rows than a launch has"
    assert way.follow(ids, logits, caches, TAPPED)
    way.leave(caches)
    assert not way.follow(ids, logits, caches, TAPPED), "somebody else writes them"


def test_caches_are_not_kept_by_what_was_sent(t):
    way, caches = trials.forward(CASE, t.model), t.caches()
    logits, _ = way(t.tokens[:, 2:8], caches, TAPPED)
    assert way.follow(t.tokens[:, 3:9], logits, caches, TAPPED)
    gone = weakref.ref(caches[0])
    del caches
    gc.collect()
    assert gone() is None


# ---- at random ------------------------------------------------------------------------------------------------------------


class Broken(Exception):
    """Raised in the middle of a round."""


COSTS = CostCurve(
    [Grid((0,), (1, 8, 16), [[0.93, 1.23, 1.46]], [0.52])],
    [DraftCost("lookup", (1, 8), (0.02, 0.02)), DraftCost("dspark", (1, 4, 7), (-0.32, -0.40, -0.50))],
)
CAPS = (
    7,
    3,
    ScriptedCap(PARKED),
    Liar((7, 7, 2, 7, 0, 5)),
    FittedCap((7, 5, 7)),
    AdaptiveCap(),
    ClipCap(AdaptiveCap(), 1, 5),
)
EVERY = [pytest.param(seed, marks=pytest.mark.slow if seed > 3 else ()) for seed in range(60)]


@pytest.mark.parametrize("seed", EVERY)
def test_sessions_stops_forks_and_errors_at_random(to, stage, monkeypatch, seed):
    """Sessions of one target in turns, forks of them, errors in front of and behind what is sent and read: each says its text."""
    rng = random.Random(seed)

    def breaks(owner, name, behind):
        call = getattr(owner, name)

        def run(*how):
            if not behind and rng.random() < 0.03:
                raise Broken
            made = call(*how)
            if behind and rng.random() < 0.03:
                raise Broken
            return made

        monkeypatch.setattr(owner, name, run)

    for owner, name in (
        (stack.Forward, "follow"),
        (stack.Forward, "_sent"),
        (session_module, "follow"),
        (round_module, "read"),
    ):
        breaks(owner, name, name != "read" and rng.random() < 0.5)
    sessions = []
    for _ in range(rng.choice((1, 2, 3))):
        stop, length = rng.choice((None, rng.choice(plain()[8:]))), rng.randint(1, LENGTH)
        end = plain().index(stop) + 1 if stop is not None else LENGTH
        draft = rng.choice((stage, first_of(LOOKUP, stage)))
        stops = frozenset() if stop is None else frozenset({stop})
        made = engine(draft, to, cap=rng.choice(CAPS), costs=COSTS, stop_tokens=stops)
        sessions.append((made.open(PROMPT, max_tokens=length), plain()[: min(length, end)]))
    going = list(sessions)
    while going:
        session, want = one = rng.choice(going)
        try:
            if session.step() is None:
                going.remove(one)
                continue
        except Broken:
            continue
        if rng.random() < 0.05 and len(sessions) < 5 and session.result.finish is None:
            twin = session.fork(), want
            sessions.append(twin)
            going.append(twin)
    assert all(session.result.tokens == want for session, want in sessions)

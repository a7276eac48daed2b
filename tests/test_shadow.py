"""Shadows: drafts beside plain steps change no token and no later draft, and are judged as rounds at the same place would be."""

import json

import attrs
import mlx.core as mx
import pytest

import dspark.session as session_module
import dspark.shadow as shadow_module
from dspark.engine import bind
from dspark.errors import DsparkError
from dspark.pipeline import chain
from dspark.records import Proposal, RoundEvent, RowCommit, Shadow
from dspark.shadow import Cast, judge
from dspark.stages.accept import Greedy, Rejection, SampleMatch
from dspark.stages.draft import Lookup, NoDraft, first_of
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import KvTrim
from dspark.stages.verify import Verify
from dspark.stages.warp import temperature, warps
from dspark.telemetry.sinks import from_dict, to_dict
from tests import launched
from tests.fakes import HashTarget, ScriptedDraft
from tests.fakes import plain as said_by
from tests.launched import LENGTH, PROMPT, ScriptedCap

LOOKUP = Lookup(min_ngram=1, max_ngram=2, base=3)
SAMPLED = SampleMatch(warps(temperature(0.9)))
DEEP = 4


class Beside(ScriptedCap):
    """Caps by a script, and a shadow of so many drafts whenever one may be made."""

    def __init__(self, caps, shadow=DEEP):
        super().__init__(caps)
        self.most = shadow

    def shadow(self, carry):
        return self.most


@attrs.frozen
class Breaks(ScriptedDraft):
    """Fails to draft behind so many tokens, once."""

    behind: int = 0
    failed: list = attrs.field(factory=list)

    def __call__(self, settled, carry, cap):
        if settled.start[0] + 1 >= self.behind and not self.failed:
            self.failed.append(settled.start[0])
            raise ValueError("no drafts today")
        return super().__call__(settled, carry, cap)


@pytest.fixture
def to():
    return launched.target()


def drafters(to):
    own = launched.dspark(to)
    return {
        "launched": own,
        "by MLX": launched.dspark(to, launched=False),
        "lookup": LOOKUP,
        "hybrid": first_of(LOOKUP, own),
    }


def run(draft, to, cap, accept=None, length=LENGTH, prompt=PROMPT):
    """(tokens, rows of each round, events)."""
    events = []
    made = launched.engine(draft, to, accept, cap)
    with made.open(prompt, max_tokens=length, seed=5, sinks=(events.append,)) as session:
        rows = [commit.rows[0] for commit in session]
    return session.result.tokens, rows, events


def fake(draft, cap, target=None):
    return bind(chain(Prefill(), draft, Verify(), Greedy(), KvTrim(), cap=cap), target or HashTarget())


def judged(events):
    return [shadow for event in events for shadow in event.judged]


# ---- what is said and drafted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", [Greedy(), SAMPLED], ids=["greedy", "match"])
@pytest.mark.parametrize("name", ["launched", "by MLX", "lookup", "hybrid"])
def test_shadows_change_no_token_and_no_draft(to, name, accept):
    caps = (0,) * 9 + (3, 2) + (0,) * 7 + (5,)
    told = [run(drafters(to)[name], to, cap, accept) for cap in (Beside(caps), ScriptedCap(caps))]
    assert told[0][0] == told[1][0]
    assert judged(told[0][2])
    if name in ("launched", "by MLX"):
        # Lookup learns from shadows when to be silent.
        assert told[0][1] == told[1][1], "rounds behind a shadow draft and keep what they would without"
        assert any(row.offered for row in told[0][1])
    assert not judged(told[1][2])


def test_a_drafter_that_is_told_twice_is_caught(to, monkeypatch):
    """The control: the carry from before the shadow, kept as if it were the one behind it."""
    cast = shadow_module.cast
    monkeypatch.setattr(
        session_module, "cast", lambda pipeline, state, cap: (cast(pipeline, state, cap)[0], state.draft)
    )
    with pytest.raises(DsparkError, match="not told of all tokens"):
        run(launched.dspark(to, launched=False), to, Beside((0,) * 9 + (3,)))


@pytest.mark.parametrize("name", ["launched", "by MLX", "lookup"])
def test_a_shadow_is_judged_as_a_round_in_its_place(to, name):
    tokens, _, events = run(drafters(to)[name], to, Beside((0, 0)))
    rounds = []
    for event in events:
        if event.shadow:
            # Each round before it said one token.
            said = (*PROMPT, *tokens[: event.round - 1])
            _, rows, _ = run(drafters(to)[name], to, ScriptedCap((DEEP,)), prompt=said, length=DEEP + 2)
            rounds += [(rows[0].offered, rows[0].accepted)] if rows[0].offered else []
    found = [(shadow.offered, shadow.accepted) for shadow in judged(events)]
    assert len(found) >= 5
    assert found == rounds[: len(found)]
    assert len(set(found)) > 1


def scripted(rate=1.0, length=60):
    return ScriptedDraft(((*PROMPT, *said_by(HashTarget(), PROMPT, length)),), rate)


def shadows_of(cap, rate=1.0):
    events = []
    with fake(scripted(rate), cap).open(PROMPT, max_tokens=40, sinks=(events.append,)) as session:
        list(session)
    return events


def test_every_draft_that_is_said_stands():
    found = judged(shadows_of(Beside((0, 0))))
    assert found == [Shadow("scripted", DEEP, DEEP)] * len(found)
    assert {s.accepted for s in judged(shadows_of(Beside((0, 0)), rate=0.0))} == {0}


def test_drafts_that_the_drafter_does_not_believe_in_are_not_judged():
    """Three rows: two of four believed in, none, and all of two; what each row said since."""
    drafts = mx.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]])
    proposal = Proposal(drafts[:, :1], drafts, (4, 4, 2), None, ("a", "a", "b"), (0, 0, 0), mx.array([2, 0, 4]))
    shadow = Cast(proposal, ((1, 2, 3, 4), (5, 6, 7, 8), (9, 11, 12)), (drafts[:, :2], drafts[:, 2:]))
    assert judge(shadow) == (Shadow("a", 2, 2), Shadow("b", 2, 1))
    everything = judge(shadow._replace(proposal=proposal._replace(keep=None)))
    assert everything == (Shadow("a", 4, 4), Shadow("a", 4, 4), Shadow("b", 2, 1))


def test_a_token_that_was_not_heard_is_caught(monkeypatch):
    """The control: one commit is missed."""
    heard = Cast.heard
    missed = lambda shadow, commits: shadow if commits[0].tokens[0] % 5 == 0 else heard(shadow, commits)
    monkeypatch.setattr(Cast, "heard", missed)
    assert any(s.accepted < DEEP for s in judged(shadows_of(Beside((0, 0)))))


def test_one_shadow_at_a_time_and_only_beside_steps_sent_ahead():
    events = shadows_of(Beside((0, 0)))
    assert not events[0].shadow, "the first step is not sent ahead"
    out = 0
    for event in events:
        out += (event.shadow > 0) - len(event.judged)
        assert 0 <= out <= 1
        assert event.reads == 1 + len(event.judged)
    assert not judged(shadows_of(Beside((2,))))


def test_a_shadow_is_forgotten_where_drafting_begins_again():
    events = shadows_of(Beside((0, 0, 0, 3)))
    assert sum(event.shadow > 0 for event in events) > 4
    assert not judged(events), "four tokens are not said between two rounds that draft"


def test_a_session_that_never_drafts_makes_no_shadow():
    events = []
    with fake(NoDraft(), Beside((0, 0))).open(PROMPT, max_tokens=12, sinks=(events.append,)) as session:
        list(session)
    assert not any(event.shadow for event in events)


def test_drafts_that_are_weighed_are_not_judged(to):
    for accept, made in ((Rejection(SAMPLED.warp), False), (SAMPLED, True)):
        _, _, events = run(launched.dspark(to, launched=False), to, Beside((0, 0)), accept, length=12)
        assert any(event.shadow for event in events) == made


# ---- sessions that end, part, or fail ---------------------------------------------------------------------------------


def test_rows_of_a_batch_are_judged_each():
    target, prompts = HashTarget(), (PROMPT, (9, 8, 7), (5, 5))
    truths = [tuple(said_by(target, p, 40)) for p in prompts]
    draft = ScriptedDraft(tuple((*p, *t) for p, t in zip(prompts, truths, strict=True)), 0.7)
    events, lengths = [], (31, 14, 22)
    engine = fake(draft, Beside((0,) * 11 + (2,)), target)
    with engine.open(prompts, max_tokens=lengths, sinks=(events.append,)) as session:
        list(session)
    for result, truth, length in zip(session.results, truths, lengths, strict=True):
        assert result.tokens == truth[:length]
    assert {len(event.judged) for event in events} >= {0, 1, 2, 3}


@pytest.mark.parametrize("rounds", [2, 4, 7])
def test_a_fork_beside_a_shadow_goes_on_alike(to, rounds):
    draft = launched.dspark(to)
    engine = launched.engine(draft, to, cap=Beside((0,) * 7 + (3, 3)))
    with engine.open(PROMPT, max_tokens=LENGTH, seed=5) as session:
        for _ in range(rounds):
            session.step()
        twin = session.fork()
        list(session)
        with twin:
            list(twin)
    assert session.result.tokens == twin.result.tokens == launched.plain()


def test_a_shadow_that_fails_loses_no_token():
    target = HashTarget()
    truth = tuple(said_by(target, PROMPT, 40))
    draft = Breaks(((*PROMPT, *truth),), 1.0, behind=len(PROMPT) + 6)
    with fake(draft, Beside((0, 0))).open(PROMPT, max_tokens=30) as session:
        said, broken = [], 0
        while (session.result.finish is None) and broken < 3:
            try:
                said += session.step().rows[0].tokens
            except ValueError:
                broken += 1
    assert broken == 1
    assert tuple(said) == truth[:30]


def test_a_cancelled_session_forgets_its_shadow():
    with fake(scripted(), Beside((0, 0))).open(PROMPT, max_tokens=40) as session:
        for _ in range(4):
            session.step()
        session.cancel()
        list(session)
    assert session.result.finish == "cancelled"
    assert session.result.tokens == tuple(said_by(HashTarget(), PROMPT, 4))


# ---- records ----------------------------------------------------------------------------------------------------------


def test_events_with_shadows_are_kept():
    row = RowCommit(0, (1,), 0, 0, "plain")
    event = RoundEvent(3, (row,), 0, "parked", 1, 2, 1.0, (7,), shadow=4, judged=(Shadow("dspark", 4, 2),))
    assert from_dict(json.loads(json.dumps(to_dict(event)))) == event
    without = event._replace(shadow=0, judged=())
    assert not {"shadow", "judged"} & set(to_dict(without))
    assert from_dict(to_dict(without)) == without


def test_a_shadow_is_read_where_it_was_computed_already(monkeypatch):
    """Its arrays were sent to the device when it was made."""
    sent, send = [], mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (sent.append(arrays), send(*arrays))[1])
    read = []
    monkeypatch.setattr(session_module, "judge", lambda shadow: (read.append(shadow.words), judge(shadow))[1])
    assert judged(shadows_of(Beside((0, 0))))
    assert read
    assert all(any(words is array for arrays in sent for array in arrays) for words in read)
    assert {word.shape for words in read for word in words} == {(1, 2)}, "what 8 bytes hold"

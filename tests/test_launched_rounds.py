"""Sessions whose forwards and drafter's rounds are launches say what plain decoding by launches says; drafts that are begun before
a round is read are those that would be asked for behind it; what only suits greedy decoding of one row is used for nothing else."""

import sys
from pathlib import Path

import attrs
import mlx.core as mx
import numpy as np
import pytest

import dspark.round as round_module
from dspark.kernels import in_place
from dspark.models.heads import Context
from dspark.records import Opening, RowCommit, State
from dspark.round import follow, land, send
from dspark.session import Session, SessionOptions
from dspark.stages.accept import Greedy, Rejection, SampleMatch, Sampling
from dspark.stages.accept.base import leading_match
from dspark.stages.draft import NoDraft, first_of
from dspark.stages.draft.block import BlockDraft
from dspark.stages.warp import temperature, top_p, warps
from tests import launched
from tests.launched import BLOCK, LENGTH, LOOKUP, PROMPT, FittedCap, ScriptedCap, dspark, engine, plain, target
from tests.stack_trials import bits

PARKED = (3, 0, 0, 0, 2, 0, 7, 7, 0, 0)
LONG = (7, 8, 9, *range(30, 61), 7, 8, 9)


def run(draft, to, prompt=PROMPT, length=LENGTH, accept=None, reuse=None, sampling=None, cap=BLOCK, **options):
    made = engine(draft, to, accept, cap, **options)
    how = SessionOptions(reuse=reuse)
    session = made.open(prompt, max_tokens=length, seed=5, options=how, sampling=sampling)
    return session, [commit.rows[0] for commit in session]


@pytest.fixture
def to():
    return target()


@pytest.fixture
def stage(to):
    return dspark(to)


# ---- the text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", range(1, BLOCK + 1))
def test_text_is_plain_decodings(to, cap):
    stage = dspark(to, causal=cap % 2 == 0)
    session, rows = run(stage, to, cap=cap)
    assert session.result.tokens == plain()
    stood = {row.accepted for row in rows if row.offered == cap}
    assert {0, 1, cap} <= stood, "some blocks stand, some do not"
    launch = stage.head.launch
    assert launch.foreseen >= len(rows) - 1, "behind the first block all were begun early"
    assert len(launch.calls) == launch.foreseen + 1


@pytest.mark.parametrize(
    "changes", [{"anchor_predicts": False}, {"lm_head": "own", "draft_vocab_size": 40}, {"lm_head": "own"}]
)
def test_text_is_plain_decodings_for_other_drafters(to, changes):
    stage = dspark(to, **changes)
    if "draft_vocab_size" in changes:
        stage.head.reduce_vocabulary(mx.array(sorted({*plain(), *range(60)})[:40]))
        stage.head.launch = launched.rounds(stage.head, to)
    session, _ = run(stage, to)
    assert session.result.tokens == plain()
    assert stage.head.launch.foreseen


@pytest.mark.parametrize("prompt", [(5,), (5, 9), LONG])
def test_prompts_of_any_length(to, prompt):
    for chunk in (2048, 8):
        stage = dspark(to)
        want, _ = run(NoDraft(), to, prompt, 12, chunk=chunk)
        session, _ = run(stage, to, prompt, 12, chunk=chunk)
        assert session.result.tokens == want.result.tokens
        assert stage.head.launch.foreseen


def test_with_lookup_in_front(to, stage):
    session, rows = run(first_of(LOOKUP, stage), to)
    assert session.result.tokens == plain()
    sources = [row.source for row in rows]
    assert {"lookup", "dspark"} <= set(sources)
    launch = stage.head.launch
    # Behind a lookup nothing was begun early, and behind its own block it was.
    assert 0 < launch.foreseen == sources.count("dspark")
    assert sum(call.keep is not None for call in launch.calls) > 1


@pytest.mark.parametrize("draft", ["dspark", "hybrid"])
def test_parked_rounds_in_between(to, stage, draft):
    session, rows = run(stage if draft == "dspark" else first_of(LOOKUP, stage), to, cap=ScriptedCap(PARKED))
    assert session.result.tokens == plain()
    assert {row.offered for row in rows} >= {0, 2, 3}


def test_blocks_that_are_cut_and_padded(to, stage):
    session, rows = run(stage, to, cap=FittedCap((3, 7, 5)))
    assert session.result.tokens == plain()
    assert len({row.offered for row in rows}) > 2


@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_length_limits(to, stage, length):
    session, _ = run(stage, to, length=length)
    assert session.result.tokens == plain()[:length]
    assert session.result.finish == "length"


# Stands in the middle of a block that stands.
STOP = 71


def test_stop_tokens_in_the_middle_of_a_block(to, stage):
    free = [row.tokens for row in run(stage, to)[1]]
    assert any(STOP in tokens[:-1] for tokens in free), "more of that block stood"
    session, rows = run(dspark(to), to, stop_tokens=frozenset({STOP}))
    assert session.result.tokens == plain()[: plain().index(STOP) + 1]
    assert session.result.finish == "stop"
    assert [row.tokens for row in rows[:-1]] == free[: len(rows) - 1]


def test_a_launch_that_miscounts_is_caught(to, stage, monkeypatch):
    """The control: what is said of the logits is one draft too many."""
    said = type(to.launch).said

    def wrong(self, logits):
        found = said(self, logits)
        if found is None or found.choice.shape[1] < 2:
            return found
        more = mx.minimum(found.accepted + 1, found.choice.shape[1] - 1)
        report = mx.concatenate([more[None], found.report[:, 1:]], axis=1)
        words = (mx.concatenate([more, found.words[0][1:]]), *found.words[1:])
        return found._replace(accepted=more, report=report, words=words)

    monkeypatch.setattr(type(to.launch), "said", wrong)
    assert run(stage, to)[0].result.tokens != plain()


# ---- drafts that are begun early ------------------------------------------------------------------------------------------


def traced(to, monkeypatch, draft=lambda stage: stage, foresees=True, spoilt=None, lossless=True, **options):
    """Of each drafted round where it begins and its drafts; then the context's keys and values at the end, as bits. lossless:
    whether the text is to be plain decoding's."""
    stage, proposals = dspark(to), []
    ask = BlockDraft.__call__

    def asked(self, settled, carry, cap):
        proposal, carry = ask(self, settled, carry, cap)
        proposals.append((proposal.start, proposal.tokens.tolist()))
        return proposal, carry

    with monkeypatch.context() as patch:
        patch.setattr(BlockDraft, "__call__", asked)
        if not foresees:
            patch.setattr(BlockDraft, "foresee", lambda self, acceptance, carry, cap: carry)
        if spoilt is not None:
            patch.setattr(*spoilt)
        session, _ = run(draft(stage), to, **options)
    carry = session._state.draft
    carry = carry if hasattr(carry, "context") else carry[1]
    rows, held = carry.context.rows, carry.context.starts[0]
    kept = [bits(a[:, :, :held]) for row in rows for a in (row.keys, row.values)]
    assert (session.result.tokens == plain()) == lossless
    return proposals, kept, stage.head.launch.foreseen


WAYS = {
    "cap 7": {},
    "cap 2": {"cap": 2},
    "parked": {"cap": ScriptedCap(PARKED)},
    "fitted": {"cap": FittedCap((3, 7, 5))},
    "hybrid": {"draft": lambda stage: first_of(LOOKUP, stage)},
}


def alike(one, other):
    """Whether drafts and contexts are; the one may have been told of a round more, and either have fewer drafts: where what is
    begun is one of fewer, or not cut at the text's end. Rounds are compared where both begin at one place."""
    same = all(
        np.array_equal(a[:, :, : min(a.shape[2], b.shape[2])], b[:, :, : min(a.shape[2], b.shape[2])])
        for a, b in zip(one[1], other[1], strict=True)
    )
    drafts, told = dict(one[0]), dict(other[0])
    both = [(drafts[start][0], told[start][0]) for start in drafts if start in told]
    return len(both) > 4 and same and all(n and a[:n] == b[:n] for a, b in both for n in [min(len(a), len(b))])


@pytest.mark.parametrize("way", WAYS)
def test_drafts_begun_early_are_those_asked_for(to, monkeypatch, way):
    early = traced(to, monkeypatch, **WAYS[way])
    asked = traced(to, monkeypatch, foresees=False, **WAYS[way])
    assert early[2]
    assert not asked[2]
    assert alike(early, asked)


def wrong_taps(launch):
    """Rounds that are begun early take in taps of nothing."""
    call = launch.__call__

    def spoilt(self, context, taps, keep, anchor, count, slots):
        return call(self, context, taps if keep is not None else taps * 0, keep, anchor, count, slots)

    return launch, "__call__", spoilt


def wrong_anchor(launch):
    """Rounds that are begun early stand behind another token."""
    call = launch.__call__

    def spoilt(self, context, taps, keep, anchor, count, slots):
        if keep is None:
            anchor = mx.concatenate([anchor[:, :1], (anchor[:, 1:2] + 1) % launched.CASE.vocab, anchor[:, 2:]], axis=1)
        return call(self, context, taps, keep, anchor, count, slots)

    return launch, "__call__", spoilt


@pytest.mark.parametrize(("wrong", "lossless"), [(wrong_taps, True), (wrong_anchor, False)])
def test_other_drafts_are_noticed(to, monkeypatch, wrong, lossless):
    """Drafts may be anything; the token in front of them goes to the target with them."""
    asked = traced(to, monkeypatch, foresees=False)
    spoilt = traced(to, monkeypatch, spoilt=wrong(launched.Rounds), lossless=lossless)
    assert not alike(spoilt, asked)


def begun(to, stage, rounds=3):
    """A session that has drafts begun early."""
    session = engine(stage, to).open(PROMPT, max_tokens=LENGTH)
    for _ in range(rounds):
        session.step()
    assert session.state.draft.foreseen is not None
    return session


def asked_next(stage, session, settled):
    """The drafts of a session's next round, if it were this one, and whether the drafter had to be asked for them."""
    before = len(stage.head.launch.calls)
    proposal, carry = stage(settled, session.state.draft, BLOCK)
    assert carry.foreseen is None
    assert carry.context.starts == settled.start
    return proposal.tokens.tolist(), len(stage.head.launch.calls) > before


def test_drafts_begun_early_are_dropped_where_the_round_is_another(to, stage):
    settled = begun(to, stage).state.settled
    right, asked = asked_next(stage, begun(to, stage), settled)
    session = begun(to, stage)
    settled = session.state.settled
    assert asked_next(stage, session, settled) == (right, False)
    # The same taps in an array of their own: it is another round's, as far as anybody can tell.
    other = settled._replace(taps=settled.taps + 0)
    assert asked_next(stage, begun(to, stage), other) == (right, True)
    assert asked


def test_parking_takes_what_was_begun_as_told(to, stage):
    session = begun(to, stage)
    before, carry, settled = len(stage.head.launch.calls), session.state.draft, session.state.settled
    told = stage.skip(settled, carry)
    assert told.foreseen is None
    assert (told.context.starts, told.waiting) == (settled.start, ())
    assert len(stage.head.launch.calls) == before
    other = settled._replace(taps=settled.taps + 0)
    told = stage.skip(other, carry)
    assert told.foreseen is None
    assert told.context.starts == settled.start
    assert len(stage.head.launch.calls) == before + (settled.keep[0] > 1)


# ---- sessions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["dspark", "hybrid"])
def test_forks_go_ways_of_their_own(to, stage, draft):
    session = engine(stage if draft == "dspark" else first_of(LOOKUP, stage), to).open(PROMPT, max_tokens=LENGTH)
    for _ in range(4):
        session.step()
    twin = session.fork()
    # In turns, a round each.
    while any([session.step(), twin.step()]):
        pass
    assert session.result.tokens == twin.result.tokens == plain()


def test_a_fork_that_writes_where_the_other_reads_is_caught(to, stage, monkeypatch):
    """The control: caches and context are not copied."""
    monkeypatch.setattr("dspark.buffers.single.own_buffers", lambda caches: None)
    monkeypatch.setattr("copy.deepcopy", lambda value, memo=None: value)
    session = engine(stage, to).open(PROMPT, max_tokens=LENGTH)
    for _ in range(4):
        session.step()
    twin = session.fork()
    while any([session.step(), twin.step()]):
        pass
    assert not session.result.tokens == twin.result.tokens == plain()


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_fork_keeps_what_the_other_writes_over(to, monkeypatch, evaluated):
    """Another prompt goes on from the beginning of the session that was forked. Without the copies made at once it is seen."""
    made = engine(NoDraft(), to)
    session = made.open(PROMPT, max_tokens=LENGTH)
    for _ in range(12):
        session.step()
    with monkeypatch.context() as patch:
        if not evaluated:
            patch.setattr(mx, "eval", lambda *arrays: None)
        twin = session.fork()
    session.cancel()
    session.step()
    other, _ = run(NoDraft(), to, (*PROMPT[:5], *range(40, 60)), 3, reuse=session)
    assert other.result.cached_tokens == 5
    list(twin)
    assert (twin.result.tokens == plain()) == evaluated


@pytest.fixture
def copies(monkeypatch):
    """Tokens held by buffers that were copied."""
    seen, together = [], in_place.together
    monkeypatch.setattr(
        in_place,
        "together",
        lambda arrays, held, needed: seen.append((len(arrays), held)) or together(arrays, held, needed),
    )
    return seen


@pytest.mark.parametrize(
    ("accept", "contexts"), [(Greedy(), 1), (SampleMatch(warps(temperature(0.8))), 1), (Rejection(warps(temperature(0.8))), 0)],
    ids=["greedy", "sample-match", "rejection"],
)  # fmt: skip
@pytest.mark.parametrize("cap", [BLOCK, ScriptedCap(PARKED)], ids=["drafted", "parked"])
def test_buffers_stay_where_they_are(to, stage, copies, accept, contexts, cap):
    """They are copied when they are first seen, however a session goes on: two layers of caches, one of context."""
    run(stage, to, accept=accept, cap=cap)
    assert [n for n, _ in copies] == [4, *[2] * contexts] or [n for n, _ in copies] == [*[2] * contexts, 4]


def test_buffers_that_go_to_and_fro_are_noticed(to, stage, copies, monkeypatch):
    """The control: a launch takes in taps behind which MLX drafts."""
    monkeypatch.setattr(BlockDraft, "_alone", lambda self, carry: True)
    monkeypatch.setattr(BlockDraft, "_launched", lambda self, settled, carry, count: None)
    run(stage, to)
    assert len(copies) > 5


def test_sessions_take_turns(to, stage):
    prompts = PROMPT, (7, 8, 9)
    wants = [run(NoDraft(), to, prompt)[0].result.tokens for prompt in prompts]
    sessions = [engine(stage, to).open(prompt, max_tokens=LENGTH) for prompt in prompts]
    while any(list(map(Session.step, sessions))):
        pass
    assert [session.result.tokens for session in sessions] == wants


@pytest.mark.parametrize("stop", [None, STOP])
def test_a_next_prompt_goes_on_from_a_session(to, stage, stop):
    def both(draft):
        stops = frozenset() if stop is None else frozenset({stop})
        first, _ = run(draft, to, stop_tokens=stops)
        prompt = (*PROMPT, *first.result.tokens, 9, 2, 6)
        second, _ = run(draft, to, prompt, 14, reuse=first)
        return first.result.tokens, second.result.tokens, second.result.cached_tokens

    want = both(NoDraft())
    before = stage.head.launch.foreseen
    assert both(stage) == want
    assert want[2] >= len(PROMPT)
    assert stage.head.launch.foreseen > before


def test_a_cancelled_session_leaves_nothing_behind(to, stage):
    made = engine(stage, to)
    session = made.open(PROMPT, max_tokens=LENGTH)
    for _ in range(3):
        session.step()
    session.cancel()
    assert session.step().finish == "cancelled"
    assert session.step() is None
    said = session.result.tokens
    assert said == plain()[: len(said)]
    with made.open(PROMPT, max_tokens=LENGTH) as other:
        list(other)
    assert other.result.tokens == plain()


# ---- one read a round -----------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """Who evaluates arrays or takes values from them."""
    seen = []

    def counted(home, name):
        read = getattr(home, name)

        def noted(*args):
            seen.append((Path(sys._getframe(1).f_code.co_filename).name, name))
            return read(*args)

        monkeypatch.setattr(home, name, noted)

    for name in ("tolist", "item", "__int__", "__float__", "__bool__"):
        counted(mx.array, name)
    counted(mx, "eval")
    return seen


@pytest.mark.parametrize("cap", [BLOCK, ScriptedCap((3, 0, 2, 7))])
def test_a_round_reads_once(to, stage, reads, cap):
    """All words of its report, of which only the first is waited for; whoever else looks at one looks at what was read."""
    session = engine(stage, to, cap=cap).open(PROMPT, max_tokens=LENGTH)
    for _ in range(3):
        session.step()
    rounds = 0
    while session.result.finish is None:
        reads.clear()
        commit = session.step()
        rounds += 1
        again = [("sent_ahead.py", "tolist")] * (reads[0][0] == "sent_ahead.py")
        words = (commit.rows[0].offered + 1) // 2 + 1
        assert reads == again + [("round.py", "tolist")] * words
    assert rounds > 5


def test_a_second_read_is_noticed(to, stage, reads, monkeypatch):
    foresee = BlockDraft.foresee

    def peeking(self, acceptance, carry, cap):
        acceptance.report.tolist()
        return foresee(self, acceptance, carry, cap)

    monkeypatch.setattr(BlockDraft, "foresee", peeking)
    session = engine(stage, to).open(PROMPT, max_tokens=LENGTH)
    session.step()
    reads.clear()
    session.step()
    assert ("test_launched_rounds.py", "tolist") in reads


# ---- what is said of the logits -------------------------------------------------------------------------------------------


@pytest.fixture
def decisions(monkeypatch):
    """Of each round whether something was said of it, and whether that is what Greedy computes."""
    seen, accept = [], Greedy.__call__

    def checked(self, verdict, carry):
        acceptance, carry = accept(self, verdict, carry)
        want = leading_match(verdict, mx.argmax(verdict.logits, axis=-1).astype(mx.int32))
        same = (
            acceptance.accepted.tolist() == want.accepted.tolist()
            and acceptance.next.tolist() == want.following.tolist()
        )
        if acceptance.report is not None:
            head = [want.accepted.item(), want.following.item()]
            whole = [*head, *verdict.proposal.tokens.tolist()[0]]
            same = same and acceptance.report.tolist() == [whole]
            same = same and [n for word in verdict.said.words for n in word.tolist()][: len(whole)] == whole
            same = same and verdict.said.choice.tolist() == want.said.tolist()
        seen.append((acceptance.report is not None, same))
        return acceptance, carry

    monkeypatch.setattr(Greedy, "__call__", checked)
    return seen


@pytest.mark.parametrize("cap", [BLOCK, 2, ScriptedCap(PARKED)])
def test_what_is_said_is_what_greedy_computes(to, stage, decisions, cap):
    run(stage, to, cap=cap)
    assert set(decisions) == {(True, True)}


def test_where_blocks_are_padded_nothing_is_taken_as_said(to, stage, decisions):
    run(stage, to, cap=FittedCap((3, 7, 5)))
    assert set(decisions) == {(True, True), (False, True)}


def test_other_words_are_noticed(to, stage, decisions, monkeypatch):
    said = type(to.launch).said

    def wrong(self, logits):
        found = said(self, logits)
        return found and found._replace(following=(found.following + 1) % 88)

    monkeypatch.setattr(type(to.launch), "said", wrong)
    run(stage, to)
    assert (True, False) in decisions


# ---- what it is not for ---------------------------------------------------------------------------------------------------

DRAWN = warps(temperature(0.8), top_p(0.9))


@pytest.fixture
def acceptances(monkeypatch):
    """Reports that were read."""
    seen, read = [], round_module.read
    monkeypatch.setattr(
        round_module, "read", lambda a: seen.append(a.report is not None and a.logprobs is None) or read(a)
    )
    return seen


@pytest.mark.parametrize(
    ("accept", "launched_rounds"),
    [
        (Rejection(DRAWN), False),
        (SampleMatch(DRAWN), True),
        (Sampling(repetition_penalty=1.3, logit_bias={78: -1.0}), True),
        (Sampling(logprobs=True, top_logprobs=2), True),
    ],
    ids=["rejection", "sample-match", "penalties", "log-probabilities"],
)
def test_other_ways_of_choosing_read_no_report(to, acceptances, accept, launched_rounds):
    sampled = isinstance(accept, Sampling)
    how = {"sampling": accept} if sampled else {"accept": accept}
    stage = dspark(to)
    session, rows = run(stage, to, **how)
    assert acceptances
    assert not any(acceptances)
    assert stage.head.launch.foreseen == 0
    assert sum(row.offered for row in rows) > LENGTH / 2
    # Drafts that are drawn are no launch's.
    assert bool(stage.head.launch.calls) == launched_rounds
    want, _ = run(dspark(to, launched=False), to, **how)
    assert session.result.tokens == want.result.tokens


def test_greedy_reads_reports(to, stage, acceptances):
    """The control of the one above."""
    run(stage, to)
    assert all(acceptances)


def test_a_batch_reads_no_report(to, stage, acceptances):
    prompts = [list(PROMPT), [7, 8, 9]]
    made = engine(stage, to)
    with made.open(prompts, max_tokens=20) as session:
        both = 0
        while len(session._rows) == 2 or not both:
            session.step()
            both += 1
        assert not any(acceptances)
        assert stage.head.launch.foreseen == 0
        list(session)
    bare = target()
    bare.launch = None
    with engine(dspark(bare, launched=False), bare).open(prompts, max_tokens=20) as other:
        list(other)
    assert [r.tokens for r in session.results] == [r.tokens for r in other.results]


def test_a_context_is_told_of_every_token(to, stage, monkeypatch):
    """The control of `starts`: a context that stays behind is noticed."""
    monkeypatch.setattr(
        BlockDraft,
        "_up_to",
        staticmethod(lambda settled, carry: carry._replace(context=Context(carry.context.rows, carry.context.starts))),
    )
    with pytest.raises(Exception, match="was not told of all tokens"):
        run(stage, to, cap=ScriptedCap(PARKED))


class FirstOnly:
    """A row that keeps the first token of every round, whatever stood."""

    def __init__(self):
        self.tokens = []

    def commit(self, said, accepted, offered, source):
        self.tokens.append(said[0])
        return RowCommit(0, (said[0],), min(accepted, 1), offered, source)


def kept_by_ones(to, stage, length=12):
    """What a row says that keeps one token of every round."""
    made = engine(stage, to)
    pipeline = attrs.evolve(made.pipeline, accept=made.accept())
    opening = Opening(to, (PROMPT,), (0,), pipeline.accept)
    buffers, carry, row = made.buffers(), stage.init(opening), FirstOnly()
    (settled,) = pipeline.prefill(to, buffers, PROMPT, 0, stage.target_layer_ids, None)
    state = State(buffers.epoch, settled, carry, pipeline.accept.init(opening), None)
    while len(row.tokens) < length:
        flight = follow(pipeline, to, buffers, send(pipeline, to, buffers, state, BLOCK), BLOCK, None, LENGTH)
        state, *_ = land(pipeline, buffers, flight, [row])
    return tuple(row.tokens)


def test_a_row_may_keep_less_than_stood(to, stage):
    """What was begun early stands behind another token then, and is dropped."""
    assert kept_by_ones(to, stage) == plain()[:12]


def test_drafts_behind_a_token_that_was_not_kept_are_noticed(to, stage, monkeypatch):
    told = BlockDraft._told
    always = lambda self, settled, carry: told(self, settled._replace(whole=True), carry)
    monkeypatch.setattr(BlockDraft, "_told", always)
    assert kept_by_ones(to, stage) != plain()[:12]

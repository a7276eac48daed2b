"""The promise: greedy and SampleMatch equal plain decoding token for token, under every draft, rollback, cap and length."""

import pytest

import dspark.session as session_module
from dspark.buffers.single import SingleBuffers
from dspark.caps import ClipCap, FixedCap, ParkCap
from dspark.engine import bind
from dspark.pipeline import chain
from dspark.stages.accept import Greedy, SampleMatch, Sampling
from dspark.stages.draft import Lookup, NoDraft, first_of
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import Checkpoint, KvTrim
from dspark.stages.verify import Verify
from tests.fakes import VOCAB, HashTarget, ScriptedDraft, plain

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)
LENGTH = 60


@pytest.fixture(scope="module")
def truth():
    return PROMPT + tuple(plain(HashTarget(), PROMPT, LENGTH + 40))


def drafts(truth):
    scripted = {f"scripted-{rate}": ScriptedDraft((truth,), rate) for rate in (0.0, 0.5, 0.9, 1.0)}
    return scripted | {
        "none": NoDraft(),
        "lookup": Lookup(min_ngram=1, max_ngram=3),
        "hybrid": first_of(Lookup(min_ngram=1, max_ngram=3), ScriptedDraft((truth,), 0.5)),
        "tapped": ScriptedDraft((truth,), 0.5, taps=(1, 3)),
    }


DRAFTS = tuple(drafts(PROMPT))
ROLLBACKS = {"kv-trim": KvTrim(), "checkpoint": Checkpoint()}


def engine(draft, rollback, accept=None, cap=4, chunk=4):
    return bind(chain(Prefill(chunk=chunk), draft, Verify(), accept or Greedy(), rollback, cap=cap), HashTarget())


def answer(engine, length=LENGTH, **options):
    with engine.open(PROMPT, max_tokens=length, seed=7, **options) as session:
        tokens = [t for commit in session for t in commit.tokens]
    assert tuple(tokens) == session.result.tokens
    return tokens


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("cap", [1, 4, 8])
def test_greedy_equals_plain_decoding(truth, draft, rollback, cap):
    assert answer(engine(drafts(truth)[draft], ROLLBACKS[rollback], cap=cap)) == list(truth[len(PROMPT) :][:LENGTH])


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_sample_match_equals_plain_sampling(truth, draft, rollback):
    accept = SampleMatch(warp=Sampling(temperature=0.8, top_p=0.9).accept("sample-match").warp)
    sampled = answer(engine(NoDraft(), KvTrim(), accept))
    assert len(set(sampled)) > 20
    truth = PROMPT + tuple(sampled)
    assert answer(engine(drafts(truth)[draft], ROLLBACKS[rollback], accept)) == sampled


@pytest.mark.parametrize(
    "cap", [FixedCap(0), ParkCap(FixedCap(4), probe_every=3, patience=1), ClipCap(FixedCap(9), 0, 2)]
)
def test_caps_change_no_token(truth, cap):
    for rate in (0.0, 0.9):
        tokens = answer(engine(ScriptedDraft((truth,), rate), KvTrim(), cap=cap))
        assert tokens == list(truth[len(PROMPT) :][:LENGTH])


def test_the_answer_says_dozens_of_different_tokens(truth):
    assert len(set(truth)) > 30


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9])
def test_a_rollback_of_one_row_too_few_is_caught(truth, rate, rollback, monkeypatch):
    def settle(self, keep, fed):
        wrong = tuple(min(n + 1, self._armed[0].width) for n in keep)
        right(self, wrong, tuple((*row, 0) for row in fed))
        self.held = (self.held[0] - wrong[0] + keep[0],)

    right = SingleBuffers.settle
    monkeypatch.setattr(SingleBuffers, "settle", settle)
    assert answer(engine(ScriptedDraft((truth,), rate), ROLLBACKS[rollback])) != list(truth[len(PROMPT) :][:LENGTH])


def test_accepting_one_draft_too_many_is_caught(truth, monkeypatch):
    def land(pipeline, buffers, flight, decide):
        wrong = flight.acceptance._replace(accepted=flight.acceptance.accepted * 0 + flight.proposal.tokens.shape[1])
        return original(pipeline, buffers, flight._replace(acceptance=wrong), decide)

    original = session_module.land
    monkeypatch.setattr(session_module, "land", land)
    assert answer(engine(ScriptedDraft((truth,), 0.5), KvTrim())) != list(truth[len(PROMPT) :][:LENGTH])


def test_a_perfect_draft_is_accepted_in_full(truth):
    with engine(ScriptedDraft((truth,), 1.0), KvTrim()).open(PROMPT, max_tokens=60) as session:
        list(session)
    assert (session.result.rounds, session.result.accepted_length) == (12, 5.0)
    assert all(offered == accepted for offered, accepted in session.result.by_position)


def test_the_vocabulary_is_used(truth):
    assert max(truth) < VOCAB

"""A cap controller may cut a draft and pad a verify: no token changes, no padding row is accepted, and none is held."""

import attrs
import mlx.core as mx
import numpy as np
import pytest

import dspark.stages.accept.base as accept_base
import dspark.stages.accept.rejection as rejection
from dspark.blocks import fitted, reshaped
from dspark.caps import AbstractCap, FixedCap
from dspark.engine import bind
from dspark.models.target import Target
from dspark.pipeline import chain
from dspark.records import DenseQ, Proposal, SparseQ
from dspark.stages.accept import Greedy, Rejection, SampleMatch, Sampling
from dspark.stages.draft import Lookup, NoDraft, first_of
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import Checkpoint, KvTrim, RollbackAuto
from dspark.stages.verify import Verify
from tests.fakes import HashTarget, ScriptedDraft, ScriptTarget, plain
from tests.families import build
from tests.reference import chi_square_score, opening, softmax, verdict
from tests.speculation import plain as plain_text
from tests.speculation import prompts

LENGTH = 40
PROMPTS = [(3, 1, 4, 1, 5), (9, 2), (6, 5, 3, 5, 8, 9, 7, 9, 3)]


@attrs.frozen
class OddCap(AbstractCap):
    """Goes through (drafts to keep, rows to verify) in turn; rows may be fewer than needed, or many more."""

    shapes: tuple[tuple[int, int], ...] = ((4, 8), (0, 1), (2, 3), (0, 5), (9, 0), (1, 13), (3, 4), (1, 2))
    cap: int = 6

    def init(self, costs=None):
        return 0

    def propose(self, carry):
        return self.cap

    def fit(self, carry, source, offered):
        assert source in ("scripted", "lookup")
        assert 0 < offered <= self.cap
        return self.shapes[(carry + offered) % len(self.shapes)]

    def observe(self, carry, event):
        return carry + 1

    def reason(self, carry):
        return "pinned"


def answers(draft, asked, target, rollback, cap, accept=None, events=None, **options):
    pipe = chain(Prefill(chunk=4), draft, Verify(), accept or Greedy(), rollback, cap=cap)
    several = [list(p) for p in asked] if len(asked) > 1 else list(asked[0])
    sinks = () if events is None else (events.append,)
    with bind(pipe, target).open(several, max_tokens=LENGTH, sinks=sinks, **options) as session:
        for _ in session:
            held = session._buffers.held
            if session._sent is None:
                assert all(n == len(row.context) - 1 for row, n in zip(session._rows, held, strict=False)), (
                    "padding is held"
                )
    return [list(result.tokens) for result in session.results]


def scripted(asked, truths, rate, vocab):
    return ScriptedDraft(tuple((*p, *t) for p, t in zip(asked, truths, strict=True)), rate, vocab=vocab)


@pytest.mark.parametrize("rollback", [KvTrim(), Checkpoint()])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["scripted", "lookup", "hybrid"])
def test_cut_and_padded_blocks_say_what_plain_decoding_says(rows, kind, rollback):
    asked = PROMPTS[:rows]
    truths = [plain(HashTarget(), p, LENGTH + 20) for p in asked]
    draft = scripted(asked, truths, 0.7, HashTarget.vocab_size)
    lookup = Lookup(min_ngram=1, max_ngram=2)
    draft = {"scripted": draft, "lookup": lookup, "hybrid": first_of(lookup, draft)}[kind]
    events = []
    said = answers(draft, asked, HashTarget(), rollback, OddCap(), events=events)
    assert said == [t[:LENGTH] for t in truths]
    widths = {event.width for event in events}
    assert {13, 8} & widths
    assert all(row.accepted <= row.offered < event.width for event in events for row in event.rows)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5", "nemotron_h", "lfm2"])
def test_every_kind_of_cache_drops_padding(family, rows):
    """Dense, rotating (windows of 8, narrower than the widest block) and recurrent caches."""
    target = Target(build(family))
    asked = prompts(target.vocab_size, [9, 4, 13][:rows])
    truths = [plain_text(target, p, LENGTH) for p in asked]
    draft = scripted(asked, truths, 0.7, target.vocab_size)
    assert answers(draft, asked, target, RollbackAuto(), OddCap()) == truths


@pytest.mark.parametrize("rows", [1, 3])
def test_sample_match_is_plain_sampling_in_padded_blocks(rows):
    accept = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.1)
    asked = PROMPTS[:rows]
    truths = answers(NoDraft(), asked, HashTarget(), KvTrim(), 0, sampling=accept, seed=5)
    draft = scripted(asked, [[*t, *[0] * 20] for t in truths], 0.7, HashTarget.vocab_size)
    assert answers(draft, asked, HashTarget(), KvTrim(), OddCap(), sampling=accept, seed=5) == truths


def test_log_probabilities_are_those_of_the_plain_step():
    sampling = Sampling(temperature=0.7, logprobs=True, top_logprobs=2)
    truth = PROMPTS[0] + tuple(plain(HashTarget(), PROMPTS[0], LENGTH + 20))

    def report(draft, cap):
        pipe = chain(Prefill(), draft, Verify(), Greedy(), KvTrim(), cap=cap)
        with bind(pipe, HashTarget()).open(PROMPTS[0], max_tokens=LENGTH, sampling=sampling, seed=3) as session:
            list(session)
        return session.result.logprobs

    assert report(ScriptedDraft((truth,), 0.7), OddCap()) == report(NoDraft(), FixedCap(0))


# ---- padding is never accepted ----------------------------------------------------------------------------------------


def zeros(cap, length=30):
    """What is said by a target that says nothing but the padding's own token 0, with one true draft a round."""
    target = ScriptTarget([0] * 200)
    events = []
    pipe = chain(Prefill(), ScriptedDraft(((1, *[0] * 200),), 1.0), Verify(), Greedy(), KvTrim(), cap=cap)
    with bind(pipe, target).open([1], max_tokens=length, sinks=(events.append,)) as session:
        list(session)
    return events


def never_beyond_the_offer(events):
    return all(len(row.tokens) <= row.offered + 1 for event in events for row in event.rows)


def test_padding_that_happens_to_be_right_is_not_accepted():
    events = zeros(OddCap(((2, 9),)))
    assert never_beyond_the_offer(events)
    assert {event.width for event in events} == {9}


def accept_padding(monkeypatch):
    """The bug: the count of leading drafts does not stop at the offered ones."""
    careless = lambda stands, offered: right(stands, (stands.shape[1],) * len(offered))
    right = accept_base.count_leading
    monkeypatch.setattr(accept_base, "count_leading", careless)
    monkeypatch.setattr(rejection, "count_leading", careless)


def test_accepted_padding_would_be_seen(monkeypatch):
    accept_padding(monkeypatch)
    assert not never_beyond_the_offer(zeros(OddCap(((2, 9),))))


WORDS, TRIALS = 5, 4000


def rejection_score(q_kind):
    """How far the first two tokens of padded blocks are from the target's distribution, each draft drawn from q."""
    rng = np.random.default_rng(11)
    logits = rng.normal(0, 1, (1, 4, WORDS)).astype(np.float32)
    q = softmax(rng.normal(0, 1, (1, 1, WORDS)))
    counts = np.zeros((2, WORDS))
    accept = Rejection()
    drafts = rng.choice(WORDS, size=TRIALS, p=q[0, 0])
    carry = accept.init(opening(TRIALS, tuple(range(TRIALS))))
    tokens = mx.array(drafts[:, None].astype(np.int32))
    probs = mx.array(np.repeat(q, TRIALS, 0).astype(np.float32))
    ids = mx.broadcast_to(mx.arange(WORDS), (TRIALS, 1, WORDS))
    known = DenseQ(probs) if q_kind == "dense" else SparseQ(ids, probs)
    plain_block = Proposal(
        mx.zeros((TRIALS, 1), mx.int32), tokens, (1,) * TRIALS, known, ("s",) * TRIALS, (0,) * TRIALS
    )
    block = reshaped(plain_block, (1,) * TRIALS, 4)
    said = verdict(np.repeat(logits, TRIALS, 0), block.tokens, block.start, block.offered, block.q)
    acceptance, _ = accept(said, carry)
    accepted, following = np.array(acceptance.accepted), np.array(acceptance.next)
    first = np.where(accepted > 0, drafts, following)
    counts[0] = np.bincount(first, minlength=WORDS)
    counts[1] = np.bincount(following[accepted > 0], minlength=WORDS)
    return accepted.max(), chi_square_score(counts, softmax(logits[0, :2].astype(np.float64)))


@pytest.mark.parametrize("q_kind", ["dense", "sparse"])
def test_rejection_keeps_the_distribution_in_padded_blocks(q_kind):
    most, score = rejection_score(q_kind)
    assert most == 1
    assert score < 4


def test_rejection_that_accepts_padding_is_caught(monkeypatch):
    accept_padding(monkeypatch)
    most, score = rejection_score("dense")
    assert most > 1
    assert score > 4


# ---- the shape itself -------------------------------------------------------------------------------------------------


def block(offered=(3, 0), start=(7, 9)):
    rows = len(offered)
    tokens = mx.arange(1, 3 * rows + 1, dtype=mx.int32).reshape(rows, 3)
    source = tuple("scripted" if n else "plain" for n in offered)
    return Proposal(mx.zeros((rows, 1), mx.int32), tokens, offered, DenseQ(mx.ones((rows, 3, 4)) / 4), source, start)


def test_a_batch_is_as_wide_as_its_widest_row_asks():
    shaped = fitted(block((3, 2)), OddCap(((9, 9), (9, 9), (1, 2), (2, 6))), 0)
    assert shaped.offered == (2, 1)
    assert shaped.tokens.tolist() == [[1, 2, 3, 0, 0], [4, 5, 6, 0, 0]]
    assert shaped.q.probs.shape == (2, 5, 4)
    assert shaped.q.probs[:, 3:].sum().item() == 0


def test_a_row_cut_to_nothing_is_plain():
    shaped = fitted(block((3, 0)), OddCap(((0, 1),)), 0)
    assert (shaped.offered, shaped.source, shaped.q, shaped.tokens.shape) == ((0, 0), ("plain", "plain"), None, (2, 0))


def test_padding_stays_within_the_positions_of_the_target():
    cap = OddCap(((2, 9),))
    assert [fitted(block(), cap, 0, longest).tokens.shape[1] + 1 for longest in (100, 13, 12, 5)] == [9, 4, 3, 3]


def test_a_block_that_fits_is_left_alone_and_a_cap_without_a_mind_is_not_asked():
    same = block((3, 2))
    assert fitted(same, OddCap(((9, 4),)), 0) is same
    pipes = [chain(Prefill(), NoDraft(), Verify(), Greedy(), KvTrim(), cap=cap) for cap in (FixedCap(4), OddCap())]
    assert [pipe.fits for pipe in pipes] == [False, True]


def test_sample_match_of_one_row_is_not_moved_by_its_width():
    """The noise of a position is its own: padding draws more of it and changes none."""
    logits = np.random.default_rng(3).normal(0, 1, (1, 6, WORDS)).astype(np.float32)
    accept, said = SampleMatch(), []
    for width in (3, 6):
        shaped = reshaped(
            Proposal(mx.zeros((1, 1), mx.int32), mx.array([[1, 2]]), (2,), None, ("s",), (4,)), (2,), width
        )
        acceptance, _ = accept(verdict(logits[:, :width], shaped.tokens, (4,), (2,)), accept.init(opening(1, (9,))))
        said.append((acceptance.accepted.item(), acceptance.next.item()))
    assert said[0] == said[1]

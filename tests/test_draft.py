"""Drafters that need no weights: what lookup finds, when it stops trying, and how a hybrid chooses."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.caps.base import Offer
from dspark.errors import InputError
from dspark.records import DenseQ, Opening, Proposal, Settled, SparseQ
from dspark.stages.draft import FirstOf, Lookup, NoDraft, first_of
from dspark.stages.draft.first_of import _fill
from dspark.stages.draft.ngram import Gate, NGramIndex
from tests.fakes import ScriptedDraft

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def naive(history, sizes):
    """The definition: longest n first, the latest earlier occurrence of the last n tokens."""
    for n in sizes:
        for end in range(len(history) - 1, n - 1, -1):
            if n < len(history) and history[end - n : end] == history[-n:]:
                return end
    return 0


@given(TOKENS)
def test_lookup_finds_the_latest_earlier_occurrence(history):
    index = NGramIndex(2, 4)
    index.absorb(tuple(history), len(history) - 1)
    start, depth = index.find()
    assert start == naive(history, (4, 3, 2))
    if start:
        assert depth >= 2
        assert history[start - depth : start] == history[len(history) - depth :]


@given(TOKENS, st.integers(1, 5))
def test_absorbing_in_pieces_or_twice_changes_nothing(history, size):
    whole, pieces = NGramIndex(2, 3), NGramIndex(2, 3)
    whole.absorb(tuple(history), len(history) - 1)
    for i in range(0, len(history), size):
        piece = tuple(history[i : i + size])
        assert pieces.absorb(piece, i + len(piece) - 1) == len(piece)
        assert pieces.absorb(piece, i + len(piece) - 1) == 0
    assert pieces.history == history
    assert pieces.find() == whole.find()


def test_a_draft_that_runs_into_the_end_goes_round_again():
    index = NGramIndex(2, 3)
    index.absorb((1, 2, 3, 1, 2, 3, 1, 2), 7)
    start, _ = index.find()
    assert index.follow(start, 7) == [3, 1, 2, 3, 1, 2, 3]


def draft(lookup, history, cap=32):
    carry = lookup.init(Opening(None, (tuple(history),), (0,)))
    settled = Settled(mx.array([[history[-1]]]), (tuple(history),), None, (0,), (len(history) - 1,))
    return lookup(settled, carry, cap)


def test_drafts_grow_with_the_match_and_obey_the_cap():
    rng = np.random.default_rng(0)
    text = rng.permutation(200)[:60].tolist()
    short, _ = draft(Lookup(), [*text, 900, *text[:4]])
    assert short.tokens.tolist() == [text[4:10]]
    long, _ = draft(Lookup(), [*text, 900, *text[:12]])
    assert long.tokens.tolist() == [text[12:36]]
    capped, _ = draft(Lookup(), [*text, 900, *text[:12]], cap=3)
    assert capped.tokens.tolist() == [text[12:15]]
    miss, _ = draft(Lookup(), text)
    assert (miss.tokens.shape, miss.offered, miss.source) == ((1, 0), (0,), ("plain",))


SIX = (1, 2, 3, 4, 5, 6)


def test_the_gate_shortens_closes_probes_and_opens():
    gate = Gate(probe_every=3)
    assert gate.length(10, 6, 32) == 20
    for _ in range(2):
        gate.drafted(SIX)
        gate.judge([9])
    assert gate.length(10, 6, 32) == 6
    for _ in range(2):
        gate.drafted(SIX)
        gate.judge([1, 2, 9])
    assert [gate.length(10, 6, 32) for _ in range(6)] == [0, 0, 6, 0, 0, 6]
    gate.drafted(SIX)
    gate.judge([1, 2, 3, 9])
    assert gate.length(10, 6, 32) == 20


@pytest.mark.parametrize("said", [[[1, 2, 9]], [[1], [2], [9]], [[1, 2], [9, 3, 4, 5, 6]]])
def test_the_gate_judges_what_is_said_in_one_round_or_in_several(said):
    gate = Gate(probe_every=3)
    for strikes in range(1, 5):
        gate.drafted(SIX)
        for tokens in said:
            gate.judge(tokens)
        assert gate.strikes == strikes
    gate.drafted(SIX)
    gate.judge(SIX[:5])
    assert gate.strikes == 4, "not judged to its end yet"
    gate.judge(SIX[5:])
    assert gate.strikes == 0


def test_a_gate_forgets_a_draft_that_another_one_follows():
    gate = Gate(probe_every=3)
    gate.drafted(SIX)
    gate.judge([1])
    gate.drafted((7, 7))
    gate.judge([7])
    assert gate.strikes == 0
    gate.judge([2])
    assert gate.strikes == 0, "half of two stood"


def test_a_gate_that_takes_failures_for_successes_never_closes():
    gate = Gate(probe_every=3)
    for _ in range(8):
        gate.drafted(SIX)
        gate.judge((*SIX, 9))
    assert gate.length(10, 6, 32) == 20


@pytest.mark.parametrize(
    "options", [{"min_ngram": 0}, {"min_ngram": 5, "max_ngram": 4}, {"base": 0}, {"probe_every": 0}]
)
def test_bad_lookup_options_are_refused(options):
    with pytest.raises(InputError, match=r"must"):
        Lookup(**options)


def test_a_hybrid_needs_a_branch():
    with pytest.raises(InputError, match="at least one branch"):
        FirstOf(())


def test_a_hybrid_of_nothing_is_plain():
    proposal, _ = draft(first_of(NoDraft(), NoDraft()), [1, 2, 3])
    assert proposal.source == ("plain",)


def proposal(tokens, offered, q=None, source="a"):
    rows = len(tokens)
    return Proposal(mx.zeros((rows, 1), mx.int32), mx.array(tokens), offered, q, (source,) * rows, (0,) * rows)


def test_a_cap_may_limit_each_branch_by_itself():
    told = {"lookup": 2, "scripted": 3}
    for by_source, offered in (
        ({}, 4),
        (told, 2),
        ({"lookup": 0, "scripted": 3}, 3),
        ({"lookup": 0, "scripted": 0}, 0),
    ):
        prompt = (7, 8, 9, 1, 2, 7, 8, 9, 1, 2, 7, 8, 9)
        draft = first_of(Lookup(min_ngram=2), ScriptedDraft(((*prompt, 1, 2, 7, 8, 9, 1),)))
        carry = draft.init(Opening(None, (prompt,), (0,)))
        settled = Settled(mx.array([[9]]), (prompt,), None, (0,), (12,))
        proposal, carry = draft(settled, carry, Offer(4, by_source))
        assert proposal.offered == (offered,)
        assert carry[1][0][1] == 13, "the other branch was told"


def test_in_a_batch_the_choice_is_by_row():
    first, second = proposal([[1, 2, 3], [0, 0, 0]], (3, 0)), proposal([[7, 7], [8, 9]], (2, 2), source="b")
    both = _fill(first, second)
    assert both.tokens.tolist() == [[1, 2, 3], [8, 9, 0]]
    assert (both.offered, both.source) == ((3, 2), ("a", "b"))


@pytest.mark.parametrize("inside", [True, False])
def test_mixed_q_holds_each_rows_own_law(inside):
    rng = np.random.default_rng(1)
    ids = np.array([[[4, 5, 6], [7, 8, 9]]] * 2)
    probs = rng.dirichlet([1, 1, 1], (2, 2)).astype(np.float32)
    point = 5 if inside else 11
    first = proposal([[point, point, 0], [0, 0, 0]], (3, 0))
    second = proposal([[4, 7], [4, 7]], (2, 2), SparseQ(mx.array(ids), mx.array(probs)), "b")
    q = _fill(first, second).q
    dense = np.zeros((2, 3, 16))
    for b, k, c in np.ndindex(2, 3, 3):
        dense[b, k, q.ids[b, k, c].item()] += q.probs[b, k, c].item()
    assert all(len(set(row)) == 3 for slot in q.ids.tolist() for row in slot)
    assert dense[0].argmax(-1).tolist() == [point, point, 0]
    np.testing.assert_allclose(dense[0].sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(dense[1, 0, 4:7], probs[1, 0], atol=1e-7)
    full = _fill(first, second._replace(q=DenseQ(mx.array(dense[:, :2].astype(np.float32))))).q
    assert full.probs[0].argmax(-1).tolist() == [point, point, 0]

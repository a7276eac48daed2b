"""Drafts that were drawn, and weighed by what they were drawn from, leave plain sampling's distribution as it is."""

from __future__ import annotations

from functools import cache

import attrs
import mlx.core as mx
import numpy as np
import pytest

from dspark.engine import bind
from dspark.models.target import Target
from dspark.pipeline import chain
from dspark.records import DenseQ, Opening, Settled, SparseQ, Verdict
from dspark.stages.accept import Rejection
from dspark.stages.draft import DFlash, DFlash2, DSpark, NoDraft
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import rollback_auto
from dspark.stages.verify import Verify
from dspark.stages.warp import temperature, top_p, warps
from tests.families import build
from tests.reference import chi_square_score, distribution
from tests.tiny_drafters import random_drafter

VOCAB, CAP, ROWS, SEED = 12, 3, 2000, 1
PROMPT = (3, 1, 4, 1, 5, 9, 2)
KINDS = {
    "dense": ("vanilla", DSpark),
    "independent": ("dflash", DFlash),
    "sparse": ("dflash2", DFlash2),
    "reduced": ("reduced", DSpark),
}
WARPS = {"hot": (1.4, 1.0), "truncated": (1.4, 0.8)}


@cache
def target() -> Target:
    model = build("llama", vocab_size=VOCAB, num_hidden_layers=3, hidden_size=32, head_dim=8)
    return Target(model, {"model_type": "llama"}, "llama")


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    root = tmp_path_factory.mktemp("drafters")
    return {
        kind: stage(random_drafter(root / name, name, target(), seed=SEED, head_dim=8), bits=0).bind(target())
        for kind, (name, stage) in KINDS.items()
    }


def accept_of(warp: str) -> Rejection:
    t, p = WARPS[warp]
    return Rejection(warps(top_p(p), temperature(t)))


def round_of(draft, prompts: np.ndarray, seeds: list[int], accept) -> list[list[int]]:
    """The tokens that one round behind each prompt [N, P] commits, all rows in one batch."""
    rows, held, ids = len(prompts), prompts.shape[1] - 1, draft.target_layer_ids
    # Rows that begin alike are prefilled once.
    begun, which = np.unique(prompts[:, :-1], axis=0, return_inverse=True)
    caches, place = target().make_caches(), mx.array(which.reshape(-1))
    _, taps = target()(mx.array(begun), caches, ids)
    taps = taps[place]
    for layer in caches:
        layer.keys, layer.values = layer.keys[place], layer.values[place]
    opening = Opening(target(), tuple(map(tuple, prompts.tolist())), tuple(seeds), accept)
    anchor = mx.array(prompts[:, -1:]).astype(mx.int32)
    settled = Settled(anchor, opening.prompts, taps, (held,) * rows, (held,) * rows)
    proposal, _ = draft(settled, draft.init(opening), CAP)
    logits, _ = target()(mx.concatenate([anchor, proposal.tokens], axis=1), caches)
    acceptance, _ = accept(Verdict(proposal, logits, None), accept.init(opening))
    counts, following, tokens = acceptance.accepted.tolist(), acceptance.next.tolist(), proposal.tokens.tolist()
    return [[*row[:n], last] for row, n, last in zip(tokens, counts, following, strict=True)]


def first_two(draft, accept) -> tuple[np.ndarray, float]:
    """The first two tokens that each of ROWS seeds says, and how many drafts stood in the first round."""
    seeds, prompts = list(range(ROWS)), np.array([PROMPT] * ROWS)
    said = round_of(draft, prompts, seeds, accept)
    accepted = np.mean([len(row) - 1 for row in said])
    short = [i for i, row in enumerate(said) if len(row) < 2]
    longer = np.array([(*PROMPT, *said[i]) for i in short])
    for i, more in zip(short, round_of(draft, longer, short, accept), strict=True):
        said[i] += more
    return np.array([row[:2] for row in said]), accepted


@cache
def law(warp: str) -> tuple[np.ndarray, np.ndarray]:
    """Of the first token [V], and of the second behind each first [V, V], from the target's own logits."""
    t, p = WARPS[warp]
    prompts = mx.array([(*PROMPT, token) for token in range(VOCAB)])
    logits = np.array(target()(prompts, target().make_caches())[0])
    first = distribution(logits[0, -2], temperature=t, top_p=p)
    return first, np.stack([distribution(row, temperature=t, top_p=p) for row in logits[:, -1]])


def score(said: np.ndarray, warp: str) -> tuple[float, float]:
    """How far tokens are from the law, in standard deviations: the first ones, and the second ones behind each first."""
    first, second = law(warp)
    pairs = np.zeros((VOCAB, VOCAB))
    np.add.at(pairs, tuple(said.T), 1)
    return chi_square_score(pairs.sum(1), first), chi_square_score(pairs, second)


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("kind", KINDS)
def test_rejection_keeps_the_law(drafts, kind, warp):
    said, accepted = first_two(drafts[kind], accept_of(warp))
    # A right drafter scores above 4 about once in 30,000, and the seeds are fixed.
    assert max(score(said, warp)) < 4
    assert 0.15 < accepted < CAP - 0.5, "drafts stand and fall"


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_wrong_q_is_caught(drafts, kind, monkeypatch):
    """The control: drafts drawn from one distribution and weighed by another, which is flat over the same tokens."""
    draft = drafts[kind]

    def lying(self, settled, carry, cap):
        proposal, carry = call(self, settled, carry, cap)
        q = proposal.q
        flat = (q.probs > 0) / mx.sum(q.probs > 0, axis=-1, keepdims=True)
        wrong = DenseQ(flat) if isinstance(q, DenseQ) else SparseQ(q.ids, flat)
        return proposal._replace(q=wrong), carry

    call = type(draft).__call__
    monkeypatch.setattr(type(draft), "__call__", lying)
    said, _ = first_two(draft, accept_of("hot"))
    assert max(score(said, "hot")) > 8


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_known_of_q(drafts, kind):
    seen = []

    @attrs.frozen(eq=False)
    class Seeing:
        target_layer_ids = drafts[kind].target_layer_ids
        init = staticmethod(drafts[kind].init)

        def __call__(self, settled, carry, cap):
            proposal, carry = drafts[kind](settled, carry, cap)
            seen.append(proposal.q)
            return proposal, carry

    round_of(Seeing(), np.array([PROMPT]), [0], accept_of("truncated"))
    (q,) = seen
    assert isinstance(q, SparseQ if kind == "sparse" else DenseQ)
    assert q.probs.shape == (1, CAP, 4 if kind == "sparse" else VOCAB)
    # float32 sums of at most 12 numbers.
    assert mx.abs(mx.sum(q.probs, axis=-1) - 1).max().item() < 1e-6
    if kind != "sparse":
        assert mx.any(q.probs == 0).item(), "the drafter cuts as the target does"
    if kind == "reduced":
        assert mx.sum(mx.any(q.probs > 0, axis=1)).item() <= VOCAB // 2


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_sessions_say_what_the_batch_says(drafts, kind):
    """The rounds above are those of sessions: the same seeds, the same tokens."""
    accept = accept_of("truncated")
    said = round_of(drafts[kind], np.array([PROMPT] * 8), list(range(8)), accept)
    stages = (Prefill(), drafts[kind].written, Verify(), accept, rollback_auto())
    engine = bind(chain(*stages, cap=CAP), target())
    for seed, expected in enumerate(said):
        session = engine.open(PROMPT, max_tokens=12, seed=[seed])
        assert list(session.step().tokens) == expected


def test_plain_sampling_has_the_law():
    """The law is the session's: 500 sessions without drafts."""
    stages = (Prefill(), NoDraft(), Verify(), accept_of("hot"), rollback_auto())
    engine = bind(chain(*stages, cap=0), target())
    said = []
    for seed in range(0, 500, 50):
        session = engine.open([PROMPT] * 50, max_tokens=2, seed=list(range(seed, seed + 50)))
        list(session)
        said += [result.tokens for result in session.results]
    assert max(score(np.array(said), "hot")) < 4

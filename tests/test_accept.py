"""Accept stages choose as the target would: token for token (Greedy, SampleMatch) or in distribution (Rejection).

Chi-square scores are of 20,000 fixed seeds, so a test either always passes or always fails: below 4 is what chance gives,
and the broken stages next to it score above 8.
"""

from __future__ import annotations

import attrs
import mlx.core as mx
import numpy as np
import pytest

from dspark.errors import InputError
from dspark.records import DenseQ, SparseQ
from dspark.stages.accept import Greedy, Rejection, SampleMatch, Sampling
from dspark.stages.accept import base as accept_base
from dspark.stages.accept import match as accept_match
from dspark.stages.accept.base import Decision, positions
from dspark.stages.accept.rejection import chance, leftover
from dspark.stages.keys import draw, keys
from dspark.stages.warp import temperature, top_k, top_p, warps
from tests.reference import chi_square_score, decode, distribution, opening, scripted_drafts, scripted_table, verdict

V, ROWS, DRAFTS = 5, 20_000, 2
PROMPT = (3, 1, 4)
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 4, "min_p": 0.1},
    {"temperature": 1.5, "top_p": 0.6},
]
by_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()))

# --- the formula -------------------------------------------------------------------------------------------------------


def random_pair(seed: int, size: int = 11) -> tuple[np.ndarray, np.ndarray]:
    """p and q, each with some tokens ruled out."""
    rng = np.random.default_rng(seed)
    pair = rng.dirichlet(np.full(size, 0.5), 2) * (rng.random((2, size)) > 0.3) + 1e-300
    return tuple(pair / pair.sum(-1, keepdims=True))


def outcome(p: np.ndarray, q: np.ndarray, stands: np.ndarray) -> np.ndarray:
    """Distribution of a round's first token: a draft from q that stands with these chances, else max(p - q, 0)."""
    rest = np.maximum(p - q, 0)
    rest = rest / rest.sum() if rest.sum() > 1e-8 else p
    kept = q * stands
    return kept + (1 - kept.sum()) * rest


@pytest.mark.parametrize("seed", range(20))
def test_rule_gives_the_target_distribution(seed):
    p, q = random_pair(seed)
    assert np.abs(outcome(p, q, np.minimum(1, p / q)) - p).max() < 1e-12
    assert np.abs(outcome(p, q, p) - p).max() > 1e-3, "keeping a draft when a sample of p equals it is another rule"


# --- the graph, sampled ------------------------------------------------------------------------------------------------


def tables(seed: int) -> np.ndarray:
    """Logits [V, V] of the next token, by the last one."""
    return np.random.default_rng(seed).normal(0, 1.5, (V, V)).astype(np.float32)


def proposals(kind: str, q: np.ndarray, anchors: np.ndarray) -> tuple[mx.array, DenseQ | SparseQ | None]:
    """Drafts of every row by tables q [V, V] of probabilities, drawn with the "draft" keys, and what they were drawn from."""
    tokens, probs, last = [], [], mx.array(anchors)
    for slot in range(DRAFTS):
        probs.append(mx.array(q.astype(np.float32))[last])
        if kind == "point":
            last = mx.argmax(probs[-1], axis=-1).astype(mx.int32)
        else:
            slot_keys = keys(range(ROWS), [9 + slot] * ROWS, 1, "draft")[:, 0]
            last = draw(mx.log(probs[-1]), slot_keys)
        tokens.append(last)
    dense = mx.stack(probs, axis=1)
    if kind == "point":
        return mx.stack(tokens, axis=1), None
    if kind == "sparse":
        ids = mx.argsort(-dense, axis=-1)[..., :4].astype(mx.int32)
        return mx.stack(tokens, axis=1), SparseQ(ids, mx.take_along_axis(dense, ids, axis=-1))
    return mx.stack(tokens, axis=1), DenseQ(dense)


def draft_table(kind: str, setting: dict) -> np.ndarray:
    """The drafter's probabilities, behind the same truncation as the target's; a sparse one knows four tokens."""
    rows = tables(1)
    if kind == "sparse":
        rows = np.where(rows == rows.min(-1, keepdims=True), -50, rows)
    table = np.stack([distribution(row, **setting) for row in rows])
    return np.where(table < 1e-12, 0, table)


def score(accept, setting: dict, kind: str, offered=None, claimed_q: np.ndarray | None = None) -> float:
    """Emitted tokens of one block against the target's distribution given the token before, over all rows."""
    p = tables(0)
    anchors = (np.arange(ROWS) % 4).astype(np.int32)
    q_table = draft_table(kind, setting)
    tokens, q = proposals(kind, q_table, anchors)
    if claimed_q is not None:
        line = mx.concatenate([mx.array(anchors)[:, None], tokens[:, :-1]], axis=1)
        q = DenseQ(mx.array(claimed_q.astype(np.float32))[line])
    before = mx.concatenate([mx.array(anchors)[:, None], tokens], axis=1)
    counts = (np.arange(ROWS) // 4 % (DRAFTS + 1)).tolist() if offered == "ragged" else [DRAFTS] * ROWS
    block = verdict(mx.array(p)[before], tokens, [8] * ROWS, counts, q)
    acceptance, _ = accept(block, accept.init(opening(ROWS)))
    before, accepted, following = np.array(before), np.array(acceptance.accepted), np.array(acceptance.next)
    assert (accepted <= np.array(counts)).all()
    said = np.concatenate([np.array(tokens), np.zeros((ROWS, 1), np.int32)], axis=1)
    said[np.arange(ROWS), accepted] = following
    emitted = np.arange(DRAFTS + 1) <= accepted[:, None]
    seen = np.zeros((V, V))
    np.add.at(seen, (before[emitted], said[emitted]), 1)
    return chi_square_score(seen, np.stack([distribution(row, **setting) for row in p]))


@by_setting
@pytest.mark.parametrize("kind", ["point", "sparse", "dense"])
def test_rejection_in_distribution(setting, kind):
    assert score(Sampling(**setting).accept("rejection"), setting, kind, "ragged") < 4


@pytest.mark.parametrize("kind", ["point", "sparse", "dense"])
def test_rejection_where_every_draft_is_offered(kind):
    assert score(Sampling(**SETTINGS[3]).accept("rejection"), SETTINGS[3], kind) < 4


@by_setting
@pytest.mark.parametrize("kind", ["point", "dense"])
def test_sample_match_in_distribution(setting, kind):
    assert score(Sampling(**setting).accept("sample-match"), setting, kind, "ragged") < 4


def score_of_pairs(purpose: str, setting: dict) -> float:
    """The first two tokens of every row, in as many rounds as it takes, against the target's joint distribution. A position
    that a rejection left open is judged again with the same keys; drafts are drawn with the keys of `purpose`."""
    accept, p = Sampling(**setting).accept("rejection"), tables(0)
    q = mx.array(draft_table("dense", setting).astype(np.float32))
    carry, text, held = accept.init(opening(ROWS)), np.zeros((ROWS, 8), np.int32), np.zeros(ROWS, int)
    text[:, 0] = np.arange(ROWS) % 4
    while held.min() < 2:
        line = [mx.array(text[np.arange(ROWS), held])]
        for slot in range(DRAFTS):
            slot_keys = keys(range(ROWS), (held + 1 + slot).tolist(), 1, purpose)[:, 0]
            line.append(draw(mx.log(q[line[-1]]), slot_keys))
        line = mx.stack(line, axis=1)
        block = verdict(mx.array(p)[line], line[:, 1:], held.tolist(), q=DenseQ(q[line[:, :-1]]))
        acceptance, carry = accept(block, carry)
        said = np.concatenate([np.array(line)[:, 1:], np.zeros((ROWS, 1), np.int32)], axis=1)
        said[np.arange(ROWS), np.array(acceptance.accepted)] = np.array(acceptance.next)
        for i in range(DRAFTS + 1):
            more = (held < 5) & (i <= np.array(acceptance.accepted))
            text[more, held[more] + 1 + i] = said[more, i]
        held = np.where(held < 5, held + np.array(acceptance.accepted) + 1, held)
    seen, one = np.zeros((4, V, V)), np.stack([distribution(row, **setting) for row in p])
    np.add.at(seen, tuple(text[:, :3].T), 1)
    return chi_square_score(seen.reshape(4, -1), (one[:4, :, None] * one[None]).reshape(4, -1))


@pytest.mark.parametrize("setting", SETTINGS[:3])
def test_rejection_over_rounds(setting):
    assert score_of_pairs("draft", setting) < 4


def test_control_a_purpose_used_twice():
    """Drafts drawn with the noise that the rest is sampled with."""
    assert score_of_pairs("sample", SETTINGS[2]) > 8


class CompareSamples(Rejection):
    """Broken: keeps a draft when a sample of p equals it, and then draws from the rest as if ratios had been compared."""

    def decide(self, verdict, logits, carry):
        drafts = verdict.proposal.tokens.shape[1]
        sample = draw(logits, keys(carry.seeds, positions(verdict), drafts + 1, "accept"))
        stands = (verdict.proposal.tokens == sample[:, :drafts]).astype(mx.int32)
        accepted = mx.sum(mx.cumprod(stands, axis=1), axis=1)
        rest = leftover(accept_base.at_row(mx.softmax(logits, axis=-1), accepted), verdict, accepted)
        last = accept_base.at_row(keys(carry.seeds, positions(verdict), drafts + 1, "sample"), accepted)
        return Decision(accepted, draw(mx.log(rest), last), None)


def test_control_comparing_samples():
    chain = warps(temperature(1.0))
    assert score(CompareSamples(chain), SETTINGS[0], "dense") > 8


@pytest.mark.parametrize("setting", [SETTINGS[2], SETTINGS[4]])
def test_control_q_before_truncation(setting):
    """Drafts come from the truncated q while the ratio is made with the whole one."""
    whole = np.stack([distribution(row, temperature=setting["temperature"]) for row in tables(1)])
    assert score(Sampling(**setting).accept("rejection"), setting, "dense", claimed_q=whole) > 8


def test_control_another_temperature():
    assert score(Sampling(temperature=0.8).accept("rejection"), SETTINGS[0], "dense") > 8


def test_control_offered_is_not_masked(monkeypatch):
    """Rows behind the offered drafts are judged as if their padding had been drawn from q."""
    whole = lambda stands, offered: mx.sum(mx.cumprod(stands.astype(mx.int32), axis=1), axis=1)
    monkeypatch.setattr("dspark.stages.accept.rejection.count_leading", whole)
    with pytest.raises(AssertionError):
        score(Rejection(), SETTINGS[0], "dense", "ragged")


# --- SampleMatch and Greedy, token for token ---------------------------------------------------------------------------

WORDS, LENGTH = 23, 40
TABLE = scripted_table(WORDS, 1.0)
STAGES = {
    "greedy": Sampling().accept(),
    "sampled": Sampling(temperature=0.9).accept(),
    "truncated": Sampling(temperature=1.2, top_p=0.9, top_k=12, min_p=0.02).accept(),
    "penalised": Sampling(
        temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
    ).accept(),
    "frugal": Sampling(repetition_penalty=1.5, repetition_context=5, frequency_penalty=0.7).accept(),
}


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("drafts", [1, 2, 7, 9])
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_equals_plain_decoding(name, drafts, rate):
    stage = STAGES[name]
    plain = decode(stage, TABLE, PROMPT, LENGTH)
    lengths = []
    draft = scripted_drafts(plain, len(PROMPT), drafts, rate, WORDS)
    drafted = decode(stage, TABLE, PROMPT, LENGTH, draft, on_round=lambda a: lengths.append(a.accepted.item()))
    assert drafted == plain
    assert len(set(plain)) > 6
    assert (max(lengths) == 0) if rate == 0 else (max(lengths) == drafts or rate < 1)


def test_sample_match_at_a_changing_cap():
    plain = decode(STAGES["sampled"], TABLE, PROMPT, LENGTH)
    caps = [3, 0, 5, 1, 0, 2]
    draft = lambda text, n: scripted_drafts(plain, len(PROMPT), caps[n % 6], 0.8, WORDS, n)(text, n)
    assert decode(STAGES["sampled"], TABLE, PROMPT, LENGTH, draft) == plain


def test_control_keys_that_forget_the_position(monkeypatch):
    plain = decode(STAGES["sampled"], TABLE, PROMPT, LENGTH)
    draft = scripted_drafts(plain, len(PROMPT), 3, 0.5, WORDS)
    monkeypatch.setattr(accept_match, "positions", lambda verdict: (1,) * len(verdict.proposal.start))
    assert decode(STAGES["sampled"], TABLE, PROMPT, LENGTH, draft) != decode(STAGES["sampled"], TABLE, PROMPT, LENGTH)


def test_rejection_without_drafts_is_plain_sampling():
    sampled = decode(STAGES["sampled"], TABLE, PROMPT, LENGTH)
    assert decode(Sampling(temperature=0.9).accept("rejection"), TABLE, PROMPT, LENGTH) == sampled


def test_rejection_repeats_with_the_same_drafts():
    stage, answer = Sampling(temperature=0.9).accept("rejection"), decode(STAGES["sampled"], TABLE, PROMPT, LENGTH)
    once, again = (
        decode(stage, TABLE, PROMPT, LENGTH, scripted_drafts(answer, len(PROMPT), 3, 0.7, WORDS)) for _ in range(2)
    )
    assert once == again


@pytest.mark.parametrize("offered", [(0, 0), (1, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize("kind", ["greedy", "sample-match", "rejection"])
def test_drafts_behind_the_offered_never_stand(offered, kind):
    """The target says 2 with certainty and so do all drafts; the padding does not count."""
    logits = np.full((2, 4, V), -20, np.float32)
    logits[..., 2] = 20
    stage = Sampling(temperature=0.0 if kind == "greedy" else 1.0).accept(kind)
    acceptance, _ = stage(verdict(logits, [[2, 2, 2]] * 2, (4, 9), offered), stage.init(opening(2)))
    assert acceptance.accepted.tolist() == list(offered)
    assert acceptance.next.tolist() == [2, 2]


def test_rest_of_nothing_is_p():
    """Where p and q are equal nothing is left of p - q; a draft refused by rounding is followed by a sample of p."""
    p = mx.array([[0.25, 0.75, 0.0]])
    block = verdict(mx.zeros((1, 2, 3)), [[1]], (0,), q=DenseQ(p[:, None]))
    assert mx.array_equal(leftover(p, block, mx.array([0])), p)
    assert mx.array_equal(leftover(p, block, mx.array([1])), p), "the bonus row has no q"


# --- parity ------------------------------------------------------------------------------------------------------------

VECTORS = "tests/parity/sampling.npz"


@pytest.mark.parametrize(("t", "p", "k"), [(0.7, 0.8, 20), (0.6, 0.95, 0), (1.3, 0.5, 50)])
def test_vectors_of_the_dflash_package(t, p, k, vectors):
    """p, q, the chance of each draft and what is left of p, against the published drafter package's own functions.

    Probabilities of float32 logits near 10: 2e-6; a ratio of two such, up to 2e-5 of itself.
    """
    name = f"T{t}_p{p}_k{k}_"
    chain = warps(temperature(t), top_k(k), top_p(p))
    target, drafts = (mx.softmax(chain(mx.array(vectors[f"{w}_logits"])), axis=-1) for w in ("target", "draft"))
    assert np.abs(np.array(target) - vectors[name + "p"]).max() < 2e-6
    assert np.abs(np.array(drafts) - vectors[name + "q"]).max() < 2e-6
    tokens = mx.array(vectors["draft_tokens"].astype(np.int32))
    q_of, p_of = np.array(chance(drafts, tokens)), np.array(chance(target[:, :-1], tokens))
    could = q_of > 0
    ratio = np.minimum(1, p_of[could] / q_of[could])
    assert np.allclose(ratio, vectors[name + "accept_prob"][could], rtol=2e-5, atol=0)
    block = verdict(vectors["target_logits"], tokens, (0,), q=DenseQ(drafts))
    for slot in range(tokens.shape[1]):
        rest = np.array(leftover(target[:, slot], block, mx.array([slot])))[0]
        assert np.abs(rest / rest.sum() - vectors[name + "residual"][0, slot]).max() < 1e-5
    assert np.abs(np.array(mx.minimum(target[:, :-1], drafts).sum(-1)) - vectors[name + "overlap"]).max() < 1e-5


def test_greedy_vector(vectors):
    stage = Greedy()
    tokens = vectors["draft_tokens"].astype(np.int32)
    acceptance, _ = stage(verdict(vectors["target_logits"], tokens, (0,)), stage.init(opening(1)))
    assert acceptance.accepted.item() == int(vectors["greedy_accept_len"])
    assert acceptance.next.item() == int(vectors["greedy_target"][0, acceptance.accepted.item()])


@pytest.fixture
def vectors(request):
    with np.load(request.config.rootpath / VECTORS) as found:
        return {name: found[name] for name in found.files}


# --- Sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0}, {"temperature": 0.7, "top_k": 1}])
def test_greedy_options(options):
    """They choose Greedy, and forced into a sampling stage they still say the likeliest token."""
    sampling = Sampling(**options)
    assert sampling.is_greedy
    assert sampling.accept() == sampling.accept(q_known=True) == Greedy()
    plain = decode(Greedy(), TABLE, PROMPT, LENGTH)
    for kind in ("sample-match", "rejection"):
        assert decode(sampling.accept(kind), TABLE, PROMPT, LENGTH) == plain


def test_default_stages():
    sampling = Sampling(temperature=0.7)
    assert sampling.accept() == SampleMatch(warps(temperature(0.7)))
    assert sampling.accept(q_known=True) == Rejection(warps(temperature(0.7)))
    assert sampling.accept("greedy") == Greedy()
    assert attrs.evolve(sampling, logprobs=True, top_logprobs=3).accept().logprobs == 3
    with pytest.raises(InputError, match="allowed: auto, greedy, rejection, sample-match; did you mean 'rejection'"):
        sampling.accept("rejecton")

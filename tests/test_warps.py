"""Warps: the same distribution as mlx_lm for the same options, penalties that see the drafts, selection without a sort."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm.sample_utils as reference
import numpy as np
import pytest

from dspark.errors import InputError
from dspark.stages.accept import Greedy, Sampling
from dspark.stages.accept import base as accept_base
from dspark.stages.registry import KINDS, kind_of
from dspark.stages.warp import (
    Context,
    LogitBias,
    TopK,
    TopP,
    frequency_penalty,
    logit_bias,
    min_p,
    presence_penalty,
    repetition_penalty,
    select,
    temperature,
    top_k,
    top_p,
    warps,
)
from dspark.stages.warp.history import spread
from dspark.stages.warp.truncate import TopKAndP
from tests.reference import decode, distribution, opening, scripted_drafts, scripted_table, softmax, verdict

PROMPT, LENGTH, WORDS = (3, 1, 4, 1, 5), 40, 23
TABLE = scripted_table(WORDS, 1.0)


@pytest.fixture
def mlx_lm(monkeypatch):
    """mlx_lm's own sampler and processors, made to hand out the distribution instead of a token of it. Its compiled
    functions run uncompiled, for machines without a C++ compiler."""
    mx.disable_compile()
    monkeypatch.setattr(
        reference, "categorical_sampling", lambda logits, temp: mx.softmax(logits * (1 / temp), axis=-1)
    )

    def probabilities(logits, tokens, sampler, processors):
        logits = mx.array(logits)[None]
        for process in reference.make_logits_processors(**processors):
            logits = process(mx.array(tokens), logits)
        return np.array(reference.make_sampler(**sampler)(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))[0]

    yield probabilities
    mx.enable_compile()


SAMPLERS = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.4, "top_k": 5},
    {"temperature": 0.6, "min_p": 0.05},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 6},
    {"temperature": 1.7, "top_p": 0.7, "top_k": 12, "min_p": 0.02},
]


# --- mlx_lm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", SAMPLERS, ids=str)
@pytest.mark.parametrize("size", [23, 5000])
def test_sampler_equals_mlx_lm(options, size, mlx_lm):
    """Probabilities of at most 1 in float32: 2e-6. With the temperature first another set of tokens is kept."""
    rows = np.random.default_rng(size).normal(0, 2, (6, size)).astype(np.float32)
    found = np.array(mx.softmax(Sampling(**options).chain(mx.array(rows)[None]), axis=-1))[0]
    theirs = {("temp" if key == "temperature" else key): value for key, value in options.items()}
    for row, probs in zip(rows, found, strict=True):
        expected = mlx_lm(row, (1,), theirs, {})
        assert ((probs > 0) == (expected > 0)).all()
        assert np.abs(probs - expected).max() < 2e-6
        assert np.abs(probs - distribution(row, **options)).max() < 2e-6


def test_control_temperature_before_truncation():
    rows = np.random.default_rng(0).normal(0, 2, (6, WORDS)).astype(np.float32)
    options = SAMPLERS[5]
    first = warps(temperature(1.7), top_p(0.7), min_p(0.02), top_k(12))
    found = np.array(mx.softmax(first(mx.array(rows)[None]), axis=-1))[0]
    assert np.abs(found - np.stack([distribution(row, **options) for row in rows])).max() > 0.01


PENALTIES = [
    {"logit_bias": {3: 2.5, 7: -1.0}},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.4},
    {"repetition_penalty": 0.8, "presence_penalty": -0.3, "frequency_penalty": 0.9, "logit_bias": {0: 1.0}},
]


def penalised(options: dict, prompt, answer, drafts, logits) -> np.ndarray:
    """Probabilities [K + 1, V] behind Sampling's chain, for a session that has said `answer` and is offered `drafts`."""
    stage = Sampling(temperature=0.9, **options).accept("rejection")
    carry = stage.init(opening(1, None, (prompt,)))
    for token in answer:
        certain = np.where(np.arange(logits.shape[1]) == token, 1e4, 0).astype(np.float32)
        acceptance, carry = stage(verdict(certain[None, None], mx.zeros((1, 0), mx.int32), (0,)), carry)
        assert acceptance.next.item() == token
    context = spread(carry.history, stage.warp, mx.array([drafts], dtype=mx.int32), logits.shape[1]).context
    return np.array(mx.softmax(stage.warp(mx.array(logits)[None], context), axis=-1))[0]


@pytest.mark.parametrize("options", PENALTIES, ids=str)
@pytest.mark.parametrize("answer", [(), (2,), (2, 9, 2, 11, 2, 3)])
def test_processors_equal_mlx_lm(options, answer, mlx_lm):
    """Row by row of a block, with the drafts before it among the tokens. mlx_lm counts presence and frequency over the last
    20 tokens, which is the answer here; repetition sees the prompt too, 17 + 6 + 4 tokens, so its window moves."""
    prompt, drafts = tuple(range(6, 23)), [2, 4, 4, 9]
    logits = np.random.default_rng(1).normal(0, 2, (5, WORDS)).astype(np.float32)
    found = penalised(options, prompt, answer, drafts, logits)
    for row in range(5):
        said = [*answer, *drafts[:row]]
        with_prompt = {k: v for k, v in options.items() if not k.startswith(("presence", "frequency"))}
        behind = {k: v for k, v in options.items() if k not in with_prompt}
        line = logits[row]
        for part, tokens in ((with_prompt, [*prompt, *said]), (behind, said)):
            if part and tokens:
                line = processed_by_mlx_lm(line, tokens, part)
        expected = mlx_lm(line, (1,), {"temp": 0.9}, {})
        assert np.abs(found[row] - expected).max() < 2e-6


def processed_by_mlx_lm(row, tokens, options):
    logits = mx.array(row)[None]
    for process in reference.make_logits_processors(**options):
        logits = process(mx.array(tokens), logits)
    return np.array(logits)[0]


# --- penalties in a block ----------------------------------------------------------------------------------------------

FORGETFUL = {
    "repetition": Greedy(warps(repetition_penalty(1.6, 6))),
    "presence": Greedy(warps(presence_penalty(1.5))),
    "frequency": Greedy(warps(frequency_penalty(0.8))),
}


@pytest.mark.parametrize("name", FORGETFUL)
def test_control_penalties_without_the_drafts(name, monkeypatch):
    """Every row of a block penalised as its first one is: the text changes (test_accept holds the promise itself)."""
    plain = decode(FORGETFUL[name], TABLE, PROMPT, LENGTH)
    assert decode(Greedy(), TABLE, PROMPT, LENGTH) != plain

    def without_drafts(history, warp, tokens, vocab_size):
        block = spread(history, warp, tokens, vocab_size)
        first = [None if a is None else mx.broadcast_to(a[:, :1], a.shape) for a in block.context]
        return block._replace(context=Context(*first))

    draft = scripted_drafts(plain, len(PROMPT), 6, 1.0, WORDS)
    assert decode(FORGETFUL[name], TABLE, PROMPT, LENGTH, draft) == plain
    monkeypatch.setattr(accept_base, "spread", without_drafts)
    assert decode(FORGETFUL[name], TABLE, PROMPT, LENGTH, draft) != plain


def test_window_is_exactly_as_long_as_said():
    """The token that left the window is free again; a window one longer or shorter gives another answer."""
    answers = [decode(Greedy(warps(repetition_penalty(1.6, size))), TABLE, PROMPT, LENGTH) for size in (5, 6, 7)]
    assert len({tuple(answer) for answer in answers}) == 3

    def by_hand(size):
        text = list(PROMPT)
        while len(text) < len(PROMPT) + LENGTH:
            logits = TABLE(len(text), text[-1]).astype(np.float32)
            for token in set(text[-size:]):
                logits[token] = logits[token] * 1.6 if logits[token] < 0 else logits[token] / 1.6
            text.append(int(np.argmax(logits)))
        return text[len(PROMPT) :]

    assert answers == [by_hand(size) for size in (5, 6, 7)]


def test_answer_penalties_do_not_see_the_prompt():
    logits = np.ones((1, 1, WORDS), np.float32)
    logits[..., 4] = 1.2
    stage = Greedy(warps(presence_penalty(1.0), frequency_penalty(1.0)))
    carry = stage.init(opening(1, None, ((4, 4, 4),)))
    first, carry = stage(verdict(logits, mx.zeros((1, 0), mx.int32), (2,)), carry)
    second, carry = stage(verdict(logits, mx.zeros((1, 0), mx.int32), (3,)), carry)
    assert first.next.item() == 4
    assert second.next.item() != 4


def test_no_history_without_need():
    stage = Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.0, presence_penalty=0.0).accept()
    assert stage.init(opening(2)).history is None


def test_bias_bans_and_forces():
    logits = mx.array(np.random.default_rng(0).normal(0, 1, (1, 3, WORDS)).astype(np.float32))
    banned = mx.softmax(logit_bias({2: -float("inf")})(logits, Context()), axis=-1)
    assert banned[..., 2].tolist() == [[0, 0, 0]]
    assert mx.argmax(logit_bias({2: 100})(logits, Context()), axis=-1).tolist() == [[2, 2, 2]]


def test_bias_outside_the_vocabulary():
    """Refused when a session opens, and by the link itself, since such a write would go past the logits."""
    stage = Sampling(logit_bias={23: 1.0}).accept()
    with pytest.raises(InputError, match="token 23, but this target's vocabulary ends at 22"):
        stage.init(opening(1, vocab_size=WORDS))
    with pytest.raises(InputError, match="vocabulary ends at 22"):
        stage.warp(mx.zeros((1, 1, WORDS)))


# --- selection ---------------------------------------------------------------------------------------------------------

SHAPES = {
    "peaked": lambda rng, size: rng.normal(0, 4, (3, size)),
    "flat": lambda rng, size: rng.normal(0, 0.01, (3, size)),
    "steep": lambda rng, size: -np.sort(rng.random((3, size)) * 40),
}
by_shape = pytest.mark.parametrize("shape", SHAPES)
SIZES = [5, 512, 513, 4096, 4099, 12_345]


@by_shape
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", [1, 4, 300])
def test_top_equals_a_sort(shape, size, n):
    n = min(n, size)
    rows = SHAPES[shape](np.random.default_rng(n), size).astype(np.float32)
    values, ids = select.top(mx.array(rows), n)
    expected = -np.sort(-rows, axis=-1)[:, :n]
    assert (np.array(values) == expected).all()
    assert (np.take_along_axis(rows, np.array(ids).astype(int), -1) == expected).all()
    assert all(len(set(row)) == n for row in ids.tolist())
    assert (np.array(select.top_values(mx.array(rows), n))[:, ::-1] == expected).all()


def test_top_with_ties_and_ruled_out_tokens():
    """Half of the tokens equal, most ruled out: still n different ids and the right values."""
    rows = np.full((1, 5000), -np.inf, np.float32)
    rows[:, ::7], rows[:, 3] = 1.0, 2.0
    values, ids = select.top(mx.array(rows), 40)
    assert values.tolist() == [[2.0] + [1.0] * 39]
    assert len(set(ids.tolist()[0])) == 40


@by_shape
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mass", [0.001, 0.5, 0.95, 0.9999])
def test_nucleus_equals_a_sort(shape, size, mass, monkeypatch):
    """Against a float64 sort: at most the tokens at the very border, whose cumulative sum lies within 1e-4 of the mass
    (float32 sums of up to 12,345 terms), may differ; and the way of a GPU, one sort, agrees as far."""
    rows = SHAPES[shape](np.random.default_rng(size), size).astype(np.float32)
    probs = mx.softmax(mx.array(rows), axis=-1)
    halved = np.array(probs >= select.nucleus_border(probs, mass))
    monkeypatch.setattr(select, "SMALL", 1 << 30)
    assert_nucleus(rows, halved, mass)
    assert_nucleus(rows, np.array(probs >= select.nucleus_border(probs, mass)), mass)


def assert_nucleus(rows: np.ndarray, kept: np.ndarray, mass: float, slack: float = 1e-4) -> None:
    exact = softmax(rows.astype(np.float64))
    for probs, keep in zip(exact, kept, strict=True):
        assert keep.any()
        least = probs[keep].min()
        assert (keep == (probs >= least)).all(), "an upper set"
        assert probs[probs > least].sum() < mass + slack
        assert probs[keep].sum() > mass - slack


def test_control_a_border_too_far():
    rows = SHAPES["peaked"](np.random.default_rng(5), 513).astype(np.float32)
    probs = mx.softmax(mx.array(rows), axis=-1)
    border = select.nucleus_border(probs, 0.9)
    one_more = mx.max(mx.where(probs < border, probs, 0), axis=-1, keepdims=True)
    one_less = mx.min(mx.where(probs > border, probs, 1), axis=-1, keepdims=True)
    for wrong in (one_more, one_less):
        with pytest.raises(AssertionError):
            assert_nucleus(rows, np.array(probs >= wrong), 0.9)


def test_ties_at_a_border_stay_together():
    logits = mx.log(mx.array([[[0.4, 0.2, 0.2, 0.15, 0.05]]]))
    kept = lambda link: (link(logits, Context()) > -mx.inf).tolist()[0][0]
    assert kept(top_p(0.5)) == kept(top_k(2)) == [True, True, True, False, False]
    assert kept(top_p(0.3)) == [True, False, False, False, False]
    assert kept(top_p(1e-9)) == kept(top_k(1)) == kept(min_p(1.0)) == [True, False, False, False, False]


@by_shape
@pytest.mark.parametrize("size", [30, 5000])
@pytest.mark.parametrize("p_first", [True, False])
def test_fused_selection_equals_its_links(shape, size, p_first):
    """One selection for top-p and top-k keeps what the two keep one after the other."""
    rows = mx.array(SHAPES[shape](np.random.default_rng(size), size).astype(np.float32))[None]
    links = (top_p(0.8), top_k(20)) if p_first else (top_k(20), top_p(0.8))
    one_by_one = links[1](links[0](rows, Context()), Context())
    assert mx.array_equal(warps(*links)(rows), one_by_one)
    if shape == "flat":
        assert not mx.array_equal(warps(*links[::-1])(rows), one_by_one), "a control: the order counts"


def test_what_is_fused():
    pair = lambda *links: warps(*links).parts[1]
    assert pair(top_p(0.9), min_p(0.1), top_k(5), temperature(0.5)) == (
        TopKAndP(5, 0.9, True),
        min_p(0.1),
        temperature(0.5),
    )
    assert pair(top_k(5), top_p(0.9)) == (TopKAndP(5, 0.9, False),)
    for apart in ((top_k(5), min_p(0.1), top_p(0.9)), (top_k(1), top_p(0.9)), (top_k(5000), top_p(0.9))):
        assert pair(*apart) == apart


# --- chains ------------------------------------------------------------------------------------------------------------


def test_links_that_change_nothing_are_left_out():
    idle = warps(temperature(1), top_p(1), top_k(0), min_p(0), repetition_penalty(1), logit_bias({}))
    assert idle.parts == ((), ())
    assert not idle.recent_tokens
    logits = mx.zeros((1, 1, 4))
    assert idle(logits) is logits


def test_greedy_skips_links_that_keep_the_order():
    chain = warps(temperature(0.5), top_p(0.9), logit_bias({1: 3}))
    assert warps(logit_bias({1: 3}), temperature(0.5), top_p(0.9)).greedy_rest == ()
    assert chain.greedy_rest == (temperature(0.5), top_p(0.9), logit_bias({1: 3}))


@pytest.mark.parametrize("link", [temperature(0), temperature(1e-6), top_p(0), top_k(1)])
def test_greedy_links_leave_one_token(link):
    logits = mx.array([[[1.0, 3.0, 3.0, 2.0]]])
    assert link.is_greedy
    assert mx.softmax(link(logits, Context()), axis=-1).tolist() == [[[0, 1, 0, 0]]]


def test_drafters_shape_their_logits_without_the_penalties():
    """Penalties need the target's past, which a drafter does not have; a draft may come from any distribution."""
    logits = mx.array(np.random.default_rng(0).normal(0, 1, (1, 3, WORDS)).astype(np.float32))
    chain = warps(presence_penalty(1), temperature(0.5), repetition_penalty(2), top_k(4))
    assert mx.array_equal(chain.shape_drafts(logits), warps(temperature(0.5), top_k(4))(logits))


def test_kinds():
    assert {kind_of("warp", type(link)) for link in Sampling().chain.links} == {
        "temperature", "top-k", "top-p", "min-p", "logit-bias",
        "repetition-penalty", "presence-penalty", "frequency-penalty",
    }  # fmt: skip
    assert set(KINDS["accept"]) >= {"greedy", "sample-match", "rejection"}


NAN, INF = float("nan"), float("inf")
BAD = [
    ("temperature", NAN, "temperature is nan; it must be a finite number of at least 0"),
    ("temperature", -0.1, "temperature is -0.1; it must be a finite number of at least 0"),
    ("temperature", INF, "temperature is inf; it must be a finite number of at least 0"),
    ("temperature", "hot", "temperature is 'hot'; it must be a finite number of at least 0"),
    ("temperature", True, "temperature is True; it must be a finite number of at least 0"),
    ("top_p", 7, "top_p is 7; it must be a number from 0 to 1"),
    ("top_p", NAN, "top_p is nan; it must be a number from 0 to 1"),
    ("top_k", -1, "top_k is -1; it must be a whole number of at least 0"),
    ("top_k", 2.0, "top_k is 2.0; it must be a whole number of at least 0"),
    ("min_p", 1.5, "min_p is 1.5; it must be a number from 0 to 1"),
    ("repetition_penalty", 0, "repetition_penalty is 0; it must be a finite number above 0"),
    ("repetition_penalty", NAN, "repetition_penalty is nan; it must be a finite number above 0"),
    ("repetition_context", 0, "repetition_context is 0; it must be a whole number of at least 1"),
    ("presence_penalty", INF, "presence_penalty is inf; it must be a finite number"),
    ("frequency_penalty", NAN, "frequency_penalty is nan; it must be a finite number"),
    ("logit_bias", {"x": 1}, "logit_bias holds ('x', 1); each entry is a token id and a number"),
    ("logit_bias", {-1: 1}, "logit_bias gives token -1 the bias 1.0; token ids count from 0 and a bias is finite, or "
     "-inf for a token that must never come"),
    ("logit_bias", {1: NAN}, "logit_bias gives token 1 the bias nan; token ids count from 0 and a bias is finite, or "
     "-inf for a token that must never come"),
    ("logprobs", 1, "logprobs is 1; it must be true or false"),
    ("top_logprobs", 3, "top_logprobs is 3 but logprobs is off; turn logprobs on"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_values(name, value, message):
    with pytest.raises(InputError) as error:
        Sampling(**{name: value})
    assert str(error.value) == message


def test_bad_link():
    with pytest.raises(InputError, match=r"warps\(\) takes links such as temperature\(0.7\) or top_p\(0.95\), not 0.7"):
        warps(0.7)


def test_links_compare_by_value():
    assert LogitBias({1: 2, 0: 1}) == LogitBias([(0, 1.0), (1, 2.0)])
    assert hash(warps(TopK(3), TopP(0.5))) == hash(warps(top_k(3), top_p(0.5)))

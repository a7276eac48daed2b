"""A DSpark drafter's round in one launch drafts what float32 arithmetic drafts, as nearly as 16-bit numbers let it, and leaves the
keys and values that it would; what the host does not know yet it finds in a report; what it is not written for is told in words."""

import copy

import mlx.core as mx
import numpy as np
import pytest

from dspark.kernels import in_place, stack, stack_draft
from dspark.models.heads import LayerConfig, context
from dspark.models.heads.config import RopeConfig
from dspark.models.heads.head import Head
from dspark.models.heads.nvfp4 import Nvfp4Linear
from tests import draft_trials as trials
from tests.draft_faults import FAULTS, FOREVER, broken
from tests.draft_trials import Case, Rounds, ask, behind, buffers, opened, trial, worst
from tests.stack_trials import bits

F16, BF16 = mx.float16, mx.bfloat16
# A block takes several of a step's tiles with 3 and 5 blocks, and with 37 there are more blocks than tiles.
CASES = {
    "own, reduced": Case(BF16, F16, False, warps=4, splits=2, blocks=3, reduced=70),
    "tied": Case(F16, F16, False, warps=8, splits=1, blocks=7, lm_head="tied", anchor=False, block=8, origin=5),
    "borrowed, reduced": Case(
        F16,
        BF16,
        True,
        warps=2,
        splits=3,
        blocks=5,
        lm_head="borrowed",
        reduced=64,
        dim=128,
        heads=4,
        kv_heads=2,
        layers=1,
    ),
    "borrowed": Case(BF16, BF16, True, warps=2, splits=2, blocks=37, lm_head="borrowed", anchor=False, kv_heads=2),
}
# (rows of taps, how many count, tokens drafted): several times as many as products have rows, none, and all in between.
STEPS = [(30, 30, 7), (3, 2, 6), (8, 8, 4), (1, 1, 7), (0, 0, 3), (9, 4, 1), (8, 0, 5)]
# The kernel rounds what enters a product to 16 bits, and MLX's own way rounds after every operation. A row's error in root mean
# squares over those of MLX's is 0.8 to 1.2 here.
ROOM = 2.0


@pytest.fixture
def t():
    return trial(CASES["own, reduced"])


@pytest.fixture
def way(t):
    return Rounds(t)


@pytest.mark.parametrize("name", CASES)
def test_a_round_is_float32s(name):
    t = trial(CASES[name])
    assert worst(t, Rounds(t), STEPS) <= ROOM


@pytest.mark.parametrize("count", range(1, 8))
def test_a_shorter_block_begins_alike(t, way, count):
    """Where slots see what is behind them the whole block is computed, so fewer drafts are the same ones."""
    for case in (t, trial(CASES["borrowed, reduced"])):
        own = way if case is t else Rounds(case)
        most = case.head.config.num_drafts
        whole, short = (ask(case, own, opened(case), 0, (9, 9, n))[0] for n in (most, min(count, most)))
        assert whole.tolist()[0][: short.shape[1]] == short.tolist()[0]


@pytest.mark.parametrize("name", ["own, reduced", "tied"])
def test_taps_are_taken_in_without_drafts(name):
    """As with some, bit for bit; and the launch behind it finds all as it should be."""
    t = trial(CASES[name])
    ends = []
    for drafts in (True, False):
        way, context, at = Rounds(t), opened(t), 0
        for taken, keep in ((19, 19), (3, 2), (8, 8)):
            if drafts:
                _, context = ask(t, way, context, at, (taken, keep, 3))
            else:
                way.absorb(context, t.taps[:, at : at + taken], keep)
                context = behind(context, keep)
            at += keep
        tokens, context = ask(t, way, context, at, (4, 4, 5))
        ends.append(
            [np.array(tokens), way.logits(5).view(np.uint32), *(a.view(np.uint32) for a in trials.held(context))]
        )
    assert all(map(np.array_equal, *ends))


# ---- what a broken text does ----------------------------------------------------------------------------------------------

SMALL = Case(F16, F16, True, warps=2, splits=2, blocks=5, hidden=32, reduced=62, kv_heads=2, anchor=False, origin=5)
SHORT = [(18, 18, 6), (9, 3, 6)]


def reported(t, way, context, at, taken, accepted, token):
    """A round whose end stands in a report alone."""
    report = mx.array([[accepted, token, *range(taken - 1)]], dtype=mx.int32)
    count = t.head.config.num_drafts
    taps = t.taps[:, at : at + taken]
    tokens = way(context, taps, None, report, count, t.head.config.slots_for(count))
    return tokens, behind(context, accepted + 1)


def as_reported(t, way, accepted=3, taken=6):
    """Whether a report leads to the same bits as being told."""
    token, ends, count = int(trials.anchor(17 + accepted + 1).item()), [], t.head.config.num_drafts
    for told in (True, False):
        _, context = ask(t, way, opened(t), 0, (18, 17, count))
        if told:
            tokens, context = ask(t, way, context, 17, (taken, accepted + 1, count))
        else:
            tokens, context = reported(t, way, context, 17, taken, accepted, token)
        logits = way.logits(count)
        ends.append([np.array(tokens), logits.view(np.uint32), *(a.view(np.uint32) for a in trials.held(context))])
    return all(map(np.array_equal, *ends))


def as_parted(t, way, apart=3, last=7):
    """Whether taps in arrays of one row, and a last one of several, lead to the same bits as in one."""
    ends, count, taken = [], t.head.config.num_drafts, apart + last
    for parted in (False, True):
        _, context = ask(t, way, opened(t), 0, (18, 17, count))
        taps = t.taps[:, 17 : 17 + taken]
        if parted:
            taps = (*(taps[:, i : i + 1] for i in range(apart)), taps[:, apart:])
        assert way.takes(context, taps)
        tokens = way(context, taps, taken - 1, trials.anchor(16 + taken), count, t.head.config.slots_for(count))
        held = trials.held(behind(context, taken - 1))
        ends.append([np.array(tokens), way.logits(count).view(np.uint32), *(a.view(np.uint32) for a in held)])
    return all(map(np.array_equal, *ends))


def told(t, way, which="told"):
    try:
        if which == "parted":
            return "nothing" if as_parted(t, way) else "wrong numbers"
        if which == "untold":
            return "nothing" if as_reported(t, way) else "wrong numbers"
        return "wrong numbers" if worst(t, way, SHORT, ROOM) > ROOM else "nothing"
    except RuntimeError as stopped:
        return str(stopped)


@pytest.mark.parametrize("which", ["told", "untold", "parted"])
def test_a_text_with_all_faults_off_is_right(which):
    t = trial(SMALL)
    assert told(t, broken(t), which) == "nothing"


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_text_is_caught(name):
    t = trial(SMALL)
    found = told(t, broken(t, name), FAULTS[name][0])
    assert found != "nothing"
    assert name not in FOREVER or "for ever" in found


# ---- reports --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("taken", "accepted"), [(1, 0), (6, 0), (6, 3), (8, 7), (12, 9)])
@pytest.mark.parametrize("name", ["own, reduced", "borrowed, reduced"])
def test_a_report_leads_where_being_told_leads(name, taken, accepted):
    t = trial(CASES[name])
    assert as_reported(t, Rounds(t), accepted, taken)


@pytest.mark.parametrize(("apart", "last"), [(1, 1), (7, 1), (7, 8), (4, 17), (0, 3)])
def test_taps_may_come_in_several_arrays(t, way, apart, last):
    assert as_parted(t, way, apart, last)


# ---- contexts -------------------------------------------------------------------------------------------------------------


def drafted(t, way, steps):
    """Of each round its tokens and logits, then keys and values, as bits."""
    context, at, out, rooms = opened(t), 0, [], []
    for step in steps:
        tokens, context = ask(t, way, context, at, step)
        out += [np.array(tokens), way.logits(step[2]).view(np.uint32)]
        rooms.append({a.shape[2] for a in buffers(context.rows)})
        at += step[1]
    return [*out, *map(np.array, trials.held(context))], rooms


def test_buffers_grow_and_keep_what_they_hold(t, way, monkeypatch):
    steps = [(9, 9, 7), (9, 9, 7), (8, 3, 7), (8, 8, 7)]
    roomy, once = drafted(t, way, steps)
    assert once == [{in_place.GROWTH}] * 4
    monkeypatch.setattr(in_place, "GROWTH", 8)
    tight, rooms = drafted(t, way, steps)
    assert all(map(np.array_equal, tight, roomy))
    assert [max(room) for room in rooms] == [24, 32, 48, 48]
    together = in_place.together
    monkeypatch.setattr(in_place, "together", lambda arrays, held, needed: together(arrays, max(0, held - 1), needed))
    assert not all(map(np.array_equal, drafted(t, way, steps)[0], roomy))


def in_turns(t, way, leave=True):
    """The largest error where MLX and the launch go on from one another."""
    head = copy.copy(t.head)
    head.launch = way if leave else None
    mine, exact, own, most, at = opened(t), opened(t, t.exact), opened(t), 0.0, 0
    for i, step in enumerate(STEPS[:6]):
        if i % 2:
            logits, mine = trials.by_mlx(t, head, mine, at, step)
        else:
            _, mine = ask(t, way, mine, at, step)
            logits = way.logits(step[2])
        want, exact = trials.by_mlx(t, t.exact, exact, at, step)
        near, own = trials.by_mlx(t, t.head, own, at, step)
        most = max(most, trials.far(logits, want, near), *map(trials.far, *map(trials.held, (mine, exact, own))))
        at += step[1]
    return most


@pytest.mark.parametrize("name", ["own, reduced", "tied"])
def test_mlx_and_the_launch_go_on_from_one_another(name):
    t = trial(CASES[name])
    assert in_turns(t, Rounds(t)) <= ROOM


def test_mlx_writing_unasked_is_caught(t, way):
    """The control: nobody tells the launch that its buffers are written by others."""
    assert not in_turns(t, way, leave=False) <= ROOM


def test_a_context_is_held_until_somebody_else_writes(t, way):
    _, context = ask(t, way, opened(t), 0, (9, 9, 7))
    assert way.holds(context)
    assert not way.holds(opened(t))
    twin = context.copy()
    assert not way.holds(twin)
    way.leave(twin)
    assert way.holds(context)
    way.leave(context)
    assert not way.holds(context)


@pytest.mark.parametrize(
    "how", [lambda c: c.copy(), copy.deepcopy, lambda c: c.take([0])], ids=["copy", "deepcopy", "take"]
)
def test_copies_see_no_later_writes(t, way, how, monkeypatch):
    def seen(evaluated):
        _, made = ask(t, way, opened(t), 0, (9, 5, 7))
        twin = how(made)
        if evaluated:
            mx.eval(twin.state)
        end = None if evaluated else 5
        before = [bits(a[:, :, :end]) for a in buffers(twin.rows)] if evaluated else trials.held(made)
        _, later = ask(t, way, made, 5, (9, 4, 7))
        _, later = ask(t, way, later, 9, (9, 9, 7))
        after = [bits(a) for a in buffers(twin.rows)] if evaluated else trials.held(twin)
        # A copy goes a way of its own.
        mine, _ = ask(t, way, twin, 30, (6, 6, 7))
        alone, _ = ask(t, way, ask(t, way, opened(t), 0, (9, 5, 7))[1], 30, (6, 6, 7))
        return all(map(np.array_equal, before, after)) and mine.tolist() == alone.tolist()

    assert seen(evaluated=True)
    assert seen(evaluated=False)

    if how(opened(t)).rows[0] is not None and "take" not in str(how.__code__.co_names):
        monkeypatch.setattr(context, "copied", lambda array: array[:])
        assert not seen(evaluated=True)


def test_which_rounds_it_takes(t, way):
    taps = lambda rows, dtype=F16: mx.zeros((1, rows, 96), dtype)
    context = t.head.make_context()
    assert way.takes(context, None)
    assert [way.takes(context, taps(n)) for n in (1, 512, 513)] == [True, True, False]
    assert not way.takes(context, taps(1, BF16))
    assert not way.takes(t.head.make_context((0, 0)), taps(1))
    limited = t.head.make_context((100,), window=40)
    assert [way.takes(limited, taps(n)) for n in (1, 32, 33)] == [True, True, False]
    way._run = None
    assert not way.takes(context, taps(1))


def test_with_no_rows_nothing_is_done(t, way):
    _, context = ask(t, way, opened(t), 0, (9, 9, 7))
    before = [bits(a) for a in buffers(context.rows)]
    way(context, t.taps[:, 9:12], 3, trials.anchor(12), 1, 0)
    mx.eval(context.state)
    assert all(map(np.array_equal, before, map(bits, buffers(context.rows))))


# ---- which drafters -------------------------------------------------------------------------------------------------------

NO_MARKOV = {"markov": "none", "markov_rank": 0}


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("dflash drafter", {"kind": "dflash", **NO_MARKOV}),
        (
            "dflash2 drafter",
            {
                "kind": "dflash2", **NO_MARKOV, "anchor_predicts": False, "draft_vocab_size": None,
                "selector_rank": 8, "selector_top_k": 4,
            },
        ),
        ("dspark drafter with a gated Markov head", {"markov": "gated"}),
        ("dspark drafter with a rnn Markov head", {"markov": "rnn"}),
        ("dspark drafter with a none Markov head", NO_MARKOV),
        ("window", {"layers": (LayerConfig(window=32),) * 2}),
        ("window, or not all the same", {"layers": (LayerConfig(), LayerConfig(causal=True))}),
        ("sandwich", {"sandwich": True}),
        ("offset_norms, gated_query", {"offset_norms": True, "gated_query": True}),
        ("qkv_bias", {"qkv_bias": True}),
        ("output_bias", {"output_bias": True}),
        ("sinks", {"sinks": True}),
        ("activation", {"activation": "gelu_tanh"}),
        ("value_norm", {"value_norm": True}),
        ("value_scale", {"value_scale": 2.0}),
        ("embedding_scale", {"embedding_scale": 2.0}),
        ("logit_multiplier", {"logit_multiplier": 2.0}),
        ("logit_softcap", {"logit_softcap": 30.0}),
        ("log_snr", {"log_snr": (-3.0, 3.0), "log_snr_width": 8}),
        ("attention_scale", {"attention_scale": 0.5}),
        ("positions", {"rope": RopeConfig(style="interleaved")}),
        ("positions", {"rope": RopeConfig(dims=32)}),
        ("heads of 80", {"head_dim": 80}),
        ("72 columns", {"hidden_size": 72}),
        ("multiples", {"intermediate_size": 100}),
        ("multiples", {"target_hidden_size": 44}),
        ("multiples", {"markov_rank": 12}),
        ("blocks of 16", {"block_size": 16}),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_is_not_written_for_is_told(words, changes):
    head = Head(trials.config(CASES["own, reduced"], **changes))
    head.set_dtype(BF16)
    assert words in stack_draft.study(head, F16)


@pytest.mark.parametrize(("dtype", "taps"), [(mx.float32, F16), (F16, mx.float32)])
def test_other_numbers_are_told(dtype, taps):
    head = Head(trials.config(CASES["own, reduced"]))
    head.set_dtype(dtype)
    assert "no floats of 16 bits" in stack_draft.study(head, taps)


@pytest.mark.parametrize("name", CASES)
def test_what_it_is_written_for(name, monkeypatch):
    case = CASES[name]
    t = trial(case)
    found = stack_draft.study(t.head, case.taps)
    one = found.layers
    sizes = (one.hidden, one.heads, one.kv_heads, one.dim, one.mlp, one.layers, one.half)
    assert sizes == (64, case.heads, case.kv_heads, case.dim, 96, case.layers, case.dtype == F16)
    assert (found.taps, found.rank, found.mask, found.slots) == (96, 16, 5, case.block)
    assert (found.taps_half, found.causal, found.first) == (case.taps == F16, case.causal, 0 if case.anchor else 1)
    assert one.vocab == (case.reduced or trials.VOCAB)
    # A scale that is written out is the usual one all the same.
    head = Head(trials.config(case, attention_scale=case.dim**-0.5))
    head.set_dtype(case.dtype)
    assert stack_draft.study(head, case.taps) == found
    monkeypatch.setattr(stack, "MOST_BYTES", one.nbytes - 1)
    assert "of weights" in stack_draft.study(t.head, case.taps)


@pytest.mark.parametrize("name", CASES)
def test_scratch_has_room_for_what_blocks_share(name):
    way = Rounds(trial(CASES[name]))
    kind, one = way.kind, way.kind.layers
    counters = 8 * (one.layers * 6 + 5 + kind.slots)
    assert way._scratch[0].nbytes >= 4 * counters + (one.scratch_bytes - 4 * 8 * (one.layers * 6 + 1))
    packed = stack_draft.packed(trial(CASES[name]).head, kind, trials_table(name))
    more = one.hidden * (kind.taps + 2 * one.layers * one.keys)
    assert packed.size == one.nbytes // 2 + more


def trials_table(name):
    t = trial(CASES[name])
    return stack_draft.head_table(t.head, t.target, t.case.dtype)


@pytest.mark.parametrize("name", CASES)
def test_the_table_is_the_one_that_makes_logits(name):
    t = trial(CASES[name])
    hidden = mx.random.normal((5, t.case.hidden), key=mx.random.key(1))
    want = t.exact.base_logits(hidden)
    table = trials_table(name).astype(mx.float32)
    assert mx.allclose(hidden @ table.T, want, atol=1e-4).item()
    assert not mx.allclose(hidden @ table[::-1].T, want, atol=1e-4).item()


def test_a_drafter_with_matrices_of_another_kind_goes_its_own_way(t):
    head = Head(t.head.config)
    head.set_dtype(mx.bfloat16)
    assert not isinstance(stack_draft.study(head, mx.float16), str)
    head.layers[-1].mlp.down_proj = Nvfp4Linear(mx.zeros((1, 1), mx.uint32), mx.zeros((1, 1), mx.uint8), mx.array(1.0))
    assert "matrices of other classes" in stack_draft.study(head, mx.float16)

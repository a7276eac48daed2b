"""The drafter network beyond the vectors: every option against a plain rewriting, and a context that rolls, batches and forks."""

from __future__ import annotations

import attrs
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dspark.errors import BindError, CheckpointError
from dspark.models.heads import (
    Head,
    HeadConfig,
    LayerConfig,
    RopeConfig,
    Sampling,
    draft,
    draft_rows,
    noise_shape,
    packed_hidden,
    previous_tokens,
)
from dspark.models.heads import context as context_module
from dspark.models.heads.drafting import best
from dspark.models.heads.shapes import parameter_shapes
from tests import head_reference as reference

V, H, TAPS, BLOCK = 61, 32, 2, 5
SLIDING, FREE = LayerConfig(causal=True, window=4), LayerConfig(window=7)
BASE = HeadConfig(
    kind="dspark",
    block_size=BLOCK,
    anchor_predicts=True,
    mask_token_id=60,
    target_layer_ids=(1, 3),
    vocab_size=V,
    hidden_size=H,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    layers=(LayerConfig(), LayerConfig()),
    target_hidden_size=24,
    embedding="own",
    lm_head="own",
)
YARN = RopeConfig(theta=1e4, scaling="yarn", factor=32.0, original_max_position=64)
OPTIONS = {
    "plain": {},
    "rnn": {"markov": "rnn", "markov_rank": 6, "confidence": "hidden"},
    "gated": {"markov": "gated", "markov_rank": 6, "confidence": "markov"},
    "vanilla, 1+N": {"markov": "vanilla", "markov_rank": 6, "anchor_predicts": False},
    "causal windows": {"layers": (SLIDING, SLIDING), "markov": "vanilla", "markov_rank": 6},
    "windows of one": {"layers": (LayerConfig(causal=True, window=1), LayerConfig(window=1))},
    "mixed windows": {"layers": (FREE, LayerConfig(causal=True))},
    "sinks and biases": {"sinks": True, "qkv_bias": True, "output_bias": True, "value_scale": 0.7},
    "gated queries": {"gated_query": True, "offset_norms": True, "rope": RopeConfig(theta=1e4, dims=4)},
    "yarn": {"rope": YARN},
    "llama3": {"rope": RopeConfig(theta=5e5, scaling="llama3", factor=8.0, original_max_position=64)},
    "linear": {"rope": RopeConfig(scaling="linear", factor=4.0, style="interleaved")},
    "gemma, own values": {
        "sandwich": True,
        "value_norm": True,
        "attention_scale": 1.0,
        "activation": "gelu_tanh",
        "embedding_scale": H**0.5,
        "logit_softcap": 30.0,
        "rope": RopeConfig(theta=1e6, scaling="proportional", dims=4),
    },
    "gemma, keys as values": {"sandwich": True, "value_norm": True, "keys_are_values": True, "attention_scale": 1.0},
    "dflash": {"kind": "dflash", "anchor_predicts": False, "logit_multiplier": 0.2, "logit_softcap": 8.0},
    "dflash2": {
        "kind": "dflash2",
        "anchor_predicts": False,
        "conv_kernel": 3,
        "conv_group": 8,
        "selector_rank": 5,
        "selector_top_k": 4,
        "logit_multiplier": 0.2,
        "logit_softcap": 20.0,
    },
    "log-SNR": {"log_snr": (-9.0, 9.0), "log_snr_width": 12},
}
by_option = pytest.mark.parametrize("name", OPTIONS)
# float32 against float64 over two layers, states of up to 10 (dflash2's convolutions amplify most).
CLOSE = 1e-4


def make(name: str, seed: int = 0, **changes) -> Head:
    """A drafter with weights large enough to matter everywhere."""
    config = attrs.evolve(BASE, **{**OPTIONS[name], **changes})
    head, rng = Head(config), np.random.default_rng(seed)
    arrays = {}
    for key, array in tree_flatten(head.parameters()):
        scale = 0.3 if key.endswith(("norm.weight", "bias", "layer_scalar")) else 2.0 / np.sqrt(array.shape[-1])
        center = 0.0 if config.offset_norms or key.endswith("bias") or array.ndim > 1 else 1.0
        arrays[key] = mx.array((center + scale * rng.normal(size=array.shape)).astype(np.float32))
    head.load_weights(list(arrays.items()))
    return head


def taps_of(rows: int, seed: int = 1, batch: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=(batch, rows, TAPS * 24)).astype(np.float32))


def numpy_weights(head: Head) -> dict[str, np.ndarray]:
    return {k: np.array(v, dtype=np.float64) for k, v in tree_flatten(head.parameters())}


def apart(a, b) -> float:
    return float(np.abs(np.array(a, dtype=np.float64) - np.array(b, dtype=np.float64)).max())


def after_rounds(head: Head, taps: mx.array, sizes: tuple[int, ...], anchor: int = 5, start: int = 0) -> mx.array:
    """The block's hidden rows after absorbing the taps in portions, with a block in between, as in rounds."""
    context, at = head.make_context((start,)), 0
    for size in sizes:
        context = head.absorb(context, taps[:, at : at + size])
        at += size
        hidden = head.block(context, mx.array([[anchor]]))
    assert at == taps.shape[1]
    return hidden


# ---- every option, against the plain rewriting ---------------------------------------------------------------------------


@by_option
def test_block_equals_the_plain_rewriting(name):
    head, taps = make(name), taps_of(13)
    c, weights = head.config, numpy_weights(head)
    embed = weights["embed_tokens.weight"]
    got = after_rounds(head, taps, (9, 3, 1), start=2)
    if c.log_snr is not None:
        # The conditioning itself is held by the GGUF vectors; here it must be the only difference.
        head.log_snr_embed.fc2.weight, head.log_snr_embed.fc2.bias = mx.zeros((H, 12)), mx.zeros((H,))
        assert apart(got, after_rounds(head, taps, (9, 3, 1), start=2)) > 0.01
        got = after_rounds(head, taps, (9, 3, 1), start=2)
    want = reference.block_hidden(c, weights, np.array(taps[0], dtype=np.float64), 5, 15, embed)
    assert apart(got[0], want) < CLOSE
    base = reference.base_logits(c, want, weights["lm_head.weight"])
    assert apart(head.base_logits(got)[0], base) < 10 * CLOSE


@pytest.mark.parametrize("name", ["rnn", "gated", "vanilla, 1+N", "causal windows"])
def test_markov_chain_equals_the_plain_rewriting(name):
    head = make(name)
    c, weights, cap = head.config, numpy_weights(head), head.config.num_drafts
    hidden = after_rounds(head, taps_of(9), (9,))
    said = draft(head, hidden, mx.array([[5]]), cap)
    rows = np.array(head.predicting(hidden, cap)[0], dtype=np.float64)
    base = np.array(head.base_logits(said.hidden)[0], dtype=np.float64)
    tokens, steps = reference.markov_chain(c, weights, rows, base, 5)
    assert said.tokens.tolist() == [tokens]
    before = previous_tokens(mx.array([[5]]), said.tokens)
    assert apart(head.step_logits(head.base_logits(said.hidden), said.hidden, before)[0], steps) < 10 * CLOSE


def test_the_rewriting_notices_a_wrong_option():
    head, taps = make("causal windows"), taps_of(13)
    weights = numpy_weights(head)
    wider = attrs.evolve(head.config, layers=(LayerConfig(causal=True, window=5), SLIDING))
    want = reference.block_hidden(
        wider, weights, np.array(taps[0], dtype=np.float64), 5, 13, weights["embed_tokens.weight"]
    )
    assert apart(after_rounds(head, taps, (13,))[0], want) > 100 * CLOSE


@by_option
def test_parameters_are_those_that_the_config_promises(name):
    head = make(name)
    assert {k: v.shape for k, v in tree_flatten(head.parameters())} == parameter_shapes(head.config)


# ---- the context ---------------------------------------------------------------------------------------------------------


@by_option
def test_context_does_not_depend_on_how_it_came(name):
    head, taps = make(name), taps_of(24)
    whole = after_rounds(head, taps, (24,))
    assert apart(whole, after_rounds(head, taps, (1, 7, 2, 5, 1, 1, 4, 3))) < CLOSE


@by_option
def test_rejected_rows_are_never_seen(name):
    """All rows of a verify are absorbed; those behind `keep` and what the block wrote are overwritten."""
    head, taps, noise = make(name), taps_of(14), 50 * taps_of(6, seed=9)
    context, at = head.make_context(), 0
    for keep in (6, 1, 3, 4):
        rows = mx.concatenate([taps[:, at : at + keep], noise], axis=1)[:, :8]
        context = head.absorb(context, rows, keep)
        head.block(context, mx.array([[7]]))
        at += keep
    assert context.starts == (14,)
    assert apart(head.block(context, mx.array([[5]])), after_rounds(head, taps, (14,))) < CLOSE


@by_option
@pytest.mark.parametrize("slack", [0, 2])
def test_compaction_keeps_what_can_be_seen(name, slack, monkeypatch):
    monkeypatch.setattr(context_module, "SLACK", slack)
    head, taps = make(name), taps_of(200)
    sizes = (20,) + (4,) * 45
    context, at = head.make_context(), 0
    for size in sizes:
        context = head.absorb(context, taps[:, at : at + size])
        at += size
        hidden = head.block(context, mx.array([[5]]))
    assert apart(hidden, after_rounds(head, taps, (200,))) < CLOSE
    for layer in context.rows:
        if layer.limit is not None:
            assert layer.keys.shape[2] <= 64
            assert layer.origins[0] > 0


def test_a_limited_layer_holds_no_more_than_its_window_and_slack():
    head = make("causal windows")
    context = head.absorb(head.make_context(), taps_of(3000))
    assert [layer.keys.shape[2] for layer in context.rows] == [320, 320]
    assert make("plain").absorb(make("plain").make_context(), taps_of(3000)).rows[0].keys.shape[2] >= 3000


def test_a_context_window_limits_full_layers():
    head, taps = make("plain"), taps_of(30)
    limited = head.make_context(window=8)
    for i in range(0, 30, 3):
        limited = head.absorb(limited, taps[:, i : i + 3])
        hidden = head.block(limited, mx.array([[5]]))
    # The last eight rows alone, at their own places.
    tail = head.absorb(head.make_context((22,)), taps[:, 22:])
    assert apart(hidden, head.block(tail, mx.array([[5]]))) < CLOSE
    assert apart(hidden, after_rounds(head, taps, (30,))) > 100 * CLOSE


def worst_row_of_a_batch(head: Head) -> float:
    """Three rows of different lengths that absorb different counts, against each of them alone; then two of them, swapped."""
    texts = [taps_of(n, seed=n) for n in (4, 9, 15)]
    first, *others = [head.absorb(head.make_context(), text) for text in texts]
    context = first.join(others[0]).join(others[1])
    more, anchors = taps_of(4, seed=77, batch=3), mx.array([[5], [6], [7]])
    context = head.absorb(context, more, (4, 1, 2))
    context = head.absorb(context, more, (2, 3, 4))
    assert context.starts == (10, 13, 21)
    got = head.block(context, anchors)
    swapped = head.block(context.take([2, 0]), mx.array([[7], [5]]))
    off = [apart(swapped, got[mx.array([2, 0])])]
    for b, (one, two) in enumerate(((4, 2), (1, 3), (2, 4))):
        rows = mx.concatenate([texts[b], more[b : b + 1, :one], more[b : b + 1, :two]], axis=1)
        off.append(apart(got[b : b + 1], after_rounds(head, rows, (rows.shape[1],), anchor=5 + b)))
    return max(off)


@by_option
def test_rows_of_a_batch_are_apart(name):
    assert worst_row_of_a_batch(make(name)) < CLOSE


def test_a_ragged_mask_left_out_is_caught(monkeypatch):
    monkeypatch.setattr(context_module, "ragged_mask", lambda *_: None)
    assert worst_row_of_a_batch(make("plain")) > 100 * CLOSE


def test_copies_go_their_own_ways():
    head, taps = make("mixed windows"), taps_of(12)
    context = head.absorb(head.make_context(), taps[:, :8])
    twin = context.copy()
    context = head.absorb(context, taps[:, 8:])
    twin = head.absorb(twin, 9 * taps[:, 8:10])
    assert apart(head.block(context, mx.array([[5]])), after_rounds(head, taps, (12,))) < CLOSE
    other = mx.concatenate([taps[:, :8], 9 * taps[:, 8:10]], axis=1)
    assert apart(head.block(twin, mx.array([[5]])), after_rounds(head, other, (10,))) < CLOSE


def test_a_round_writes_in_place():
    """A round allocates far less than the context holds, once the last round's read is done."""
    head = make("plain")
    context = head.absorb(head.make_context(), taps_of(20000))
    mx.eval(context.state)
    taps, peaks = taps_of(3), []
    for hold in (False, True):
        held = [layer.copy() for layer in context.rows] if hold else None
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        context = head.absorb(context, taps, 2)
        mx.eval(head.block(context, mx.array([[5]])), context.state)
        peaks.append(mx.get_peak_memory() - before)
        del held
    # Attention's scores alone take a third of what this narrow context does.
    assert peaks[0] < context.nbytes / 2 < context.nbytes < peaks[1]


def test_bad_use_is_named():
    head = make("plain")
    context = head.absorb(head.make_context(), taps_of(3))
    with pytest.raises(ValueError, match="keep"):
        head.absorb(context, taps_of(2), 3)
    with pytest.raises(ValueError, match="whole"):
        head.block(context, mx.array([[5]]), slots=2)
    with pytest.raises(BindError, match="no confidence head"):
        head.confidence(mx.zeros((1, 1, H)), mx.array([[1]]))
    with pytest.raises(BindError, match="lends none"):
        Head(attrs.evolve(BASE, lm_head="borrowed")).bind(None, None)
    with pytest.raises(BindError, match="bind it"):
        Head(attrs.evolve(BASE, lm_head="borrowed")).base_logits(mx.zeros((1, H)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_heads": 3}, "cannot share"),
        ({"head_dim": 7}, "cannot be turned"),
        ({"mask_token_id": 61}, "no row"),
        ({"block_size": 0}, "from 1 to"),
        ({"kind": "dflash2"}, "candidate selector"),
        ({"kind": "dflash", "markov": "vanilla", "markov_rank": 2}, "kind dspark has"),
        ({"markov_rank": 3}, "do not go together"),
        ({"target_layer_ids": (1, 1)}, "stand once"),
        ({"confidence_temperatures": (1.0,)}, "for 5 drafts"),
    ],
)
def test_configs_that_are_none_are_refused(changes, words):
    with pytest.raises(CheckpointError, match=words):
        attrs.evolve(BASE, **changes)


# ---- slots and draws -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", range(1, BLOCK + 1))
def test_causal_blocks_compute_only_what_the_cap_needs(cap):
    head = make("causal windows")
    context = head.absorb(head.make_context(), taps_of(9))
    assert (head.config.slots_for(cap), make("plain").config.slots_for(cap)) == (cap, BLOCK)
    whole = draft(head, head.block(context, mx.array([[5]])), mx.array([[5]]), cap)
    part = draft(head, head.block(context, mx.array([[5]]), head.config.slots_for(cap)), mx.array([[5]]), cap)
    assert part.tokens.tolist() == whole.tokens.tolist()
    assert part.tokens.shape == (1, cap)
    assert apart(part.hidden, whole.hidden) < CLOSE


@pytest.mark.parametrize("name", ["plain", "gated", "dflash", "dflash2", "reduced"])
def test_draws_follow_q(name):
    """20,000 seeded draws of one slot behind another: their shares are q's, and q is a distribution."""
    changes = {"draft_vocab_size": 20, "markov": "vanilla", "markov_rank": 6} if name == "reduced" else {}
    head = make("plain" if name == "reduced" else name, **changes)
    ids = np.sort(np.random.default_rng(3).permutation(V)[:20])
    if name == "reduced":
        head.reduce_vocabulary(mx.array(ids))
    draws, cap = 20_000, 2
    hidden = mx.broadcast_to(5.0 * mx.random.normal((1, cap, H), key=mx.random.key(4)), (draws, cap, H))
    anchor = mx.full((draws, 1), 5, dtype=mx.int32)
    noise = mx.random.gumbel(noise_shape(head, draws, cap), key=mx.random.key(5))
    said = draft_rows(head, hidden, anchor, Sampling(noise, lambda logits: logits / 2, temperature=2.0))
    tokens = np.array(said.tokens)
    probs = np.array(said.q.probs)
    assert np.abs(probs.sum(-1) - 1).max() < 1e-5
    if name == "reduced":
        assert set(tokens.ravel()) <= set(ids)
        assert probs[..., np.setdiff1d(np.arange(V), ids)].max() == 0
    if hasattr(said.q, "ids"):
        places = np.array(said.q.ids)
        assert all(len(set(row)) == len(row) for row in places[:50].reshape(-1, places.shape[-1]))
        dense = np.zeros((draws, cap, V))
        np.put_along_axis(dense, places, probs, axis=-1)
        probs = dense
    # Behind each first token the second slot has a q of its own: compare the sum over draws with the counts.
    flatter = 0.9 * probs + 0.1 * (probs > 0) / (probs > 0).sum(-1, keepdims=True)
    for k in range(cap):
        seen = np.bincount(tokens[:, k], minlength=V)
        assert seen[probs[:, k].sum(0) == 0].sum() == 0
        assert chi_square(seen, probs[:, k].sum(0)) < 2.5 < chi_square(seen, flatter[:, k].sum(0))


def chi_square(seen: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square a degree of freedom, over cells that are expected to hold more than 20."""
    common = expected > 20
    return float(((seen - expected)[common] ** 2 / expected[common]).sum() / common.sum())


@pytest.mark.parametrize("size", [16, 61, 4096, 5000, 70_001])
def test_the_best_candidates_are_found(size):
    rng = np.random.default_rng(size)
    logits = rng.normal(size=(2, 3, size)).astype(np.float32)
    # All of the best in one group, and one to a group.
    logits[0, 0, :16] += 9
    logits[0, 1, :: max(1, size // 16)] += 9
    values, ids = best(mx.array(logits), 16)
    want = np.sort(logits, axis=-1)[..., ::-1][..., :16]
    assert np.array_equal(values, want)
    assert np.array_equal(np.take_along_axis(logits, np.array(ids).astype(np.int64), axis=-1), want)


def test_a_greedy_draft_is_the_draw_without_noise():
    for name in ("gated", "dflash", "dflash2"):
        head = make(name)
        hidden = after_rounds(head, taps_of(9), (9,))
        greedy = draft(head, hidden, mx.array([[5]]), 3)
        still = draft(head, hidden, mx.array([[5]]), 3, Sampling(mx.zeros(noise_shape(head, 1, 3)), temperature=0.5))
        assert greedy.q is None
        assert still.tokens.tolist() == greedy.tokens.tolist()


def test_a_padded_target_is_covered():
    """A target's logits may have more columns than the drafter's vocabulary; a borrowed head that has them is cropped."""
    head = make("plain", lm_head="borrowed")
    table = mx.random.normal((V + 3, H), key=mx.random.key(1))
    head.bind(None, lambda x: x @ table.T, V + 3)
    logits = head.base_logits(mx.zeros((1, 2, H)))
    assert logits.shape == (1, 2, V)
    assert head.widen(logits).shape == (1, 2, V + 3)
    assert noise_shape(head, 1, 2) == (1, 2, V + 3)
    assert mx.all(head.widen(logits)[..., V:] == -mx.inf).item()


# ---- training --------------------------------------------------------------------------------------------------------------


@by_option
def test_packed_blocks_equal_rounds(name):
    head, taps = make(name), taps_of(20)
    anchors, ids = mx.array([[3, 9, 20]]), mx.array([[5, 6, 7]])
    packed = packed_hidden(head, taps, anchors, ids)
    for n, (at, token) in enumerate(((3, 5), (9, 6), (20, 7))):
        assert apart(packed[:, n], after_rounds(head, taps[:, :at], (at,), anchor=token)) < CLOSE


@pytest.mark.parametrize("name", ["gated", "sinks and biases", "gemma, own values", "dflash2"])
def test_heads_can_be_trained(name):
    head, taps = make(name), taps_of(12)
    anchors, ids = mx.array([[2, 6]]), mx.array([[5, 6]])
    labels = mx.array(np.random.default_rng(0).integers(0, V, (1, 2, BLOCK)))

    def loss(head: Head) -> mx.array:
        hidden = packed_hidden(head, taps, anchors, ids)
        logits = head.step_logits(head.base_logits(hidden), hidden, labels)
        return nn.losses.cross_entropy(logits, labels, reduction="mean")

    step = nn.value_and_grad(head, loss)
    optimiser, first = optim.Adam(3e-3), None
    for _ in range(30):
        value, grads = step(head)
        optimiser.update(head, grads)
        mx.eval(head.parameters(), value)
        first = value.item() if first is None else first
    assert value.item() < 0.5 * first
    touched = {k for k, g in tree_flatten(grads) if mx.any(g != 0).item()}
    untouched = {k for k, _ in tree_flatten(head.parameters())} - touched
    assert {k.split(".")[0] for k in untouched} <= {"confidence_head", "candidate_selector"}

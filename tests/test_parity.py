"""Drafters compute what the upstream programs compute, from the published files, over three rounds that share a cache."""

from __future__ import annotations

import hashlib
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dspark.checkpoints.drafter import load_drafter
from dspark.models.heads import Head, draft_rows, kept_prefix, noise_shape, packed_hidden, previous_tokens
from dspark.models.heads.drafting import Sampling, lattice
from dspark.models.heads.nvfp4 import Nvfp4Linear
from dspark.models.heads.parts import log_snr_features
from dspark.stages.warp import temperature, top_k, top_p, warps
from tests.parity_sets import ROUNDS, VectorSet, read_set

# The vectors' own tolerances, given for hidden states up to 5 and logits up to 43; residual streams are larger, so theirs
# grow with them. Probabilities: the logits' tolerance over T, times a slope of at most 1/4.
HIDDEN, LOGITS, PROBS = 5e-5, 5e-4, 2e-4
DSPARK = (
    "dspark_qwen3",
    "dspark_qwen3_gated",
    "dspark_qwen3_nomarkov",
    "dspark_qwen35_native",
    "dspark_gemma4",
    "dspark_lfm2_interleaved",
    "dspark_nemotron",
    "gguf_dspark",
    "specforge_dspark",
    "speculators_dspark_anchor_full",
    "speculators_dspark_reduced",
)
DFLASH = ("dflash", "dflash_softcap", "dflash_swa", "speculators_dflash_reduced")
DFLASH2 = ("dflash2", "dflash2_full", "speculators_dflash2")
ALL = DSPARK + DFLASH + DFLASH2


def wrong(got: mx.array, want: np.ndarray, tolerance: float) -> str:
    """Nothing where every number is within the tolerance, else by how much the worst one is off."""
    if tuple(got.shape) != want.shape:
        return f"shape {tuple(got.shape)} instead of {want.shape}"
    off = float(np.abs(np.array(got, dtype=np.float64) - want).max())
    return "" if off <= tolerance else f"off by {off:.2g}, allowed {tolerance:.2g}"


def load(vectors: VectorSet, folder, **options) -> Head:
    """The set's drafter from its files, unpacked, bound to the set's target."""
    if vectors.gguf is None:
        path = vectors.write(folder)
    else:
        path = folder / "drafter.gguf"
        path.write_bytes(vectors.gguf)
    head = load_drafter(path, **{"bits": None, **options})
    lend(head, vectors)
    return head


def lend(head: Head, vectors: VectorSet) -> None:
    tables = {name: mx.array(array) for name, array in vectors.target.items()}
    embed, lm_head = tables.get("embed_tokens.weight"), tables.get("lm_head.weight")
    head.bind(None if embed is None else lambda ids: embed[ids], None if lm_head is None else lambda x: x @ lm_head.T)


@cache
def vectors_of(name: str) -> VectorSet:
    return read_set(name)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Loaded drafters by set, each loaded once."""
    return cache(lambda name: load(vectors_of(name), tmp_path_factory.mktemp(name)))


def replay(head: Head, vectors: VectorSet, shift_taps: int = 0) -> dict[str, str]:
    """Run the three rounds and name every output that is off. `shift_taps`: take taps of the wrong layers, for a control."""
    context, faults = head.make_context(), {}
    for r in ROUNDS:
        given = vectors.round(r)
        taps = mx.array(given["target_hidden"])
        if shift_taps:
            taps = mx.roll(taps, shift_taps * head.config.target_hidden_size, axis=-1)
        context = head.absorb(context, taps)
        assert context.starts == (int(given["start"]),)
        for name, fault in one_round(head, context, taps, given).items():
            if fault:
                faults[f"round {r}: {name}"] = fault
    return faults


def one_round(head: Head, context, taps: mx.array, given: dict[str, np.ndarray]) -> dict[str, str]:
    anchor, trace = mx.array(given["block_ids"][:, :1].astype(np.int32)), []
    hidden = head.block(context, anchor, trace=trace)
    said = draft_rows(head, head.predicting(hidden, head.config.num_drafts), anchor)
    before = previous_tokens(anchor, said.tokens)
    base = head.base_logits(hidden)
    found = {
        "context": wrong(head.context(taps), given["out_context"], HIDDEN),
        "block hidden": wrong(hidden, given["out_block_hidden"], HIDDEN),
        "tokens": "" if np.array_equal(said.tokens, given["out_tokens"]) else f"{said.tokens.tolist()}",
    }
    for i, state in enumerate(trace):
        name = "out_block_embed" if i == 0 else f"out_layer{i - 1}"
        if name in given:
            found[name] = wrong(state, given[name], HIDDEN * max(1, np.abs(given[name]).max() / 4))
    for i, layer in enumerate(context.rows):
        if f"ctx_k_layer{i}" in given:
            rows = int(given["start"])
            found[f"keys {i}"] = wrong(layer.keys[:, :, :rows], given[f"ctx_k_layer{i}"], HIDDEN)
            found[f"values {i}"] = wrong(layer.values[:, :, :rows], given[f"ctx_v_layer{i}"], HIDDEN)
    if "out_base_logits" in given:
        found["base logits"] = wrong(base, given["out_base_logits"], LOGITS)
    else:
        found["base logits"] = wrong(base[:, 1:], given["out_logits"], LOGITS)
    if "out_step_logits" in given:
        steps = head.step_logits(head.predicting(base, head.config.num_drafts), said.hidden, before)
        found["step logits"] = wrong(steps, given["out_step_logits"], LOGITS)
    if "out_confidence_logits" in given:
        found["confidence"] = wrong(head.confidence(said.hidden, before), given["out_confidence_logits"], LOGITS)
    if "out_lattice_scores" in given:
        found |= selector_faults(head, said.hidden, anchor, given)
    return found


def selector_faults(head: Head, hidden: mx.array, anchor: mx.array, given: dict[str, np.ndarray]) -> dict[str, str]:
    paths = lattice(head, hidden, anchor)
    unary = mx.take_along_axis(head.base_logits(hidden), paths.ids, axis=-1)
    same = np.array_equal(paths.ids, given["out_candidates_sorted"])
    return {
        "candidates": "" if same else "other candidates, or another order",
        "unary": wrong(unary, given["out_unary_sorted"], LOGITS),
        "lattice": wrong(paths.scores, given["out_lattice_scores"], LOGITS),
        "selector hidden": wrong(
            head.candidate_selector.hidden_projection(hidden), given["out_selector_hidden"], HIDDEN * 4
        ),
    }


@pytest.mark.parametrize("name", ALL)
def test_three_rounds(heads, name):
    assert replay(heads(name), vectors_of(name)) == {}


def test_three_rounds_under_muses_names(tmp_path):
    """Muse-Glimmer's assistant is a DFlash drafter with flat keys and two names of its own."""
    vectors = vectors_of("dflash")
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    config = vectors.config | vectors.config["dflash_config"] | {"architectures": ["MuseGlimmerAssistantModel"]}
    del config["dflash_config"]
    folder = vectors.write(tmp_path, config, {names.get(k, k): v for k, v in vectors.weights.items()})
    head = load_drafter(folder, bits=None)
    lend(head, vectors)
    assert replay(head, vectors) == {}


# ---- what it is drawn from ---------------------------------------------------------------------------------------------


def forcing(head: Head, choices: np.ndarray) -> mx.array:
    """Noise that makes a draw end in these choices [1, K]: far above what logits reach."""
    size = noise_shape(head, 1, choices.shape[1])[2]
    return mx.array(1e6 * np.eye(size, dtype=np.float32)[choices])


def cold(head: Head, choices: np.ndarray, warp) -> Sampling:
    return Sampling(forcing(head, choices), warp, temperature=0.7)


def at_temperature(logits: mx.array) -> mx.array:
    return logits / 0.7


@pytest.mark.parametrize("name", ALL)
def test_q_is_what_upstream_draws_from(heads, name):
    """At T 0.7, along tokens that are forced upon the draw."""
    head, vectors = heads(name), vectors_of(name)
    context, checked = head.make_context(), 0
    for r in ROUNDS:
        given = vectors.round(r)
        context = head.absorb(context, mx.array(given["target_hidden"]))
        anchor = mx.array(given["block_ids"][:, :1].astype(np.int32))
        hidden = head.predicting(head.block(context, anchor), head.config.num_drafts)
        truncated = warps(temperature(0.7), top_k(20), top_p(0.9))
        cases = [
            ("forced_tokens", "forced_out_q_T0.7", at_temperature),
            ("out_tokens", "out_q_T0.7_target_vocab", at_temperature),
            ("out_tokens", "out_q_T0.7_topp0.9_topk20", truncated),
        ]
        for tokens, law, warp in cases:
            if law in given:
                places = given["forced_slots"][None] if head.config.kind == "dflash2" else given[tokens]
                said = draft_rows(head, hidden, anchor, cold(head, places, warp))
                assert np.array_equal(said.tokens, given[tokens])
                assert wrong(said.q.probs, given[law], PROBS) == ""
                checked += 1
        if "forced_out_step_logits" in given:
            forced = mx.array(given["forced_tokens"].astype(np.int32))
            before = previous_tokens(anchor, forced)
            steps = head.step_logits(head.base_logits(hidden), hidden, before)
            assert wrong(steps, given["forced_out_step_logits"], LOGITS) == ""
        if "forced_out_confidence_logits" in given:
            assert wrong(head.confidence(hidden, before), given["forced_out_confidence_logits"], LOGITS) == ""
    has_law = any("_q_T" in key for key in vectors.arrays)
    assert bool(checked) == has_law


@pytest.mark.parametrize("name", [n for n in DSPARK if n.startswith("dspark") or n == "gguf_dspark"])
def test_confidence_cuts_where_upstream_cuts(heads, name):
    head, vectors = heads(name), vectors_of(name)
    for r in ROUNDS:
        given = vectors.round(r)
        if "out_confidence_logits" in given:
            logits = mx.array(given["out_confidence_logits"])
            assert kept_prefix(logits, 0.0).tolist() == [int(given["out_draft_len_thr0"])]
            assert kept_prefix(logits, 0.5).tolist() == [int(given["out_draft_len_thr05"])]
    assert head.config.confidence == ("none" if name in ("dspark_nemotron", "dspark_qwen3_nomarkov") else "markov")


# ---- encodings ---------------------------------------------------------------------------------------------------------


def test_a_gguf_is_converted_bit_for_bit(heads):
    head, vectors = heads("gguf_dspark"), vectors_of("gguf_dspark")
    have = {k: hashlib.sha256(np.array(v).tobytes()).hexdigest() for k, v in tree_flatten(head.parameters())}
    assert have == vectors.index["sha256"]
    features = log_snr_features(64)[[0, 1, 1, 1]]
    # Upstream takes the sine of 1000 f in float32, whose step there is 6e-5.
    assert np.abs(features - vectors.arrays["log_snr_features"]).max() < 1e-4
    assert wrong(head.log_snr_embed(4), vectors.arrays["log_snr_addend"], HIDDEN) == ""


def test_nvfp4_is_run_from_its_own_bytes():
    vectors = read_set("nvfp4")
    weights = {k.removeprefix("layers.0.mlp.up_proj."): v for k, v in vectors.weights.items()}
    packed = mx.array(weights["weight"].astype(np.uint8)).view(mx.uint32)
    scales = mx.array(weights["weight_scale"].astype(np.uint8))
    linear = Nvfp4Linear(packed, scales, mx.array(weights["weight_scale_2"]))
    want = vectors.arrays["out_dequant"]
    assert np.array_equal(linear.dequantised(), want)
    x = mx.random.normal((3, 64), key=mx.random.key(0))
    # float32 sums of 64 products of up to 20.
    assert wrong(linear(x), np.array(x, dtype=np.float64) @ want.T.astype(np.float64), 1e-4) == ""


@pytest.mark.parametrize("name", ALL)
def test_sixteen_bits_stay_sixteen(name, tmp_path):
    """What a GPU computes in bfloat16 is not raised to float32 on the way; logits and probabilities are."""
    vectors, trace = vectors_of(name), []
    head = load(vectors, tmp_path, dtype=mx.bfloat16)
    context = head.absorb(head.make_context(), mx.array(vectors.round(1)["target_hidden"]))
    anchor = mx.array([[3]])
    hidden = head.block(context, anchor, trace=trace)
    said = draft_rows(head, hidden, anchor, Sampling(mx.zeros(noise_shape(head, 1, hidden.shape[1]))))
    assert {x.dtype for x in (*trace, hidden, *context.state)} == {mx.bfloat16}
    assert {head.base_logits(hidden).dtype, said.q.probs.dtype} == {mx.float32}


# ---- training's forward ------------------------------------------------------------------------------------------------


def test_packed_blocks_equal_dspark_training(tmp_path):
    vectors = read_set("dspark_qwen3_train")
    head, given = load(vectors, tmp_path), vectors.arrays
    anchors, ids = (mx.array(given[k].astype(np.int32)) for k in ("anchor_positions", "input_ids"))
    hidden = packed_hidden(head, mx.array(given["target_hidden_states"]), anchors, mx.take_along_axis(ids, anchors, 1))
    places = mx.minimum(anchors[..., None] + mx.arange(head.config.block_size), ids.shape[1] - 1)
    before = mx.take_along_axis(ids, places.reshape(2, -1), axis=1).reshape(places.shape)
    logits = head.step_logits(head.base_logits(hidden), hidden, before)
    kept = given["out_eval_mask"].astype(bool)
    assert wrong(mx.array(np.array(logits)[kept]), given["out_draft_logits"][kept], LOGITS) == ""
    confidence = np.array(head.confidence(hidden, before))[kept]
    assert wrong(mx.array(confidence), given["out_confidence_logits"][kept], LOGITS) == ""


def test_packed_blocks_equal_dflash2_training(tmp_path):
    vectors = read_set("dflash2_train")
    head, given = load(vectors, tmp_path), vectors.arrays
    valid = given["anchor_valid"].astype(bool)
    anchors = mx.array(given["anchor_positions"][None].astype(np.int32))
    ids = mx.array(given["input_ids"].astype(np.int32))
    hidden = packed_hidden(head, mx.array(given["target_hidden_states"]), anchors, mx.take_along_axis(ids, anchors, 1))
    want = given["out_block_hidden"][valid]
    assert wrong(mx.array(np.array(hidden[0])[valid]), want, HIDDEN) == ""
    logits = head.base_logits(hidden)
    assert wrong(mx.array(np.array(logits[0])[valid]), given["out_unary_logits"][valid], LOGITS) == ""


# ---- negative controls -------------------------------------------------------------------------------------------------


def broken(name: str, tmp_path, **changes) -> dict[str, str]:
    """The faults of a set whose config.json says something else."""
    vectors = vectors_of(name)
    head = load_drafter(vectors.write(tmp_path, {**vectors.config, **changes}), bits=None)
    lend(head, vectors)
    return replay(head, vectors)


def test_taps_of_the_wrong_layers_are_caught(heads):
    faults = replay(heads("dspark_qwen3"), vectors_of("dspark_qwen3"), shift_taps=1)
    assert {"round 1: context", "round 1: tokens", "round 3: tokens"} <= set(faults)


def test_slots_shifted_by_one_are_caught(tmp_path):
    faults = broken("dspark_qwen3", tmp_path, sample_from_anchor=False)
    assert {f"round {r}: tokens" for r in ROUNDS} <= set(faults)
    assert "round 1: block hidden" not in faults


def test_the_wrong_rope_style_is_caught(tmp_path):
    faults = broken("dspark_lfm2_interleaved", tmp_path, rope_is_neox_style=True)
    assert {"round 1: block hidden", "round 1: keys 0"} <= set(faults)
    assert "round 1: context" not in faults


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dflash2", {"is_causal": None}),
        ("dflash_swa", {"layer_types": ["full_attention"] * 2}),
        ("dflash_swa", {"sliding_window": 9}),
        ("dspark_gemma4", {"final_logit_softcapping": None}),
        ("dspark_qwen35_native", {"architectures": ["Qwen3DSparkModel"], "layer_types": None}),
    ],
)
def test_other_misreadings_are_caught(tmp_path, name, changes):
    if "architectures" in changes:
        # Read as plain qwen3 its gated q_proj has twice the rows that there should be.
        with pytest.raises(Exception, match="q_proj"):
            broken(name, tmp_path, **changes)
    else:
        assert broken(name, tmp_path, **changes)

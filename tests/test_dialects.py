"""Every packaging is read rightly, and what is not read is refused in one sentence that says why and what would work."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dspark.checkpoints.dialects import DIALECTS
from dspark.checkpoints.dialects.keys import Keys
from dspark.checkpoints.drafter import (
    DrafterWarning,
    TargetFacts,
    facts_of,
    inspect,
    lend_tables,
    load_drafter,
)
from dspark.errors import CheckpointError, InputError, SourceError, UserError
from dspark.models.heads import Head, draft
from dspark.models.heads.nvfp4 import Nvfp4Linear
from tests.drafter_files import body, sizes, typed, write_headers
from tests.parity_sets import VectorSet, read_set
from tests.published import PUBLISHED, Published
from tests.test_parity import lend

TINY = TargetFacts(hidden_size=64, vocab_size=256, num_layers=8)


def changed(vectors: VectorSet, **changes) -> dict:
    return {**vectors.config, **changes}


# ---- what is published ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_drafters_are_read(name, tmp_path):
    """From headers alone: the files are holes of up to ten gigabytes."""
    expected: Published = PUBLISHED[name]()
    report = inspect(expected.write(tmp_path))
    assert report.refused is None
    assert report.packaging == expected.packaging
    assert (report.kind, report.slots.startswith("anchor"), report.drafts) == (
        expected.kind,
        expected.anchor,
        expected.drafts,
    )
    assert report.target_layer_ids == expected.taps
    assert report.masks == expected.masks
    assert (report.rope, report.tables, report.heads) == (expected.rope, expected.tables, expected.heads)
    assert dict(report.lines())["taps"] == "layers " + ", ".join(map(str, expected.taps))


def test_every_dialect_has_a_published_example(tmp_path):
    seen = {make().packaging for make in PUBLISHED.values()} | {"PrismML GGUF DSpark"}
    assert {d.name for d in DIALECTS} == seen


def test_bonsai_is_read_from_its_gguf(tmp_path):
    (tmp_path / "drafter.gguf").write_bytes(read_set("gguf_dspark").gguf)
    for path in (tmp_path / "drafter.gguf", tmp_path):
        report = inspect(path)
        assert (report.packaging, report.drafts, report.target_layer_ids) == ("PrismML GGUF DSpark", 4, (1, 3, 5))
        assert "log-SNR conditioning" in report.heads


def test_tensors_decide_where_no_architecture_is_named(tmp_path):
    for name, kind in (
        ("dflash2", "dflash2"),
        ("specforge_dspark", "dspark"),
        ("dspark_qwen3", "dspark"),
        ("dflash", "dflash"),
    ):
        vectors = read_set(name)
        report = inspect(vectors.write(tmp_path / name, changed(vectors, architectures=[])))
        assert (report.refused, report.kind) == (None, kind)


@pytest.mark.parametrize(
    ("block", "tokens", "anchor"), [(8, 8, True), (8, 7, False), (7, 6, False), (8, 4, False), (8, None, False)]
)
def test_speculators_slots_follow_the_layout_rule(tmp_path, block, tokens, anchor):
    config = PUBLISHED["RedHatAI/Qwen3.8-27B-speculator.dspark"]().config
    methods = [] if tokens is None else [{"speculative_tokens": tokens}]
    config |= {"block_size": block, "speculators_config": {"proposal_methods": methods}}
    folder = write_headers(tmp_path, config, PUBLISHED["RedHatAI/Qwen3.8-27B-speculator.dspark"]().tensors)
    assert inspect(folder).slots.startswith("anchor") == anchor


@pytest.mark.parametrize(
    ("top", "nested", "masks"),
    [
        ({}, {}, "all layers causal, window 2048"),
        ({}, {"causal": False}, "all layers bidirectional, window 2048"),
        ({"is_causal": True}, {"causal": False}, "all layers causal, window 2048"),
        ({"is_causal": False}, {"causal": True}, "all layers bidirectional, window 2048"),
        ({}, {"use_swa": True, "swa_window_size": 512}, "all layers causal, window 512"),
        ({}, {"use_swa": False, "swa_window_size": 512}, "all layers causal, window 2048"),
    ],
)
def test_causality_has_an_order_of_precedence(tmp_path, top, nested, masks):
    made = PUBLISHED["incoai/Qwen3.8-27B-DFlash2"]()
    config = {k: v for k, v in made.config.items() if k != "is_causal"} | top
    config["dflash_config"] = config["dflash_config"] | nested
    assert inspect(write_headers(tmp_path, config, made.tensors)).masks == (masks,)


def test_nested_keys_win_over_flat_ones(tmp_path):
    vectors = read_set("dflash")
    config = changed(vectors, mask_token_id=9, target_layer_ids=[0, 1, 2], block_size=7)
    report = inspect(vectors.write(tmp_path, config))
    assert (report.mask_token_id, report.target_layer_ids) == (250, (1, 4, 6))


# ---- what is refused ------------------------------------------------------------------------------------------------------


def reason(folder: Path, target: TargetFacts | None = None) -> str:
    """Why a folder is refused, which loading and inspecting must say alike."""
    with pytest.raises(UserError) as caught:
        load_drafter(folder, target=target)
    text = str(caught.value)
    report = inspect(folder, target)
    assert report.refused == text
    assert dict(report.lines())["refused"] == text
    assert one_sentence(text)
    assert text.startswith(str(folder))
    return text


def one_sentence(text: str) -> bool:
    return "\n" not in text and "Traceback" not in text and 20 < len(text) < 3000


REFUSED = {
    "eagle3": ({"speculators_model_type": "eagle3"}, "'eagle3', another way to draft; dspark, dflash and dflash2"),
    "peagle": ({"speculators_model_type": "peagle"}, "'peagle', another way"),
    "EAGLE by name": ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE drafter"),
    "DeepSeek-V4": (
        {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "dspark_block_size": 5},
        "DSpark drafter inside",
    ),
    "DeepSeek-V4 by class": (
        {"architectures": ["DSparkDraftModel"], "model_type": "deepseek_v4"},
        "no drafter to be loaded",
    ),
    "Domino": ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}}, "Domino"),
    "Laguna": ({"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna"),
    "unknown": ({"architectures": ["K3DSparkModel"]}, "'K3DSparkModel' is no packaging"),
    "last layer": ({"target_layer_ids": [1, 4, 7]}, "the last of num_target_layers 8"),
    "own vocabulary": ({"draft_vocab_size": 96}, "needs the speculators packaging"),
    "Markov rank": ({"markov_rank": 32}, "the tensors show rank 16"),
    "Markov type": ({"markov_head_type": "rnn"}, "those of a vanilla head"),
    "rope": ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type is 'longrope'"),
    "rope by layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differently by layer type"),
    "taps": ({"target_layer_ids": [1, 4]}, "fc.weight has the shape [64, 192] instead of [64, 128]"),
    "width": ({"hidden_size": 72}, "has the shape"),
    "activation": ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    "temperatures": ({"confidence_temperatures": [1.0]}, "1 confidence_temperatures for 7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, tmp_path):
    changes, words = REFUSED[name]
    vectors = read_set("dspark_qwen3")
    assert words in reason(vectors.write(tmp_path, changed(vectors, **changes)))


def test_a_language_model_is_no_drafter(tmp_path):
    config = sizes(64, 160, (4, 2, 24), 256, architectures=["Qwen3ForCausalLM"])
    shapes = {f"model.{k}": s for k, s in body(64, 160, (4, 2, 24), 2, 1).items() if k.startswith(("layers", "norm"))}
    assert "is a language model" in reason(write_headers(tmp_path, config, typed(shapes)))


def test_a_reduced_dflash2_is_refused(tmp_path):
    vectors = read_set("speculators_dflash2")
    assert "reduced vocabulary (96 of 256)" in reason(vectors.write(tmp_path, changed(vectors, draft_vocab_size=96)))


def test_reduced_vocabularies_must_be_mapped(tmp_path):
    vectors = read_set("speculators_dspark_reduced")
    without = {k: v for k, v in vectors.weights.items() if k != "d2t"}
    assert "no d2t maps them" in reason(vectors.write(tmp_path / "a", weights=without))
    far = {**vectors.weights, "d2t": vectors.weights["d2t"] + 200}
    with pytest.raises(CheckpointError, match="d2t leads outside"):
        load_drafter(vectors.write(tmp_path / "c", weights=far))
    assert "d2t has the shape [96] instead of [95]" in reason(
        vectors.write(tmp_path / "d", changed(vectors, draft_vocab_size=95))
    )


def test_missing_and_surplus_tensors_are_all_listed(tmp_path):
    vectors = read_set("dspark_qwen3")
    weights = {k: v for k, v in vectors.weights.items() if ".mlp." not in k}
    weights |= {"prefix.weight": np.zeros((3, 3), np.float32), "norm.weight": np.ones(65, np.float32)}
    text = reason(vectors.write(tmp_path, weights=weights))
    gone = [f"layers.{i}.mlp.{part}_proj.weight is missing" for i in (0, 1) for part in ("gate", "up", "down")]
    assert all(words in text for words in [*gone, "prefix.weight is surplus", "norm.weight has the shape [65]"])


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"hidden_size": 128}, "its taps are 64 wide and the target's layers 128"),
        ({"vocab_size": 250}, "256 tokens and the target's 250"),
        ({"vocab_size": 32000}, "256 tokens and the target's 32000"),
        ({"num_layers": 7}, "the last layer of a target with 7"),
        ({"num_layers": 5}, "layers that are not there of a target with 5"),
    ],
)
def test_a_drafter_must_fit_its_target(tmp_path, facts, words):
    folder = read_set("dflash").write(tmp_path)
    assert load_drafter(folder, bits=None, target=TINY).config.target_layer_ids == (1, 4, 6)
    assert words in reason(folder, attrs.evolve(TINY, **facts))


def test_nvidia_means_the_last_layer_raw(tmp_path):
    """Nemotron's heads tap the 52nd of 52 layers; nobody else may, for the usual last hidden state is behind the final norm."""
    made = PUBLISHED["NVIDIA Nemotron-3.5-Lightning DSpark, NVFP4"]()
    facts = TargetFacts(2688, 131072, 52, "nemotron_h")
    assert inspect(made.write(tmp_path / "a"), facts).refused is None
    config = {k: v for k, v in made.config.items() if not k.startswith("eagle")}
    assert "the last of num_target_layers 52" in reason(write_headers(tmp_path / "b", config, made.tensors), facts)
    del config["num_target_layers"]
    assert "the last layer of a target with 52" in reason(write_headers(tmp_path / "c", config, made.tensors), facts)


def test_a_padded_target_fits(tmp_path):
    folder = read_set("dflash").write(tmp_path)
    assert load_drafter(folder, bits=None, target=TargetFacts(64, 288, 8)).config.vocab_size == 256


def test_gemma_targets_scale_what_they_lend(tmp_path):
    """z-lab trains on the target's own, scaled embedding; the table that is lent is raw."""
    vectors = read_set("dflash")
    folder, gemma = vectors.write(tmp_path / "a"), TargetFacts(64, 256, 8, "gemma4_text")
    assert load_drafter(folder, bits=None, target=gemma).config.embedding_scale == 8.0
    said = {**vectors.config, "dflash_config": {**vectors.config["dflash_config"], "input_embedding_scale": 3.0}}
    assert load_drafter(vectors.write(tmp_path / "b", said), bits=None, target=gemma).config.embedding_scale == 3.0
    raw = read_set("speculators_dflash2").write(tmp_path / "c")
    assert load_drafter(raw, bits=None, target=gemma).config.embedding_scale == 1.0


# ---- files that are none ---------------------------------------------------------------------------------------------------


def test_folders_without_a_drafter(tmp_path):
    vectors = read_set("dflash")
    for folder, words in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path, "no config.json"),
        (vectors.write(tmp_path / "text") / "config.json", "a .gguf file"),
    ):
        with pytest.raises(SourceError, match=words):
            inspect(folder)
    empty = vectors.write(tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="no safetensors"):
        load_drafter(empty)
    (empty / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="convert them first"):
        load_drafter(empty)
    (vectors.write(tmp_path / "mimo") / "mask_embedding.pt").touch()
    assert "mask_embedding.pt" in reason(tmp_path / "mimo")


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", "[" * 100_000, '{"a": 1', "\ufeff{}"])
def test_configs_that_are_no_json(tmp_path, text):
    folder = read_set("dflash").write(tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        load_drafter(folder)
    assert one_sentence(str(caught.value))
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_drafter(folder)


def test_indexed_shards(tmp_path):
    vectors = read_set("dflash")
    folder = vectors.write(tmp_path)
    whole = mx.load(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": list(whole)[::2], "b.safetensors": list(whole)[1::2]}
    for file, names in parts.items():
        mx.save_safetensors(str(folder / file), {n: whole[n] for n in names})
    index = {n: file for file, names in parts.items() for n in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert load_drafter(folder, bits=None).config.kind == "dflash"
    for bad, words in (
        ("../x.safetensors", "no safetensors file of this folder"),
        ("c.safetensors", "c.safetensors is missing"),
    ):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**index, "norm.weight": bad}}))
        with pytest.raises(UserError, match=words):
            load_drafter(folder)


def test_damaged_safetensors(tmp_path):
    """Cut at many lengths, and with bytes of its header changed: one sentence, or a head that loads."""
    folder = read_set("dflash").write(tmp_path)
    file, rng = folder / "model.safetensors", np.random.default_rng(0)
    data = file.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    outcomes = set()
    for i in range(60):
        bad = bytearray(data[: int(rng.integers(0, len(data)))] if i % 2 else data)
        for _ in range(3):
            bad[int(rng.integers(0, min(head, len(bad))))] = int(rng.integers(0, 256)) if len(bad) else 0
        file.write_bytes(bytes(bad))
        outcomes.add(outcome(folder))
    assert outcomes == {"refused"}


def test_damaged_gguf(tmp_path):
    """A crafted file must give one sentence: `mx.load` would take the process down."""
    data, rng = read_set("gguf_dspark").gguf, np.random.default_rng(1)
    file, outcomes = tmp_path / "drafter.gguf", []
    for i in range(150):
        bad = bytearray(data[: int(rng.integers(1, 4000))] if i % 5 == 0 else data)
        for _ in range(int(rng.integers(1, 4))):
            bad[int(rng.integers(0, min(3600, len(bad))))] = int(rng.integers(0, 256))
        file.write_bytes(bytes(bad))
        outcomes.append(outcome(file))
    assert set(outcomes) == {"refused", "loaded"}
    assert outcomes.count("refused") > 75


def test_other_ggufs_are_refused(tmp_path):
    file = tmp_path / "drafter.gguf"
    data = read_set("gguf_dspark").gguf
    file.write_bytes(data.replace(b"dspark", b"llamas"))
    assert "general.architecture is 'llamas'" in reason(file)
    (tmp_path / "other.gguf").write_bytes(data)
    with pytest.raises(SourceError, match="name the one to use"):
        inspect(tmp_path)


# ---- fuzz ------------------------------------------------------------------------------------------------------------------

FUZZED = (
    "dspark_qwen3_gated",
    "dspark_gemma4",
    "dspark_qwen35_native",
    "dspark_nemotron",
    "specforge_dspark",
    "dspark_lfm2_interleaved",
    "dflash_swa",
    "dflash2",
    "speculators_dspark_reduced",
    "speculators_dflash2",
)
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 7, 7.0, 2.7, 1e300, -1e300, float("nan"), float("inf"), 1 << 31, 1 << 63, 10**40, "",
    "7", "full_attention", [], [[]], [1], [1, 1, 1], [-1, 4, 6], ["a"], {}, {"a": 1}, [None], "\u0000", {"rope_type": "yarn"},
    {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0000001}, [2.5, 3.5, 4.5], ["sliding_attention"] * 2,
]  # fmt: skip


def places(config: dict, path: tuple = ()) -> list[tuple]:
    found = []
    for key, value in config.items():
        found.append((*path, key))
        if isinstance(value, dict):
            found += places(value, (*path, key))
    return found


def mutated(config: dict, rng: np.random.Generator) -> dict:
    """A copy with one to three keys deleted, replaced, renamed or added."""
    config = json.loads(json.dumps(config))
    for _ in range(int(rng.integers(1, 4))):
        paths = places(config)
        if not paths:
            break
        *parents, key = paths[int(rng.integers(len(paths)))]
        table = config
        for parent in parents:
            table = table[parent]
        how = rng.random()
        if how < 0.25:
            table.pop(key)
        elif how < 0.9:
            table[key] = VALUES[int(rng.integers(len(VALUES)))]
        else:
            table[f"{key}_"] = table.pop(key)
    return config


def outcome(path: Path) -> str:
    """Load, and draft if that goes: "loaded" or "refused". Anything else than a user's error goes up."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DrafterWarning)
            head = load_drafter(path, bits=None)
    except UserError as error:
        good = one_sentence(str(error)) and str(error).startswith(str(path))
        return "refused" if good else f"refused, but not in a sentence: {error}"
    table = mx.zeros((1 << 9, head.config.hidden_size))
    head.bind(lambda ids: table[ids % 512], lambda x: mx.zeros((*x.shape[:-1], head.config.vocab_size)))
    context = head.absorb(head.make_context(), mx.zeros((1, 3, head.fc.weight.shape[1])))
    anchor = mx.array([[1]])
    mx.eval(draft(head, head.block(context, anchor), anchor, head.config.num_drafts).tokens)
    return "loaded"


def fuzz(name: str, tmp_path: Path, count: int) -> list[str]:
    vectors, rng = read_set(name), np.random.default_rng(FUZZED.index(name))
    folder, found = vectors.write(tmp_path), []
    for _ in range(count):
        (folder / "config.json").write_text(json.dumps(mutated(vectors.config, rng)))
        found.append(outcome(folder))
    return found


@pytest.mark.parametrize("name", FUZZED)
def test_fuzzed_configs_load_or_are_refused_in_a_sentence(name, tmp_path):
    """Ten packagings, 25 mutations each."""
    found = fuzz(name, tmp_path, 25)
    assert {"loaded", "refused"} == set(found)


def test_the_fuzz_catches_a_reader_that_checks_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Keys, "whole", lambda self, name, default=7, low=0, high=0: self._or(name, default)[1])
    with pytest.raises((TypeError, ValueError)):
        fuzz("dspark_qwen3_gated", tmp_path, 100)


# ---- loading ---------------------------------------------------------------------------------------------------------------


def test_an_untrained_drafter_warns(tmp_path):
    vectors = read_set("dspark_qwen3")
    fresh = {k: np.ones_like(v) if k.endswith("norm.weight") else v for k, v in vectors.weights.items()}
    with pytest.warns(DrafterWarning, match="looks untrained"):
        head = load_drafter(vectors.write(tmp_path / "a", weights=fresh), bits=None)
    assert "looks untrained" in head.about.notes[0]
    assert load_drafter(vectors.write(tmp_path / "b"), bits=None).about.notes == ()


def packed_modules(head: Head) -> dict[str, tuple[int, int]]:
    kinds = (nn.QuantizedLinear, nn.QuantizedEmbedding)
    return {k: (m.bits, m.group_size) for k, m in head.named_modules() if isinstance(m, kinds)}


def test_weights_are_packed_on_loading(tmp_path):
    head = load_drafter(read_set("dflash2").write(tmp_path / "a"))
    assert head.about.bits == 4
    packed = packed_modules(head)
    # 96 columns divide into groups of 32 only, 160 into neither 64 nor 128.
    assert packed["layers.0.self_attn.q_proj"] == (4, 64)
    assert (packed["layers.0.self_attn.o_proj"], packed["layers.0.mlp.down_proj"]) == ((4, 32), (4, 32))
    assert not any("selector" in name or "conv" in name for name in packed)
    head = load_drafter(read_set("dspark_qwen3_gated").write(tmp_path / "b"), bits=8, group_size=32)
    packed = packed_modules(head)
    assert {"embed_tokens", "lm_head", "fc"} <= set(packed)
    # Rank 16 is no group, and what is small or only looked up stays.
    assert not any(name.startswith(("markov_head", "confidence_head")) for name in packed)
    assert packed_modules(load_drafter(tmp_path / "b", bits=0)) == {}
    for options in ({"bits": 7}, {"bits": "4"}, {"group_size": 48}):
        with pytest.raises(InputError, match="allowed are"):
            load_drafter(tmp_path / "b", **options)


def test_packed_drafters_say_nearly_the_same(tmp_path):
    vectors = read_set("speculators_dspark_anchor_full")
    folder, given = vectors.write(tmp_path), vectors.round(1)
    off = {}
    for bits in (None, 8, 4):
        head = load_drafter(folder, bits=bits)
        lend(head, vectors)
        context = head.absorb(head.make_context(), mx.array(given["target_hidden"]))
        hidden = head.block(context, mx.array(given["block_ids"][:, :1].astype(np.int32)))
        off[bits] = float(np.abs(np.array(hidden) - given["out_block_hidden"]).mean())
    assert off[None] < 1e-5 < off[8] < 0.05 < off[4] < 0.6


def test_a_mlx_packed_checkpoint_is_kept_as_it_is(tmp_path):
    vectors = read_set("dspark_qwen3")
    head = load_drafter(vectors.write(tmp_path / "plain"), bits=8, group_size=32)
    saved = dict(tree_flatten(head.parameters()))
    folder = tmp_path / "packed"
    folder.mkdir()
    config = changed(vectors, quantization={"group_size": 32, "bits": 8})
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), saved)
    again = load_drafter(folder)
    assert {k: mx.array_equal(v, saved[k]).item() for k, v in tree_flatten(again.parameters())} == dict.fromkeys(
        saved, True
    )
    assert packed_modules(again) == packed_modules(head)
    (folder / "config.json").write_text(json.dumps(changed(vectors, quantization={"group_size": 64, "bits": 8})))
    assert "is not packed as quantization" in reason(folder)
    (folder / "config.json").write_text(json.dumps(vectors.config))
    assert "groups of 32, 64 or 128" in reason(folder)


def test_an_nvfp4_checkpoint_runs_from_its_own_bytes(tmp_path):
    """Its MLP, fc and Markov table packed as modelopt does, against the same head with those weights dequantised."""
    vectors, plain = read_set("dspark_nemotron"), {}
    tensors: dict[str, tuple[str, mx.array]] = {}
    for name, array in vectors.weights.items():
        tensors[name] = ("F32", mx.array(array))
        plain[name] = array
        if ".mlp." in name or name in ("fc.weight", "markov_head.markov_w2.weight"):
            scale = mx.array(0.5, dtype=mx.float32)
            packed, scales = mx.quantize(mx.array(array) / scale, mode="nvfp4")
            base = name.removesuffix(".weight")
            tensors[name] = ("U8", packed.view(mx.uint8))
            tensors[f"{base}.weight_scale"] = ("F8_E4M3", scales)
            tensors[f"{base}.weight_scale_2"] = ("F32", scale)
            tensors[f"{base}.input_scale"] = ("F32", scale)
            plain[name] = np.array(Nvfp4Linear(packed, scales, scale).dequantised())
    folder = write_arrays(tmp_path / "nvfp4", vectors.config, tensors)
    head = load_drafter(folder, bits=None)
    assert inspect(folder).packed == "part of them NVFP4"
    linears = {k for k, m in head.named_modules() if isinstance(m, Nvfp4Linear)}
    assert linears == {f"layers.{i}.mlp.{p}_proj" for i in (0, 1) for p in ("gate", "up", "down")} | {
        "fc",
        "markov_head.markov_w2",
    }
    other = load_drafter(vectors.write(tmp_path / "plain", weights=plain), bits=None)
    said = []
    for one in (head, other, load_drafter(folder)):
        lend(one, vectors)
        context = one.absorb(one.make_context(), mx.array(vectors.round(1)["target_hidden"]))
        anchor = mx.array([[3]])
        hidden = one.block(context, anchor)
        said.append((hidden, draft(one, hidden, anchor, 7).tokens.tolist()))
    # The same products, summed in another order.
    assert mx.abs(said[0][0] - said[1][0]).max().item() < 1e-4
    assert said[0][1] == said[1][1]
    assert mx.abs(said[2][0] - said[0][0]).max().item() > 1e-3


def write_arrays(folder: Path, config: dict, tensors: dict[str, tuple[str, mx.array]]) -> Path:
    """A safetensors file with types that MLX does not write."""
    write_headers(folder, config, {name: (dtype, tuple(a.shape)) for name, (dtype, a) in tensors.items()})
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        for _, array in tensors.values():
            file.write(np.array(array).tobytes())
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [None, 8])
def test_a_target_lends_its_tables(tmp_path, tied, bits):
    """Tied or not, quantised or not: rows and logits are those of the target's own weights."""
    vectors = read_set("dflash")
    head = load_drafter(vectors.write(tmp_path), bits=None)
    embedding, linear = nn.Embedding(256, 64), nn.Linear(64, 256, bias=False)
    embedding.weight, linear.weight = mx.random.normal((256, 64)), mx.random.normal((256, 64))
    if bits:
        embedding, linear = embedding.to_quantized(64, bits), linear.to_quantized(64, bits)
    raw = embedding if tied else linear
    target = SimpleNamespace(embedding=embedding, lm_head_raw=raw, vocab_size=256, hidden_size=64, num_layers=8)
    target.name, target.config = "tiny", {"text_config": {"model_type": "gemma4_text"}}
    assert facts_of(target) == TargetFacts(64, 256, 8, "gemma4_text", "tiny")
    lend_tables(head, target)
    whole = lambda m: mx.dequantize(m.weight, m.scales, m.biases, 64, bits) if bits else m.weight
    ids, hidden = mx.array([[3, 250]]), mx.random.normal((1, 2, 64))
    assert mx.abs(head.embed(ids) - whole(embedding)[ids]).max().item() < 1e-6
    assert mx.abs(head.base_logits(hidden) - hidden @ whole(raw).T).max().item() < 1e-3
    assert not any("table" in name for name, _ in tree_flatten(head.parameters()))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [None, 8])
def test_a_reduced_vocabulary_without_rows_borrows_the_targets(tmp_path, tied, bits):
    """Its logits are the target's own at the tokens that d2t names, and in its order."""
    vectors = read_set("speculators_dspark_reduced")
    head = load_drafter(
        vectors.write(tmp_path, weights={k: v for k, v in vectors.weights.items() if k != "lm_head.weight"}), bits=None
    )
    assert head.config.lm_head == "borrowed"
    assert head.target_ids is not None
    embedding, linear = nn.Embedding(256, 64), nn.Linear(64, 256, bias=not tied)
    embedding.weight, linear.weight = mx.random.normal((256, 64)), mx.random.normal((256, 64))
    if bits:
        embedding, linear = embedding.to_quantized(64, bits), linear.to_quantized(64, bits)
    raw = embedding if tied else linear
    lend_tables(head, SimpleNamespace(embedding=embedding, lm_head_raw=raw, vocab_size=256))
    hidden = mx.random.normal((1, 2, 64))
    whole = (raw.as_linear if tied else raw)(hidden)
    wanted = whole[..., head.target_ids]
    assert mx.abs(head.base_logits(hidden) - wanted).max().item() < 1e-3
    # In another order it is not the same.
    assert mx.abs(head.base_logits(hidden) - wanted[..., ::-1]).max().item() > 1e-3


def test_numbers_are_held_as_the_machine_needs(tmp_path):
    """A CPU computes in float32; asked for, 16 bits are given, and what a GGUF holds in float32 beside them is not kept."""
    folder = read_set("dflash").write(tmp_path)
    assert load_drafter(folder).dtype == mx.float32
    head = load_drafter(folder, bits=None, dtype=mx.bfloat16)
    assert {v.dtype for _, v in tree_flatten(head.parameters())} == {mx.bfloat16}


def test_reading_headers_reads_nothing_else(tmp_path, monkeypatch):
    folder = read_set("dflash").write(tmp_path)
    monkeypatch.setattr(mx, "load", lambda *_: pytest.fail("weights were read"))
    assert inspect(folder).parameters == sum(v.size for v in read_set("dflash").weights.values())
    with pytest.raises(pytest.fail.Exception):
        load_drafter(folder)


def test_the_page_lists_every_packaging():
    text = (Path(__file__).parent.parent / "docs" / "drafters.md").read_text()
    rows = re.findall(r"^\| ([^|]+?) \|", text, re.MULTILINE)
    assert {d.name for d in DIALECTS} <= set(rows)
    named = set(re.findall(r"`([a-z0-9_]+)`", text))
    sets = {p.stem for p in (Path(__file__).parent / "parity").glob("*.npz")}
    assert sets <= named

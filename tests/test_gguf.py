"""A GGUF file is read bit for bit, becomes mlx-lm's own model, and a crafted one ends in one sentence."""

from __future__ import annotations

import contextlib
import struct

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen2, qwen3

from dspark.checkpoints import gguf, gguf_header, gguf_tensors
from dspark.checkpoints.gguf import load_gguf
from dspark.checkpoints.gguf_header import read_header
from dspark.checkpoints.gguf_tensors import read_tensor
from dspark.checkpoints.gguf_tokenizer import build_tokenizer, end_ids
from dspark.errors import CheckpointError
from tests.tiny_gguf import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    blocks,
    dequantised,
    gguf_bytes,
    model_shapes,
    tiny_model,
    value,
)

SHAPE = (6, 64)
MODULES = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}


def one_tensor(path, kind, shape=SHAPE, seed=3):
    raw = blocks(kind, shape, seed)
    path.write_bytes(gguf_bytes({"general.name": "one"}, {"x.weight": (kind, shape, raw)}))
    return raw


def read_one(path):
    with open(path, "rb") as file:
        return read_tensor(file, read_header(path).tensors["x.weight"])


# Weights


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_tensors_equal_mlx_own_reader_bit_for_bit(tmp_path, kind):
    path = tmp_path / "one.gguf"
    one_tensor(path, kind)
    ours = {f"x.{leaf or 'weight'}": array for leaf, array in read_one(path).items()}
    theirs = mx.load(str(path))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype
        assert mx.array_equal(array, theirs[name]), name


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)])
def test_packed_weights_stand_for_what_the_format_says(tmp_path, kind, bits):
    path = tmp_path / "one.gguf"
    wanted = dequantised(kind, one_tensor(path, kind), SHAPE)
    parts = {leaf: a if leaf == "weight" else a.astype(mx.float32) for leaf, a in read_one(path).items()}
    found = np.array(mx.dequantize(parts["weight"], parts["scales"], parts["biases"], 32, bits))
    # Q8_0 adds 128 times the scale and takes it away again: one rounding of a product of at most 255 * 0.02.
    assert np.abs(found - wanted).max() <= (0 if kind != "Q8_0" else 255 * 0.02 * 2**-23)


def test_the_comparison_notices_a_wrong_nibble_order(tmp_path, monkeypatch):
    path = tmp_path / "one.gguf"
    one_tensor(path, "Q4_1")
    monkeypatch.setattr(gguf_tensors, "_nibbles", np.ascontiguousarray)
    assert not mx.array_equal(read_one(path)["weight"], mx.load(str(path))["x.weight"])


def reference_model(path, kind):
    """mlx-lm's model with the float32 weights that the file stands for, q and k put back in numpy."""
    args = {
        "model_type": kind, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": MLP,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "tie_word_embeddings": True,
        "vocab_size": model_shapes()["token_embd.weight"][0],
    }  # fmt: skip
    model = MODULES[kind].Model(MODULES[kind].ModelArgs.from_dict(args))
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    pairs = []
    header = read_header(path)
    raw = path.read_bytes()
    for name, info in header.tensors.items():
        array = dequantised(info.type, raw[info.offset : info.offset + info.nbytes], info.shape)
        if kind == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = HEADS if ".attn_q." in name else KV_HEADS
            # Row r of a head was written at 2 r, or at 2 (r - half) + 1 for the second half.
            order = [h * HEAD_DIM + 2 * (r % 8) + r // 8 for h in range(heads) for r in range(HEAD_DIM)]
            array = array[order]
        stem, leaf = name.rsplit(".", 1)
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            stem = f"model.layers.{layer}.{gguf.NAMES[part]}"
        pairs.append((f"{names.get(stem, stem)}.{leaf}", mx.array(array)))
    model.load_weights(pairs)
    return model


IDS = mx.array([[5, 80, 17, 200, 3, 90, 41]])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_float_models_compute_what_mlx_lm_computes(tmp_path, kind):
    path = tiny_model(tmp_path / "tiny.gguf", kind, quant="F32", embed="F32")
    model, config = load_gguf(read_header(path))
    assert type(model) is MODULES[kind].Model
    assert "quantization" not in config
    wanted = reference_model(path, kind)(IDS)
    assert mx.array_equal(model(IDS), wanted)
    assert mx.argmax(wanted, -1).size > 1
    assert len(set(mx.argmax(wanted, -1)[0].tolist())) > 2, "a model that always says the same would prove nothing"


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantised_models_keep_each_layer_as_stored(tmp_path, quant):
    path = tiny_model(tmp_path / "tiny.gguf", "llama", quant=quant, embed="Q8_0")
    model, config = load_gguf(read_header(path))
    bits = 8 if quant == "Q8_0" else 4
    assert model.layers[0].self_attn.q_proj.bits == bits
    assert model.model.embed_tokens.bits == 8
    assert config["quantization"]["bits"] == bits
    assert config["quantization"].get("model.embed_tokens", {"bits": bits})["bits"] == 8
    stored = mx.load(str(path))
    ours = dict(tree_flatten(model.parameters()))
    assert mx.array_equal(ours["model.layers.1.mlp.down_proj.weight"], stored["blk.1.ffn_down.weight"])
    assert mx.array_equal(ours["model.layers.1.mlp.down_proj.scales"], stored["blk.1.ffn_down.scales"])
    model.set_dtype(mx.float32)
    difference = mx.abs(model(IDS) - reference_model(path, "llama")(IDS)).max().item()
    # The same weights, multiplied packed and unpacked: sums of some hundred float32 products of size 1.
    assert difference < 1e-3


def test_the_comparison_notices_rows_left_permuted(tmp_path, monkeypatch):
    path = tiny_model(tmp_path / "tiny.gguf", "llama", quant="F32", embed="F32")
    monkeypatch.setattr(gguf, "_permuted_heads", lambda name, config: None)
    model, _ = load_gguf(read_header(path))
    assert mx.abs(model(IDS) - reference_model(path, "llama")(IDS)).max().item() > 0.1


def test_an_output_layer_of_its_own_and_rope_factors_are_used(tmp_path):
    n_tokens = model_shapes()["token_embd.weight"][0]
    head = ("Q8_0", (n_tokens, HIDDEN), blocks("Q8_0", (n_tokens, HIDDEN), 99))
    factors = ("F32", (HEAD_DIM // 2,), np.linspace(1, 8, HEAD_DIM // 2).astype("<f4").tobytes())
    path = tiny_model(tmp_path / "t.gguf", tensors={"output.weight": head, "rope_freqs.weight": factors})
    model, config = load_gguf(read_header(path))
    assert not config["tie_word_embeddings"]
    assert model.lm_head.bits == 8
    wanted = 10000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM) * np.linspace(1, 8, HEAD_DIM // 2)
    assert np.allclose(np.array(model.layers[1].self_attn.rope._freqs), wanted, rtol=1e-6, atol=0)


# Tokenizer


def test_tokenizer_has_template_end_and_special_tokens(tmp_path):
    header = read_header(tiny_model(tmp_path / "tiny.gguf"))
    tokenizer = build_tokenizer(header)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1
    assert ids.count(2) == 1
    assert tokenizer.eos_token_ids == {0, 2}
    assert end_ids(header) == [0, 2]
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.model_max_length == 128


def test_merges_are_used_and_digits_stand_apart(tmp_path):
    smollm = build_tokenizer(read_header(tiny_model(tmp_path / "a.gguf")))
    gpt2 = build_tokenizer(read_header(tiny_model(tmp_path / "b.gguf", metadata={"tokenizer.ggml.pre": "gpt-2"})))
    assert smollm.convert_ids_to_tokens(smollm.encode("hello world")) == ["hello", "Ġw", "o", "r", "l", "d"]
    assert smollm.convert_ids_to_tokens(smollm.encode("12")) == ["1", "2"]
    assert gpt2.convert_ids_to_tokens(gpt2.encode("12")) == ["12"]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe", "tekken"])
@pytest.mark.parametrize("text", ["hello wörld 1234,  x\n\n  y's", "🙂 日本語 \t!?", "a\r\nb   c"])
def test_text_comes_back_whole(tmp_path, pre, text):
    changes = {"tokenizer.ggml.pre": pre}
    tokenizer = build_tokenizer(read_header(tiny_model(tmp_path / "t.gguf", metadata=changes)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


@pytest.mark.parametrize(
    ("pre", "given", "begins"),
    [("smollm", None, False), ("llama-bpe", None, True), ("smollm", True, True), ("llama-bpe", False, False)],
)
def test_bos_is_added_where_the_file_says_so(tmp_path, pre, given, begins):
    changes = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": given}
    tokenizer = build_tokenizer(read_header(tiny_model(tmp_path / "t.gguf", metadata=changes)))
    assert (tokenizer.encode("hello")[0] == 1) is begins


TOKENS = ["a", "b", "ab"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.pre": "smolm"}, "did you mean 'smollm'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokenizer.ggml.model": "llama"}, "its tokenizer is 'llama'"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["h zz"]}, "'h zz'"),
        ({"tokenizer.ggml.merges": ["h e l"]}, "'h e l'"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "tokenizer.ggml.eos_token_id is 9999"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "has 2 entries"),
        ({"tokenizer.ggml.tokens": ["a"] * 9, "tokenizer.ggml.token_type": [1] * 9}, "twice"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "bos_token_id is not"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_refused(tmp_path, changes, says):
    header = read_header(tiny_model(tmp_path / "t.gguf", metadata=changes))
    with pytest.raises(CheckpointError) as caught:
        build_tokenizer(header)
    assert says in str(caught.value)
    assert one_sentence(caught.value)


# What cannot be read


def one_sentence(error):
    return "\n" not in str(error) and len(str(error)) < 600


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"metadata": {"general.architecture": "gemma3"}}, "its architecture is 'gemma3'"),
        ({"metadata": {"general.architecture": "lama"}}, "did you mean 'llama'"),
        ({"metadata": {"split.count": 3}}, "one part of a split model"),
        ({"metadata": {"llama.expert_count": 8}}, "llama.expert_count is 8"),
        ({"metadata": {"llama.block_count": None}}, "llama.block_count is None"),
        ({"metadata": {"llama.block_count": 1 << 30}}, f"llama.block_count is {1 << 30}"),
        ({"metadata": {"llama.block_count": 3}}, "missing blk.2.attn_q.weight, "),
        ({"metadata": {"llama.block_count": 1}}, "unknown blk.1.attn_norm.weight, "),
        ({"metadata": {"llama.attention.head_count": [4, 4]}}, "llama.attention.head_count is"),
        ({"metadata": {"llama.embedding_length": 32}}, "wrong shape"),
        ({"metadata": {"llama.attention.layer_norm_rms_epsilon": float("nan")}}, "a number above 0 is needed"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "llama.rope.dimension_count is 8; only 16"),
        ({"metadata": {"llama.rope.scaling.type": "su"}}, "llama.rope.scaling.type is 'su'"),
        ({"tensors": {"output_norm.weight": None}}, "missing output_norm.weight"),
        ({"tensors": {"token_embd.weight": None}}, "'token_embd.weight' is missing"),
        ({"tensors": {"blk.0.extra.weight": ("F32", (4,), bytes(16))}}, "unknown blk.0.extra.weight"),
        ({"tensors": {"output_norm.weight": ("Q8_0", (64,), bytes(68))}}, "quantised vectors output_norm.weight"),
        (
            {"tensors": {"blk.0.attn_v.weight": ("Q6_K", (32, 256), bytes(32 * 210))}},
            "types other than F32, F16, Q4_0, Q4_1, Q8_0: blk.0.attn_v.weight (Q6_K)",
        ),
    ],
)
def test_a_model_that_cannot_be_read_is_refused_by_name(tmp_path, changes, says):
    header = read_header(tiny_model(tmp_path / "t.gguf", **changes))
    with pytest.raises(CheckpointError) as caught:
        load_gguf(header)
    assert says in str(caught.value)
    assert one_sentence(caught.value)


def crafted(**parts) -> bytes:
    """A file of one key and one tensor, with any part of it replaced."""
    fields = {
        "magic": b"GGUF", "version": struct.pack("<I", 3), "n_tensors": struct.pack("<Q", 1),
        "n_keys": struct.pack("<Q", 1), "key_length": struct.pack("<Q", 3), "key": b"key", "value": value(7),
        "name": struct.pack("<Q", 1) + b"x", "n_dims": struct.pack("<I", 2), "dims": struct.pack("<QQ", 32, 2),
        "type": struct.pack("<I", 0), "offset": struct.pack("<Q", 0),
    }  # fmt: skip
    head = b"".join((fields | parts).values())
    return head + bytes(-len(head) % 32) + bytes(256)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"magic": b"GGML"}, "no GGUF file"),
        ({"version": struct.pack("<I", 1)}, "its GGUF version is 1"),
        ({"version": struct.pack(">I", 3)}, "it is big-endian"),
        ({"n_tensors": struct.pack("<Q", 1 << 60)}, f"claims {1 << 60} tensors"),
        ({"n_keys": struct.pack("<Q", 1 << 63)}, f"claims {1 << 63} keys"),
        ({"key_length": struct.pack("<Q", 1 << 62)}, "a key claims"),
        ({"key": b"\xff\xfe\xfd"}, "a key is not UTF-8"),
        ({"value": struct.pack("<IQ", 8, 1 << 40)}, "within the value of 'key'"),
        ({"value": struct.pack("<IIQ", 9, 8, 1 << 58)}, "within the array 'key'"),
        ({"value": struct.pack("<IIQ", 9, 10, 1 << 61)}, "within the array 'key'"),
        ({"value": struct.pack("<IIQ", 9, 9, 1)}, "holds the type 9"),
        ({"value": struct.pack("<I", 77)}, "unknown type 77"),
        ({"n_dims": struct.pack("<I", 0), "dims": b""}, "has 0 dimensions"),
        ({"n_dims": struct.pack("<I", 9)}, "has 9 dimensions"),
        ({"dims": struct.pack("<QQ", 0, 2)}, "impossible shape (2, 0)"),
        ({"dims": struct.pack("<QQ", 1 << 40, 1 << 40)}, "impossible shape"),
        ({"dims": struct.pack("<QQ", 33, 2), "type": struct.pack("<I", 3)}, "no multiple of 32"),
        ({"dims": struct.pack("<QQ", 32, 3)}, "reaches to"),
        ({"type": struct.pack("<I", 99)}, "is of type 99"),
        ({"offset": struct.pack("<Q", 32)}, "reaches to"),
        ({"offset": struct.pack("<Q", (1 << 64) - 32)}, "reaches to"),
        ({"offset": struct.pack("<Q", 4)}, "no multiple of 32"),
        ({"n_tensors": struct.pack("<Q", 2)}, "has 0 dimensions"),
        ({"key_length": struct.pack("<Q", 17), "key": b"general.alignment", "value": value(0)}, "alignment is 0"),
        ({"key_length": struct.pack("<Q", 17), "key": b"general.alignment", "value": value(48)}, "alignment is 48"),
        ({"key_length": struct.pack("<Q", 17), "key": b"general.alignment", "value": value("x")}, "alignment is 'x'"),
    ],
)
def test_a_crafted_header_ends_in_one_sentence(tmp_path, parts, says):
    path = tmp_path / "crafted.gguf"
    path.write_bytes(crafted())
    assert list(read_header(path).tensors) == ["x"], "what is not replaced must be sound"
    path.write_bytes(crafted(**parts))
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert one_sentence(caught.value)


def test_names_that_stand_twice_are_refused(tmp_path):
    path = tmp_path / "twice.gguf"
    whole = gguf_bytes({"a.a": 1, "a.b": 2}, {"x": ("F32", (8,), bytes(32)), "y": ("F32", (8,), bytes(32))})
    for old, new, says in (
        (b"a.b", b"a.a", "the key 'a.a'"),
        (b"\1" + bytes(7) + b"y", b"\1" + bytes(7) + b"x", "'x'"),
    ):
        assert whole.count(old) == 1
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(CheckpointError, match=says):
            read_header(path)


def load_all(path, data: bytes):
    """The whole way from bytes to a model."""
    path.write_bytes(data)
    header = read_header(path)
    return build_tokenizer(header), load_gguf(header)


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    whole = tiny_model(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(200), *range(200, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_header(path)


@pytest.mark.parametrize("seed", range(60))
def test_a_file_with_wrong_bytes_is_read_or_refused(tmp_path, seed):
    whole = bytearray(tiny_model(tmp_path / "whole.gguf").read_bytes())
    start = read_header(tmp_path / "whole.gguf").tensors["token_embd.weight"].offset
    rng = np.random.default_rng(seed)
    for _ in range(rng.integers(1, 4)):
        whole[rng.integers(0, start)] = rng.integers(0, 256)
    # Any other exception, or a crash of the process, fails the test.
    with contextlib.suppress(CheckpointError):
        load_all(tmp_path / "wrong.gguf", bytes(whole))


def test_the_cut_notices_a_reader_that_checks_nothing(tmp_path, monkeypatch):
    whole = tiny_model(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: len(whole) // 2])
    monkeypatch.setattr(gguf_header._Reader, "placed", lambda self, info, start, alignment: info)
    assert read_header(path).tensors


def test_a_folder_or_a_missing_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_header(path)

"""Write GGUF files as small as can be, byte by byte from the format's description, so that reader and writer share no code."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 64, 4, 2, 16, 96, 2


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """A metadata value with its type in front: bool, int (uint32), float (float32), str, or a list of one of them."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item, bytes):
        return item
    if item and isinstance(item[0], str):
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))
    return struct.pack("<IIQ", 9, 5, len(item)) + struct.pack(f"<{len(item)}i", *item)


def gguf_bytes(metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], bytes]], alignment=32) -> bytes:
    """A whole file. `tensors`: name to (type, shape outermost first, data)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        head += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", TYPE_IDS[kind], len(data))
        data += raw
    return head + b"\0" * (-len(head) % alignment) + data


def blocks(kind: str, shape: tuple[int, ...], seed: int) -> bytes:
    """Random data of a type: blocks with small scales and any quants at all."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    if kind == "F32":
        return rng.standard_normal(size).astype("<f4").tobytes()
    if kind == "F16":
        return rng.standard_normal(size).astype("<f2").tobytes()
    count = size // 32
    halves = [rng.uniform(-0.02, 0.02, (count, 1)).astype("<f2").view(np.uint8) for _ in range(2)]
    quants = rng.integers(0, 256, (count, 32 if kind == "Q8_0" else 16), np.uint8)
    return np.concatenate([*halves[: 2 if kind == "Q4_1" else 1], quants], axis=1).tobytes()


def dequantised(kind: str, raw: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 weights that the format's description gives for this data."""
    if kind in ("F32", "F16"):
        return np.frombuffer(raw, "<f4" if kind == "F32" else "<f2").astype(np.float32).reshape(shape)
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    weights = []
    for at in range(0, len(raw), size):
        block = raw[at : at + size]
        scale = np.float32(np.frombuffer(block[:2], "<f2")[0])
        if kind == "Q8_0":
            weights.append(np.frombuffer(block[2:], np.int8).astype(np.float32) * scale)
            continue
        quants = np.frombuffer(block[4 if kind == "Q4_1" else 2 :], np.uint8)
        nibbles = np.concatenate([quants & 15, quants >> 4]).astype(np.float32)
        low = np.float32(np.frombuffer(block[2:4], "<f2")[0]) if kind == "Q4_1" else -8 * scale
        weights.append(nibbles * scale + low)
    return np.concatenate(weights).reshape(shape)


def byte_tokens() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes as, by byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(other)) for b in range(256)]


def vocabulary(pre: str = "smollm") -> dict[str, Any]:
    """Tokenizer metadata: 3 control tokens, 256 bytes, and a few merges."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens(), *(m.replace(" ", "") for m in merges)]
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": template,
    }


def model_metadata(kind: str = "llama", pre: str = "smollm") -> dict[str, Any]:
    fields = {
        "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": MLP,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
    }  # fmt: skip
    metadata = {"general.architecture": kind, "general.name": "tiny"}
    return metadata | {f"{kind}.{key}": item for key, item in fields.items()} | vocabulary(pre)


def model_shapes(kind: str = "llama", n_tokens: int | None = None) -> dict[str, tuple[int, ...]]:
    """Every tensor of a tiny model, by its name in the file, and its shape."""
    n_tokens = n_tokens or len(vocabulary()["tokenizer.ggml.tokens"])
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "attn_norm.weight": (HIDDEN,), "attn_q.weight": (q, HIDDEN), "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN), "attn_output.weight": (HIDDEN, q), "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (MLP, HIDDEN), "ffn_up.weight": (MLP, HIDDEN), "ffn_down.weight": (HIDDEN, MLP),
    }  # fmt: skip
    if kind == "qwen2":
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if kind == "qwen3":
        layer |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    shapes = {"token_embd.weight": (n_tokens, HIDDEN), "output_norm.weight": (HIDDEN,)}
    return shapes | {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}


def tiny_model(path: Path, kind: str = "llama", quant: str = "Q4_1", embed: str = "Q8_0", **changes: Any) -> Path:
    """A whole model in a file: matrices of type `quant`, embedding of type `embed`, vectors in float32.

    `changes`: `metadata` to add or (None) to drop, `tensors` likewise.
    """
    tensors: dict[str, Any] = {}
    for seed, (name, shape) in enumerate(model_shapes(kind).items()):
        of = "F32" if len(shape) == 1 else embed if name.startswith("token_embd") else quant
        tensors[name] = (of, shape, blocks(of, shape, seed))
    metadata: dict[str, Any] = model_metadata(kind)
    for key, table in (("metadata", metadata), ("tensors", tensors)):
        table |= changes.get(key, {})
        for name in [name for name, item in table.items() if item is None]:
            del table[name]
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path

"""Load a GGUF file as mlx-lm's own model: the same class, each tensor quantised exactly as stored, nothing requantised.

What can be read: architectures llama, qwen2 and qwen3 (dense), types F32, F16, Q4_0, Q4_1 and Q8_0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dspark.checkpoints.gguf_config import ROPE_FACTORS, read_config
from dspark.checkpoints.gguf_header import SUPPORTED, GgufHeader
from dspark.checkpoints.gguf_tensors import BITS, GROUP_SIZE, read_tensor
from dspark.errors import CheckpointError

NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Slot(NamedTuple):
    """Where a tensor of the file goes: the module's path in the model, weight or bias, and the shape it must have."""

    module: str
    leaf: str
    shape: tuple[int, ...]


def load_gguf(header: GgufHeader) -> tuple[nn.Module, dict[str, Any]]:
    """Build mlx-lm's model from a GGUF file and give it with the config that an mlx-lm folder would have.

    Arrays are evaluated as stored: float16 scales, float32 norms. Raises `CheckpointError` before anything large is
    read when an architecture, type, name or shape does not fit.
    """
    config = read_config(header)
    slots = _match(header, config)
    model = _new_model(config)
    packed = {slots[i.name].module: BITS[i.type] for i in header.tensors.values() if i.name in slots and i.type in BITS}
    if packed:
        config["quantization"] = _quantise(model, packed)
    with open(header.path, "rb") as file:
        for name, slot in slots.items():
            arrays = read_tensor(file, header.tensors[name], _permuted_heads(name, config))
            pairs = [(f"{slot.module}.{leaf or slot.leaf}", array) for leaf, array in arrays.items()]
            model.load_weights(pairs, strict=False)
        if ROPE_FACTORS in header.tensors:
            _set_rope(model, config, read_tensor(file, header.tensors[ROPE_FACTORS])[""])
    model.eval()
    mx.eval(model.parameters())
    return model, config


def expected(config: dict[str, Any]) -> Iterator[tuple[str, Slot]]:
    """Every tensor that a file with this config holds, by its name in the file, and where it goes."""
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q),
        "attn_norm": (hidden,), "ffn_norm": (hidden,),
        "ffn_gate": (mlp, hidden), "ffn_up": (mlp, hidden), "ffn_down": (hidden, mlp),
    }  # fmt: skip
    if config["model_type"] == "qwen3":
        shapes |= {"attn_q_norm": (dim,), "attn_k_norm": (dim,)}
    top = {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        top["output"] = (vocab, hidden)
    for name, shape in top.items():
        yield f"{name}.weight", Slot(TOP[name], "weight", shape)
    biased = ("attn_q", "attn_k", "attn_v")
    if config["model_type"] == "qwen3" or not config.get("attention_bias", True):
        biased = ()
    elif config["model_type"] == "llama":
        # mlx-lm's llama has all four or none.
        biased = (*biased, "attn_output")
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            module = f"model.layers.{layer}.{NAMES[name]}"
            yield f"blk.{layer}.{name}.weight", Slot(module, "weight", shape)
            if name in biased:
                yield f"blk.{layer}.{name}.bias", Slot(module, "bias", shape[:1])


def _match(header: GgufHeader, config: dict[str, Any]) -> dict[str, Slot]:
    """Pair the file's tensors with the model's parameters; all misfits are named at once (the first few of each)."""
    slots, found = dict(expected(config)), header.tensors
    faults = []
    if missing := [name for name in slots if name not in found]:
        faults.append(f"missing {_few(missing)}")
    if unknown := [name for name in found if name not in slots and name != ROPE_FACTORS]:
        faults.append(f"unknown {_few(unknown)}")
    both = [(name, slot, found[name]) for name, slot in slots.items() if name in found]
    if wrong := [f"{n} {i.shape} instead of {s.shape}" for n, s, i in both if i.shape != s.shape]:
        faults.append(f"wrong shape {_few(wrong)}")
    if unread := [f"{i.name} ({i.type})" for i in found.values() if i.type not in SUPPORTED]:
        faults.append(f"types other than {', '.join(SUPPORTED)}: {_few(unread)}")
    if packed := [n for n, s, i in both if i.type in BITS and len(s.shape) == 1]:
        faults.append(f"quantised vectors {_few(packed)}")
    if faults:
        raise CheckpointError(f"{header.path}: its tensors do not make a {config['model_type']}: {'; '.join(faults)}")
    return slots


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _new_model(config: dict[str, Any]) -> nn.Module:
    from mlx_lm.models import llama, qwen2, qwen3

    module = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}[config["model_type"]]
    return module.Model(module.ModelArgs.from_dict(config))


def _quantise(model: nn.Module, packed: dict[str, int]) -> dict[str, Any]:
    """Make the layers that are packed in the file quantised ones, and give the entry for the config."""
    each = {path: {"group_size": GROUP_SIZE, "bits": bits} for path, bits in packed.items()}
    nn.quantize(model, GROUP_SIZE, 4, class_predicate=lambda path, _: each.get(path, False))
    bits = list(packed.values())
    common = max(set(bits), key=bits.count)
    return {"group_size": GROUP_SIZE, "bits": common} | {p: s for p, s in each.items() if s["bits"] != common}


def _permuted_heads(name: str, config: dict[str, Any]) -> int | None:
    # Only llama files are written for a rope that turns neighbours.
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
    if config["model_type"] != "llama" or not match:
        return None
    return config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]


def _set_rope(model: Any, config: dict[str, Any], factors: mx.array) -> None:
    dim = config["head_dim"]
    if factors.shape != (dim // 2,):
        raise CheckpointError(f"{ROPE_FACTORS} has shape {factors.shape}; {(dim // 2,)} is needed")
    frequencies = config["rope_theta"] ** (mx.arange(0, dim, 2) / dim) * factors.astype(mx.float32)
    for layer in model.layers:
        layer.self_attn.rope._freqs = frequencies

"""Drafters on disk as they are published: real sizes in the headers, no data behind them (sparse files)."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ITEMS = {"BF16": 2, "F32": 4, "F16": 2, "I64": 8, "BOOL": 1, "U8": 1, "F8_E4M3": 1, "U32": 4}
Shapes = dict[str, tuple[int, ...]]


def write_headers(folder: Path, config: Any, tensors: dict[str, tuple[str, tuple[int, ...]]], name="model.safetensors"):
    """config.json and a safetensors file of the size its header claims, all holes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    at, entries = 0, {}
    for key, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * ITEMS[dtype]
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    with open(folder / name, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + at)
    return folder


def typed(shapes: Shapes, dtype: str = "BF16") -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: ("I64" if name == "d2t" else "BOOL" if name == "t2d" else dtype, s) for name, s in shapes.items()}


def body(h: int, i: int, heads: tuple[int, int, int], layers: int, taps: int, *, gated: bool = False) -> Shapes:
    """The tensors of a qwen3 body; heads: query heads, key heads, size."""
    n, kv, d = heads
    shapes: Shapes = {"fc.weight": (h, taps * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for k in range(layers):
        at = f"layers.{k}."
        shapes |= {
            f"{at}input_layernorm.weight": (h,),
            f"{at}post_attention_layernorm.weight": (h,),
            f"{at}self_attn.q_proj.weight": (n * d * (2 if gated else 1), h),
            f"{at}self_attn.k_proj.weight": (kv * d, h),
            f"{at}self_attn.v_proj.weight": (kv * d, h),
            f"{at}self_attn.o_proj.weight": (h, n * d),
            f"{at}self_attn.q_norm.weight": (d,),
            f"{at}self_attn.k_norm.weight": (d,),
            f"{at}mlp.gate_proj.weight": (i, h),
            f"{at}mlp.up_proj.weight": (i, h),
            f"{at}mlp.down_proj.weight": (h, i),
        }
    return shapes


def tables(v: int, h: int, rows: int | None = None) -> Shapes:
    return {"embed_tokens.weight": (v, h), "lm_head.weight": (rows or v, h)}


def markov(v: int, r: int, h: int, *, rows: int | None = None, confidence: bool = True) -> Shapes:
    shapes: Shapes = {"markov_head.markov_w1.weight": (v, r), "markov_head.markov_w2.weight": (rows or v, r)}
    if confidence:
        shapes |= {"confidence_head.proj.weight": (1, h + r), "confidence_head.proj.bias": (1,)}
    return shapes


def dflash2(v: int, r: int, h: int, layers: int, kernel: int = 2, group: int = 16) -> Shapes:
    shapes: Shapes = {
        "candidate_selector.predecessor_codebook": (v, r),
        "candidate_selector.successor_codebook": (v, r),
        "candidate_selector.hidden_projection.weight": (r, h),
    }
    for k in range(layers):
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{k}.{conv}.base_kernel"] = (2, kernel, h)
            shapes[f"layers.{k}.{conv}.kernel_projection.weight"] = (2 * kernel * h // group, h)
    return shapes


def nvfp4(shapes: Shapes, names: Iterable[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The same tensors, those named packed as modelopt packs them."""
    tensors = typed(shapes)
    for name in names:
        out, into = shapes[name]
        base = name.removesuffix(".weight")
        tensors[name] = ("U8", (out, into // 2))
        tensors[f"{base}.weight_scale"] = ("F8_E4M3", (out, into // 16))
        tensors[f"{base}.weight_scale_2"] = ("F32", ())
        tensors[f"{base}.input_scale"] = ("F32", ())
    return tensors


def sizes(h: int, i: int, heads: tuple[int, int, int], v: int, layers: int = 5, **more: Any) -> dict[str, Any]:
    """The keys of a qwen3 config."""
    n, kv, d = heads
    return {
        "model_type": "qwen3",
        "hidden_size": h,
        "intermediate_size": i,
        "num_attention_heads": n,
        "num_key_value_heads": kv,
        "head_dim": d,
        "vocab_size": v,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 1000000,
        **more,
    }

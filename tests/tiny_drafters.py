"""Tiny drafters for any tiny target, written to disk in the packagings they are published in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from dspark.models.heads import Head, HeadConfig, LayerConfig
from dspark.models.heads.shapes import parameter_shapes

BLOCK, WINDOW, RANK = 5, 6, 8
# What each kind has beyond a body of two layers: fields of HeadConfig.
KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {"kind": "dspark", "markov": "vanilla", "markov_rank": RANK, "confidence": "markov"},
    "gated": {"kind": "dspark", "markov": "gated", "markov_rank": RANK, "confidence": "hidden"},
    "rnn": {"kind": "dspark", "markov": "rnn", "markov_rank": RANK},
    "causal": {
        "kind": "dspark",
        "markov": "vanilla",
        "markov_rank": RANK,
        "layers": (LayerConfig(causal=True, window=WINDOW),) * 2,
    },
    "reduced": {"kind": "dspark", "markov": "vanilla", "markov_rank": RANK, "lm_head": "own"},
    "dflash": {"kind": "dflash", "anchor_predicts": False},
    "dflash2": {
        "kind": "dflash2",
        "anchor_predicts": False,
        "conv_kernel": 2,
        "conv_group": 16,
        "selector_rank": RANK,
        "selector_top_k": 4,
        "layers": (LayerConfig(window=WINDOW),) * 2,
    },
}


def head_config(name: str, target: Any, **changes: Any) -> HeadConfig:
    """The network of one kind for a target of these sizes. Tables are borrowed but where the kind has its own."""
    fields = {
        "block_size": BLOCK,
        "anchor_predicts": True,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": (0, target.num_layers - 2),
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "layers": (LayerConfig(),) * 2,
        "target_hidden_size": target.hidden_size,
        **KINDS[name],
        **changes,
    }
    if name == "reduced":
        fields.setdefault("draft_vocab_size", target.vocab_size // 2)
    return HeadConfig(**fields)


def random_drafter(folder: Path, name: str, target: Any, seed: int = 0, **changes: Any) -> str:
    """A drafter of random weights, as scattered as a trained one's; it is hardly ever right."""
    config, rng = head_config(name, target, **changes), np.random.default_rng(seed)
    arrays = {key: _random(rng, key, shape) for key, shape in parameter_shapes(config).items()}
    return write(folder, name, config, arrays)


def save_head(folder: Path, name: str, head: Head) -> str:
    """A head that a test made or trained."""
    return write(folder, name, head.config, dict(tree_flatten(head.parameters())))


def write(folder: Path, name: str, config: HeadConfig, arrays: dict[str, Any], **keys: Any) -> str:
    """config.json and model.safetensors; `keys` replace keys of the config file."""
    folder.mkdir(parents=True, exist_ok=True)
    if config.draft_vocab_size is not None:
        ids = np.sort(np.random.default_rng(1).permutation(config.vocab_size)[: config.draft_vocab_size])
        arrays = {**arrays, "d2t": mx.array(ids - np.arange(len(ids)), dtype=mx.int64)}
    (folder / "config.json").write_text(json.dumps({**published(name, config), **keys}))
    mx.save_safetensors(str(folder / "model.safetensors"), {k: mx.array(v) for k, v in arrays.items()})
    return str(folder)


def published(name: str, config: HeadConfig) -> dict[str, Any]:
    """config.json as that kind is published: DeepSpec, z-lab, DFlash 2, or speculators for a reduced vocabulary."""
    body = _body(config)
    draft = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    if name == "reduced":
        return {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": "dspark",
            "transformer_layer_config": body,
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
            "draft_vocab_size": config.draft_vocab_size,
            "sample_from_anchor": config.anchor_predicts,
            "markov_rank": config.markov_rank,
        }
    if config.kind == "dspark":
        own = {"markov_rank": config.markov_rank, "markov_head_type": config.markov}
        return {"architectures": ["Qwen3DSparkModel"], **body, "block_size": config.block_size, **draft, **own}
    nested = {**draft, "block_size": config.block_size}
    if config.kind == "dflash2":
        names = ("selector_rank", "selector_top_k")
        nested |= {n: getattr(config, n) for n in names}
        nested |= {"conv_kernel_size": config.conv_kernel, "conv_group_size": config.conv_group}
    name = "DFlashDraftModel" if config.kind == "dflash" else "DFlash2DraftModel"
    return {"architectures": [name], **body, "is_causal": config.causal, "dflash_config": nested}


def _body(config: HeadConfig) -> dict[str, Any]:
    window = config.layers[0].window
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_is_neox_style": config.rope.style == "neox",
        "layer_types": ["full_attention" if layer.window is None else "sliding_attention" for layer in config.layers],
        **({} if window is None else {"sliding_window": window}),
    }


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> mx.array:
    if "norm" in name:
        values = 1 + 0.1 * rng.normal(size=shape)
    elif name.endswith("base_kernel"):
        values = np.stack([np.ones(shape[2:]), *[np.zeros(shape[2:])] * (shape[1] - 1)])[None] + rng.normal(
            0, 0.2, shape
        )
    elif "codebook" in name or "markov_w" in name:
        values = rng.normal(size=shape)
    else:
        values = rng.normal(0, 1.4 / np.sqrt(shape[-1]), shape)
    return mx.array(values.astype(np.float32))

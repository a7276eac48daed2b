"""Write a trained drafter in the layout that its kind is published in, so that other tools read it too: DeepSpec's for
DSpark, z-lab's for DFlash and DFlash 2, speculators' where the vocabulary is reduced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from dspark.models.heads.config import HeadConfig

ARCHITECTURES = {"dspark": "Qwen3DSparkModel", "dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
PACKED = tuple(f"{name}.weight" for name in ("_proj", "fc", "markov_w1", "markov_w2", "lm_head", "kernel_projection"))
# Of what is small.
FINE_BITS = 8


def write_drafter(
    folder: Path,
    config: HeadConfig,
    parameters: Any,
    *,
    num_target_layers: int,
    target_name: str,
    target_ids: mx.array | None = None,
    lm_head: mx.array | None = None,
    bits: int | None = None,
) -> None:
    """Write config.json and model.safetensors, in bfloat16 or, with `bits`, packed by MLX in groups of 64 or 32.

    target_ids, lm_head: of a reduced vocabulary, each row's token and the rows themselves.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: array.astype(mx.bfloat16) for name, array in tree_flatten(parameters)}
    table = published_config(config, num_target_layers, target_name)
    if target_ids is not None and lm_head is not None:
        arrays["lm_head.weight"] = lm_head.astype(mx.bfloat16)
        ids = np.array(target_ids, np.int64)
        arrays["d2t"] = mx.array(ids - np.arange(len(ids)), dtype=mx.int64)
        known = np.zeros(config.vocab_size, bool)
        known[ids] = True
        arrays["t2d"] = mx.array(known)
    if bits is not None:
        arrays, table["quantization"] = packed(arrays, bits)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "pt" if bits is None else "mlx"})
    text = json.dumps(table, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def reduced(arrays: dict[str, mx.array], ids: np.ndarray) -> dict[str, mx.array]:
    """A drafter over the tokens `ids` [V], ascending: their rows of the Markov head, and d2t. The vocabulary projection is the
    target's, so it has no rows here."""
    made = dict(arrays)
    if "markov_head.markov_w2.weight" in made:
        made["markov_head.markov_w2.weight"] = made["markov_head.markov_w2.weight"][mx.array(ids)]
    made["d2t"] = mx.array(ids - np.arange(len(ids)), dtype=mx.int32)
    return made


def packed(arrays: dict[str, mx.array], bits: int) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Linears and tables packed, and the entry that says how. Small heads and norms stay as they are."""
    made: dict[str, mx.array] = {}
    how: dict[str, Any] = {"group_size": 64, "bits": bits, "mode": "affine"}
    for name, array in arrays.items():
        base = name.removesuffix(".weight")
        if not _packs(name, array):
            made[name] = array
            continue
        size = 64 if array.shape[-1] % 64 == 0 else 32
        own = max(bits, FINE_BITS) if base.endswith("kernel_projection") else bits
        made[name], made[f"{base}.scales"], made[f"{base}.biases"] = mx.quantize(array, size, own)
        if (size, own) != (64, bits):
            how[base] = {"group_size": size, "bits": own}
    return made, how


def _packs(name: str, array: mx.array) -> bool:
    if array.ndim != 2 or array.shape[-1] % 32 or "confidence_head" in name:
        return False
    return name.endswith(PACKED)


def published_config(config: HeadConfig, num_target_layers: int, target_name: str) -> dict[str, Any]:
    """config.json as the kind's own tools read it."""
    body = _body(config)
    if config.draft_vocab_size is not None:
        return _speculators(config, body, target_name)
    heads: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.kind]],
        "num_target_layers": num_target_layers,
        "block_size": config.block_size,
    }
    own = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    if config.kind == "dspark":
        return body | heads | own | _dspark(config) | {"num_anchors": 512}
    if config.kind == "dflash2":
        own |= _dflash2(config)
        heads["is_causal"] = False
    return body | heads | {"dflash_config": {"block_size": config.block_size, **own}}


def _body(config: HeadConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * len(config.layers),
        "tie_word_embeddings": False,
    }


def _dspark(config: HeadConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence != "none",
        "confidence_head_with_markov": config.confidence == "markov",
    }


def _dflash2(config: HeadConfig) -> dict[str, Any]:
    return {
        "conv_kernel_size": config.conv_kernel,
        "conv_group_size": config.conv_group,
        "selector_rank": config.selector_rank,
        "selector_top_k": config.selector_top_k,
    }


def _speculators(config: HeadConfig, body: dict[str, Any], target_name: str) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": config.num_drafts}
    return {
        "architectures": ["DSparkDraftModel" if config.kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": config.kind,
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
        "transformer_layer_config": body,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        # This packaging counts the stream that enters a layer.
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.anchor_predicts,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        **(_dspark(config) if config.kind == "dspark" else {}),
    }

"""PrismML's GGUF of a DSpark head (Bonsai): a qwen3 body whose block embeddings carry a noise level."""

from __future__ import annotations

import re

import numpy as np

from dspark.checkpoints.dialects import backbone
from dspark.checkpoints.dialects.base import Dialect, Reading
from dspark.checkpoints.dialects.keys import Keys
from dspark.checkpoints.dialects.source import Source
from dspark.checkpoints.dialects.weights import read_weights
from dspark.errors import CheckpointError
from dspark.models.heads.config import MAX_BLOCK, MAX_LAYERS, HeadConfig, LayerConfig, RopeConfig

ARCHITECTURES = ("dspark", "dflash")
NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "norm.weight",
    "dspark.fc.weight": "fc.weight",
    "dspark.hidden_norm.weight": "hidden_norm.weight",
    "dspark.markov_head_a.weight": "markov_head.markov_w1.weight",
    "dspark.markov_head_b.weight": "markov_head.markov_w2.weight",
    "dspark.markov_head.down.weight": "markov_head.markov_w1.weight",
    "dspark.markov_head.up.weight": "markov_head.markov_w2.weight",
    "markov_head.down.weight": "markov_head.markov_w1.weight",
    "markov_head.up.weight": "markov_head.markov_w2.weight",
    "dspark.confidence_head.weight": "confidence_head.proj.weight",
    "dspark.confidence_head.bias": "confidence_head.proj.bias",
    "confidence_head.weight": "confidence_head.proj.weight",
    "confidence_head.bias": "confidence_head.proj.bias",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def rename(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        return f"layers.{match[1]}.{LAYER_NAMES.get(match[2], match[2])}.{match[3]}"
    if match := re.fullmatch(r"dspark\.log_snr_(fc[12])\.(weight|bias)", name):
        return f"log_snr_embed.{match[1]}.{match[2]}"
    return name


def recognises(source: Source) -> bool:
    return source.gguf is not None


def read(source: Source) -> Reading:
    keys = _keys(source)
    weights = read_weights(source, rename)
    hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    head_dim = keys.whole("attention.key_length", max(1, hidden // heads))
    if keys.whole("attention.value_length", head_dim) != head_dim:
        raise keys.refuse("attention.value_length", f"keys and values of one size ({head_dim}) can be read")
    config = HeadConfig(
        kind="dspark",
        anchor_predicts=True,
        block_size=keys.whole("dspark.block_size", high=MAX_BLOCK),
        mask_token_id=keys.whole("dspark.mask_token_id", low=0),
        vocab_size=keys.whole("vocab_size", _rows(weights)),
        hidden_size=hidden,
        intermediate_size=keys.whole("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=keys.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        layers=(LayerConfig(),) * keys.whole("block_count", high=MAX_LAYERS),
        rms_norm_eps=keys.real("attention.layer_norm_rms_epsilon", high=1.0),
        rope=RopeConfig(theta=keys.real("rope.freq_base", low=1.0)),
        **backbone.taps(keys, keys.wholes("dspark.target_layers", low=-1), hidden),
        **backbone.tables(weights, False),
        **backbone.markov(Keys(keys.file, ("", {"markov_rank": keys.whole("dspark.markov_rank", 0, low=0)})), weights),
        **backbone.confidence(keys, weights, hidden),
        **backbone.log_snr(keys, weights, "dspark."),
    )
    return Reading(config, weights)


def _keys(source: Source) -> Keys:
    """The file's keys without their architecture in front, arrays as lists."""
    assert source.gguf is not None
    metadata = source.gguf.metadata
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES or not any(str(k).startswith((f"{name}.dspark.", "dspark.dspark.")) for k in metadata):
        raise CheckpointError(
            f"{source.path}: general.architecture is {name!r}, no DSpark head as PrismML packs it (dspark.dspark.* keys); "
            "other GGUF files are targets, or drafters that are read from safetensors"
        )
    plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in metadata.items()}
    own = {k.split(".", 1)[1]: v for k, v in plain.items() if k.startswith((f"{name}.", "dspark."))}
    return Keys(str(source.path), (str(name), own))


def _rows(weights: dict) -> int:
    table = weights.get("embed_tokens.weight") or weights.get("markov_head.markov_w1.weight")
    return table.shape[0] if table else 1


DIALECT = Dialect("PrismML GGUF DSpark", recognises, read)

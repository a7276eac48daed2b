"""What every packaging shares: sizes, rope, windows, taps, and the heads that the tensors show."""

from __future__ import annotations

import math
from typing import Any

from dspark.checkpoints.dialects.keys import Keys
from dspark.checkpoints.dialects.weights import Weights
from dspark.errors import CheckpointError
from dspark.models.heads.config import MAX_BLOCK, MAX_LAYERS, LayerConfig, RopeConfig

Fields = dict[str, Any]

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ROPE_TYPES = ("default", "mrope", "linear", "yarn", "llama3", "proportional")


def sizes(keys: Keys, weights: Weights) -> Fields:
    """Widths, heads, norms' epsilon, and which projections have a bias (as the tensors show)."""
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    act = keys.text("hidden_act", None, tuple(ACTIVATIONS)) or keys.text(
        "hidden_activation", "silu", tuple(ACTIVATIONS)
    )
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.whole("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": keys.whole("num_key_value_heads", heads),
        "head_dim": keys.whole("head_dim", max(1, hidden // heads)),
        "vocab_size": keys.whole("vocab_size"),
        "rms_norm_eps": keys.real("rms_norm_eps", 1e-6, high=1.0),
        "activation": ACTIVATIONS[act],
        "qkv_bias": "layers.0.self_attn.q_proj.bias" in weights,
        "output_bias": "layers.0.self_attn.o_proj.bias" in weights,
        "sinks": "layers.0.self_attn.attention_sink_bias" in weights,
    }


def num_layers(keys: Keys) -> int:
    return keys.whole("num_hidden_layers", high=MAX_LAYERS)


def block(keys: Keys) -> Fields:
    return {
        "block_size": keys.whole("block_size", high=MAX_BLOCK),
        "mask_token_id": keys.whole("mask_token_id", low=0),
    }


def taps(keys: Keys, ids: tuple[int, ...], hidden: int) -> Fields:
    """The tapped layers, and the target's width. `num_target_layers` guards the last layer, unless its raw output was meant.

    Of a target whose layers run more than once the ids count steps, so ids beyond that number void the guard.
    """
    layers = keys.whole("num_target_layers", None)
    if layers is not None and ids and max(ids) == layers - 1 and not taps_raw(keys):
        raise CheckpointError(
            f"{keys.file}: the taps {list(ids)} hold {layers - 1}, the last of num_target_layers {layers}, whose output behind "
            "the final norm is not what a tap gives; take a drafter that taps earlier layers"
        )
    return {"target_layer_ids": ids, "target_hidden_size": keys.whole("target_hidden_size", hidden)}


def taps_raw(keys: Keys) -> bool:
    """Whether the drafter was trained on layers' raw outputs, so that the last layer may be tapped too: NVIDIA's exports."""
    return keys.has("eagle_aux_hidden_state_layer_ids")


def rope(keys: Keys, head_dim: int, *, partial: bool = False, by_layer: bool = False) -> RopeConfig:
    """Rotary positions in the old and the new spelling. `partial`: heed partial_rotary_factor, elsewhere noise.
    `by_layer`: take the full layers' of a table that differs by layer type.

    mrope turns text like an ordinary rope, so its sections are noise.
    """
    table = _rope_table(keys, by_layer)
    kind = table.text("rope_type", None, ROPE_TYPES) or table.text("type", "default", ROPE_TYPES)
    theta = table.real("rope_theta", None, low=1.0) or keys.real("rope_theta", 10000.0, low=1.0)
    fields: Fields = {"theta": theta, "style": _rope_style(keys)}
    if kind == "proportional" or partial:
        share = table.real("partial_rotary_factor", None, high=1.0) or keys.real(
            "partial_rotary_factor", 0.25, high=1.0
        )
        fields["dims"] = max(2, int(head_dim * share) // 2 * 2)
    if kind == "linear":
        fields |= {"factor": table.real("factor", high=1e6)}
    elif kind in ("yarn", "llama3"):
        fields |= {
            "factor": table.real("factor", high=1e6),
            "original_max_position": table.whole("original_max_position_embeddings", None, high=1 << 40)
            or keys.whole("max_position_embeddings", high=1 << 40),
        }
    if kind == "yarn":
        fields |= {
            "beta_fast": table.real("beta_fast", 32.0),
            "beta_slow": table.real("beta_slow", 1.0),
            "attention_factor": _attention_factor(table),
            "truncate": table.flag("truncate", True),
        }
    if kind == "llama3":
        fields |= {
            "low_freq_factor": table.real("low_freq_factor", 1.0),
            "high_freq_factor": table.real("high_freq_factor", 4.0),
        }
        if fields["low_freq_factor"] >= fields["high_freq_factor"]:
            raise table.refuse("high_freq_factor", "it must be above low_freq_factor")
    return RopeConfig(scaling="none" if kind in ("default", "mrope") else kind, **fields)


def _rope_table(keys: Keys, by_layer: bool) -> Keys:
    """rope_parameters (new), or its full_attention part, else rope_scaling (old)."""
    name = "rope_parameters" if keys.has("rope_parameters") else "rope_scaling"
    if not keys.has(name):
        return Keys(keys.file)
    table = keys.sub(name)
    if not table.has("full_attention"):
        return table
    if not by_layer:
        raise keys.refuse(name, "positions that turn differently by layer type are read of gemma4 drafters only")
    return table.sub("full_attention")


def _rope_style(keys: Keys) -> str:
    neox = keys.flag("rope_is_neox_style", None)
    if neox is None:
        neox = keys.flag("is_neox_style", True)
    return "neox" if neox else "interleaved"


def _attention_factor(table: Keys) -> float | None:
    given, factor = table.real("attention_factor", None), table.real("factor")
    top, bottom = table.real("mscale", None), table.real("mscale_all_dim", None)
    if given is not None or top is None or bottom is None:
        return given
    grow = lambda mscale: 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
    return grow(top) / grow(bottom)


def layers(keys: Keys, top: Keys, count: int) -> tuple[LayerConfig, ...]:
    """Windows and causality, layer by layer.

    Causal is the first that is said of: top-level is_causal, the nested causal, dflash_query_causal; else a layer is causal
    where it slides. `top`: the top level alone.
    """
    windows = _windows(keys, count)
    causal = top.flag("is_causal", None)
    for name in ("causal", "dflash_query_causal"):
        causal = keys.flag(name, None) if causal is None else causal
    return tuple(LayerConfig(causal=w is not None if causal is None else causal, window=w) for w in windows)


def _windows(keys: Keys, count: int) -> list[int | None]:
    window = keys.whole("sliding_window", None) or keys.whole("swa_window_size", None)
    if keys.flag("use_swa", False):
        window = keys.whole("swa_window_size", window)
        slides = [True] * count
    elif keys.has("layer_types"):
        kinds = keys.texts("layer_types")
        slides = [kind == "sliding_attention" for kind in kinds]
        known = {"full_attention", "sliding_attention"}
        if len(kinds) != count or not set(kinds) <= known:
            raise keys.refuse(
                "layer_types", f"it must name full_attention or sliding_attention for each of {count} layers"
            )
    else:
        first = keys.whole("max_window_layers", 28, low=0) if keys.flag("use_sliding_window", False) else count
        slides = [i >= first for i in range(count)]
    if any(slides) and window is None:
        raise CheckpointError(
            f"{keys.file}: layers slide, but no sliding_window says how far; restore the published file"
        )
    return [window if slide else None for slide in slides]


def tables(weights: Weights, tied: bool) -> Fields:
    """Which of embedding and lm_head the file has; the target lends the rest."""
    embedding = "own" if "embed_tokens.weight" in weights else "borrowed"
    lm_head = "own" if "lm_head.weight" in weights else "tied" if tied and embedding == "own" else "borrowed"
    return {"embedding": embedding, "lm_head": lm_head}


def markov(keys: Keys, weights: Weights) -> Fields:
    """The Markov head as the tensors show it; the config must not say otherwise."""
    table = weights.get("markov_head.markov_w1.weight")
    said = keys.whole("markov_rank", 0, low=0)
    rank = table.shape[-1] if table and len(table.shape) == 2 else 0
    if said and said != rank:
        have = f"the tensors show rank {rank}" if rank else "there are no markov_head tensors"
        raise keys.refuse("markov_rank", f"but {have}; fetch the whole checkpoint")
    if not rank:
        return {}
    kind = "gated" if "markov_head.gate_proj.weight" in weights else "vanilla"
    kind = "rnn" if "markov_head.joint_proj.weight" in weights else kind
    if keys.text("markov_head_type", kind, ("vanilla", "gated", "rnn")) != kind:
        raise keys.refuse("markov_head_type", f"but the tensors are those of a {kind} head; fetch the whole checkpoint")
    return {"markov": kind, "markov_rank": rank}


def confidence(keys: Keys, weights: Weights, hidden: int) -> Fields:
    """The confidence head, by its tensors alone: configs leave it out or claim one that is not there."""
    proj = weights.get("confidence_head.proj.weight")
    if proj is None:
        return {}
    kind = "hidden" if proj.shape[-1:] == (hidden,) else "markov"
    return {"confidence": kind, "confidence_temperatures": keys.reals("confidence_temperatures", ())}


def log_snr(keys: Keys, weights: Weights, prefix: str = "") -> Fields:
    """PrismML's conditioning of the block on noise levels; `prefix` stands before its keys."""
    first = weights.get("log_snr_embed.fc1.weight")
    if not keys.flag(f"{prefix}log_snr_conditioning", first is not None):
        return {}
    if first is None:
        raise keys.refuse(f"{prefix}log_snr_conditioning", "but there are no log_snr tensors; fetch the whole file")
    low, high = (keys.real(f"{prefix}{end}_log_snr", v, -1e6, 1e6) for end, v in (("min", -9.0), ("max", 9.0)))
    return {"log_snr": (low, high), "log_snr_width": first.shape[0]}


def logit_transform(keys: Keys) -> Fields:
    """DFlash's output multiplier and soft cap, and the scale of its block's embeddings."""
    return {
        "logit_multiplier": keys.real("output_multiplier", 1.0, high=1e6),
        "logit_softcap": keys.real("final_logit_softcapping", None, high=1e6),
        "embedding_scale": keys.real("input_embedding_scale", 1.0, high=1e6),
    }


def selector(keys: Keys, weights: Weights, hidden: int) -> Fields:
    """DFlash 2's convolutions and candidate selector. Its vocabulary cannot be reduced."""
    draft_vocab, vocab = keys.whole("draft_vocab_size", None), keys.whole("vocab_size")
    if (draft_vocab or vocab) != vocab or "d2t" in weights:
        raise CheckpointError(
            f"{keys.file}: this DFlash 2 drafter has a reduced vocabulary ({draft_vocab} of {vocab}), over which its selector is "
            "not defined; take one whose draft_vocab_size is the target's"
        )
    return {
        "conv_kernel": keys.whole("conv_kernel_size", 2, high=MAX_BLOCK),
        "conv_group": keys.whole("conv_group_size", 16, high=hidden),
        "selector_rank": keys.whole("selector_rank", 256),
        "selector_top_k": keys.whole("selector_top_k", 16),
    }


def default_taps(keys: Keys, count: int) -> tuple[int, ...]:
    """DFlash's own choice where the config names no taps: as many as layers, spread over the target."""
    n = keys.whole("num_target_layers")
    if count == 1:
        return (n // 2,)
    return tuple(round(1 + i * (n - 4) / (count - 1)) for i in range(count))

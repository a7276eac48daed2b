"""vLLM's speculators packaging of dspark, dflash and dflash2: the body's config nested, taps counted one late, vocabularies
that may be reduced.

`aux_hidden_state_layer_ids` name the stream that enters a layer, so tap = id - 1. Which slots predict is said by
sample_from_anchor, else by block_size less speculative_tokens: 1 means each slot itself, 0 the anchor.
"""

from __future__ import annotations

from typing import Any

from dspark.checkpoints.dialects import backbone
from dspark.checkpoints.dialects.base import Dialect, Reading
from dspark.checkpoints.dialects.keys import Keys
from dspark.checkpoints.dialects.source import Source
from dspark.checkpoints.dialects.weights import Weights, read_weights
from dspark.errors import CheckpointError
from dspark.models.heads.config import HeadConfig, LayerConfig

KINDS = ("dspark", "dflash", "dflash2")


def recognises(source: Source) -> bool:
    return "speculators_model_type" in source.config or "speculators_config" in source.config


def kind_of(source: Source) -> str:
    """The algorithm; raises for one that is no block drafter."""
    keys = Keys(
        source.config_file, ("", source.config), ("speculators_config", source.config.get("speculators_config"))
    )
    kind = keys.text("speculators_model_type", None) or keys.text("algorithm")
    if kind not in KINDS:
        raise CheckpointError(
            f"{source.config_file}: speculators_model_type is {kind!r}, another way to draft; dspark, dflash and dflash2 are read, "
            "so take one of those for this target"
        )
    return kind


def read(source: Source) -> Reading:
    kind, weights = kind_of(source), read_weights(source)
    keys = Keys(source.config_file, ("", source.config))
    body = keys.sub("transformer_layer_config")
    sizes, count = backbone.sizes(body, weights), backbone.num_layers(body)
    ids = tuple(i - 1 for i in keys.wholes("aux_hidden_state_layer_ids"))
    config = HeadConfig(
        kind=kind,
        anchor_predicts=_anchor_predicts(keys, source),
        layers=_layers(keys, body, count, kind),
        rope=backbone.rope(body, sizes["head_dim"]),
        **sizes,
        **backbone.block(keys),
        **backbone.taps(keys, ids, sizes["hidden_size"]),
        **backbone.tables(weights, False),
        **_heads(kind, keys, weights, sizes, source),
    )
    return Reading(config, weights, gemma_scale=False)


def _heads(kind: str, keys: Keys, weights: Weights, sizes: backbone.Fields, source: Source) -> backbone.Fields:
    if kind == "dspark":
        # Base logits are raw here: no soft cap, no multiplier.
        heads = backbone.markov(keys, weights) | backbone.confidence(keys, weights, sizes["hidden_size"])
        return heads | _vocabulary(keys, weights, sizes["vocab_size"])
    if kind == "dflash":
        return backbone.logit_transform(keys) | _vocabulary(keys, weights, sizes["vocab_size"])
    sections = (("", source.config), ("transformer_layer_config", source.config.get("transformer_layer_config")))
    both = Keys(source.config_file, *sections)
    return backbone.logit_transform(keys) | backbone.selector(both, weights, sizes["hidden_size"])


def _vocabulary(keys: Keys, weights: Weights, vocab: int) -> backbone.Fields:
    head = weights.get("lm_head.weight")
    rows = keys.whole("draft_vocab_size", head.shape[0] if head else vocab)
    if rows == vocab:
        return {}
    if "d2t" not in weights:
        raise keys.refuse(
            "draft_vocab_size", f"fewer than the {vocab} of the target, but no d2t maps them; fetch the whole file"
        )
    return {"draft_vocab_size": rows}


def _anchor_predicts(keys: Keys, source: Source) -> bool:
    said = keys.flag("sample_from_anchor", None)
    if said is not None:
        return said
    tokens = _speculative_tokens(source)
    return tokens is not None and keys.whole("block_size") - tokens == 0


def _speculative_tokens(source: Source) -> int | None:
    """proposal_methods[0].speculative_tokens, or None."""
    table: Any = source.config.get("speculators_config")
    methods = table.get("proposal_methods") if isinstance(table, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    if first is None:
        return None
    keys = Keys(source.config_file, ("speculators_config.proposal_methods[0]", first))
    return keys.whole("speculative_tokens", None)


def _layers(keys: Keys, body: Keys, count: int, kind: str) -> tuple[LayerConfig, ...]:
    """Full layers see the whole block; sliding ones are causal unless sliding_window_non_causal says otherwise."""
    free = keys.flag("sliding_window_non_causal", kind == "dflash2")
    windows = [layer.window for layer in backbone.layers(body, Keys(keys.file), count)]
    return tuple(LayerConfig(causal=w is not None and not free, window=w) for w in windows)


DIALECT = Dialect("speculators", recognises, read)

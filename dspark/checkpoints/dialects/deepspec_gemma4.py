"""DSpark as DeepSpec saves it over a gemma4 body: sandwich norms, proportional rope, values normed or equal to the keys."""

from __future__ import annotations

from dspark.checkpoints.dialects import backbone
from dspark.checkpoints.dialects.base import Dialect, Reading, architecture, keys_of, top_of
from dspark.checkpoints.dialects.source import Source
from dspark.checkpoints.dialects.weights import Weights, read_weights
from dspark.models.heads.config import HeadConfig, LayerConfig


def read(source: Source) -> Reading:
    keys, weights = keys_of(source), read_weights(source)
    sizes, count = _sizes(source, weights), backbone.num_layers(keys)
    config = HeadConfig(
        kind="dspark",
        anchor_predicts=keys.flag("sample_from_anchor", True),
        layers=_layers(source, count),
        rope=backbone.rope(keys, sizes["head_dim"], by_layer=True),
        attention_scale=1.0,
        sandwich=True,
        value_norm=True,
        keys_are_values="layers.0.self_attn.v_proj.weight" not in weights,
        embedding_scale=sizes["hidden_size"] ** 0.5,
        logit_softcap=keys.real("final_logit_softcapping", None, high=1e6),
        **sizes,
        **backbone.block(keys),
        **backbone.taps(keys, keys.wholes("target_layer_ids", low=-1), sizes["hidden_size"]),
        **backbone.tables(weights, keys.flag("tie_word_embeddings", False)),
        **backbone.markov(keys, weights),
        **backbone.confidence(keys, weights, sizes["hidden_size"]),
    )
    return Reading(config, weights)


def _sizes(source: Source, weights: Weights) -> backbone.Fields:
    """Full-attention layers have head sizes of their own."""
    keys = keys_of(source)
    sizes = backbone.sizes(keys, weights)
    sizes["head_dim"] = keys.whole("global_head_dim", sizes["head_dim"])
    if keys.flag("attention_k_eq_v", False):
        sizes["num_kv_heads"] = keys.whole("num_global_key_value_heads", sizes["num_kv_heads"])
    return sizes


def _layers(source: Source, count: int) -> tuple[LayerConfig, ...]:
    keys = top_of(source)
    kinds = keys.texts("layer_types", ("full_attention",) * count)
    if len(kinds) == count and "sliding_attention" in kinds:
        raise keys.refuse(
            "layer_types", "gemma4 drafters with sliding layers are not supported; take one with full attention"
        )
    return (LayerConfig(causal=keys.flag("is_causal", False)),) * count


DIALECT = Dialect("DeepSpec (gemma4)", lambda source: architecture(source) == "Gemma4DSparkModel", read)

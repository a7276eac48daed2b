"""NVIDIA's Nemotron DSpark: a Qwen3DSparkModel whose slots predict themselves, causal, with windows and attention sinks."""

from __future__ import annotations

from dspark.checkpoints.dialects import backbone
from dspark.checkpoints.dialects.base import Dialect, Reading, architecture, keys_of, nested, top_of
from dspark.checkpoints.dialects.deepspec import ARCHITECTURES
from dspark.checkpoints.dialects.source import Source
from dspark.checkpoints.dialects.weights import read_weights
from dspark.models.heads.config import HeadConfig


def recognises(source: Source) -> bool:
    marks = ("dspark_fixup_head_type", "dflash_query_causal")
    marked = any(name in source.config for name in marks) or nested(source, "attention_sink_bias") is not None
    return architecture(source) in ARCHITECTURES and marked


def read(source: Source) -> Reading:
    keys, weights = keys_of(source), read_weights(source)
    sizes, count = backbone.sizes(keys, weights), backbone.num_layers(keys)
    keys.text("dspark_fixup_head_type", "markov", ("markov",))
    config = HeadConfig(
        kind="dspark",
        anchor_predicts=keys.flag("sample_from_anchor", False),
        layers=backbone.layers(keys, top_of(source), count),
        rope=backbone.rope(keys, sizes["head_dim"]),
        value_scale=keys.real("attention_value_scale", 1.0, high=1e6),
        **sizes,
        **backbone.block(keys),
        **backbone.taps(keys, keys.wholes("target_layer_ids", low=-1), sizes["hidden_size"]),
        **backbone.tables(weights, keys.flag("tie_word_embeddings", False)),
        **backbone.markov(keys, weights),
        **backbone.confidence(keys, weights, sizes["hidden_size"]),
    )
    return Reading(config, weights, raw_taps=backbone.taps_raw(keys))


DIALECT = Dialect("Nemotron DSpark", recognises, read)

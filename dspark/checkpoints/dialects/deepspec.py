"""DSpark as DeepSpec saves it over a qwen3 body: flat keys in a copy of the target's config, the anchor's slot predicts.

MiniCPM5's heads ship without tables and borrow the target's; Ling's differ in name only; deepseek-ai's dflash_*_block7 have
no Markov head and still predict from the anchor. Keys of the target's that stand in the file (partial rotary, mrope, mixtures
of experts, layer types of another depth) are noise.
"""

from __future__ import annotations

from dspark.checkpoints.dialects import backbone
from dspark.checkpoints.dialects.base import Dialect, Reading, architecture, keys_of, top_of
from dspark.checkpoints.dialects.source import Source
from dspark.checkpoints.dialects.weights import read_weights
from dspark.models.heads.config import HeadConfig, LayerConfig

ARCHITECTURES = ("Qwen3DSparkModel", "LingDSparkModel")


def read(source: Source) -> Reading:
    keys, weights = keys_of(source), read_weights(source)
    sizes, count = backbone.sizes(keys, weights), backbone.num_layers(keys)
    if keys.whole("draft_vocab_size", sizes["vocab_size"]) != sizes["vocab_size"]:
        raise keys.refuse(
            "draft_vocab_size", "a reduced vocabulary needs the speculators packaging, which maps its rows"
        )
    config = HeadConfig(
        kind="dspark",
        anchor_predicts=keys.flag("sample_from_anchor", True),
        layers=_layers(source, count),
        rope=backbone.rope(keys, sizes["head_dim"]),
        **sizes,
        **backbone.block(keys),
        **backbone.taps(keys, keys.wholes("target_layer_ids", low=-1), sizes["hidden_size"]),
        **backbone.tables(weights, keys.flag("tie_word_embeddings", False)),
        **backbone.markov(keys, weights),
        **backbone.confidence(keys, weights, sizes["hidden_size"]),
        **backbone.log_snr(keys, weights),
    )
    return Reading(config, weights)


def _layers(source: Source, count: int) -> tuple[LayerConfig, ...]:
    """Full and bidirectional, unless layer_types are really this drafter's."""
    kinds = source.config.get("layer_types")
    if (
        isinstance(kinds, list)
        and len(kinds) == count
        and "sliding_attention" in kinds
        and "linear_attention" not in kinds
    ):
        return backbone.layers(keys_of(source), top_of(source), count)
    causal = top_of(source).flag("is_causal", False)
    return (LayerConfig(causal=causal),) * count


DIALECT = Dialect("DeepSpec (qwen3)", lambda source: architecture(source) in ARCHITECTURES, read)

"""DSpark as SpecForge and SGLang package it (RadixArk, DimInfer, Nanbeige): keys nested in dflash_config, the anchor's slot
predicts, tables are borrowed and used raw, without soft cap."""

from __future__ import annotations

from dspark.checkpoints.dialects import backbone
from dspark.checkpoints.dialects.base import Dialect, Reading, architecture, keys_of, nested, top_of
from dspark.checkpoints.dialects.source import Source
from dspark.checkpoints.dialects.weights import read_weights
from dspark.models.heads.config import HeadConfig


def recognises(source: Source) -> bool:
    name = architecture(source)
    return name == "DSparkDraftModel" or (name == "DFlashDraftModel" and nested(source, "projector_type") == "dspark")


def read(source: Source) -> Reading:
    keys, weights = keys_of(source), read_weights(source)
    sizes, count = backbone.sizes(keys, weights), backbone.num_layers(keys)
    keys.text("attention_mode", "gqa", ("gqa",))
    if keys.whole("draft_vocab_size", sizes["vocab_size"]) != sizes["vocab_size"]:
        raise keys.refuse(
            "draft_vocab_size", "a reduced vocabulary needs the speculators packaging, which maps its rows"
        )
    config = HeadConfig(
        kind="dspark",
        anchor_predicts=keys.flag("sample_from_anchor", True),
        layers=backbone.layers(keys, top_of(source), count),
        rope=backbone.rope(keys, sizes["head_dim"]),
        logit_multiplier=1.0 / keys.real("logits_mup_width_multiplier", 1.0, high=1e6),
        **sizes,
        **backbone.block(keys),
        **backbone.taps(keys, keys.wholes("target_layer_ids", low=-1), sizes["hidden_size"]),
        **backbone.tables(weights, False),
        **backbone.markov(keys, weights),
        **backbone.confidence(keys, weights, sizes["hidden_size"]),
    )
    return Reading(config, weights)


DIALECT = Dialect("SpecForge DSpark", recognises, read)

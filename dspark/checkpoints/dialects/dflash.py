"""DFlash as z-lab publishes it, keys flat or nested: each slot predicts itself, tables are borrowed."""

from __future__ import annotations

from dspark.checkpoints.dialects import backbone
from dspark.checkpoints.dialects.base import Dialect, Reading, architecture, keys_of, nested, top_of
from dspark.checkpoints.dialects.source import Source
from dspark.checkpoints.dialects.weights import Rename, read_weights
from dspark.errors import CheckpointError
from dspark.models.heads.config import HeadConfig


def recognises(source: Source) -> bool:
    return architecture(source) == "DFlashDraftModel" and nested(source, "projector_type") != "domino"


def read(source: Source, rename: Rename = lambda name: name) -> Reading:
    keys, weights = keys_of(source), read_weights(source, rename)
    _refuse_extras(source, weights)
    sizes, count = backbone.sizes(keys, weights), backbone.num_layers(keys)
    ids = keys.wholes("target_layer_ids", None, low=-1) or backbone.default_taps(keys, count)
    config = HeadConfig(
        kind="dflash",
        anchor_predicts=keys.flag("sample_from_anchor", False),
        layers=backbone.layers(keys, top_of(source), count),
        rope=backbone.rope(keys, sizes["head_dim"]),
        value_scale=keys.real("attention_value_scale", 1.0, high=1e6),
        **sizes,
        **backbone.block(keys),
        **backbone.taps(keys, ids, sizes["hidden_size"]),
        **backbone.tables(weights, False),
        **backbone.logit_transform(keys),
    )
    scaled = keys.has("input_embedding_scale")
    return Reading(config, weights, gemma_scale=not scaled, raw_taps=backbone.taps_raw(keys))


def _refuse_extras(source: Source, weights: dict) -> None:
    if not source.gguf and (source.path / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"{source.path}: its mask row is in mask_embedding.pt, which is not read; take a drafter without"
        )
    if any(name.startswith("markov_head.") for name in weights):
        raise CheckpointError(
            f"{source.path}: a DFlash checkpoint with a Markov head is no published packaging; "
            'set dflash_config.projector_type to "dspark" if it was trained as DSpark'
        )


DIALECT = Dialect("z-lab DFlash", recognises, read)

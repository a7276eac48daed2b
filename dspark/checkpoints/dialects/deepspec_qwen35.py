"""DSpark over a qwen3.5 body (Ornith): gated queries, a quarter of each head turned, norm weights stored as offsets from 1."""

from __future__ import annotations

import attrs

from dspark.checkpoints.dialects import backbone, deepspec
from dspark.checkpoints.dialects.base import Dialect, Reading, architecture, keys_of
from dspark.checkpoints.dialects.source import Source


def read(source: Source) -> Reading:
    reading = deepspec.read(source)
    config, query = reading.config, reading.weights.get("layers.0.self_attn.q_proj.weight")
    gated = query is not None and query.shape[:1] == (2 * config.num_heads * config.head_dim,)
    rope = backbone.rope(keys_of(source), config.head_dim, partial=True)
    return reading._replace(config=attrs.evolve(config, rope=rope, gated_query=gated, offset_norms=True))


DIALECT = Dialect("DeepSpec (qwen3.5)", lambda source: architecture(source) == "Qwen35DSparkModel", read)

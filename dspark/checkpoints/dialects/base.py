"""What a dialect is: one packaging of drafters, how it is recognised, and how its keys become a `HeadConfig`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs

from dspark.checkpoints.dialects.keys import Keys
from dspark.checkpoints.dialects.source import Source
from dspark.checkpoints.dialects.weights import Weights
from dspark.models.heads.config import HeadConfig


class Reading(NamedTuple):
    """A drafter as one dialect understands it, nothing loaded.

    gemma_scale: the block's embeddings must carry the factor that the target's own embedding layer applies. raw_taps: the
    last layer may be tapped, its output in front of the final norm being meant. notes: what a user should know.
    """

    config: HeadConfig
    weights: Weights
    gemma_scale: bool = False
    raw_taps: bool = False
    notes: tuple[str, ...] = ()


@attrs.frozen
class Dialect:
    """One packaging. `recognises` looks at names only; `read` raises CheckpointError, one sentence, for what does not fit."""

    name: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source], Reading]


def architecture(source: Source) -> str:
    """The first of `architectures`, or "" where there is none."""
    names = source.config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def nested(source: Source, name: str) -> Any:
    """A key of dflash_config, or None."""
    table = source.config.get("dflash_config")
    return table.get(name) if isinstance(table, dict) else None


def keys_of(source: Source) -> Keys:
    """All keys in the order drafters are read: dflash_config, dspark_config, then the top level."""
    config = source.config
    return Keys(
        source.config_file,
        ("dflash_config", config.get("dflash_config")),
        ("dspark_config", config.get("dspark_config")),
        ("", config),
    )


def top_of(source: Source) -> Keys:
    """The top level alone."""
    return Keys(source.config_file, ("", source.config))

"""The packagings that drafters are published in, one a module, and which of them a folder is.

The order is the one that resolves every checkpoint seen: a GGUF; speculators before any architecture (its dflash2 carries
z-lab's name); Nemotron's marks before the DeepSpec that it names itself after; then architectures; then tensor names.
"""

from __future__ import annotations

from dspark.checkpoints.dialects import (
    deepspec,
    deepspec_gemma4,
    deepspec_qwen35,
    dflash,
    dflash2,
    lfm2,
    muse,
    nemotron,
    prism,
    specforge,
    speculators,
)
from dspark.checkpoints.dialects.base import Dialect, Reading, architecture
from dspark.checkpoints.dialects.refusals import refuse_by_name, unknown
from dspark.checkpoints.dialects.source import Source, open_source

DIALECTS: tuple[Dialect, ...] = (
    prism.DIALECT,
    speculators.DIALECT,
    nemotron.DIALECT,
    deepspec.DIALECT,
    deepspec_gemma4.DIALECT,
    deepspec_qwen35.DIALECT,
    specforge.DIALECT,
    lfm2.DIALECT,
    dflash2.DIALECT,
    dflash.DIALECT,
    muse.DIALECT,
)

__all__ = ["DIALECTS", "Dialect", "Reading", "Source", "open_source", "recognise"]


def recognise(source: Source) -> Dialect:
    """The dialect a source is written in. Raises CheckpointError, with the reason, for one that is not read."""
    refuse_by_name(source)
    for dialect in DIALECTS:
        if dialect.recognises(source):
            return dialect
    if not architecture(source) and (found := _by_tensors(source)):
        return found
    raise unknown(source, tuple(d.name for d in DIALECTS))


def _by_tensors(source: Source) -> Dialect | None:
    """For a config that names no architecture: what its tensors can only be."""
    names = [name.removeprefix("model.") for name in source.tensors]
    if not {"fc.weight", "hidden_norm.weight"} <= set(names):
        return None
    if any(name.startswith("candidate_selector.") for name in names):
        return dflash2.DIALECT
    if any(name.removeprefix("logit_head.").startswith("markov_head.") for name in names):
        return specforge.DIALECT if "dflash_config" in source.config else deepspec.DIALECT
    return dflash.DIALECT

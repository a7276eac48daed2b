"""Load a drafter from a folder or a GGUF file, whatever packaging it is in; `inspect` says what it is from headers alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dspark.checkpoints.dialects import Reading, Source, open_source, recognise
from dspark.checkpoints.drafter_weights import load_arrays, target_ids
from dspark.checkpoints.dtypes import unpack
from dspark.checkpoints.fit import TargetFacts, check_fit, check_tensors, facts_of
from dspark.checkpoints.layout import by_columns
from dspark.checkpoints.report import DrafterReport, describe
from dspark.checkpoints.trust import unpack_wrong
from dspark.errors import CheckpointError, InputError, UserError
from dspark.models.heads.head import Head
from dspark.models.lending import lend_tables

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
# Small, and what they lose in 4 bits costs acceptance. Of a Markov head only W2 is read whole each step.
KEPT = ("candidate_selector.", "confidence_head.", "log_snr_embed.", "markov_head.", "attention_conv.", "mlp_conv.")
READ_WHOLE = "markov_head.markov_w2"


class DrafterWarning(UserWarning):
    """A drafter was loaded, and something about it costs acceptance."""


@attrs.frozen
class About:
    """Where a loaded drafter came from. bits: what its large weights were packed to on loading, None for as stored; dense:
    whether what was stored packed is not."""

    path: Path
    packaging: str
    bits: int | None
    notes: tuple[str, ...]
    dense: bool = False


def load_drafter(
    path: str | Path,
    *,
    bits: int | None = 4,
    group_size: int = 64,
    dense: bool = False,
    target: TargetFacts | None = None,
    dtype: mx.Dtype | None = None,
) -> Head:
    """Load the drafter at `path`; bind it to a target's tables before use (`lend_tables`, `Head.bind`).

    bits: pack large weights to so many bits (2 to 8), in groups of `group_size` where the rows divide, else of 32; 0 or None
    keeps what is stored. Weights stored packed (NVFP4, MLX) stay as they are, or with `dense` are unpacked, and none packed
    (`packing` has this machine's rule for both). target: refuse a drafter that does not fit it.
    dtype: to compute in; None means float32 on a CPU, elsewhere what is stored, bfloat16 for float16. What is noteworthy
    is in `head.about.notes`; an untrained drafter warns. Raises CheckpointError, SourceError or InputError, one sentence.
    """
    bits = None if dense else _checked_bits(bits, group_size)
    source = open_source(Path(path))
    dialect = recognise(source)
    reading = _read(source, target)
    config = reading.config
    head = Head(config)
    dtype = _dtype(source, reading, dtype)
    arrays, packed = load_arrays(source, reading.weights, dtype)
    ids = target_ids(source, config, arrays.pop("d2t", None))
    if ids is not None:
        head.reduce_vocabulary(ids)
    for name, module in packed.items():
        _replace(head, name, module)
    head.load_weights(list(arrays.items()), strict=False)
    notes = reading.notes + _untrained(source, head)
    if bits is not None:
        _quantise(head, bits, group_size)
    if dense:
        unpack(head, dtype)
        by_columns(head, tied=config.lm_head == "tied")
    elif unpacked := unpack_wrong(head, dtype):
        what = f"{', '.join(unpacked[:3])}{' and others' if len(unpacked) > 3 else ''}"
        notes = (*notes, f"{source.path}: computed unpacked, since this MLX multiplies them wrong when packed: {what}")
    mx.eval(head.parameters())
    head.eval()
    head.about = About(source.path, dialect.name, bits, notes, dense)
    return head


def inspect(path: str | Path, target: TargetFacts | None = None) -> DrafterReport:
    """What the drafter at `path` is, and why it would be refused if it would. Reads headers only; raises SourceError where
    there is nothing to read."""
    source = open_source(Path(path))
    try:
        dialect = recognise(source)
    except UserError as error:
        return DrafterReport(source.path, "unknown", refused=str(error))
    try:
        return describe(source, dialect.name, _read(source, target))
    except UserError as error:
        return DrafterReport(source.path, dialect.name, refused=str(error))


def _read(source: Source, target: TargetFacts | None) -> Reading:
    """What the source holds, checked against itself and the target."""
    try:
        reading = recognise(source).read(source)
    except CheckpointError as error:
        # A config that holds together key by key but not as a whole is refused by the network, which knows no file.
        named = str(error).startswith(str(source.path))
        raise error if named else CheckpointError(f"{source.config_file}: {error}") from None
    check_tensors(source, reading)
    if target is None:
        return reading
    check_fit(source, reading, target)
    scale = target.embedding_scale
    if not reading.gemma_scale or scale == 1.0:
        return reading
    return reading._replace(config=attrs.evolve(reading.config, embedding_scale=scale))


def _checked_bits(bits: Any, group_size: Any) -> int | None:
    if bits in (None, 0):
        return None
    if bits not in BITS:
        raise InputError(
            f"drafter bits {bits!r}: allowed are {', '.join(map(str, BITS))}, and 0 to keep what is stored"
        )
    if group_size not in GROUP_SIZES:
        raise InputError(f"drafter group_size {group_size!r}: allowed are {', '.join(map(str, GROUP_SIZES))}")
    return bits


def _dtype(source: Source, reading: Reading, asked: mx.Dtype | None) -> mx.Dtype:
    if asked is not None:
        return asked
    if mx.default_device().type == mx.DeviceType.cpu:
        return mx.float32
    stored = reading.weights["norm.weight"].stored[""]
    # Taps are raw residual streams, whose outliers leave float16's range.
    return mx.float32 if source.tensors[stored].dtype in ("F32", "F64") and source.gguf is None else mx.bfloat16


def _replace(head: Head, name: str, module: nn.Module) -> None:
    *parents, last = name.split(".")
    owner: Any = head
    for part in parents:
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
    setattr(owner, last, module)


def _untrained(source: Source, head: Head) -> tuple[str, ...]:
    """A note (and a warning) where every norm weight is exactly as it was initialised."""
    parameters: Any = tree_flatten(head.parameters())
    norms = mx.concatenate([array for name, array in parameters if name.endswith("norm.weight")])
    # Stored as offsets they start at 0; written by a tool that did not know, at 1.
    starts = (0.0, 1.0) if head.config.offset_norms else (1.0,)
    if not any(mx.array_equal(norms, mx.full(norms.shape, start)).item() for start in starts):
        return ()
    note = f"{source.path}: every norm weight is as initialised, so this drafter looks untrained; it will hardly be accepted"
    warnings.warn(note, DrafterWarning, stacklevel=3)
    return (note,)


def _quantise(head: Head, bits: int, group_size: int) -> None:
    """Pack linears and own tables whose rows divide into groups; the rest stay."""

    def how(path: str, module: nn.Module) -> bool | dict[str, int]:
        if not isinstance(module, nn.Linear | nn.Embedding):
            return False
        if path != READ_WHOLE and any(part in path for part in KEPT):
            return False
        columns = module.weight.shape[-1]
        size = next((g for g in (group_size, 32) if columns % g == 0), None)
        return {"group_size": size, "bits": bits} if size else False

    nn.quantize(head, class_predicate=how)


__all__ = [
    "About",
    "DrafterReport",
    "DrafterWarning",
    "TargetFacts",
    "facts_of",
    "inspect",
    "lend_tables",
    "load_drafter",
]

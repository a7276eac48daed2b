"""A drafter's tensors under the names of its parameters, whatever they are stored as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dspark.checkpoints.dialects.source import Source, Tensor
from dspark.errors import CheckpointError

Rename = Callable[[str], str]

FLOATS = ("F32", "F16", "BF16", "F64")
# Kept by training or by other runtimes; nothing of a draft depends on them.
IGNORED_SUFFIXES = (".input_scale", ".rotary_emb.inv_freq", ".k_scale", ".v_scale")
IGNORED_PREFIXES = ("verifier_", "rotary_emb.", "t2d")
STRIPPED_PREFIXES = ("model.", "logit_head.")


class Weight(NamedTuple):
    """One parameter: what it is (`plain`, `nvfp4`, `mlx`), its shape unpacked, and the stored tensors it is made of.

    stored: role -> name in the file; roles are "" for the tensor itself, and "scales", "biases", "scale_2".
    group_size, bits: of an `mlx` packed one.
    """

    encoding: str
    shape: tuple[int, ...]
    stored: dict[str, str]
    group_size: int = 0
    bits: int = 0


Weights = dict[str, Weight]


def read_weights(source: Source, rename: Rename = lambda name: name) -> Weights:
    """The parameters a source holds. Raises CheckpointError for packings that cannot be read, by tensor name."""
    names = _canonical(source, rename)
    weights: Weights = {}
    packed = {name.removesuffix(".weight_scale_2") for name in names if name.endswith(".weight_scale_2")}
    grouped = {name.removesuffix(".scales") for name in names if name.endswith(".scales")}
    for name, stored in names.items():
        base, _, part = name.rpartition(".")
        if base in packed and part in ("weight_scale", "weight_scale_2"):
            continue
        if base in grouped and part in ("scales", "biases"):
            continue
        if base in packed and part == "weight":
            weights[name] = _nvfp4(source, base, names)
        elif base in grouped and part == "weight":
            weights[name] = _mlx(source, base, names)
        else:
            weights[name] = Weight("plain", _plain(source, name, stored), {"": stored})
    return weights


def _canonical(source: Source, rename: Rename) -> dict[str, str]:
    """Parameter name -> name in the file."""
    names: dict[str, str] = {}
    for stored in source.tensors:
        name = stored
        for prefix in STRIPPED_PREFIXES:
            name = name.removeprefix(prefix)
        if name.endswith(IGNORED_SUFFIXES) or name.startswith(IGNORED_PREFIXES):
            continue
        name = rename(name)
        if name in names:
            raise CheckpointError(f"{source.path}: the tensors {names[name]!r} and {stored!r} are both {name}")
        names[name] = stored
    return names


def _plain(source: Source, name: str, stored: str) -> tuple[int, ...]:
    tensor = source.tensors[stored]
    if name == "d2t":
        if tensor.dtype not in ("I64", "I32"):
            raise CheckpointError(f"{source.path}: d2t is of type {tensor.dtype}; whole numbers are expected")
    elif tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{source.path}: the tensor {stored!r} is packed as {tensor.dtype}; modelopt's NVFP4, MLX's own packing and "
            "plain floats can be read, so take the bf16 checkpoint"
        )
    return tensor.shape


def _nvfp4(source: Source, base: str, names: dict[str, str]) -> Weight:
    """modelopt: two E2M1 nibbles a byte, an e4m3 scale for each 16 weights, one float32 scale."""
    roles = {"": f"{base}.weight", "scales": f"{base}.weight_scale", "scale_2": f"{base}.weight_scale_2"}
    stored = {role: names[name] for role, name in roles.items() if name in names}
    found = {role: source.tensors[name] for role, name in stored.items()}
    shape = found[""].shape
    fits = len(found) == 3 and len(shape) == 2 and (found[""].dtype, found["scale_2"].dtype) == ("U8", "F32")
    if fits:
        scales, scale_2 = found["scales"], found["scale_2"]
        fits = scales.dtype in ("F8_E4M3", "U8") and scales.shape == (shape[0], shape[1] // 8)
        fits = fits and shape[1] % 8 == 0 and scale_2.shape in ((), (1,))
    if not fits:
        raise CheckpointError(f"{source.path}: {base} is not packed as modelopt's NVFP4; take the bf16 checkpoint")
    return Weight("nvfp4", (shape[0], shape[1] * 2), stored)


def _mlx(source: Source, base: str, names: dict[str, str]) -> Weight:
    """MLX: 32 // bits weights a uint32, scales and biases a group."""
    roles = {"": f"{base}.weight", "scales": f"{base}.scales", "biases": f"{base}.biases"}
    stored = {role: names[name] for role, name in roles.items() if name in names}
    group_size, bits = _mlx_format(source, base)
    packed, scales = source.tensors[stored[""]], source.tensors[stored["scales"]]
    fits = len(stored) == 3 and packed.dtype == "U32" and len(packed.shape) == len(scales.shape) == 2
    if not fits or packed.shape[-1] * 32 != scales.shape[-1] * group_size * bits:
        raise CheckpointError(
            f"{source.path}: {base} is not packed as quantization in config.json says ({bits} bits, groups of {group_size})"
        )
    return Weight("mlx", (packed.shape[0], scales.shape[-1] * group_size), stored, group_size, bits)


def _mlx_format(source: Source, base: str) -> tuple[int, int]:
    table: Any = source.config.get("quantization")
    table = table if isinstance(table, dict) else {}
    own = table.get(base)
    merged = {**table, **own} if isinstance(own, dict) else table
    group_size, bits, mode = merged.get("group_size"), merged.get("bits"), merged.get("mode", "affine")
    if group_size not in (32, 64, 128) or bits not in (2, 3, 4, 5, 6, 8) or mode != "affine":
        raise CheckpointError(
            f"{source.config_file}: quantization of {base} is {group_size!r} weights a group, {bits!r} bits, mode {mode!r}; "
            "groups of 32, 64 or 128 and 2 to 8 bits, affine, can be read"
        )
    return group_size, bits


def stored_dtype(source: Source, weights: Weights) -> str:
    """The type that the norms are stored in, which is what the network was published in."""
    weight = weights.get("norm.weight")
    tensor: Tensor | None = source.tensors.get(weight.stored[""]) if weight else None
    return tensor.dtype if tensor else "BF16"

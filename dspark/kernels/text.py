"""What the kernels' texts share: constants in front, comments off, and which shapes they are written for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

import mlx.core as mx


def defines(constants: Mapping[str, int] | Mapping[str, int | str]) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in constants.items())


@lru_cache(None)
def shortened(name: str) -> str:
    """A kernel's text without comments and indentation: MLX copies it at each call."""
    lines = (line.split("//")[0].strip() for line in files("dspark.kernels").joinpath(name).read_text().splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def made_from(parts: int, header: str, source: str) -> dict[str, Any]:
    """What MLX makes a kernel of, for `parts` matrices [weight, scales, biases] that share x. MLX keeps compiled kernels on disk
    by name alone, so the name changes with the text."""
    return {
        "name": f"dspark_qmm_{hashlib.sha256((header + source).encode()).hexdigest()[:12]}",
        "input_names": ["x", *(f"{name}{i}" for i in range(parts) for name in ("w", "s", "b"))],
        "output_names": [f"y{i}" for i in range(parts)],
        "header": header,
        "source": source,
    }


def unsuited(rows: int, most: int, out: Sequence[int], tile: int, bits: int, group: int, dtype: mx.Dtype) -> str | None:
    """Why a kernel for tiles of `tile` weight rows and `most` rows of x is not written for this, None where it is."""
    if rows > most:
        return f"{rows} rows, where {most} is the most"
    if bits not in (4, 8) or group not in (32, 64):
        return f"{bits} bits in groups of {group}, where 4 and 8 bits in groups of 32 and 64 are written"
    if dtype not in (mx.bfloat16, mx.float16):
        return f"{str(dtype).removeprefix('mlx.core.')} input, where only 16-bit floats are written"
    if odd := [n for n in out if n % tile]:
        return f"{odd[0]} rows of weights are no multiple of {tile}"
    return None

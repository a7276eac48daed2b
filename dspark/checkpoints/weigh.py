"""How much memory a model's weights will take, read from file headers before a single weight is loaded."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

from dspark.checkpoints.gguf_header import GgufHeader
from dspark.checkpoints.gguf_tensors import BITS, GROUP_SIZE
from dspark.errors import CheckpointError
from dspark.platform import DtypePlan

WEIGHTS = "model*.safetensors"
MAX_HEADER_NBYTES = 100 << 20
ITEM_NBYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
FLOATS = ("F64", "F32", "F16", "BF16")


class Sizes(NamedTuple):
    """Bytes on disk (`stored`), of these in packed weights (`packed`), and how many weights each part stands for."""

    stored_nbytes: int
    packed_nbytes: int
    packed_weights: int
    scales: int
    floats: int

    @property
    def float32_nbytes(self) -> int:
        """With every weight as float32; scales are then gone."""
        return 4 * (self.packed_weights + self.floats)

    def held_nbytes(self, plan: DtypePlan) -> int:
        """Bytes in memory once loaded as `plan` says."""
        if plan.dequantise:
            return self.float32_nbytes
        if plan.dtype is None:
            return self.stored_nbytes
        return self.packed_nbytes + (self.scales + self.floats) * (4 if plan.dtype == "float32" else 2)


def weigh_gguf(header: GgufHeader) -> Sizes:
    """Sizes of a GGUF file as dspark holds it: packed weights with a float16 scale and bias for each 32."""
    packed = {info.name: BITS[info.type] * info.size // 8 for info in header.tensors.values() if info.type in BITS}
    packed_weights = sum(header.tensors[name].size for name in packed)
    floats = sum(info.size for info in header.tensors.values() if info.name not in packed)
    return Sizes(header.nbytes, sum(packed.values()), packed_weights, 2 * packed_weights // GROUP_SIZE, floats)


def weigh_folder(folder: Path, config: dict[str, Any]) -> Sizes:
    """Sizes of `model*.safetensors` in a folder; raises `CheckpointError` for files that are missing or damaged."""
    files = sorted(folder.glob(WEIGHTS))
    if not files:
        raise CheckpointError(
            f"{folder}: holds no {WEIGHTS}; dspark reads safetensors and GGUF, never pickles (.bin, .pt), which can "
            "run code"
        )
    tensors: dict[str, Any] = {}
    for file in files:
        tensors |= read_safetensors_header(file)
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    stored = packed = packed_weights = scales = floats = 0
    for name, info in tensors.items():
        size, layer = math.prod(info["shape"]), name.rpartition(".")[0]
        nbytes = size * ITEM_NBYTES.get(info["dtype"], 1)
        stored += nbytes
        if name.endswith((".scales", ".biases")):
            scales += size
        elif info["dtype"] in ("U32", "I32") and name.endswith(("weight", "weight_packed")):
            packed += nbytes
            packed_weights += 32 * size // _bits(quantization, layer)
        elif info["dtype"] in FLOATS:
            floats += size
    return Sizes(stored, packed, packed_weights, scales, floats)


def read_safetensors_header(file: Path) -> dict[str, Any]:
    """Names to dtype, shape and offsets; raises `CheckpointError` for a file that is not whole."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as opened:
            head = opened.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else MAX_HEADER_NBYTES
            if length > min(MAX_HEADER_NBYTES, size - 8):
                raise CheckpointError(f"{file}: no whole safetensors file ({size} bytes); fetch it again")
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            end = 8 + length + max((int(info["data_offsets"][1]) for info in header.values()), default=0)
            fields = [(str(info["dtype"]), [int(n) for n in info["shape"]]) for info in header.values()]
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise CheckpointError(f"{file}: its safetensors header is damaged; fetch it again") from None
    if end > size or any(n < 0 for _, shape in fields for n in shape):
        raise CheckpointError(f"{file}: it ends after {size} bytes, but its tensors reach to {end}; fetch it again")
    return header


def _bits(quantization: dict[str, Any], layer: str) -> int:
    own = quantization.get(layer)
    bits = (own if isinstance(own, dict) else quantization).get("bits", 4)
    return bits if isinstance(bits, int) and 1 <= bits <= 32 else 4

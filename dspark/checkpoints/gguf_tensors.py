"""Turn the tensors of a checked GGUF file into MLX arrays, bit for bit: quantised weights are repacked, never requantised.

GGUF keeps 32 weights in a block with its scale (and minimum) in front; MLX keeps packed weights, scales and biases
apart, `w = scale * q + bias`, with 32 weights a group. Q4_0 stores `d * (q - 8)`, Q4_1 `d * q + m`, Q8_0 `d * q` with
a signed q, which MLX holds as `d * (q + 128) - 128 d`.
"""

from __future__ import annotations

from typing import BinaryIO

import mlx.core as mx
import numpy as np

from dspark.checkpoints.gguf_header import TYPES, TensorInfo
from dspark.errors import CheckpointError

GROUP_SIZE = 32
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


def read_tensor(file: BinaryIO, info: TensorInfo, unpermute_heads: int | None = None) -> dict[str, mx.array]:
    """Read one tensor: `{"": array}` for floats, `{"weight", "scales", "biases"}` for quantised ones.

    Packed weights are uint32 (rows, columns * bits / 32), scales and biases float16 (rows, columns / 32).
    `unpermute_heads` gives the rows of q and k back the order that MLX's rope expects. Costs one copy of the tensor.
    """
    file.seek(info.offset)
    data = np.frombuffer(file.read(info.nbytes), np.uint8)
    if data.size < info.nbytes:
        raise CheckpointError(f"the tensor {info.name!r} became shorter while it was read; fetch the file again")
    if info.type in FLOATS:
        return {"": _rows(data.view(FLOATS[info.type]).reshape(info.shape), unpermute_heads)}
    packed, scales, biases = _unblock(data, info)
    return {
        "weight": _rows(packed.view("<u4").reshape(*info.shape[:-1], -1), unpermute_heads),
        "scales": _rows(scales.reshape(*info.shape[:-1], -1), unpermute_heads),
        "biases": _rows(biases.reshape(*info.shape[:-1], -1), unpermute_heads),
    }


def _unblock(data: np.ndarray, info: TensorInfo) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    block_nbytes = next(nbytes for name, _, nbytes in TYPES.values() if name == info.type)
    blocks = data.reshape(-1, block_nbytes)
    scales = _float16(blocks, 0)
    if info.type == "Q8_0":
        return blocks[:, 2:] ^ np.uint8(0x80), scales, _scaled(scales, -128)
    if info.type == "Q4_0":
        return _nibbles(blocks[:, 2:]), scales, _scaled(scales, -8)
    return _nibbles(blocks[:, 4:]), scales, _float16(blocks, 2)


def _float16(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0]


def _scaled(scales: np.ndarray, by: int) -> np.ndarray:
    # A scale this large is absurd, and MLX's own reader makes it infinite too.
    with np.errstate(over="ignore"):
        return (scales.astype(np.float32) * by).astype(np.float16)


def _nibbles(quants: np.ndarray) -> np.ndarray:
    """Reorder 16 bytes a block: GGUF pairs weight i with i + 16 in a byte, MLX pairs 2 i with 2 i + 1."""
    weights = np.concatenate([quants & 0x0F, quants >> 4], axis=1)
    return weights[:, 0::2] | (weights[:, 1::2] << 4)


def _rows(array: np.ndarray, heads: int | None) -> mx.array:
    if heads:
        # Stored (heads, half, 2) for a rope that turns neighbours; wanted (heads, 2, half) for one that turns halves.
        array = array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return mx.array(np.ascontiguousarray(array))

"""A linear layer in NVIDIA's 4-bit floats as modelopt publishes it, run from those very bytes."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

GROUP_SIZE = 16


class Nvfp4Linear(nn.Module):
    """y = scale_2 * (x W^T), W = E2M1 nibbles times an e4m3 scale for each 16 weights.

    weight uint32 [out, in / 8]; scales uint8 [out, in / 16], e4m3 bytes; scale_2 float32 []. Frozen.
    """

    def __init__(self, weight: mx.array, scales: mx.array, scale_2: mx.array):
        super().__init__()
        self.weight, self.scales, self.scale_2 = weight, scales, scale_2
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        product = mx.quantized_matmul(
            x, self.weight, self.scales, transpose=True, group_size=GROUP_SIZE, bits=4, mode="nvfp4"
        )
        # In float32: the second scale rounded to 16 bits would be off for the whole matrix alike.
        return (product * self.scale_2).astype(x.dtype)

    def dequantised(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """[out, in]."""
        whole = mx.dequantize(self.weight, self.scales, group_size=GROUP_SIZE, bits=4, mode="nvfp4", dtype=mx.float32)
        return (whole * self.scale_2).astype(dtype)

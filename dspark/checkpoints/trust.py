"""Packed matrices that this MLX multiplies wrong on this GPU are computed unpacked.

On an H200 MLX 0.32.4's quantised product of 64 columns in 4 bits gave numbers without any relation to the right ones, without a
word; those of 576 and more were right. A drafter's Markov head has so few columns, and drafts from wrong logits only fail.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from dspark.checkpoints.dtypes import dense

# Rows that take the kernels of a plain step and of a draft, and none that MLX would compile for half a minute first.
ROWS = (1, 7)
# Of the root mean square: 16-bit sums were seen to be off by 0.004, wrong ones by 1 and far more.
WRONG = 0.05


def unpack_wrong(model: Any, dtype: mx.Dtype) -> tuple[str, ...]:
    """Replace, in place, each packed linear of a shape whose products are wrong here; returns their paths. Costs two products for
    each shape, and the same in float32 on the CPU; nothing on a CPU, where MLX has one way for all shapes."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return ()
    wrong: dict[tuple[Any, ...], bool] = {}
    found = []
    for path, module in list(model.named_modules()):
        if type(module) is not nn.QuantizedLinear:
            continue
        key = (
            module.weight.shape,
            module.scales.shape,
            module.scales.dtype,
            module.bits,
            module.group_size,
            module.mode,
        )
        if key not in wrong:
            wrong[key] = any(not error(module, rows) < WRONG for rows in ROWS)
        if wrong[key] and (plain := dense(module, dtype)) is not None:
            mx.eval(plain.parameters())
            model.update_modules(tree_unflatten([(path, plain)]))
            found.append(path)
    return tuple(found)


def error(module: Any, rows: int) -> float:
    """How far a packed linear's product of random rows is from float32 arithmetic, as a share of its root mean square."""
    columns = module.weight.shape[1] * 32 // module.bits
    x = mx.random.normal((1, rows, columns), key=mx.random.key(rows)).astype(module.scales.dtype)
    y = product(module, x).astype(mx.float32)
    with mx.stream(mx.cpu):
        packed = module.weight, module.scales, module.get("biases")
        weight = mx.dequantize(*packed, module.group_size, module.bits, module.mode, dtype=mx.float32)
        right = x.astype(mx.float32) @ weight.T
        if "bias" in module:
            right = right + module.bias.astype(mx.float32)
        off: Any = (mx.sqrt(mx.mean(mx.square(y - right))) / mx.sqrt(mx.mean(mx.square(right)))).item()
    return off


def product(module: Any, x: mx.array) -> mx.array:
    return module(x)

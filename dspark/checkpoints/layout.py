"""Lay dense weights out as the CPU's BLAS multiplies them fastest by a few rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dspark.platform import open_blas


def by_columns(model: Any, tied: bool | None = None) -> None:
    """Store a model's float32 matrices [out, in] column by column, in place, where OpenBLAS multiplies: a layer computes
    x @ W.T, and a transposed operand costs OpenBLAS a third more at one row and a sixth at six (docs/performance-notes.md).

    Values, shapes and classes stay; so does the memory, for matrices are turned one by one. Tables of embeddings are turned
    where they are the head as well (`tied`; None: where the model has no `lm_head`). Nothing is done where another library
    multiplies: none was measured.
    """
    if mx.default_device().type != mx.DeviceType.cpu or open_blas().name != "openblas":
        return
    modules = model.named_modules()
    if tied is None:
        tied = not any(path.rpartition(".")[2] == "lm_head" for path, _ in modules)
    for _, module in modules:
        # Exactly these: what a subclass does with its weight is its own affair.
        if type(module) is nn.Linear or (tied and type(module) is nn.Embedding):
            weight: mx.array = module.weight
            if weight.dtype == mx.float32:
                module.weight = mx.contiguous(weight.T).T
                mx.eval(module.weight)

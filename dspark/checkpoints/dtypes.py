"""Hold a loaded model's weights in the number format that a `DtypePlan` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path, tree_unflatten

from dspark.models.heads.nvfp4 import Nvfp4Linear
from dspark.platform import DtypePlan


def hold(model: Any, plan: DtypePlan) -> None:
    """Cast and, where planned, dequantise `model` in place, layer by layer, so that few weights exist twice at a time.

    Scales are cast before they are used, for a product in 16 bits would round. Layers of a family's own (rotated or
    fused ones) stay packed, since only their class knows what their packed weights mean.
    """
    if plan.dtype is None:
        return
    dtype = getattr(mx, plan.dtype)
    cast = _caster(dtype, getattr(model, "cast_predicate", None) if dtype != mx.float32 else None)
    model.update(tree_map_with_path(cast, model.parameters()))
    if plan.dequantise:
        unpack(model, dtype)
    mx.eval(model.parameters())


def unpack(model: Any, dtype: mx.Dtype) -> None:
    """Turn packed linears and tables into plain ones of `dtype` in place, one by one, so that few exist twice at a time."""
    for path, module in list(model.named_modules()):
        if (plain := dense(module, dtype)) is not None:
            mx.eval(plain.parameters())
            model.update_modules(tree_unflatten([(path, plain)]))


def _caster(dtype: mx.Dtype, keep: Callable[[str], bool] | None) -> Callable[[str, mx.array], mx.array]:
    # A family says through cast_predicate which weights must not lose precision.
    def cast(path: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating) or (keep is not None and not keep(path)):
            return array
        return array.astype(dtype)

    return cast


def dense(module: nn.Module, dtype: mx.Dtype) -> nn.Module | None:
    """The plain module of a packed one, None for any other."""
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    if isinstance(module, Nvfp4Linear):
        return _linear(nn.Linear, module.dequantised(dtype), None)
    makers = {nn.QuantizedLinear: nn.Linear, nn.QuantizedEmbedding: nn.Embedding, QuantizedSwitchLinear: SwitchLinear}
    # Exactly these classes: a subclass may do more to its weights than dequantising undoes.
    maker = makers.get(type(module))
    if maker is None or "global_scale" in module:
        return None
    packed: Any = module
    weight = mx.dequantize(
        packed.weight, packed.scales, packed.get("biases"), packed.group_size, packed.bits, packed.mode, dtype=dtype
    )
    return _linear(maker, weight, packed.get("bias"))


def _linear(maker: Any, weight: mx.array, bias: mx.array | None) -> nn.Module:
    # Made tiny and then given the weight: the constructor would fill one of full size with random numbers.
    plain: Any = maker(1, 1) if weight.ndim == 2 else maker(1, 1, 1)
    plain.weight = weight
    plain.pop("bias", None)
    if bias is not None:
        plain.bias = bias
    plain.freeze()
    return plain

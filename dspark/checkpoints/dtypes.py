"""Hold a loaded model's weights in the number format that a `DtypePlan` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path, tree_unflatten

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
        for path, module in list(model.named_modules()):
            if (dense := _dense(module, dtype)) is not None:
                mx.eval(dense.parameters())
                model.update_modules(tree_unflatten([(path, dense)]))
    mx.eval(model.parameters())


def _caster(dtype: mx.Dtype, keep: Callable[[str], bool] | None) -> Callable[[str, mx.array], mx.array]:
    # A family says through cast_predicate which weights must not lose precision.
    def cast(path: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating) or (keep is not None and not keep(path)):
            return array
        return array.astype(dtype)

    return cast


def _dense(module: nn.Module, dtype: mx.Dtype) -> nn.Module | None:
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    makers = {nn.QuantizedLinear: nn.Linear, nn.QuantizedEmbedding: nn.Embedding, QuantizedSwitchLinear: SwitchLinear}
    # Exactly these classes: a subclass may do more to its weights than dequantising undoes.
    maker = makers.get(type(module))
    if maker is None or "global_scale" in module:
        return None
    packed: Any = module
    weight = mx.dequantize(
        packed.weight, packed.scales, packed.get("biases"), packed.group_size, packed.bits, packed.mode, dtype=dtype
    )
    # Made tiny and then given the weight: the constructor would fill one of full size with random numbers.
    dense: Any = maker(1, 1, 1) if maker is SwitchLinear else maker(1, 1)
    dense.weight = weight
    dense.pop("bias", None)
    if "bias" in module:
        dense.bias = packed.bias
    dense.freeze()
    return dense

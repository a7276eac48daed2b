"""Compile where it pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`mx.compile`, but on a CPU the function itself: MLX's fused CPU kernels are several times slower than its own."""
    return function if mx.default_device().type == mx.DeviceType.cpu else mx.compile(function)

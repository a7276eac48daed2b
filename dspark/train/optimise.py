"""AdamW as a pure function over trees, so that a compiled step takes and gives all of its state."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

BETAS = (0.9, 0.999)
EPS = 1e-8


class State(NamedTuple):
    """Everything that training changes: float32 parameters, their moments, and how many steps were made."""

    parameters: Any
    first: Any
    second: Any
    step: int


def fresh(parameters: Any) -> State:
    masters = tree_map(lambda p: p.astype(mx.float32), parameters)
    zeros = lambda: tree_map(mx.zeros_like, masters)
    return State(masters, zeros(), zeros(), 0)


def rate_at(step: int, total: int, peak: float, warmup: float) -> float:
    """The learning rate of step `step` (from 0): linear warm-up over a share of all steps, then a cosine to zero."""
    warm = max(1, round(warmup * total))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, total - warm))))


def clipped(gradients: Any, most: float) -> tuple[Any, mx.array]:
    """Gradients scaled down to a global norm of `most`, and the norm they had."""
    squares: Any = sum(mx.square(g.astype(mx.float32)).sum() for _, g in tree_flatten(gradients))
    norm = mx.sqrt(squares)
    scale = mx.minimum(1.0, most / (norm + 1e-6))
    return tree_map(lambda g: g * scale, gradients), norm


def updated(
    parameters: Any, first: Any, second: Any, gradients: Any, step: mx.array, rate: mx.array, decay: float
) -> tuple[Any, Any, Any]:
    """One AdamW step (arXiv 1711.05101); `step` counts from 1. Only matrices decay."""
    beta1, beta2 = BETAS
    first = tree_map(lambda m, g: beta1 * m + (1 - beta1) * g, first, gradients)
    second = tree_map(lambda v, g: beta2 * v + (1 - beta2) * mx.square(g), second, gradients)
    tilt1, tilt2 = 1 - mx.power(beta1, step), 1 - mx.power(beta2, step)

    def move(p: mx.array, m: mx.array, v: mx.array) -> mx.array:
        kept = p * (1 - rate * decay) if decay and p.ndim > 1 else p
        return kept - rate * (m / tilt1) / (mx.sqrt(v / tilt2) + EPS)

    return tree_map(move, parameters, first, second), first, second

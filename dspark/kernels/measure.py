"""Which way to multiply a shape is right and fastest on this machine: measured once, on a model's own weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import attrs
import mlx.core as mx

from dspark.kernels import ways
from dspark.kernels.linears import Shape, Way

# Calls in one evaluation, and evaluations of which the median counts.
CALLS, REPEATS = 24, 5
# Another way must be so much faster than the stock kernel, or two runs of one could differ as much.
MARGIN = 0.95
# Of |y| and of its root mean square: half the last place of bfloat16 in the result (2^-9), and the same in each weight, of
# which the stock kernel's wide form makes 16-bit floats. A scale taken from the wrong group is off by about 1.
TOLERANCE = 2.0**-7
# Weight rows that are compared with float32.
COMPARED = 512


@attrs.frozen
class Finding:
    """The way chosen for a shape: "stock", "padded" to `width` rows, "cuda" or "metal". Microseconds a call; `worst`: the
    largest error against float32, in tolerances; `why`: what spoke against our own kernel, or nothing."""

    way: str
    width: int = 0
    us: float = 0.0
    stock_us: float = 0.0
    worst: float = 0.0
    why: str = ""

    def make(self, shape: Shape) -> Way | None:
        """The way itself, None for the module's own call."""
        if self.way == "stock":
            return None
        return ways.padded(shape, self.width) if self.way == "padded" else ways.own(shape, self.way)


def measure(shape: Shape, sets: Sequence[Sequence[Any]], kind: str) -> Finding:
    """Try the ways on sets of modules of this shape, one after the other as a forward does, so that no set stays in a
    processor's cache. kind: our kernel for this device. Costs about a hundred products and the kernels' compilation."""
    candidates: dict[tuple[str, int], Way] = {
        ("padded", w): ways.padded(shape, w) for w in ways.WIDTHS if w > shape.rows
    }
    why = ways.why_not(shape, kind) or ""
    if not why:
        candidates[kind, 0] = ways.own(shape, kind)
    x = mx.random.normal((1, shape.rows, shape.k), key=mx.random.key(shape.rows)).astype(shape.dtype)
    stock_us = timed(ways.stock(shape), x, sets)
    best = Finding("stock", 0, stock_us, stock_us)
    for (name, width), way in candidates.items():
        try:
            worst = error(way, x, sets[0], shape)
            us = timed(way, x, sets) if worst <= 1 else 0.0
        except Exception as broken:  # a kernel that does not compile here is a finding
            why = (
                f"{type(broken).__name__}: {str(broken).strip().splitlines()[-1][:200] if str(broken).strip() else ''}"
            )
            continue
        if not worst <= 1:
            why = f"{name} is wrong on this machine: {worst:.3g} times the tolerance off"
        elif us < min(best.us, stock_us * MARGIN):
            best = Finding(name, width, us, stock_us, worst)
        elif name == kind:
            why = f"{us:.0f} us a call, where MLX's own takes {stock_us:.0f}"
    return attrs.evolve(best, why="" if best.way == kind else why)


def timed(way: Way, x: mx.array, sets: Sequence[Sequence[Any]]) -> float:
    """Microseconds a call, the host's part included: the median of some evaluations of many calls."""

    def once() -> float:
        began = time.perf_counter()
        mx.eval([way(x, sets[i % len(sets)]) for i in range(CALLS)])
        return (time.perf_counter() - began) / CALLS * 1e6

    once()
    return median(once() for _ in range(REPEATS))


def error(way: Way, x: mx.array, modules: Sequence[Any], shape: Shape) -> float:
    """The largest difference from float32 arithmetic on the CPU, in tolerances, over rows spread over each matrix."""
    worst = 0.0
    for y, module in zip(way(x, modules), modules, strict=True):
        # An odd step, so that every place in a tile is met.
        picked = mx.arange(0, y.shape[-1], y.shape[-1] // COMPARED | 1)
        with mx.stream(mx.cpu):
            parts = (
                module["weight"][picked],
                *(module[name][picked].astype(mx.float32) for name in ("scales", "biases")),
            )
            exact = x.astype(mx.float32) @ mx.dequantize(*parts, group_size=shape.group, bits=shape.bits).T
            room = TOLERANCE * (mx.abs(exact) + mx.sqrt(mx.mean(mx.square(exact))))
            far = mx.max(mx.abs(y[..., picked].astype(mx.float32) - exact) / room)
            worst = max(worst, float("inf") if mx.isnan(far).item() else far.item())
    return worst

"""Which way to multiply a shape is right and fastest on this machine: measured once, on a model's own weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import attrs
import mlx.core as mx

from dspark.kernels import ways
from dspark.kernels.linears import PREFILL_ROWS, Shape, Way

# Calls in one evaluation, and evaluations of which the median counts.
CALLS, REPEATS = 16, 5
# Another way must be so much faster than the stock kernel: two runs of one may differ by as much.
MARGIN = 0.95
# Of |y| and of its root mean square: half a unit in the last place of bfloat16 (2^-8) in the result, and the same in each
# weight, of which the stock kernel's wide form makes 16-bit floats. A scale taken from the wrong group is off by about 1.
TOLERANCE = 2.0**-7
# Weight rows that are compared with float32.
COMPARED = 512

Key = tuple[str, int]


@attrs.frozen
class Finding:
    """The way chosen for a shape: "stock", "padded" to `width` rows, "cuda", "metal" or "gemm"; of attention "stock", "fold",
    "split" by `width` rows, or "cuda", with the `width` to split by where a call is not for our kernel (0: MLX's own call).
    Microseconds a call; `worst`: the largest error against float32, in tolerances; `why`: what spoke against another way, or
    nothing."""

    way: str
    width: int = 0
    us: float = 0.0
    stock_us: float = 0.0
    worst: float = 0.0
    why: str = ""

    def make(self, shape: Shape) -> Way | None:
        """The way itself, None for the module's own call."""
        match self.way:
            case "stock":
                return None
            case "padded":
                return ways.padded(shape, self.width)
            case "gemm":
                return ways.gemm(shape)
        return ways.own(shape, self.way)


class Exact(NamedTuple):
    """What float32 arithmetic gives for some outputs of a matrix, and how far each may be off."""

    picked: mx.array
    y: mx.array
    room: mx.array


def measure(shape: Shape, sets: Sequence[Sequence[Any]], kind: str) -> Finding:
    """Try the ways on sets of modules of this shape, one after the other as a forward does, so that no set stays in a
    processor's cache. kind: our kernel for this device. Costs some hundred products, and the kernels' compilation."""
    x = mx.random.normal((1, shape.rows, shape.k), key=mx.random.key(shape.rows)).astype(shape.dtype)
    candidates: dict[Key, Way] = {("padded", w): ways.padded(shape, w) for w in ways.WIDTHS if w > shape.rows}
    why = ways.why_not(shape, kind) or ""
    if not why:
        candidates[kind, 0] = ways.own(shape, kind)
    exact = [reference(x, module, shape) for module in sets[0]]
    errors: dict[Key, float] = {}
    for key, way in candidates.items():
        try:
            errors[key] = error(way(x, sets[0]), exact)
        except Exception as broken:  # a kernel that does not compile here is a finding
            text = str(broken).strip() or "no reason given"
            why = f"{key[0]}: {type(broken).__name__}: {text.splitlines()[-1][:200]}"
    right = {key: candidates[key] for key, off in errors.items() if off <= 1}
    took = timed({("stock", 0): ways.stock(shape), **right}, x, sets)
    stock_us = took["stock", 0]
    best = min(took, key=lambda key: took[key])
    if took[best] >= MARGIN * stock_us:
        best = ("stock", 0)
    if (kind, 0) in errors and best != (kind, 0):
        off = errors[kind, 0]
        why = (
            f"{took[kind, 0]:.0f} us a call"
            if off <= 1
            else f"wrong on this machine: {off:.3g} times the tolerance off"
        )
    return Finding(*best, took[best], stock_us, errors.get(best, 0.0), "" if best[0] == kind else why)


def measure_prefill(shape: Shape, sets: Sequence[Sequence[Any]]) -> Finding:
    """Whether weights made floats once and a plain product say bit for bit what MLX's own product does, and faster: a prompt is
    then read so. `shape.rows` and PREFILL_ROWS rows are compared, the first are timed."""
    inputs = [
        mx.random.normal((1, rows, shape.k), key=mx.random.key(rows)).astype(shape.dtype)
        for rows in (shape.rows, PREFILL_ROWS)
    ]
    candidates: dict[Key, Way] = {("stock", 0): ways.stock(shape), ("gemm", 0): ways.gemm(shape)}
    for x in inputs:
        own, other = (way(x, sets[0]) for way in candidates.values())
        if not all(mx.array_equal(a, b).item() for a, b in zip(own, other, strict=True)):
            return Finding("stock", why="gemm: its bits are not those of MLX's own product")
    took = timed(candidates, inputs[0], sets)
    stock_us, us = took["stock", 0], took["gemm", 0]
    if us >= MARGIN * stock_us:
        return Finding("stock", us=stock_us, stock_us=stock_us, why=f"gemm: {us:.0f} us a call")
    return Finding("gemm", us=us, stock_us=stock_us)


def timed(candidates: dict[Key, Way], x: mx.array, sets: Sequence[Sequence[Any]]) -> dict[Key, float]:
    """Microseconds a call of each, the host's part included: medians of evaluations of many calls, taken in turn.

    Each call waits for the one before it, as the layers of a model do: side by side, kernels of few blocks look faster than they
    are.
    """

    def once(way: Way) -> float:
        began, fed = time.perf_counter(), x
        for i in range(CALLS):
            fed = x + 0 * sum(y[..., :1] for y in way(fed, sets[i % len(sets)]))
        mx.eval(fed)
        return (time.perf_counter() - began) / CALLS * 1e6

    took: dict[Key, list[float]] = {key: [] for key in candidates}
    for repeat in range(REPEATS + 1):
        for key, way in candidates.items():
            spent = once(way)
            # The first one compiles.
            if repeat:
                took[key].append(spent)
    return {key: median(spent) for key, spent in took.items()}


def reference(x: mx.array, module: Any, shape: Shape) -> Exact:
    """Outputs spread over a matrix, computed in float32 on the CPU."""
    n = module["weight"].shape[0]
    with mx.stream(mx.cpu):
        # An odd step, so that every place in a kernel's tile is met.
        picked = mx.arange(0, n, n // COMPARED | 1)
        parts = (module["weight"][picked], *(module[name][picked].astype(mx.float32) for name in ("scales", "biases")))
        y = x.astype(mx.float32) @ mx.dequantize(*parts, group_size=shape.group, bits=shape.bits).T
        return Exact(picked, y, TOLERANCE * (mx.abs(y) + mx.sqrt(mx.mean(mx.square(y)))))


def error(products: Sequence[mx.array], exact: Sequence[Exact]) -> float:
    """The largest difference, in tolerances; infinite where something is no number."""
    worst = 0.0
    for y, want in zip(products, exact, strict=True):
        far = mx.abs(y[..., want.picked].astype(mx.float32) - want.y) / want.room
        off: Any = mx.max(far).item()
        worst = max(worst, float("inf") if mx.isnan(far).any().item() else off)
    return worst
